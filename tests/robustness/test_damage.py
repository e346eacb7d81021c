"""Damage anywhere in a store: the right bytes or a typed error, and never anything else."""

from __future__ import annotations

import random
import shutil
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from casnap import NewStore, StateDict, Store
from casnap.errors import CasnapError, DamagedError
from casnap.format.digest import Digest
from casnap.format.records import Place, pack_key
from tests.support.cli_calls import invoke
from tests.support.damaged import (
    KEY,
    STEPS,
    all_places_of,
    content,
    copied_store,  # noqa: F401 - a fixture
    damage_everywhere,
    damaged,
    damages,
    expected,
    flip,
    forget_cache,
    forget_copies,
    newest,
    objects_of,
    pristine_store,  # noqa: F401 - a fixture
)
from tests.support.faults import CHUNK, assert_equal
from tests.support.sweep import STEP
from tests.support.written import change_of, commit


class Spy(StateDict):
    """A state that counts how often it was loaded."""

    loads = 0

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.loads += 1
        super().load_state_dict(state_dict)


# --- what is seen of a store ------------------------------------------------------------------

Outcomes = dict[str, "CasnapError | None"]


def observe(path: Path) -> Outcomes:
    """Call every operation: each result must be right, each error typed."""
    outcomes: Outcomes = {}

    def attempt(what: str, work: Callable[[Store], object]) -> None:
        try:
            work(Store(path, create=False))
            outcomes[what] = None
        except CasnapError as e:
            outcomes[what] = e

    attempt("list", lambda s: _check_names([x.name for x in s.snapshots()]))
    for name, step in STEPS.items():
        attempt(f"restore {name}", lambda s, n=name, i=step: _check_restore(s, n, i))
        attempt(f"read {name}", lambda s, n=name, i=step: _check_reads(s, n, i))
        attempt(f"manifest {name}", lambda s, n=name: _check_manifest(s, n))
    attempt("diff", _check_diff)
    attempt("usage", lambda s: s.usage())
    return outcomes


def _check_names(names: list[str]) -> None:
    # Without its newest root and the copy of it, a store is what it was one commit before.
    assert names == list(STEPS)[: len(names)]


def _check_restore(store: Store, name: str, step: int) -> None:
    """A state is filled in place; one with a loader of its own is untouched until all is there."""
    snapshot, state, spy = store[name], StateDict(content(step + 5)), Spy(content(step + 5))
    weight, weight_of_spy = state["weight"], spy["weight"]
    try:
        report = snapshot.restore({KEY: spy})
    except CasnapError:
        assert spy.loads == 0
        assert_equal(spy.data, expected(step + 5))
        with pytest.raises(CasnapError):
            snapshot.restore({KEY: state})
        raise
    assert spy.loads == 1
    assert not report
    assert_equal(spy.data, expected(step))
    assert torch.equal(weight_of_spy, expected(step + 5)["weight"])
    assert not snapshot.restore({KEY: state})
    assert_equal(state.data, expected(step))
    assert state["weight"] is weight


def _check_reads(store: Store, name: str, step: int) -> None:
    snapshot, holds = store[name], expected(step)
    assert torch.equal(snapshot.read_object(f"0/{KEY}/weight"), holds["weight"])
    part = snapshot.read_object(f"{KEY}/frozen", index=slice(30_000, 40_000))
    assert torch.equal(part, holds["frozen"][30_000:40_000])
    assert snapshot.read_object(f"{KEY}/notes") == holds["notes"]


def _check_manifest(store: Store, name: str) -> None:
    manifest = store[name].get_manifest()
    assert manifest.keys() >= {f"0/{KEY}/{key}" for key in expected(0)}
    assert manifest[f"0/{KEY}/frozen"].shape == (100_000,)


def _check_diff(store: Store) -> None:
    difference = store.diff("a", "b")
    changed = [change.path.removeprefix(f"{KEY}/") for change in difference.changes]
    assert changed == ["bias", "inline", "notes/1/step", "notes/1/text", "weight"]


def failed(outcomes: Outcomes) -> set[str]:
    return {what for what, error in outcomes.items() if error is not None}


# --- damages ----------------------------------------------------------------------------------


@pytest.mark.sweep
def test_any_damage_beside_an_old_cache(store: Path, cache_dir: Path) -> None:
    """Whatever happens to one file: right, or a typed error."""
    assert failed(observe(store)) == set()
    choose = random.Random(1)
    hurt: Counter[str] = Counter()
    for file in objects_of(store):
        for damage in islice(damages(file, choose), 0, None, 9 if STEP == 1 else 18):
            forget_cache(cache_dir)
            Store(store, create=False)["run/c"].get_manifest()
            with damaged(file, damage):
                top = file.relative_to(store / "casnap-store").parts[0]
                hurt[top] += bool(failed(observe(store)))
    # Each root and node is stored twice: one damage to either does no harm.
    assert not hurt["roots"]
    assert hurt["packs"]
    forget_cache(cache_dir)
    assert failed(observe(store)) == set()


