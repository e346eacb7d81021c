"""A repair saves what is whole, and names what is not; and `casnap repair`."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable
from inspect import stack
from pathlib import Path

import msgspec
import pytest
import torch

from casnap import NewStore, StateDict, Store
from casnap.backends import LocalBackend
from casnap.errors import BackendError, DamagedError
from casnap.format.digest import digest_of
from casnap.format.records import CONFIG_KEY, PackId, pack_key, root_key
from casnap.maintenance.survey import Survey
from casnap.storage.collecting.gc import GcOptions, collect
from casnap.storage.commit_log.roots import sealed_root
from tests.support.cli_calls import Terminal, failure, invoke
from tests.support.copies import names
from tests.support.damaged import (
    FROZEN,
    KEY,
    STEPS,
    WEIGHT,
    broken,
    change,
    check,
    content,
    copied_store,  # noqa: F401 - a fixture
    damage_chunk,
    damage_everywhere,
    damages,
    drop_from_index,
    expected,
    flip,
    forget_cache,
    forget_copies,
    listing_of,
    lost_in,
    named,
    newest,
    objects_of,
    other_store,
    pristine_store,  # noqa: F401 - a fixture
    record_of,
    repair,
)
from tests.support.faults import CHUNK, backend_faults, elsewhere, files, in_child
from tests.support.faulty import Call, Fault, FaultyBackend, fail
from tests.support.sweep import STEP
from tests.support.written import put_next_root

# --- what is saved ----------------------------------------------------------------------------


def test_nothing_to_repair(store: Path) -> None:
    before = files(store)
    report = repair(store)
    assert report.ok
    assert not report.found
    assert files(store) == before


@pytest.mark.sweep
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_any_damage_to_any_object(
    pristine: Path, tmp_path: Path, cache_dir: Path, seed: int
) -> None:
    """Afterwards only what is lost is wrong, and a second repair does nothing."""
    choose = random.Random(seed)
    store = tmp_path / "store"
    for file in objects_of(pristine):
        key = file.relative_to(pristine)
        if key.name == "casnap.json":
            continue
        for damage in choose.sample(list(damages(file, choose)), 2 if STEP == 1 else 1):
            shutil.rmtree(store, ignore_errors=True)
            shutil.copytree(pristine, store)
            forget_cache(cache_dir)
            change(store / key, damage)
            report = repair(store)
            forget_cache(cache_dir)
            if key.parts[0] == "roots":
                assert report.ok
                assert [str(key)] == [d.object for d in report.found] or "copies" in key.parts
                assert Store(store).check(data=True).ok
                continue
            if key.parts[0] == "index":
                assert report.ok
            gone = set(STEPS) - set(names(Store(store)))
            assert bool(gone) == (report.restored_root is not None)
            assert broken(store) - gone == (set(STEPS) if "*" in named(report) else named(report))
            lost = lost_in(store)
            assert bool(lost) != report.ok
            again = repair(store)
            assert again.root == report.root
            assert {bytes.fromhex(d.digest) for d in again.remaining} == lost


def test_the_rest_of_a_damaged_pack(store: Path) -> None:
    digest, place = damage_chunk(store, FROZEN)
    report = repair(store)
    assert (report.replaced_packs, report.saved_chunks) == (1, 11)
    # This was the first repair, and none of an earlier one is told of.
    assert [(d.kind, d.digest, d.message) for d in report.remaining] == [
        ("lost", digest.hex(), "lost: a repair found no whole copy of it")
    ]
    assert named(report) == set(STEPS)
    assert Store(store)._view.repository.newest().lost == digest
    assert place.pack not in listing_of(store).packs
    assert torch.equal(Store(store)["a"].read_object(f"{KEY}/weight"), expected(0)["weight"])
    with pytest.raises(DamagedError, match=digest.hex()):
        Store(store)["a"].read_object(f"{KEY}/frozen")


def test_the_next_take_heals(store: Path) -> None:
    damage_chunk(store, FROZEN)
    repair(store)
    # A take by another process: nothing that this one has learned helps it.
    work = lambda: Store(store).take({KEY: StateDict(content(0))}, "again")  # noqa: E731
    assert in_child(work) == 0
    assert lost_in(store) == set()
    assert repair(store).ok
    assert Store(store)._view.repository.newest().lost == b""
    assert broken(store) == set()


def test_another_copy_is_enough(store: Path) -> None:
    """If all chunks of a damaged pack lie in another pack too, the pack just leaves the index."""
    opened = Store(store).make()
    damage_chunk(store, FROZEN)
    assert in_child(lambda: _take_anew(store)) == 0
    report = opened.repair()
    assert report.ok
    assert report.replaced_packs == 1
    assert lost_in(store) == set()


def _take_anew(store: Path) -> None:
    opened = Store(store).make()
    with pytest.raises(DamagedError):
        opened["a"].restore({KEY: StateDict(content(0))})
    opened.take({KEY: StateDict(content(0))}, "again")


def test_in_memory() -> None:
    store = Store("memory://to-repair", create=NewStore(chunk_size=CHUNK)).make()
    store.take({"s": StateDict(x=torch.arange(100_000))}, "one")
    backend = store._view.repository.backend
    backend.delete(f"index/{backend.names('index')[0]}")
    report = Store("memory://to-repair").repair()
    assert report.ok
    assert report.adopted_packs == 2
    assert store.check(data=True).ok


def test_needed_but_condemned(store: Path) -> None:
    opened = Store(store).make()
    _, place = record_of(store, FROZEN)
    root = opened._view.repository.newest()
    assert put_next_root(
        opened._view.repository.backend, root, condemned={place.pack: root.seq + 1}
    )
    report = opened.repair()
    assert report.ok
    assert report.rescued_packs == 1
    assert opened._view.repository.newest().condemned == {}
    assert lost_in(store) == set()


def test_condemned_and_damaged(store: Path) -> None:
    opened = Store(store).make()
    digest, place = damage_chunk(store, FROZEN)
    root = opened._view.repository.newest()
    assert put_next_root(
        opened._view.repository.backend, root, condemned={place.pack: root.seq + 1}
    )
    opened.repair()
    assert opened._view.repository.newest().condemned == {}
    assert lost_in(store) == {digest}


def test_what_is_lost_can_be_deleted(store: Path) -> None:
    """A snapshot without its tree stops a collector; once it is deleted, the collector works."""
    opened = Store(store).make()
    damage_everywhere(store, opened._view.row_of("b").manifest.digest)
    opened._view.repository.index.cache.delete()
    assert named(repair(store)) == {"b"}
    with pytest.raises(DamagedError):
        collect(opened._view.repository, GcOptions(grace=0))
    Store(store).delete("b")
    assert collect(Store(store)._view.repository, GcOptions(grace=0)).deleted_packs
    assert lost_in(store) == set()
    assert repair(store).ok
    assert Store(store)._view.repository.newest().lost == b""


# --- the index --------------------------------------------------------------------------------


def test_the_whole_index(store: Path) -> None:
    """All segments are gone, and one chunk is damaged: the packs say what is where."""
    digest, _ = damage_chunk(store, WEIGHT)
    shutil.rmtree(store / "casnap-store/index")
    report = repair(store)
    assert (report.dropped_segments, report.adopted_packs) == (3, 6)
    assert named(report) == {"b"}
    assert lost_in(store) == {digest}
    assert broken(store) == {"b"}


def test_a_pack_that_left_the_index(store: Path) -> None:
    """What is needed is looked for in packs that no segment lists."""

    opened = Store(store).make()
    _, place = record_of(store, FROZEN)
    drop_from_index(opened, place.pack)
    report = opened.repair()
    assert report.ok
    assert report.adopted_packs == 1
    assert lost_in(store) == set()
    assert broken(store) == set()


def test_what_is_left_over_is_left_alone(store: Path) -> None:
    """Packs that nothing needs are not entered, damaged ones included."""
    damage_chunk(store, FROZEN)
    assert repair(store).adopted_packs == 0
    assert repair(store).adopted_packs == 0
    shutil.rmtree(store / "casnap-store/index")
    report = repair(store)
    assert named(report) == set(STEPS)
    assert repair(store).root == report.root


def test_a_footer_and_a_segment(store: Path) -> None:
    """What neither the index nor a footer lists is nowhere to be found."""
    _, place = record_of(store, WEIGHT)
    change(store / "casnap-store" / pack_key(place.pack), lambda raw: raw[:-40])
    shutil.rmtree(store / "casnap-store/index")
    report = repair(store)
    assert named(report) == {"b"}
    assert [why for why in report.skipped if PackId(place.pack).hex() in why]


# --- roots and storage ------------------------------------------------------------------------


def test_the_newest_root(store: Path) -> None:
    change(newest(store), flip(30))
    forget_copies(store)
    before = files(store)
    with pytest.raises(DamagedError, match="Restore this file from a backup; never delete it"):
        repair(store)
    assert files(store) == before
    assert "Restore this file" in failure("repair", store, "--yes")


@pytest.mark.parametrize("damage", [flip(30), lambda _: None])
def test_a_newest_root_that_has_a_copy(
    store: Path, damage: Callable[[bytes], bytes | None]
) -> None:
    """Another one is put behind it, and nothing needs it any more."""
    change(newest(store), damage)
    assert "its copy stands in for it" in invoke("check", store, status=1).stdout
    assert "damaged or lost" in invoke("repair", store, "--yes").stdout
    forget_copies(store)
    assert check(store, data=True).ok
    assert broken(store) == set()
    assert Store(store)._view.repository.newest().seq == 4


def test_what_may_not_be_read_is_not_given_up(store: Path) -> None:
    _, place = record_of(store, FROZEN)
    fault = Fault(fail(), "size", pack_key(place.pack), times=None)
    root = Store(store)._view.repository.newest()
    with pytest.raises(BackendError, match="Make it readable"):
        Store(FaultyBackend(LocalBackend(store), fault)).repair()
    assert Store(store)._view.repository.newest() == root


def test_what_cannot_be_read_now_is_not_given_up(store: Path) -> None:
    """Too many open files, a server that does not answer: that passes, and nothing was lost."""
    before = files(store)

    def refuse(call: Call) -> object:
        if any(f.function == "read_places" for f in stack()):
            raise BackendError(f"/missing/cut off/{call.key}: Too many open files")
        return call.go()

    fault = Fault(refuse, "read_into", "packs/*", times=None)
    with pytest.raises(BackendError, match=r"Too many open files.*Make it readable"):
        Store(FaultyBackend(LocalBackend(store), fault)).repair()
    assert files(store) == before
    assert repair(store).ok


def test_takes_meanwhile(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A number that is lost to a take costs no second look at the store."""
    looks: list[object] = []
    again = Survey.run_again
    monkeypatch.setattr(Survey, "run_again", lambda self: (looks.append(self), again(self))[1])
    damage_chunk(store, FROZEN)

    def take() -> None:
        Store(store).take({KEY: StateDict(content(5))}, "other")

    with backend_faults(0, elsewhere(take), ["put_if_absent"]):
        report = repair(store)
    assert len(report.remaining) == 1
    assert len(looks) == 1


