"""What is exported is what is meant to be, and says what it is."""

from __future__ import annotations

import copy
import inspect
import re
import subprocess
import sys
import types
from collections.abc import Iterator
from typing import Any, get_type_hints

import pytest

import casnap
from casnap import errors
from tests.support.public_face import ANSWERS, MODULES, public_face, recorded

CLASSES = [v for n in casnap.__all__ if isinstance(v := getattr(casnap, n), type)]
ERRORS = [v for v in vars(errors).values() if isinstance(v, type) and issubclass(v, Exception)]


def test_all_is_what_is_exported():
    assert casnap.__all__ == sorted(casnap.__all__)
    # Some are imported when they are asked for.
    assert all(getattr(casnap, name) is not None for name in casnap.__all__)
    public = {
        name
        for name, value in vars(casnap).items()
        if not name.startswith("_")
        and name not in ("annotations", "Any", "TYPE_CHECKING", "import_module")
        and not (isinstance(value, types.ModuleType) and value is not errors)
    }
    assert public == set(casnap.__all__)


def test_what_methods_return_can_be_imported_from_casnap() -> None:
    store = casnap.Store("memory://results")
    pending = store.async_take({"s": casnap.StateDict(x=1)}, "step_1")
    unknown = set[str]()
    for example in (store, pending, pending.wait()):
        for name in set(dir(example)) & {n for n in vars(type(example)) if n[0] != "_"}:
            member = inspect.getattr_static(example, name)
            function = getattr(member, "fget", None) or getattr(member, "__func__", member)
            answer = str(getattr(function, "__annotations__", {}).get("return"))
            unknown |= {w for w in re.findall(r"\b[A-Z]\w+", answer) if not hasattr(casnap, w)}
    # An Outcome is no type, but a variable for Snapshot, or None.
    assert unknown <= {"Any", "BaseException", "Iterator", "None", "Outcome", "Path"}


def public_callables() -> Iterator[Any]:
    values = [
        getattr(module, name)
        for module in MODULES
        for name in getattr(module, "__all__", vars(module))
    ]
    for value in dict.fromkeys([*filter(callable, values), *ANSWERS]):
        # A NewType, and an alias of types, are callable too.
        is_code = isinstance(value, type) or inspect.isroutine(value)
        if not is_code or not value.__module__.startswith("casnap"):
            continue
        yield value
        for name in vars(value) if isinstance(value, type) else ():
            member = inspect.getattr_static(value, name)
            member = getattr(member, "fget", None) or getattr(member, "__func__", member)
            if inspect.isfunction(member) and (name[0] != "_" or name == "__init__"):
                yield member


def test_the_types_in_every_public_signature_are_found() -> None:
    """By whoever asks at run time, as tools do that read or check signatures."""
    asked = 0
    for value in public_callables():
        assert get_type_hints(value) is not None
        asked += 1
    assert asked > 200


def test_completion_leaves_out_what_is_for_other_modules() -> None:
    store = casnap.Store("memory://completion")
    snapshot = store.take({"s": casnap.StateDict(x=1)}, "step_1")
    shown = {name for name in dir(store) if not name.startswith("_")}
    assert {"take", "latest", "gc", "uri", "thin"} < shown
    assert not shown & {"repository", "take_from", "hooks", "row", "read", "full_name"}
    assert not set(dir(snapshot)) & {"contents", "row", "of"}
    assert "restore" in dir(snapshot)
    # The packages that it has imported are none of its names.
    assert inspect.ismodule(casnap.take)  # type: ignore[attr-defined]
    assert {name for name in dir(casnap) if not name.startswith("_")} == set(casnap.__all__)


def test_the_takes_have_the_same_options() -> None:
    """Each is written by hand, so that a reader and a type checker see it."""

    def options(take: object) -> dict[str, object]:
        found = inspect.signature(take).parameters.values()  # type: ignore[arg-type]
        return {p.name: (p.default, p.annotation) for p in found if p.name not in OF_A_PLACE}

    store, snapshot = casnap.Store, casnap.Snapshot
    assert options(store.take) == options(store.try_take) == options(snapshot.take)
    in_background = [store.async_take, store.try_async_take, snapshot.async_take]
    for take in in_background:
        assert options(take) == options(store.async_take)
    assert options(store.take).items() < options(store.async_take).items()


OF_A_PLACE = ("self", "name", "path", "store", "storage_options")


@pytest.mark.parametrize("part", ["modules", "answers", "commands"])
def test_the_public_face_is_as_recorded(part: str) -> None:
    """A change on purpose is recorded by ``python -m tests.support.public_face``."""
    assert public_face()[part] == recorded()[part]


