"""Many processes at one store that take, delete, collect and read, and are killed while they do.

Each notes in a journal what it is about to do, and what it was told of it. So the journal says
what the store must hold at the end, what it must not, and what may be there, but then whole.
`python -m tests.support.soaking --seconds 300` is for a person.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import random
import shutil
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from casnap import NewStore, Retention, Snapshot, StateDict, Store
from tests.support.faults import CHUNK, KEY, assert_equal, memory_folder, start
from tests.support.journal import Expected, Journal, read_journal
from tests.support.object_stores import assert_no_orphans_in, forget_dead_takes, store_in
from tests.support.servers import KINDS, Bucket, shared

TAG = "kept"
EACH = ("take", "delete", "prune", "tag", "collect", "restore", "killed", "stopped")
_TICK = 0.02
_LONGEST_WAIT = 300
_STEPS_EACH = 100_000
_MOST_FAILURES = 10
# Beyond this a taker waits: where deletes are slow, a soak would end up in listing snapshots.
_MOST_SNAPSHOTS = 60


# --- states -----------------------------------------------------------------------------------


def content(taker: int, step: int) -> dict[str, Any]:
    """Return a state: a part that all share, one that comes back now and then, and one's own."""
    return {
        "shared": torch.arange(40_000, dtype=torch.float32),
        "again": torch.arange(20_000, dtype=torch.float32) * (step % 7 + 1),
        "own": torch.arange(12_000) + (taker << 40) + (step << 16),
        "step": step,
        "taker": taker,
    }


def assert_whole(snapshot: Snapshot) -> None:
    """Restore a snapshot, and compare it with what its taker took."""
    taker, step = snapshot.metadata.user["taker"], snapshot.metadata.user["step"]
    assert snapshot.name.startswith(f"t{taker}/")
    state = {KEY: StateDict(content(taker + 1, step + 1))}
    snapshot.restore(state)
    assert_equal(state[KEY].data, content(taker, step))


def held(store: Store) -> dict[str, int]:
    """Return names and steps of all snapshots of a store, each of which must be whole."""
    found = store.snapshots()
    for snapshot in found:
        assert_whole(snapshot)
    return {s.name: s.metadata.user["step"] for s in found}


# --- what the processes do ---------------------------------------------------------------------


@dataclass
class Worker:
    """One process: a role, its number, and the how-manieth since its start it is."""

    open_anew: Callable[..., Store]
    journal: Journal
    random: random.Random
    number: int
    life: int
    parent: int = field(default_factory=os.getpid)

    def opened(self) -> Iterator[Store]:
        """Yield the store again and again, now and then opened anew, while there is a parent."""
        while os.getppid() == self.parent:
            store = self.open_anew().make()
            for _ in range(self.random.randint(1, 10)):
                yield store

    def take(self) -> None:
        for i, store in enumerate(self.opened()):
            step = self.life * _STEPS_EACH + i
            overwrite = self.random.random() < 0.2
            name = f"t{self.number}/{'last' if overwrite else f'step_{step}'}"
            state = {KEY: StateDict(content(self.number, step))}
            options: Any = {
                "metadata": {"taker": self.number, "step": step},
                "overwrite": overwrite,
            }
            with self.journal.noted("take", name=name, step=step):
                if self.random.random() < 0.5:
                    store.take(state, name, **options)
                else:
                    pending = store.async_take(state, name, **options)
                    # Later changes do not show.
                    state[KEY].data["own"].zero_()
                    pending.wait()
            while len(store.snapshots()) > _MOST_SNAPSHOTS and os.getppid() == self.parent:
                time.sleep(_TICK)

    def found(self) -> Iterator[tuple[Store, Snapshot, dict[str, Any]]]:
        """Yield a snapshot and its name and step, as the journal has them, again and again."""
        for store in self.opened():
            if found := store.snapshots():
                one = self.random.choice(found)
                yield store, one, {"name": one.name, "step": one.metadata.user["step"]}
            else:
                time.sleep(_TICK)

    def delete(self) -> None:
        for store, one, which in self.found():
            what = self.random.random()
            if what < 0.1:
                # Few: what is tagged stays until it is deleted by name.
                with self.journal.noted("tag", **which):
                    store.tag(one.name, TAG)
            elif what < 0.7:
                with self.journal.noted("delete", **which):
                    store.delete(one.name, commit_id=one.commit_id)
            else:
                rule = Retention(keep_last=self.random.randint(1, 6))
                folder = one.name.partition("/")[0]
                with self.journal.noted("prune", prefix=folder) as more:
                    report = store.prune(rule, prefix=folder)
                    more["gone"] = [(v.name, v.row.metadata["step"]) for v in report.deleted]

    def collect(self) -> None:
        for store in self.opened():
            with self.journal.noted("collect"):
                store.gc(grace=0, repack=self.random.choice([0.0, 0.5, 1.0]))
            time.sleep(self.random.choice([0, 0, 0.2]))

    def read(self) -> None:
        for _, one, which in self.found():
            with self.journal.noted("restore", **which):
                assert_whole(one)


