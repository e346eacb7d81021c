"""What can be done with a store: each verb, the stores that it is tried on, and what comes of it.

``VERBS`` has them by name. A verb is done in the folder of a *case*, a copy of one of the bases:
with the store in it, and with what else the verb reads or writes beside that::

    shutil.copytree(make_bases(folder)["littered"], case)
    VERBS["take"].do(Store(case / "store"), case)
    assert whole(case / "store") == VERBS["take"].result
"""

from __future__ import annotations

import json
import os
import re
import shutil
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from casnap import NewStore, Retention, Snapshot, StateDict, Store
from casnap.errors import DamagedError, NotAStoreError, UnavailableError
from casnap.format.records import pack_key
from casnap.maintenance.check import CheckReport
from casnap.maintenance.repair import RepairReport
from casnap.serving import PullOptions, verify
from tests.support.copies import copy_in_parts, unfinished
from tests.support.damaged import change, flip, record_of
from tests.support.faults import (
    CHUNK,
    KEY,
    app_state,
    assert_equal,
    assert_holds,
    content,
    littered_store,
    take,
)
from tests.support.served import tensors_in, versions_of

States = Mapping[str, Any]
"""The names of snapshots, and what they hold: a step, and whether it is thinned."""

LITTERED = {"step_3": 3, "step_4": 4}
RUN = {f"run/{step}": step for step in range(6)} | {"step_4": 4}
SERVED = PullOptions(path=KEY, max_shard_size=100_000, keep=1)


@dataclass(frozen=True)
class Verb:
    """Something that is done with a store.

    Attributes:
        do: Does it; gets the store, and the folder of the case.
        result: What the store holds then; None: what it held before.
        between: What it may hold meanwhile.
        base: Which store it is done with.
        changes: What it writes to: the store, other files of the case, or nothing.
        ends: Checks what a process that failed has left, and does what remains to be done; gets the
            path of the store, and the folder of the case.
    """

    do: Callable[[Store, Path], object]
    result: States | None = None
    between: tuple[States, ...] = ()
    base: str = "littered"
    changes: Literal["store", "files", "nothing"] = "store"
    ends: Callable[[Path, Path], object] | None = None

    @property
    def mends(self) -> bool:
        """Whether the store is damaged before."""
        return self.base in ("unindexed", "wrecked")

    def stages(self, before: States) -> list[States]:
        """Return what the store may hold, from what it held before to the result."""
        return [before, *self.between, before if self.result is None else self.result]


# --- takes, and changes of the table ------------------------------------------------------------


def async_take(store: Store, _: Path) -> None:
    store.async_take(app_state(9), "step_9", metadata={"step": 9}).wait()


def overwrite(store: Store, _: Path) -> None:
    store.take(app_state(7), "step_3", metadata={"step": 7}, overwrite=True)


def import_file(store: Store, case: Path) -> None:
    store.import_file(case / "imported.pt", "step_9", key=KEY, metadata={"step": 9})


def average(store: Store, _: Path) -> None:
    """Compute each chunk that differs; the weights make the mean what the second one is."""
    names = ["step_3", "step_4"]
    store.average(names, "step_9", weights=[0.0, 1.0], metadata={"step": 4})


def several(store: Store, _: Path) -> None:
    """Take, delete, collect, and take over that."""
    take(store, 10)
    store.delete("step_3")
    store.gc(grace=0, repack=1.0)
    store.take(app_state(11), "step_10", metadata={"step": 11}, overwrite=True)


def witness(store: Store, _: Path) -> None:
    """Store a witness, and compare another one."""
    store.witness(app_state(9), "step_9")
    assert store.witness(app_state(9), "step_9").equal


def witnessed(path: Path, _: Path) -> None:
    """Check that there is a whole witness or none, and that the next call stores it or agrees."""
    store = Store(path)
    there = "witness/step_9" in store
    assert store.witness(app_state(9), "step_9").stored != there
    assert store.witness(app_state(8), "step_9", on_mismatch="warn").count
    assert store.check(data=True).ok


def tagged(path: Path, _: Path) -> None:
    """Check that a tag that is moved again is where it was moved to, and nowhere else."""
    store = Store(path)
    store.publish("stable", "step_4")
    assert [s.name for s in store.snapshots() if "stable" in s.tags] == ["step_4"]
    assert store.tagged("stable").name == "step_4"


def rewound(path: Path, _: Path) -> None:
    """Check that the run has gone back, or has not, and that it can again."""
    store = Store(path)
    assert [latest.name for latest in [store.latest()] if latest] in (["step_3"], ["step_4"])
    assert store.rewind("step_3").name == "step_3"


# --- what comes from other stores ---------------------------------------------------------------


def copy_in(store: Store, case: Path) -> None:
    """Copy in parts, each of which is committed."""
    copy_in_parts(case / "source", store, 2 * CHUNK)


def copied_in(path: Path, case: Path) -> None:
    copy_in_parts(case / "source", path, 2 * CHUNK)
    assert unfinished(path) == []
    assert whole(path).items() >= {"step_0": 0, "step_9": 9}.items()
    assert whole(case / "source") == {"step_0": 0, "step_9": 9}