# --- the command ------------------------------------------------------------------------------


def test_a_dry_run(store: Path, tmp_path: Path) -> None:
    damage_chunk(store, FROZEN)
    damage_chunk(store, WEIGHT)
    source = other_store(tmp_path / "other", weight=expected(1)["weight"])
    before = {key: (store / key).read_bytes() for key in files(store)}
    report = repair(store, source, dry_run=True)
    assert {key: (store / key).read_bytes() for key in files(store)} == before
    assert (report.replaced_packs, report.healed_chunks) == (2, 1)
    assert [d.digest for d in report.remaining] == [digest_of(FROZEN.numpy().tobytes()).hex()]
    assert named(report) == set(STEPS)
    done = repair(store, source)
    assert (done.saved_chunks, done.healed_chunks) == (report.saved_chunks, 1)


def test_a_dry_run_without_an_index(store: Path) -> None:
    """What the trees need is not known then, so any damage may turn out to hurt."""
    sorted((store / "casnap-store/index").iterdir())[2].unlink()
    assert repair(store, dry_run=True).ok
    digest, _ = damage_chunk(store, WEIGHT)
    assert [d.digest for d in repair(store, dry_run=True).remaining] == [digest.hex()]
    assert "nothing needs it" not in invoke("check", store, "--data", status=1).stdout
    shutil.rmtree(store / "casnap-store/index")
    before = files(store)
    report = repair(store, dry_run=True)
    assert files(store) == before
    assert (report.dropped_segments, report.adopted_packs) == (3, 6)
    assert report.healed_chunks == 0