# --- the supervisor ----------------------------------------------------------------------------


@dataclass
class Process:
    """A process under way: what it does, since when it stands still."""

    pid: int
    role: str
    number: int
    life: int
    killed: bool = False
    stopped_until: float | None = None


class Soak:
    """Starts processes at one store, kills them at random, and starts others in their place.

    Args:
        folder: Where the store, the caches and the journal are to be.
        roles: How many processes take, delete, collect and read.
        seed: Of all that is random but the timing.
        kill_every: Seconds between two kills or stops, on the average.
        bucket: Where the store is to be, if not in the folder.
    """

    def __init__(
        self,
        folder: Path,
        roles: dict[str, int],
        seed: int,
        kill_every: float,
        bucket: Bucket | None = None,
    ) -> None:
        if bucket is not None:
            # Here once: it takes each process a second.
            client = "gcs" if bucket.server.is_gcs else "s3"
            importlib.import_module(f"casnap.backends.remote.{client}")
        at_home = partial(Store, folder / "store", create=NewStore(chunk_size=CHUNK))
        self.open_anew = at_home if bucket is None else partial(store_in, bucket)
        self.journal = folder / "journal"
        self.counts: Counter[str] = Counter()
        self.failures: list[str] = []
        self._caches = folder / "caches"
        self._roles = roles
        self._seed = seed
        self._kill_every = kill_every
        self._random = random.Random(seed)
        self._processes: list[Process] = []

    def run(self, seconds: float, tell: Callable[[str], object] | None = None) -> None:
        """Let the processes run, longer on a slow machine, and kill them all."""
        began = time.monotonic()
        next_kill, next_tell = began + self._kill_every, began + 10
        try:
            for role, count in self._roles.items():
                self._processes += [self._start(role, number, 0) for number in range(count)]
            while (now := time.monotonic()) < began + seconds or self._is_early(now - began):
                self._reap()
                self._continue(now)
                if now >= next_kill:
                    next_kill = now + self._random.expovariate(1 / self._kill_every)
                    self._strike(now)
                if tell is not None and now >= next_tell:
                    next_tell += 10
                    tell(f"{now - began:.0f} s: {describe(self.counted())}")
                if len(self.failures) >= _MOST_FAILURES:
                    break
                time.sleep(_TICK)
        finally:
            for process in self._processes:
                self._kill(process)
            while self._processes:
                self._reap(restart=False)
                time.sleep(_TICK)

    def _is_early(self, passed: float) -> bool:
        """Whether one of the operations has not ended once yet."""
        return passed < _LONGEST_WAIT and not {*EACH} <= self.counted().keys()

    def counted(self) -> Counter[str]:
        """Return what was done so far, and to whom."""
        ends = Counter((e["do"], e["end"]) for e in read_journal(self.journal))
        done = {do: n for (do, end), n in ends.items() if end == "done"}
        fenced = sum(n for (_, end), n in ends.items() if end == "FencedError")
        vanished = ends["restore", "SnapshotNotFoundError"]
        return Counter(done) + self.counts + Counter(fenced=fenced, vanished=vanished)

    def _start(self, role: str, number: int, life: int) -> Process:
        rng = random.Random(f"{self._seed}/{role}/{number}/{life}")
        shared = rng.random() < 0.6
        cache = self._caches / ("shared" if shared else f"{role}-{number}")
        journal = Journal(self.journal, f"{role}-{number}")
        worker = Worker(self.open_anew, journal, rng, number, life)

        def work() -> None:
            os.environ["CASNAP_CACHE_DIR"] = str(cache)
            try:
                getattr(worker, role)()
            except BaseException:
                journal.note("fail", trace=traceback.format_exc())
                raise

        pid = start(work)
        os.close(journal._fd)
        return Process(pid, role, number, life)

    def _reap(self, *, restart: bool = True) -> None:
        for process in list(self._processes):
            pid, status = os.waitpid(process.pid, os.WNOHANG)
            if not pid:
                continue
            self._processes.remove(process)
            if not process.killed:
                code = os.waitstatus_to_exitcode(status)
                self.failures.append(f"{process.role}-{process.number} ended with {code}")
            if restart:
                again = self._start(process.role, process.number, process.life + 1)
                self._processes.append(again)

    def _continue(self, now: float) -> None:
        for process in self._processes:
            if process.stopped_until is not None and now >= process.stopped_until:
                process.stopped_until = None
                os.kill(process.pid, signal.SIGCONT)

    def _strike(self, now: float) -> None:
        what, process = self._random.random(), self._random.choice(self._processes)
        if what < 0.1:
            caches = sorted(self._caches.glob("*"))
            if caches:
                shutil.rmtree(self._random.choice(caches), ignore_errors=True)
                self.counts["caches deleted"] += 1
        elif what < 0.4 and process.stopped_until is None:
            os.kill(process.pid, signal.SIGSTOP)
            process.stopped_until = now + self._random.choice([0.05, 0.3, 1, 3])
            self.counts["stopped"] += 1
        else:
            self._kill(process)
            self.counts["killed"] += 1

    @staticmethod
    def _kill(process: Process) -> None:
        process.killed = True
        os.kill(process.pid, signal.SIGKILL)


