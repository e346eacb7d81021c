"""Everything that can be done with a store that may lie, and what must not come of it."""

from __future__ import annotations

import os
import shutil
import signal
import struct
import traceback
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from click.testing import CliRunner

from casnap import CheckReport, NewStore, Store
from casnap.cli import cli
from casnap.errors import (
    CasnapError,
    EntryNotFoundError,
    UnsupportedFormatError,
    UnsupportedTypeError,
)
from tests.support.golden import described
from tests.support.mutations import Case, Parts
from tools import read_store

SECONDS = 20
"""Of processor time, for all that is done with one store."""
_REFUSED = (read_store.UnsupportedError, *read_store.FAILURES)

Values = dict[tuple[str, str], Any]
"""What was read, by snapshot and path: described, or the error."""


def read_all(folder: Path) -> Values:
    """Read all snapshots: each key as each rank has it."""
    found: Values = {}
    for snapshot in Store(folder, create=False).snapshots():
        try:
            found[snapshot.name, "metadata"] = described(snapshot.metadata.user)
            for rank in range(len(snapshot.contents.manifest.ranks)):
                for key in snapshot.contents.trees(rank):
                    path = f"{rank}/{key}"
                    found[snapshot.name, path] = _read(snapshot, path)
        except CasnapError as e:
            found[snapshot.name, ""] = e
    return found


def _read(snapshot: Any, path: str) -> Any:
    try:
        return described(snapshot.read_object(path, allow_pickle=True))
    except CasnapError as e:
        return e


def read_without_casnap(folder: Path) -> None:
    """Have the reader that knows the page alone read all that it reads."""
    with suppress(*_REFUSED):
        store = read_store.Store(folder)
        for name in store.snapshots:
            with suppress(*_REFUSED):
                for entry in store.entries(name).values():
                    with suppress(*_REFUSED):
                        _ = store.tensor(entry) if entry[0] == "t" else store.content(entry)


def _run(*arguments: object) -> None:
    result = CliRunner().invoke(cli, [str(a) for a in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception


class Gauntlet:
    """Does everything with a forged store.

    Args:
        folder: The store.
        before: What was read of it before it was forged.
        rows: Its rows then.

    Attributes:
        problems: What must not be.
    """

    def __init__(self, folder: Path, before: Values, rows: dict[str, bytes]) -> None:
        self.folder = folder
        self.problems: list[str] = []
        self._before, self._rows = before, rows

    def run(self) -> None:
        folder = self.folder
        self._try("ls", lambda: _run("ls", folder))
        rows = self._try("rows", lambda: _rows_of(folder))
        changed = [n for n, row in (rows or {}).items() if row != self._rows.get(n)]
        for name in changed[:2]:
            self._try("show", partial(_run, "show", folder / name))
        values = self._try("read", lambda: read_all(folder), or_error=True)
        self._try("read without casnap", lambda: read_without_casnap(folder))
        for key, value in self._before.items():
            if rows is not None and key[0] in rows and key[0] not in changed:
                self._same("another value", key, value, values, unless_refused=True)
        self._judge(values)
        for what, work in (
            ("check of the structure", lambda: self._store().check()),
            ("du", lambda: self._store().usage()),
            ("dry gc", lambda: self._store().gc(grace=0, dry_run=True)),
            ("dry repair", lambda: self._store().repair(dry_run=True)),
            ("restore", self._restore),
            ("cp", lambda: self._copy(values)),
            ("gc", lambda: self._store().gc(grace=0, repack=1.0)),
            ("gc again", lambda: self._store().gc(grace=0)),
        ):
            self._try(what, work)
        after = self._try("read after gc", lambda: read_all(folder))
        for key, value in values.items() if isinstance(values, dict) else ():
            if not isinstance(value, Exception):
                self._same("lost by gc", key, value, after or {})

    def _store(self) -> Store:
        return Store(self.folder, create=False)

    def _try(self, what: str, work: Callable[[], Any], *, or_error: bool = False) -> Any:
        """Return what some work returns; if it is refused, None or the error."""
        try:
            return work()
        except CasnapError as e:
            if len(str(e)) > 5_000:
                self.problems.append(f"{what}: an error of {len(str(e)):,} characters")
            return e if or_error else None
        except Exception:  # noqa: BLE001
            self.problems.append(f"{what}: {traceback.format_exc(limit=-4)}")
            return None

    def _same(
        self, what: str, key: Any, value: Any, values: Any, *, unless_refused: bool = False
    ) -> None:
        # What is said of a whole snapshot holds for each of its keys.
        now = values.get(key, values.get((key[0], ""))) if isinstance(values, dict) else values
        if now != value and not (unless_refused and isinstance(now, Exception)):
            self.problems.append(f"{what}: {key}: {now!s:.300}")

    def _judge(self, values: Any) -> None:
        """What a read refuses, a check of all bytes finds."""
        report = self._try("check", lambda: self._store().check(data=True))
        if not isinstance(report, CheckReport):
            return
        refused = values.values() if isinstance(values, dict) else [values]
        for error in (each for each in refused if isinstance(each, Exception)):
            known = bool(report.damages)
            if isinstance(error, UnsupportedFormatError):
                known |= bool(report.unsupported)
            # It needs a class, or a torch, that is not here; or a key is empty.
            if not known and not isinstance(error, UnsupportedTypeError | EntryNotFoundError):
                self.problems.append(f"a check does not find: {error!s:.300}")

    def _restore(self) -> None:
        for snapshot in self._store().snapshots():
            with suppress(CasnapError):
                for key in sorted(snapshot.contents.keys()):
                    with suppress(CasnapError):
                        snapshot.get_state_dict_for_key(key, allow_pickle=True)

    def _copy(self, values: Any) -> None:
        store, target = self._store(), self.folder.with_name("copy")
        there = Store(target, create=NewStore(chunk_size=store.chunk_size)).make()
        for snapshot in store.snapshots():
            with suppress(CasnapError):
                store.copy(snapshot.name, to=there)
        for key, value in read_all(target).items():
            if isinstance(values, dict) and not isinstance(values.get(key), Exception):
                self._same("the copy differs", key, value, values)


def _rows_of(folder: Path) -> dict[str, bytes]:
    """Return what the table says of each snapshot."""
    snapshots = Store(folder, create=False).snapshots()
    return {s.name: msgspec.msgpack.encode(s.row) for s in snapshots}


def run_cases(
    pristine: Path, cases: Iterable[Case], work: Path, tell: Callable[[str, list[str]], None]
) -> None:
    """Forge stores and do everything with each; tell what was changed, and the problems."""
    before, rows = read_all(pristine), _rows_of(pristine)
    for what, forge in cases:
        folder = work / "forged" / "store"
        shutil.copytree(pristine, folder)
        os.environ["CASNAP_CACHE_DIR"] = str(work / "forged" / "cache")
        # A number that its field cannot hold is none to forge.
        is_forged = False
        with suppress(OverflowError, TypeError, ValueError, struct.error):
            forge(Parts(folder))
            is_forged = True
        if is_forged:
            signal.setitimer(signal.ITIMER_PROF, SECONDS)
            gauntlet = Gauntlet(folder, before, rows)
            gauntlet.run()
            tell(what, gauntlet.problems)
        signal.setitimer(signal.ITIMER_PROF, 0)
        shutil.rmtree(work / "forged")
