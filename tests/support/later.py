"""Stores that a later version has written into, and what this version does with them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from click.testing import CliRunner

from casnap import CasnapError, Retention, StateDict, Store
from casnap.cli import cli
from casnap.errors import UnsupportedFormatError
from casnap.format.records import encode
from tests.support.forger import STATE, Forger, chunks, container, tensor

LATER = "evil"
"""The name of the snapshot that the later version has taken."""
DATA = bytes(range(250)) * 16
GOOD_DATA = torch.arange(1000, dtype=torch.float32)
WORKS, REFUSED = "works", "refused"

Forge = Callable[[Forger], object]


def forged(folder: Path, forge: Forge) -> Path:
    """Return a store with a snapshot of this version, and one that ``forge`` publishes."""
    forger = Forger(folder)
    forger.keep_good()
    forge(forger)
    return folder


def leaf_with(entry: Callable[[list[Any]], Any]) -> Forge:
    """Forge a snapshot of a leaf with an entry, which is given its payload, beside a good one."""

    def forge(forger: Forger) -> None:
        payload = chunks(len(DATA), forger.add(DATA))
        publish(forger, forger.tree(*_items(forger, entry(payload))))

    return forge


def _items(forger: Forger, entry: Any) -> list[Any]:
    spec = encode([["x", "y"], None, None])
    good = chunks(4000, forger.add(GOOD_DATA.numpy().tobytes()))
    return [["", container("dict", 2, spec)], ["/x", entry], ["/y", tensor([1000], good)]]


def good_items(forger: Forger) -> list[Any]:
    return _items(forger, tensor([1000], chunks(len(DATA), forger.add(DATA))))


def publish(forger: Forger, tree: bytes, **manifest: Any) -> None:
    """Publish a snapshot of two keys: ``s`` with the tree, and ``other``, which is good."""
    other = forger.tree(STATE, ["/x", tensor([4], [16, bytes(16), b"", 0])])
    shared = {"other": other, "s": tree}
    forger.publish({}, {"global": shared, "ranks": {"0": {}}, **manifest})


def outcomes(folder: Path) -> dict[str, str]:
    """Do everything with a store; return what each operation did, or how it was refused.

    The chunks of the later snapshot must survive all of it, until that is deleted.
    """
    store = Store(folder, create=False)
    live, other = StateDict(x=torch.ones(3)), StateDict(x=torch.ones(4))
    copies = iter(folder.with_name(f"copy_{i}") for i in range(9))
    steps: dict[str, Callable[[], object]] = {
        "ls": lambda: _run("ls", folder),
        "show": lambda: _run("show", folder / LATER),
        "show the entry": lambda: _run("show", folder / LATER, "s/x"),
        "restore": lambda: store[LATER].restore({"s": live}, strict=False),
        "read": lambda: store[LATER].read_object("s/x"),
        "restore another key": lambda: store[LATER].restore({"other": other}),
        "read a neighbour": lambda: _equal(store[LATER].read_object("s/y"), GOOD_DATA),
        "diff": lambda: store.diff("good", LATER),
        "du": lambda: store.usage(),
        "take": lambda: store.take({"s": StateDict(y=GOOD_DATA), "other": other}, "later_take"),
        "tag": lambda: store.tag(LATER, "kept"),
        "gc": lambda: store.gc(grace=0.0),
        "check": lambda: _whole(store.check()),
        "check --data": lambda: _whole(store.check(data=True)),
        "cp": lambda: _copied(folder / LATER, next(copies)),
        "cp of another": lambda: _copied(folder / "good", next(copies)),
        "repair": lambda: _run("repair", folder, "--yes"),
        "untag": lambda: store.untag(LATER, "kept"),
        "thin": lambda: store.thin({"other": 1}),
        "prune": lambda: store.prune(Retention(keep_last=2)),
        "check again": lambda: _whole(store.check(data=True)),
        "delete": lambda: store.delete(LATER),
        "gc after that": lambda: store.gc(grace=0.0),
    }
    done = {}
    for name, step in steps.items():
        try:
            step()
        except CasnapError as e:
            assert "update casnap" in str(e), (name, e)  # noqa: PT017
            assert isinstance(e, UnsupportedFormatError | _CommandError)  # noqa: PT017
            done[name] = REFUSED
        else:
            done[name] = WORKS
    if done["restore"] == REFUSED:
        assert torch.equal(live["x"], torch.ones(3)), "nothing was written"
    return done


class _CommandError(CasnapError):
    """What a command was refused for."""


def _equal(value: Any, expected: torch.Tensor) -> None:
    assert torch.equal(value, expected)


def _whole(report: Any) -> None:
    assert report.ok, report.damages


def _copied(snapshot: Path, to: Path) -> None:
    _run("cp", snapshot, to)
    _whole(Store(to).check(data=True))


def _run(*arguments: object) -> str:
    """Run a command; raise what it was refused for."""
    result = CliRunner().invoke(cli, [str(a) for a in arguments])
    if result.exit_code:
        raise _CommandError(result.output)
    return result.output