def mirror(store: Store, case: Path) -> None:
    """Be the mirror of another store, in which a take goes on."""
    source = Store(case / "source", mirror=store._view.repository.backend)
    assert source.mirror is not None
    try:
        take(source, 10)
        source.wait_mirrored(120)
    finally:
        source.mirror.stop()
        for thread in threading.enumerate():
            if thread.name.startswith("casnap-mirror"):
                thread.join(120)


def mirrored(path: Path, case: Path) -> None:
    source = Store(case / "source", mirror=path)
    source.wait_mirrored(120)
    assert source.mirror is not None
    source.mirror.stop()
    assert whole(path).items() >= whole(case / "source").items()


# --- what goes elsewhere ------------------------------------------------------------------------


def copy_out(store: Store, case: Path) -> None:
    """Copy all, of which some are deltas."""
    store.copy(to=Store(case / "there", create=NewStore(chunk_size=CHUNK, codec="zstd")).make())


def copied_out(path: Path, case: Path) -> None:
    assert whole(case / "there").items() <= RUN.items()
    copy_out(Store(path), case)
    Store(case / "there").gc(grace=0)
    assert whole(case / "there") == RUN


def export(store: Store, case: Path) -> None:
    try:
        store["step_4"].export(case / "exported.pt")
    except UnavailableError:
        # No folder can be listed.
        raise
    except BaseException:
        assert [p.name for p in case.iterdir() if p.name != "store"] == []
        raise
    exported(Path(), case)


def exported(_: Path, case: Path) -> None:
    if (case / "exported.pt").exists():
        assert_equal(torch.load(case / "exported.pt")[KEY], content(4))


def pull(store: Store, case: Path) -> None:
    """Bring a folder to step 4, if it is there from step 3."""
    store.pull(case / "live", "step_4", options=SERVED)


def assert_served(live: Path, steps: set[int]) -> None:
    """Check that a folder is the whole version of one of these steps."""
    step = json.loads((live / "casnap-version.json").read_text())["metadata"]["step"]
    assert step in steps
    tensors = {k: v for k, v in content(step).items() if isinstance(v, torch.Tensor)}
    assert_equal(tensors_in(live), tensors)
    assert verify(live) == []


def pulled(path: Path, case: Path) -> None:
    """Check that the folder is the old or the new version, and that the next pull heals it."""
    if os.path.lexists(case / "live"):
        assert_served(case / "live", {3, 4})
    pull(Store(path), case)
    assert_served(case / "live", {4})
    assert len(versions_of(case / "live")) == 1


# --- reads --------------------------------------------------------------------------------------


def restore(store: Store, _: Path) -> None:
    state = app_state(0)
    loaded: list[dict[str, Any]] = []
    state[KEY].load_state_dict = loaded.append  # type: ignore[method-assign, assignment]
    try:
        store["step_3"].restore(state)
    except BaseException:
        assert loaded == []
        raise
    assert_equal(loaded[0], content(3))


def read_object(store: Store, _: Path) -> None:
    assert torch.equal(store["step_4"].read_object(f"{KEY}/weight"), content(4)["weight"])


def all_well(report: CheckReport | RepairReport) -> None:
    if not report.ok:
        raise DamagedError("it says that there is damage")


NINE = LITTERED | {"step_9": 9}
COPIED = NINE | {"step_0": 0}
THINNED = RUN | {f"run/{step}": f"{step}, thinned" for step in range(5)}
VERBS = {
    "make": Verb(lambda s, _: s.make(), {}, base="none"),
    "take": Verb(lambda s, _: take(s, 9), NINE),
    # The content of a snapshot that was deleted, which no longer may be relied on.
    "take-again": Verb(lambda s, _: take(s, 0), LITTERED | {"step_0": 0}),
    "async-take": Verb(async_take, NINE),
    "overwrite": Verb(overwrite, LITTERED | {"step_3": 7}),
    "import": Verb(import_file, NINE, base="linked"),
    "average": Verb(average, LITTERED | {"step_9": 4}),
    "several": Verb(
        several,
        {"step_4": 4, "step_10": 11},
        between=(LITTERED | {"step_10": 10}, {"step_4": 4, "step_10": 10}),
    ),
    "copy-in": Verb(
        copy_in, COPIED, (LITTERED | {"step_0": 0}, NINE), base="linked", ends=copied_in
    ),
    "mirror": Verb(
        mirror,
        COPIED | {"step_10": 10},
        (LITTERED | {"step_0": 0}, COPIED),
        base="linked",
        ends=mirrored,
    ),
    "delete": Verb(lambda s, _: s.delete("step_3"), {"step_4": 4}),
    "prune": Verb(lambda s, _: s.prune(Retention(keep_last=1)), {"step_4": 4}),
    "thin": Verb(lambda s, _: s.thin({"optim/**": 1}, prefix="run"), THINNED, base="run"),
    "tag": Verb(lambda s, _: s.tag("step_3", "best")),
    "publish": Verb(lambda s, _: s.publish("stable", "step_3"), ends=tagged),
    "witness": Verb(witness, ends=witnessed),
    "rewind": Verb(
        lambda s, _: s.rewind("step_3"), {"step_3": 3, "rewound/step_4": 4}, ends=rewound
    ),
    "configure": Verb(lambda s, _: s.configure(codec="zstd")),
    "gc": Verb(lambda s, _: s.gc(grace=0, repack=0.9)),
    "gc-with-grace": Verb(lambda s, _: s.gc(grace=3600, repack=0.9)),
    "recode": Verb(lambda s, _: s.gc(grace=0, recode_after=1), base="run"),
    "repair": Verb(lambda s, _: all_well(s.repair()), LITTERED, base="unindexed"),
    "repair-some": Verb(lambda s, _: s.repair(), {"step_3": 3}, base="wrecked"),
    "copy-out": Verb(copy_out, base="run", changes="files", ends=copied_out),
    "export": Verb(export, changes="files", ends=exported),
    "first-pull": Verb(pull, changes="files", ends=pulled),
    "pull": Verb(pull, base="served", changes="files", ends=pulled),
    "restore": Verb(restore, changes="nothing"),
    "read_object": Verb(read_object, changes="nothing"),
    "list": Verb(lambda s, _: s.snapshots(), changes="nothing"),
    "usage": Verb(lambda s, _: s.usage(), changes="nothing"),
    "check": Verb(lambda s, _: all_well(s.check(data=True)), changes="nothing"),
}