def test_the_names_of_torchsnapshot_are_here():
    for name in ("Snapshot", "PendingSnapshot", "StateDict", "RNGState", "Stateful"):
        assert name in casnap.__all__
    assert list(inspect.signature(casnap.Snapshot).parameters)[:3] == [
        "path",
        "pg",
        "storage_options",
    ]
    for take in (casnap.Snapshot.take, casnap.Snapshot.async_take):
        first = list(inspect.signature(take).parameters)[:5]
        assert first == ["path", "app_state", "pg", "replicated", "storage_options"]
    assert list(inspect.signature(casnap.Snapshot.restore).parameters)[1:3] == [
        "app_state",
        "strict",
    ]
    read = list(inspect.signature(casnap.Snapshot.read_object).parameters)
    assert read[1:4] == ["path", "obj_out", "memory_budget_bytes"]


def methods():
    return [
        (kind, name)
        for kind in CLASSES
        for name, value in vars(kind).items()
        if not name.startswith("_")
        and (callable(value) or isinstance(value, property | classmethod))
    ]


def test_every_method_is_documented_and_typed():
    assert len(methods()) > 100
    for kind, name in methods():
        value = inspect.getattr_static(kind, name)
        function = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
        where = f"{kind.__name__}.{name}"
        assert inspect.getdoc(value), where
        signature = inspect.signature(function)
        assert signature.return_annotation is not inspect.Signature.empty, where
        for parameter in list(signature.parameters.values())[1:]:
            assert parameter.annotation is not inspect.Parameter.empty, (where, parameter)


def test_errors_are_one_tree_that_is_drawn():
    for kind in ERRORS:
        assert issubclass(kind, errors.CasnapError)
        assert kind.__doc__, kind
        assert kind.__name__ in errors.__doc__
        assert str(kind("what happened")) == "what happened"


def test_errors_are_what_callers_of_others_catch():
    assert issubclass(errors.SnapshotExistsError, FileExistsError)
    assert issubclass(errors.SnapshotNotFoundError, KeyError)
    assert issubclass(errors.EntryNotFoundError, KeyError)
    assert issubclass(errors.UnsupportedTypeError, TypeError)
    assert issubclass(errors.MismatchError, RuntimeError)
    assert issubclass(errors.InvalidNameError, ValueError)


def test_the_reason_of_an_error_survives_copies():
    error = errors.UnavailableError("no", reason="denied")
    for other in (copy.copy(error), errors.retold(error, "still no")):
        assert type(other) is errors.UnavailableError
        assert other.reason == "denied"
    assert str(other) == "still no"


def test_import_is_light():
    """Neither torch nor numpy is loaded by ``import casnap``; the command lists without them."""
    code = "import casnap, sys; print(sorted({'torch', 'numpy'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_reprs_say_where():
    store = casnap.Store("memory://names")
    snapshot = store.take({"s": casnap.StateDict(x=1)}, "step", metadata={"loss": 1.5})
    assert repr(store) == "Store('memory://names')"
    assert repr(snapshot) == "Snapshot('memory://names/step')"
    assert "loss" in repr(snapshot.metadata)
    assert snapshot.tags == ()


class OwnStore(casnap.Store):
    """A store of a user, who hands on what each take is given."""

    def take(self, *args: Any, **options: Any) -> Any:
        return super().take(*args, **options)

    def async_take(self, *args: Any, **options: Any) -> Any:
        return super().async_take(*args, **options)


class OwnSnapshot(casnap.Snapshot):
    """A snapshot of a user, likewise."""

    @classmethod
    def take(cls, *args: Any, **options: Any) -> Any:
        return super().take(*args, **options)


def test_the_takes_of_a_subclass_hand_on_the_options() -> None:
    store, state = OwnStore("memory://subclass"), {"s": casnap.StateDict(x=1)}
    assert store.take(state, "a", metadata={"step": 1}).metadata.user == {"step": 1}
    assert store.async_take(state, "b", max_pending=2, replicated=[]).wait().name == "b"
    snapshot = OwnSnapshot.take("c", state, store=store, metadata={"step": 3})
    assert snapshot.metadata.user == {"step": 3}
    with pytest.raises(TypeError, match=r"Store\.take\(\) got an unexpected .*'max_pending'"):
        store.take(state, "d", max_pending=2)


def test_a_snapshot_is_no_store() -> None:
    state = {"s": casnap.StateDict(x=1)}
    snapshot: Any = casnap.Store("memory://no-store").take(state, "a")
    with pytest.raises(TypeError, match="store= is a Store or its URI; got a Snapshot"):
        casnap.Snapshot("a", store=snapshot)
    with pytest.raises(TypeError, match="store= is a Store or its URI; got a Snapshot"):
        casnap.Snapshot.take("b", state, store=snapshot)