@pytest.mark.parametrize("damage", [flip(46), flip(184), lambda raw: raw[:9], None])
def test_the_copy_of_the_newest_root_stands_in_for_it(
    store: Path, cache_dir: Path, damage: Callable[[bytes], bytes] | None
) -> None:
    """Damaged or lost: all is there, and what is committed then follows it."""
    opened, lost = Store(store, create=False), newest(store)
    with damaged(lost, damage or (lambda _: None)):
        forget_cache(cache_dir)
        assert failed(observe(store)) == set()
        for where, name in ((Store(store), "d"), (opened, "e")):
            where.take({KEY: StateDict(content(4))}, name)
        assert int(newest(store).name) == int(lost.name) + 2
        assert [s.name for s in Store(store).snapshots()] == [*STEPS, "d", "e"]
        for name, step in {**STEPS, "d": 4, "e": 4}.items():
            _check_restore(Store(store), name, step)
        assert Store(store).gc(grace=0).snapshots == len(STEPS) + 2


@pytest.mark.parametrize("known", [False, True])
def test_several_roots_that_are_lost(store: Path, cache_dir: Path, known: bool) -> None:
    """The copy of the last one says that they were there: no number is put again."""
    opened = Store(store, create=False)
    seq = int(newest(store).name)
    if known:
        opened.snapshots()
    for step in (5, 6):
        Store(store).take({KEY: StateDict(content(step))}, f"lost/{step}")
        newest(store).rename(store / f"away-{step}")
        forget_cache(cache_dir)
    opened.take({KEY: StateDict(content(7))}, "d")
    assert int(newest(store).name) == seq + 3
    opened.take({KEY: StateDict(content(8))}, "e")
    assert [s.name for s in Store(store).snapshots()] == [*STEPS, "lost/5", "lost/6", "d", "e"]
    _check_restore(Store(store), "lost/5", 5)
    assert Store(store).check(data=True).ok


def test_a_store_that_was_copied_while_it_was_written_to(store: Path, tmp_path: Path) -> None:
    """It is what it was when its roots were copied, though the copy of a later one came along."""
    backup = tmp_path / "backup"
    shutil.copytree(store, backup)
    for step in (5, 6):
        Store(store).take({KEY: StateDict(content(step))}, f"later/{step}")
    forget_copies(backup)
    shutil.copytree(store / "casnap-store/roots/copies", backup / "casnap-store/roots/copies")
    for step in (7, 8, 9):
        Store(backup).take({KEY: StateDict(content(step))}, f"own/{step}")
    names = [s.name for s in Store(backup).snapshots()]
    assert names == [*STEPS, "own/7", "own/8", "own/9"]
    _check_restore(Store(backup), "own/7", 7)
    assert Store(backup).check(data=True).ok


def test_a_damaged_newest_root_is_no_older_root(store: Path, cache_dir: Path) -> None:
    """While neither it nor its copy can be read, nothing can be: older ones are never believed."""
    file = newest(store)
    forget_copies(store)
    size = file.stat().st_size
    before = {p: p.read_bytes() for p in objects_of(store) if p != file}
    cuts = [lambda raw, n=n: raw[:n] for n in range(0, size, 23)]
    for damage in [*(flip(at, at % 8) for at in range(0, size, 5)), *cuts]:
        with damaged(file, damage):
            with pytest.raises(CasnapError):
                Store(store, create=False).latest()
            with pytest.raises(CasnapError):
                Store(store, create=False)["a"]
            with pytest.raises(CasnapError):
                Store(store).take({KEY: StateDict(x=1)}, "d")
    with damaged(file, flip(60)):
        outcomes = observe(store)
        assert failed(outcomes) == set(outcomes)
        assert all(isinstance(e, DamagedError) for e in outcomes.values())
    assert {p: p.read_bytes() for p in objects_of(store) if p != file} == before


