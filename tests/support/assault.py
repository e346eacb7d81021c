"""Every operation on a hostile store, with little memory and time."""

from __future__ import annotations

import faulthandler
import os
import signal
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import torch

# Imported before any fork, not after each.
import casnap.maintenance.check
import casnap.maintenance.repair
import casnap.maintenance.usage
import casnap.restore.restore
import casnap.storage.collecting.gc
import casnap.take.take  # noqa: F401
from casnap import Retention, Snapshot, StateDict, Store
from casnap.errors import CasnapError, DamagedError
from casnap.format.records import PackId, read_pack_footer
from casnap.storage.snapshots.references import MANIFEST, digest_in, walk
from tests.support.faults import files, in_child
from tests.support.forger import Forger, limit_memory

SECONDS = 30
Forge = Callable[[Forger], None]


def too_long(_signal: int, frame: FrameType | None) -> None:
    """End this process, whatever its threads do, and say where it was."""
    traceback.print_stack(frame)
    faulthandler.dump_traceback(all_threads=True)
    os._exit(1)


def good_is_whole(store: Store) -> None:
    state = StateDict(x=torch.zeros(100_000, dtype=torch.int64))
    store["good"].restore({"good": state})
    assert torch.equal(state["x"], torch.arange(100_000))


LOOKS: dict[str, Callable[[Store], object]] = {
    "list": lambda s: repr(s.snapshots()),
    "usage": lambda s: s.usage(),
    "dry gc": lambda s: s.gc(grace=0, repack=1, dry_run=True),
    "patient dry gc": lambda s: s.gc(dry_run=True),
    "dry prune": lambda s: s.prune(Retention(keep_last=1, keep_within=5), dry_run=True),
    "check": lambda s: s.check(),
    "check of all": lambda s: s.check(data=True),
    "dry repair": lambda s: s.repair(dry_run=True),
}
CHANGES: dict[str, Callable[[Store], object]] = {
    "tag": lambda s: s.tag("good", "keep"),
    "patient gc": lambda s: s.gc(),
    "gc": lambda s: s.gc(grace=0, repack=1),
    "tag evil": lambda s: s.tag("evil", "keep"),
    "untag evil": lambda s: s.untag("evil", "keep"),
    "prune": lambda s: s.prune(Retention(keep_last=1)),
    "delete": lambda s: s.delete("evil"),
    "gc again": lambda s: s.gc(grace=0),
    "repair": lambda s: s.repair(),
    "take": lambda s: s.take({"s": StateDict(y=1)}, "after"),
    "gc at last": lambda s: s.gc(grace=0),
}


def digests_of(snapshot: Snapshot) -> set[bytes]:
    """Return what a snapshot needs."""
    top = MANIFEST + snapshot.row.manifest.digest
    nodes = list(walk(snapshot.store._view.repository, [top], set()))
    return {digest_in(r) for node, below in nodes for r in (node, *below)}


def digests_in(folder: Path) -> set[bytes]:
    """Return what lies in the packs of a store, by their footers."""
    found: set[bytes] = set()
    for path in (folder / "casnap-store/packs").rglob("?" * 32):
        try:
            records = read_pack_footer(PackId(bytes.fromhex(path.name)), path.read_bytes())
        except DamagedError:
            continue
        found.update(digest for digest, _ in records)
    return found


class Assault:
    """Calls every operation on a hostile store, and checks what it does.

    Args:
        folder: The store; what lies beside it must stay as it is.
        needed: What the good snapshot needs.
    """

    def __init__(self, folder: Path, needed: set[bytes]) -> None:
        self.folder = folder
        self._needed = needed
        self.done: set[str] = set()
        self._beside = self._look_beside()
        self._readable = self._attempt("good", good_is_whole)

    def _look_beside(self) -> dict[str, bytes]:
        own = f"{self.folder.name}/"
        beside = {f for f in files(self.folder.parent) if not f.startswith((own, "casnap-cache/"))}
        return {name: (self.folder.parent / name).read_bytes() for name in beside}

    def _attempt(self, name: str, work: Callable[[Store], object]) -> bool:
        try:
            work(Store(self.folder, create=False))
        except CasnapError as e:
            assert len(str(e)) < 5_000, name  # noqa: PT017
            return False
        except MemoryError as e:
            raise AssertionError(f"{name} takes more memory than there is") from e
        self.done.add(name)
        return True

    def look(self) -> None:
        before = files(self.folder)
        for name, work in LOOKS.items():
            self._attempt(name, work)
            assert files(self.folder) == before, name

    def change(self) -> None:
        for name, work in CHANGES.items():
            if name == "prune" and "tag" not in self.done:
                continue
            self._attempt(name, work)
            assert self._look_beside() == self._beside, name
            if name == "repair":
                # A repair may make the snapshot readable; the rest may then be deleted.
                self._readable = self._readable or self._attempt("good", good_is_whole)
            if self._readable:
                good_is_whole(Store(self.folder, create=False))
            else:
                assert digests_in(self.folder) >= self._needed, name


def assail(folder: Path, forge: Forge, *, readable: bool | None = None) -> None:
    """Forge a store, and call every operation with little memory and time.

    Args:
        folder: Where.
        forge: What to do to it.
        readable: Whether the good snapshot can be read, if that is known.
    """
    forger = Forger(folder)
    forger.keep_good()
    needed = digests_of(Store(folder)["good"])
    forge(forger)
    outside = folder.parent / "outside"
    outside.mkdir()
    (outside / "casnap-snapshot.json").write_text("{}")

    def work() -> None:
        limit_memory()
        signal.signal(signal.SIGPROF, too_long)
        signal.setitimer(signal.ITIMER_PROF, SECONDS)
        assault = Assault(folder, needed)
        if readable is not None:
            assert ("good" in assault.done) == readable
        assault.look()
        assault.change()

    assert in_child(work) == 0