def test_command(store: Path, tmp_path: Path) -> None:
    damage_chunk(store, FROZEN)
    assert "pass --yes" in failure("repair", store, status=2)
    foreseen = invoke("repair", store, "--dry-run", status=1).stdout
    assert "what may stay lost:" in foreseen
    printed = invoke("repair", store, "--yes", status=1).stdout
    assert "damaged packs replaced: 1" in printed
    assert f"hurts run/c {KEY}/frozen" in printed
    found = json.loads(invoke("repair", store, "-y", "--json", status=1).stdout)
    assert [d["kind"] for d in found["remaining"]] == ["lost"]
    source = other_store(tmp_path / "other", frozen=expected(0)["frozen"])
    unknown = tmp_path / "no store"
    unknown.mkdir()
    result = invoke("repair", store, "--from", unknown, "--from", source, "--yes")
    assert "lost chunks found elsewhere: 1" in result.stdout
    assert "everything is whole" in result.stdout
    assert f"skipped: {unknown}: it is no casnap store" in result.stderr
    assert "no damage found" in invoke("repair", store, "--yes").stdout


def test_command_on_old_roots(store: Path) -> None:
    (store / "casnap-store/roots/0/1").unlink()
    before = files(store)
    for command in (("repair", store, "--yes"), ("check", store)):
        printed = invoke(*command).stdout
        assert "damaged or lost" in printed
    assert files(store) == before


