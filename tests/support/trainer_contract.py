"""What every trainer does with its checkpoints, as tests; a subclass says how it trains and loads.

:class:`RunContract` is a part of it: for another number of ranks, another strategy.

::

    class TestMine(TrainerContract):
        kill_at = 5
        kept = ("step-6", "step-8")

        def train(self, folder, kill_at=None, way=""):
            ...  # go on from the last checkpoint in the folder; kill_all() at that step
            return the_state_of_this_rank

        def load(self, folder):
            ...  # load the last checkpoint into a fresh state

Each run is done by processes of its own: a child, or ``ranks`` as a launcher starts them.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from casnap import Snapshot, Store
from casnap.errors import DamagedError, StateError
from casnap.format.names import STORE_FOLDER
from tests.support.bitwise import assert_same
from tests.support.exports import assert_exports
from tests.support.faults import backend_faults, in_child, untouched
from tests.support.launched import kill_world, launched

Errors = type[BaseException] | tuple[type[BaseException], ...]


class RunContract:
    """A run is killed, and goes on with the same bits; old checkpoints go.

    Attributes:
        ranks: How many ranks train; None for one process that no launcher has started.
        ways: Ways to save; the states at the end are the same.
        unordered: Those in which the trainer does not wait for what it saves, and remembers what it
            has saved: a run that was killed may keep others.
        kill_at: The step that a run is killed at: ``train`` does it.
        store: Where the store is, below the folder of a run.
        kept: The names of the snapshots that a run leaves, or how many.
        least_bytes: What each snapshot holds, at least.
        most_new_bytes: What each save but the first writes, at most.
    """

    ranks: int | None = None
    ways: tuple[str, ...] = ("",)
    unordered: tuple[str, ...] = ()
    kill_at: int
    store = ""
    kept: tuple[str, ...] | int
    least_bytes: int
    most_new_bytes: int

    def train(self, folder: Path, kill_at: int | None = None, way: str = "") -> dict[str, Any]:
        """Train, from the last checkpoint in a folder to the end; return the state of this rank."""
        raise NotImplementedError

    def check_last(self, snapshot: Snapshot, end: dict[str, Any], folder: Path) -> None:
        """Compare the last snapshot with the state at the end of rank 0; files may be made."""
        assert_exports(snapshot, folder, "model", end["model"])

    # --- how it is done ---

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Have a test that asks for a way tried with each."""
        if "way" in metafunc.fixturenames:
            metafunc.parametrize("way", self.ways)

    def work(self, work: Callable[[], object]) -> list[int]:
        """Do some work on each rank; return how they ended."""
        return [in_child(work)] if self.ranks is None else launched(self.ranks, work)

    def end(self, folder: Path, rank: int = 0) -> Any:
        """Return the state at the end of the last run in a folder."""
        return torch.load(f"{folder}-end-{rank}", weights_only=False)

    def run(
        self, folder: Path, kill_at: int | None = None, *, cut_off: bool = False, way: str = ""
    ) -> None:
        """Train on all ranks, up to the end, or until they are killed.

        Args:
            folder: Where they save.
            kill_at: The step that kills them.
            cut_off: Whether they are killed as the next save commits.
            way: One of `ways`.
        """

        def on() -> None:
            state = self.train(folder, kill_at, way)
            torch.save(state, f"{folder}-end-{os.environ.get('RANK', 0)}")

        def until_commit() -> None:
            with backend_faults(0, kill_world, names=["put_if_absent"]):
                on()

        how = -9 if cut_off or kill_at is not None else 0
        assert self.work(until_commit if cut_off else on) == [how] * (self.ranks or 1)

    def names(self, folder: Path) -> list[str]:
        """Return the names of the snapshots that a run has left."""
        return [s.name for s in Store(folder / self.store, create=False).snapshots()]

    def folders(self, folder: Path) -> set[str]:
        """Return the names of the folders of checkpoints that a run has left."""
        paths = (folder / self.store).iterdir()
        return {path.name for path in paths if path.is_dir()} - {STORE_FOLDER}

    @pytest.fixture(scope="class")
    def whole(self, tmp_path_factory: pytest.TempPathFactory) -> Path:
        """Return the folder of a run that nobody killed."""
        folder = tmp_path_factory.mktemp("whole") / "run"
        self.run(folder)
        return folder

    # --- what is promised ---

    def test_each_save_writes_what_changed_and_the_last_are_kept(self, whole: Path) -> None:
        """Old checkpoints go by the trainer's own rule, with their folders."""
        names, kept = self.names(whole), self.kept
        assert len(names) == kept if isinstance(kept, int) else names == list(kept)
        assert self.folders(whole) == set(names)
        snapshots = Store(whole / self.store, create=False).snapshots()
        assert all(s.stats.logical_bytes > self.least_bytes for s in snapshots)
        first = min(snapshots, key=lambda s: s.metadata.user["step"])
        large = [s.name for s in snapshots if s.stats.new_bytes > self.most_new_bytes]
        assert large in ([], [first.name])
        self.check_last(snapshots[-1], self.end(whole), whole.parent)

    def test_resumes_bit_exact_after_sigkill(self, whole: Path, tmp_path: Path, way: str) -> None:
        """Killed between two saves, and once more as the next one commits."""
        folder = tmp_path / "run"
        self.run(folder, self.kill_at, way=way)
        # One that saves in the background may have none yet.
        before = self.names(folder)
        for name in before[:1]:
            Store(folder / self.store).tag(name, "kept")
        self.run(folder, cut_off=True, way=way)
        assert self.names(folder) == before
        self.run(folder, way=way)
        for rank in range(self.ranks or 1):
            assert_same(self.end(folder, rank), self.end(whole, rank))
        # What has a tag is kept, whatever the trainer lets go.
        assert {*self.folders(folder), *before[:1]} == set(self.names(folder))
        if way not in self.unordered:
            assert set(self.names(folder)) == {*self.names(whole), *before[:1]}