@pytest.mark.parametrize("damage", [lambda _: b"", lambda raw: raw[:-1], flip(60)])
def test_a_lost_newest_root_whose_copy_is_torn_is_no_older_root(
    store: Path, cache_dir: Path, damage: Callable[[bytes], bytes]
) -> None:
    """A step back without a word would end in a run that goes on from an older snapshot."""
    lost = newest(store)
    copy = store / "casnap-store/roots/copies" / lost.name
    lost.rename(store / "away")
    with damaged(copy, damage):
        for fresh in (True, False):
            if fresh:
                forget_cache(cache_dir)
            with pytest.raises(DamagedError, match=f"roots/0/{lost.name} is lost, and its copy"):
                Store(store, create=False).latest()
            with pytest.raises(DamagedError, match="from a backup"):
                Store(store).take({KEY: StateDict(x=1)}, "d")
        report = Store(store).check()
        assert not report.ok
        assert "is lost, and its copy" in report.damages[0].message
    # With its copy, or after the way back that the error names, the store can be read.
    assert [s.name for s in Store(store).snapshots()] == list(STEPS)
    copy.rename(store / "copy-away")
    forget_cache(cache_dir)
    assert [s.name for s in Store(store).snapshots()] == list(STEPS)[:-1]


# --- who is hurt ------------------------------------------------------------------------------


def places_of(store: Path) -> dict[Digest, Place]:
    return dict(all_places_of(store))


def users_of(store: Path) -> dict[Digest, dict[str, set[str]]]:
    """Return, for each chunk, the snapshots that need it, and for which entries."""
    users: dict[Digest, dict[str, set[str]]] = {}
    for snapshot in Store(store).snapshots():
        for path, entry in snapshot.contents.entries():
            for digest, _ in snapshot.contents.chunks(path, entry):
                users.setdefault(digest, {}).setdefault(snapshot.name, set()).add(path)
    return users


