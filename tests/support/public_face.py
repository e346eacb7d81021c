"""The public face of casnap: each name, signature, method and command, as the record has it.

``python -m tests.support.public_face`` records it anew, when it was changed on purpose.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
from pathlib import Path
from typing import Any

import click

import casnap
import casnap.backends
import casnap.extending
import casnap.integrations.dcp
import casnap.integrations.folders
import casnap.serving
from casnap.cli import COMMANDS, cli
from casnap.comparing.changes import Diff
from casnap.maintenance.check import CheckReport
from casnap.maintenance.damage import Damage, Hurt
from casnap.maintenance.repair import RepairReport
from casnap.maintenance.usage import Usage
from casnap.mirror.status import MirrorStatus
from casnap.preemption import Preemption
from casnap.restore.entry_handle import Handle
from casnap.restore.restore_report import RestoreReport
from casnap.snapshot import EntriesByPath, SnapshotMetadata
from casnap.storage.collecting.gc import GcReport
from casnap.storage.snapshots.retention import PruneReport
from casnap.transfer.copy_jobs import CopyReport
from tests.support.stand_ins import trainers_stood_in

RECORD = Path(__file__).parent.parent / "fixtures" / "public_face.json"
MODULES = (
    casnap,
    casnap.errors,
    casnap.backends,
    casnap.extending,
    casnap.integrations.dcp,
    casnap.integrations.folders,
    casnap.serving,
)
ANSWERS = (
    SnapshotMetadata,
    EntriesByPath,
    Handle,
    RestoreReport,
    Preemption,
    PruneReport,
    MirrorStatus,
    GcReport,
    CheckReport,
    RepairReport,
    CopyReport,
    Damage,
    Hurt,
    Diff,
    Usage,
)
"""What public methods return, besides what the modules export."""
OPERATORS = (
    "__bool__",
    "__call__",
    "__contains__",
    "__enter__",
    "__eq__",
    "__getitem__",
    "__len__",
)


@functools.cache
def public_face() -> dict[str, Any]:
    """Return what users of casnap, and of its command, may rely on."""
    examples = _examples()
    with trainers_stood_in() as integrations:
        parts = (*MODULES, *integrations)
        modules = {module.__name__: _exported(module, examples) for module in parts}
    answers = {kind.__name__: _class(kind, examples.get(kind)) for kind in ANSWERS}
    commands = {"casnap": _parameters(cli)}
    context = click.Context(cli)
    for name in COMMANDS:
        command = cli.get_command(context, name)
        assert command is not None
        commands[f"casnap {name}"] = _parameters(command)
    return {"modules": modules, "answers": answers, "commands": commands}


def _examples() -> dict[type, object]:
    """Return objects whose attributes are not all written down in their classes."""
    store = casnap.Store("memory://the public face")
    state = {"state": casnap.StateDict(x=1)}
    pending = store.async_take(state, "pending", overwrite=True)
    snapshot = pending.wait()
    return {type(x): x for x in (store, pending, snapshot, snapshot.metadata)}


def _exported(module: Any, examples: dict[type, object]) -> dict[str, Any]:
    names = getattr(module, "__all__", None) or [
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and getattr(value, "__module__", "") == module.__name__
    ]
    found: dict[str, Any] = {}
    for name in sorted(names):
        value = getattr(module, name)
        if isinstance(value, type):
            found[name] = _class(value, examples.get(value))
        else:
            found[name] = _signature(value) if inspect.isroutine(value) else "value"
    return found


def _class(kind: type, example: object = None) -> dict[str, Any]:
    """Return the bases of a class, how it is called, and its public members."""
    if example is None and issubclass(kind, casnap.CasnapError):
        example = kind("what happened")
    fields = dataclasses.fields(kind) if dataclasses.is_dataclass(kind) else ()
    members: dict[str, str] = {}
    for name in sorted({*dir(kind if example is None else example), *(f.name for f in fields)}):
        owner = next((base for base in kind.__mro__ if name in vars(base)), kind)
        ours = owner.__module__.partition(".")[0] == "casnap"
        if ours and (not name.startswith("_") or name in OPERATORS):
            members[name] = _member(inspect.getattr_static(kind, name, None))
    found: dict[str, Any] = {"bases": " ".join(base.__name__ for base in kind.__mro__[1:-1])}
    made_by = next((base for base in kind.__mro__ if "__init__" in vars(base)), object)
    if made_by.__module__.startswith("casnap") and not getattr(kind, "_is_protocol", False):
        found["call"] = _signature(kind)
    return {**found, "members": members}


def _member(value: object) -> str:
    if isinstance(value, classmethod):
        return f"class {_signature(value.__func__)}"
    return _signature(value) if inspect.isroutine(value) and callable(value) else "value"


def _signature(value: Any) -> str:
    """Return names, kinds and defaults of the parameters."""
    found = inspect.signature(value)
    bare = [p.replace(annotation=p.empty) for p in found.parameters.values()]
    return str(found.replace(parameters=bare, return_annotation=found.empty))


def _parameters(command: click.Command) -> list[str]:
    return [_parameter(parameter) for parameter in command.params]


def _parameter(parameter: click.Parameter) -> str:
    """Return its names, and what is unusual about it."""
    names = " ".join([*parameter.opts, *parameter.secondary_opts])
    traits = {
        "flag": getattr(parameter, "is_flag", False),
        "required": parameter.required,
        "repeatable": parameter.multiple,
        f"{parameter.nargs} values": parameter.nargs != 1,
    }
    words = [parameter.param_type_name, names, *(trait for trait, has in traits.items() if has)]
    # Newer versions of click have a value of their own for "no default".
    if isinstance(parameter.default, str | int | float) and parameter.default:
        words.append(f"= {parameter.default}")
    return " ".join(words)


def recorded() -> dict[str, Any]:
    """Return the face as it was recorded."""
    found: dict[str, Any] = json.loads(RECORD.read_text())
    return found


if __name__ == "__main__":
    RECORD.write_text(json.dumps(public_face(), indent=1) + "\n")