def test_command_asks(store: Path) -> None:
    sorted((store / "casnap-store/index").iterdir())[0].unlink()
    root = Store(store)._view.repository.newest()
    terminal = Terminal("repair", store)
    assert f"Repair {store}?" in terminal.read_until("[y/N]").replace("\r\n", "")
    os.write(terminal.master, b"n\n")
    assert terminal.rest()[0] == 1
    assert Store(store)._view.repository.newest() == root


# --- casnap.json ------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["deleted", "damaged"])
def test_casnap_json_is_made_anew_from_the_roots(store: Path, how: str) -> None:
    file = store / "casnap-store" / CONFIG_KEY
    before = file.read_bytes()
    opened = Store(store).make()
    file.unlink()
    if how == "damaged":
        file.write_bytes(before[: len(before) // 2])
    assert "casnap repair" in failure("ls", store)
    (damage,) = opened.check().damages
    assert damage.object == CONFIG_KEY
    assert damage.kind == ("missing" if how == "deleted" else "changed")
    assert "would make it anew" in failure("repair", store, "--dry-run")
    assert "pass --yes" in failure("repair", store, status=2)
    said = invoke("repair", store, "--yes").stdout
    assert f"{CONFIG_KEY} made anew" in said
    assert "everything is whole" in said
    assert file.read_bytes() == before
    assert "no damage found" in invoke("check", store, "--data").stdout
    # An open store knows it, too.
    file.unlink()
    assert [damage.object for damage in opened.repair().found] == [CONFIG_KEY]
    assert file.read_bytes() == before


def test_without_a_copy_of_casnap_json_in_the_roots(tmp_path: Path) -> None:
    store = tmp_path / "store"
    first = msgspec.structs.replace(Store(store).make()._view.repository.newest(), store={})
    change(store / "casnap-store" / root_key(0), lambda _: sealed_root(first))
    (store / "casnap-store" / CONFIG_KEY).unlink()
    assert "no root that can be read has a copy" in failure("repair", store, "--yes")