class TrainerContract(RunContract):
    """Besides, a load changes nothing, and what is wrong is told.

    Attributes:
        name: The name of a checkpoint.
        nothing: What `load` raises where nothing is saved; None if that is no error.
        other: What it raises for a snapshot of something else; None if any snapshot is loaded.
        damaged: What it raises if the bytes of the snapshot are damaged.
    """

    name: str
    nothing: Errors | None = None
    other: Errors | None = StateError
    damaged: Errors = DamagedError

    def load(self, folder: Path) -> object:
        """Load the last checkpoint in a folder into a fresh state."""
        raise NotImplementedError

    def test_a_load_changes_nothing(self, whole: Path) -> None:
        """So it may be done from a folder that cannot be written."""
        with untouched(whole):
            assert set(self.work(lambda: self.load(whole))) == {0}

    def test_where_nothing_is_saved_nothing_is_made(self, tmp_path: Path) -> None:
        """A load that finds none tells it in the way of its framework."""
        folder = tmp_path / "run"
        (folder / self.store).mkdir(parents=True)
        self._expect(folder, self.nothing)
        assert [p for p in folder.rglob("*") if p != folder / self.store] == []

    def test_what_is_not_the_trainers_is_refused(self, tmp_path: Path) -> None:
        """A snapshot of something else, of a name that this trainer gives."""
        folder = tmp_path / "run"
        Snapshot.take(folder / self.store / self.name, {"else": torch.nn.Linear(2, 2)})
        if self.other is not None:
            self._expect(folder, self.other)

    def test_damage_reaches_the_caller(self, whole: Path, tmp_path: Path) -> None:
        """By its type."""
        shutil.copytree(whole, folder := tmp_path / "run")
        for pack in (folder / self.store / STORE_FOLDER / "packs").rglob("*"):
            if pack.is_file():
                pack.write_bytes(bytes(byte ^ 1 for byte in pack.read_bytes()))
        self._expect(folder, self.damaged)

    def _expect(self, folder: Path, error: Errors | None) -> None:
        """Load on all ranks, and have each of them get an error."""

        def refused() -> None:
            with pytest.raises(error or ()):
                self.load(folder)

        load = partial(self.load, folder)
        assert set(self.work(load if error is None else refused)) == {0}