@pytest.mark.sweep
def test_a_damaged_chunk_hurts_whom_it_belongs_to(store: Path) -> None:
    """The error names the entries hurt; what does not need the chunk is restored as ever."""
    records, users = all_places_of(store), users_of(store)
    assert len(users) > 15
    for digest, by_name in islice(users.items(), 0, None, 1 if STEP == 1 else 2):
        with ExitStack() as hurt:
            # A small chunk stands in its pack twice.
            for place in (place for other, place in records if other == digest):
                change = flip(place.offset + place.stored_size // 2)
                hurt.enter_context(damaged(store / "casnap-store" / pack_key(place.pack), change))
            outcomes = observe(store)
        assert outcomes["list"] is outcomes["usage"] is outcomes["diff"] is None
        for name in STEPS:
            error = outcomes[f"restore {name}"]
            assert outcomes[f"manifest {name}"] is None
            if name not in by_name:
                assert error is None
                continue
            assert isinstance(error, DamagedError)
            assert set(error.paths) == by_name[name]
            assert all(path in str(error) for path in error.paths)


def test_a_damaged_list_of_digests_names_its_tensor(store: Path, cache_dir: Path) -> None:
    entry = Store(store)["a"].get_manifest()[f"0/{KEY}/frozen"]
    forget_cache(cache_dir)
    damage_everywhere(store, entry.payload.digests)
    for name in STEPS:
        with pytest.raises(DamagedError) as caught:
            Store(store)[name].restore({KEY: Spy(content(7))})
        assert caught.value.paths == (f"{KEY}/frozen",)
        assert Store(store)[name].read_object(f"{KEY}/notes") == expected(STEPS[name])["notes"]


def test_one_damage_to_a_node_hurts_no_snapshot(store: Path, cache_dir: Path) -> None:
    """Each stands twice in its pack, on different pages."""
    records = all_places_of(store)
    chunks = users_of(store).keys()
    nodes = [(digest, place) for digest, place in records if digest not in chunks]
    assert len(nodes) >= 2 * 10
    for digest, place in nodes:
        pages = {p.offset // 4096 for d, p in nodes if (d, p.pack) == (digest, place.pack)}
        assert len(pages) == 2
        page = place.offset // 4096 * 4096
        wiped = lambda raw, at=page: raw[:at] + bytes(4096) + raw[at + 4096 :]  # noqa: E731
        forget_cache(cache_dir)
        with damaged(store / "casnap-store" / pack_key(place.pack), wiped):
            for name, step in STEPS.items():
                _check_restore(Store(store), name, step)


@pytest.mark.parametrize("later", ["as taken", "compressed", "repacked", "copied"])
def test_one_damage_to_a_small_chunk_hurts_no_snapshot(
    tmp_path: Path, cache_dir: Path, later: str
) -> None:
    """Such as the settings of an optimizer, without which no snapshot can be resumed."""
    store = Store(
        tmp_path / "own", create=NewStore(codec="zstd" if later == "compressed" else "auto")
    )
    settings = {f"setting number {i} of an optimizer": i for i in range(12)}
    for step in range(3):
        state = {"w": torch.full((100_000,), float(step)), "param_groups": [settings]}
        store.take({"optim": StateDict(state)}, f"step_{step}")
    if later == "repacked":
        store.delete("step_0")
        store.gc(grace=0, repack=1.0, recode_after=None)
    if later == "copied":
        store.copy(to=tmp_path / "copy")
        store = Store(tmp_path / "copy")
    path = Path(store.uri)
    entry = store["step_2"].get_manifest()["0/optim/param_groups/0"]
    assert len(entry.payload.digests) == 32
    places = [p for d, p in all_places_of(path) if d == entry.payload.digests]
    newest = max(places, key=lambda place: place.pack).pack
    pages = {(p.offset // 4096, (p.offset + p.stored_size - 1) // 4096) for p in places}
    assert len([p for p in places if p.pack == newest]) == len(pages) == 2
    for place in places:
        page = place.offset // 4096 * 4096
        wiped = lambda raw, at=page: raw[:at] + bytes(4096) + raw[at + 4096 :]  # noqa: E731
        forget_cache(cache_dir)
        with damaged(path / "casnap-store" / pack_key(place.pack), wiped):
            assert Store(path)["step_2"].read_object("optim/param_groups") == [settings]
            assert not Store(path).check(data=True).ok
    first = min(places, key=lambda place: (place.pack != newest, place.offset))
    with damaged(path / "casnap-store" / pack_key(newest), flip(first.offset)):
        assert Store(path).repair().ok
        assert Store(path).check(data=True).ok


def test_a_node_that_is_too_large_to_stand_twice_stands_once(store: Path) -> None:
    nodes = [bytes([i]) * nbytes for i, nbytes in enumerate([100, 30 << 20, 200, 20 << 20, 300])]
    repository = Store(store)._view.repository
    with change_of(repository) as session:
        digests = [session.put_node(node) for node in nodes]
        commit(session)
    result = [digest for digest, _ in all_places_of(store)]
    assert [result.count(digest) for digest in digests] == [2, 1, 2, 2, 2]
    assert [Store(store)._view.repository.node(digest) for digest in digests] == nodes
    assert Store(store).check(data=True).ok


# --- healing ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "how"), [("chunk", "deleted"), ("list", "flipped")])
def test_the_same_bytes_taken_again_heal(store: Path, how: str, kind: str, cache_dir: Path) -> None:
    """What a process saw damaged, a take of that process stores anew, for all that need it."""
    entry = Store(store)["a"].get_manifest()[f"0/{KEY}/frozen"]
    users, places = users_of(store), places_of(store)
    if kind == "chunk":
        digest = next(d for d, names in users.items() if set(names) == set(STEPS))
    else:
        digest = Digest(entry.payload.digests)
    file = store / "casnap-store" / pack_key(places[digest].pack)
    forget_cache(cache_dir)
    if how == "flipped":
        damage_everywhere(store, digest)
    else:
        file.unlink()
    opened = Store(store)
    with pytest.raises(DamagedError, match="take the same bytes again"):
        opened["run/c"].restore({KEY: Spy(content(3))})
    opened.take({KEY: StateDict(content(2))}, "healed")
    for fresh in (False, True):
        if fresh:
            forget_cache(cache_dir)
        _check_restore(Store(store), "healed", 2)
        _check_restore(Store(store), "run/c", 2)
    again = Store(store).take({KEY: StateDict(content(2))}, "again")
    assert again.stats.new_bytes < 1_000


# --- one valid object in place of another -----------------------------------------------------


@pytest.mark.parametrize("chunk_size", [CHUNK, 1 << 20])
def test_the_record_of_another_store(store: Path, tmp_path: Path, chunk_size: int) -> None:
    """Another id does no harm; under another chunk size all larger tensors are refused.

    Check says so, and what to do.
    """
    Store(tmp_path / "other", create=NewStore(chunk_size=chunk_size)).make()
    record = store / "casnap-store/casnap.json"
    other, own = (tmp_path / "other" / "casnap-store/casnap.json").read_bytes(), record.read_bytes()
    with damaged(record, lambda _: other):
        outcomes = observe(store)
        damage = Store(store).check().damages[0]
        assert (damage.kind, damage.object) == ("changed", "casnap.json")
        assert "is not the record of this store" in damage.message
        with pytest.raises(DamagedError, match="delete it, and `casnap repair` makes it anew"):
            Store(store).repair()
        record.unlink()
        invoke("repair", store, "--yes")
        assert record.read_bytes() == own
    if chunk_size == CHUNK:
        assert failed(outcomes) == set()
    else:
        assert isinstance(outcomes["restore a"], DamagedError)
        assert outcomes["list"] is None