def describe(counts: Counter[str]) -> str:
    return ", ".join(f"{what} {count}" for what, count in sorted(counts.items()))


def final_check(soak: Soak) -> list[str]:
    """Return what is wrong with what is left of a soak; count what is read."""
    events = read_journal(soak.journal)
    problems = soak.failures + [e["trace"] for e in events if e["do"] == "fail"]
    store = soak.open_anew(create=False)
    report = store.check(data=True)
    problems += [f"{damage.kind}: {damage.message}" for damage in report.damages]
    found = held(store)
    problems += Expected(events).problems_with(found)
    forget_dead_takes(store)
    for _ in range(2):
        store.gc(grace=0)
    assert_no_orphans_in(store)
    if held(soak.open_anew()) != found or not store.check(data=True).ok:
        problems.append("after the last collection the store holds something else")
    soak.counts["left"] = len(found)
    return problems


def run_soak(
    folder: Path,
    seconds: float,
    *,
    takers: int = 4,
    deleters: int = 1,
    collectors: int = 2,
    readers: int = 1,
    seed: int = 0,
    kill_every: float = 0.5,
    bucket: Bucket | None = None,
    tell: Callable[[str], object] | None = None,
) -> Counter[str]:
    """Soak a new store in a folder or bucket; check what is left of it, and return what was done.

    Raises:
        AssertionError: Something was lost, or wrong, or came back; the message says what.
    """
    roles = {"take": takers, "delete": deleters, "collect": collectors, "read": readers}
    soak = Soak(folder, roles, seed, kill_every, bucket)
    soak.run(seconds, tell)
    problems = final_check(soak)
    counts = soak.counted()
    problems = [*dict.fromkeys(problems)]
    assert not problems, f"seed {seed}: {describe(counts)}\n" + "\n".join(problems)
    return counts


def main() -> int:
    parser = argparse.ArgumentParser(description="Soak a store with processes that are killed.")
    parser.add_argument("--seconds", type=float, default=300)
    for role, count in (("takers", 4), ("deleters", 1), ("collectors", 2), ("readers", 1)):
        parser.add_argument(f"--{role}", type=int, default=count)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--kill-every", type=float, default=0.5, help="seconds, on the average")
    parser.add_argument("--folder", type=Path, help="where to; by default in memory")
    parser.add_argument("--server", choices=KINDS, help="in a bucket of this kind of server")
    options = vars(parser.parse_args())
    print(f"seed {options['seed']}", flush=True)
    folder, kind = options.pop("folder"), options.pop("server")
    with contextlib.ExitStack() as stack:
        if kind is not None:
            # This one ends also if this process is killed.
            at = Path(stack.enter_context(TemporaryDirectory()))
            options["bucket"] = stack.enter_context(stack.enter_context(shared(kind, at)).bucket())
        if folder is None:
            folder = stack.enter_context(memory_folder())
        folder.mkdir(parents=True, exist_ok=True)
        os.environ["CASNAP_CACHE_DIR"] = str(folder / "caches" / "last")
        try:
            counts = run_soak(folder, **options, tell=partial(print, flush=True))
        except AssertionError:
            traceback.print_exc()
            return 1
    print(f"all is well: {describe(counts)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