# --- the stores ---------------------------------------------------------------------------------


def weights(step: int) -> torch.Tensor:
    """Return what a run has at a step: a few elements differ from those at the step before."""
    generator = torch.Generator().manual_seed(1)
    bits = (torch.randn(CHUNK, generator=generator) * 0.02).to(torch.bfloat16).view(torch.int16)
    for seed in range(step + 1):
        chosen = torch.rand(CHUNK, generator=generator.manual_seed(seed)) < 0.01
        bits[chosen] += 1
    return bits.view(torch.bfloat16)


def run_state(step: int) -> dict[str, StateDict]:
    moments = torch.arange(10_000.0) * (step + 1)
    return {"m": StateDict(w=weights(step)), "optim": StateDict(moments=moments)}


def run_store(path: Path) -> Path:
    """Make a store of a run, in which older snapshots are recoded, and newer ones are to be."""
    store = Store(path, create=NewStore(chunk_size=CHUNK, codec="auto"))
    for step in range(6):
        store.take(run_state(step), f"run/{step}", metadata={"step": step})
        if step == 3:
            store.gc(grace=0)
    take(store, 4)
    return path


def assert_holds_step(snapshot: Snapshot) -> Any:
    """Check that a snapshot holds the state of its step; return what ``States`` says of it."""
    step = snapshot.metadata.user["step"]
    if not snapshot.name.startswith("run/"):
        assert_holds(snapshot, step)
        return step
    found = run_state(step + 1)
    expected = run_state(step)
    if snapshot.thinned:
        del found["optim"]
    snapshot.restore(found)
    for key, state in found.items():
        assert_equal(state.data, expected[key].data)
    return f"{step}, thinned" if snapshot.thinned else step


def whole(path: Path | str) -> dict[str, Any]:
    """Return the snapshots of a store that can be restored; what they hold must be right."""
    if not Path(path, "casnap-store").exists():
        return {}
    states = {}
    try:
        for snapshot in Store(path, create=False).snapshots():
            name = re.sub(r"^rewound-\d+/", "rewound/", snapshot.name)
            try:
                states[name] = assert_holds_step(snapshot)
            except DamagedError:
                continue
    except (DamagedError, NotAStoreError):
        return {}
    return states


def make_bases(folder: Path) -> dict[str, Path]:
    """Make a folder for each base, with a store in it, and what stands beside that."""
    littered = littered_store(folder / "littered/store")
    (folder / "none").mkdir()
    shutil.copytree(littered, folder / "linked/store")
    for step in (0, 9):
        take(folder / "linked/source", step)
    torch.save(content(9), folder / "linked/imported.pt")
    served = shutil.copytree(littered, folder / "served/store")
    Store(served).pull(folder / "served/live", "step_3", options=SERVED)
    unindexed = shutil.copytree(littered, folder / "unindexed/store")
    shutil.rmtree(unindexed / "casnap-store/index")
    wreck(shutil.copytree(littered, folder / "wrecked/store"))
    run_store(folder / "run/store")
    return {path.name: path for path in folder.iterdir()}


def wreck(path: Path) -> None:
    """Damage a chunk of step 4, cut off the footer of a pack of step 3, and lose a segment."""
    _, lost = record_of(path, content(4)["weight"][: CHUNK // 4])
    _, torn = record_of(path, content(3)["weight"][: CHUNK // 4])
    inner = path / "casnap-store"
    change(inner / pack_key(lost.pack), flip(lost.offset + 11))
    change(inner / pack_key(torn.pack), lambda raw: raw[:-30])
    lists = [f for f in (inner / "index").iterdir() if bytes(torn.pack) not in f.read_bytes()]
    max(lists).unlink()
