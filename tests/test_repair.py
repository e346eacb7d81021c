"""A repair saves what is whole anywhere, and names what is not; killed, it harms nothing."""

from __future__ import annotations

import itertools
import json
import os
import random
import shutil
import signal
import struct
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from casnap import StateDict, Store
from casnap.backends import LocalBackend
from casnap.digest import Digest, digest_of
from casnap.errors import BackendError, DamagedError
from casnap.format import PackId, Record, pack_key
from casnap.gc import GcOptions, collect
from casnap.repair import RepairReport
from casnap.roots import succeed
from tests.cli_calls import failure, invoke
from tests.faults import (
    CHUNK,
    backend_faults,
    faults,
    files,
    in_child,
    kill,
)
from tests.test_check import (
    FROZEN,
    broken,
    change,
    check,
    listing_of,
    record_of,
)
from tests.test_cli import Terminal
from tests.test_damage import (
    KEY,
    STEPS,
    content,
    damages,
    expected,
    flip,
    forget_cache,
    make,
    newest,
    objects_of,
)

WEIGHT = expected(1)["weight"][: CHUNK // 4]
"""A chunk of the snapshot ``b`` alone."""


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a store that nobody damages."""
    folder = tmp_path_factory.mktemp("pristine") / "store"
    make(folder)
    return folder


@pytest.fixture
def store(pristine: Path, tmp_path: Path, cache_dir: Path) -> Path:
    """Return a copy of a store, under a cache that no other test uses."""
    copy = Path(shutil.copytree(pristine, tmp_path / "store"))
    # All copies have one id, and this process one list of what it found damaged under it.
    Store(copy).objects.index.distrusted.clear()
    return copy


def repair(path: Path, *sources: Path | str, **options: bool) -> RepairReport:
    return Store(path, create=False).repair(sources=sources, **options)


def lost_in(path: Path) -> set[bytes]:
    """Check all of a store, in which nothing may be wrong but that some is known to be lost."""
    report = check(path, data=True)
    assert {damage.kind for damage in report.damages} <= {"lost"}
    return {bytes.fromhex(damage.digest) for damage in report.damages}


def damage_chunk(path: Path, raw: torch.Tensor) -> Record:
    digest, place = record_of(path, raw)
    change(path / pack_key(place.pack), flip(place.offset + 11))
    return digest, place


def named(report: RepairReport) -> set[str]:
    return {hurt.snapshot for damage in report.remaining for hurt in damage.hurts}


# --- what is saved ----------------------------------------------------------------------------


def test_nothing_to_repair(store: Path) -> None:
    before = files(store)
    report = repair(store)
    assert report.ok
    assert not report.found
    assert files(store) == before


@pytest.mark.parametrize("seed", range(2))
def test_any_damage_to_any_object(
    pristine: Path, tmp_path: Path, cache_dir: Path, seed: int
) -> None:
    """Afterwards only what is lost is wrong, and a second repair does nothing."""
    choose = random.Random(seed)
    store = tmp_path / "store"
    for file in objects_of(pristine):
        key = file.relative_to(pristine)
        if file == newest(pristine) or key.parts[0] == "casnap.json":
            continue
        for damage in choose.sample(list(damages(file, choose)), 2):
            shutil.rmtree(store, ignore_errors=True)
            shutil.copytree(pristine, store)
            forget_cache(cache_dir)
            change(store / key, damage)
            report = repair(store)
            forget_cache(cache_dir)
            if key.parts[0] == "roots":
                assert report.ok
                assert [d.object for d in report.found] == [str(key)]
                continue
            if key.parts[0] == "index":
                assert report.ok
            assert broken(store) == (set(STEPS) if "*" in named(report) else named(report)), key
            lost = lost_in(store)
            assert bool(lost) != report.ok
            again = repair(store)
            assert again.root == report.root
            assert {bytes.fromhex(d.digest) for d in again.remaining} == lost


def test_the_rest_of_a_damaged_pack(store: Path) -> None:
    digest, place = damage_chunk(store, FROZEN)
    report = repair(store)
    assert (report.replaced_packs, report.saved_chunks) == (1, 11)
    assert [(d.kind, d.digest) for d in report.remaining] == [("lost", digest.hex())]
    assert named(report) == set(STEPS)
    assert Store(store).objects.newest().lost == digest
    assert place.pack not in listing_of(store)
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
    assert Store(store).objects.newest().lost == b""
    assert broken(store) == set()


def test_a_footer_alone(store: Path) -> None:
    _, place = record_of(store, FROZEN)
    change(store / pack_key(place.pack), lambda raw: raw[:-40])
    report = repair(store)
    assert report.ok
    assert report.saved_chunks == 12
    assert lost_in(store) == set()
    assert broken(store) == set()


def test_another_copy_is_enough(store: Path) -> None:
    """A pack whose chunks all lie in another pack, too, just leaves the index."""
    opened = Store(store)
    damage_chunk(store, FROZEN)
    assert in_child(lambda: _take_anew(store)) == 0
    report = opened.repair()
    assert report.ok
    assert report.replaced_packs == 1
    assert lost_in(store) == set()


def _take_anew(store: Path) -> None:
    opened = Store(store)
    with pytest.raises(DamagedError):
        opened["a"].restore({KEY: StateDict(content(0))})
    opened.take({KEY: StateDict(content(0))}, "again")


def test_compressed(tmp_path: Path) -> None:
    store = Store(tmp_path, chunk_size=CHUNK, compress=True)
    state = {f"x{i}": torch.full((CHUNK // 4,), i) for i in range(4)}
    store.take({"s": StateDict(state)}, "one")
    size = listing_of(tmp_path).stored_bytes
    damage_chunk(tmp_path, state["x2"][: CHUNK // 8])
    report = store.repair()
    assert {h.path for d in report.remaining for h in d.hurts} == {"s/x2"}
    assert torch.equal(store["one"].read_object("s/x3"), state["x3"])
    assert listing_of(tmp_path).stored_bytes < size


def test_in_memory() -> None:
    store = Store("memory://to-repair", chunk_size=CHUNK)
    store.take({"s": StateDict(x=torch.arange(100_000))}, "one")
    backend = store.objects.backend
    backend.delete(f"index/{backend.names('index')[0]}")
    report = Store("memory://to-repair").repair()
    assert report.ok
    assert report.adopted_packs == 2
    assert store.check(data=True).ok


def test_needed_but_condemned(store: Path) -> None:
    opened = Store(store)
    _, place = record_of(store, FROZEN)
    root = opened.objects.newest()
    assert succeed(opened.objects.backend, root, condemned={place.pack: root.seq + 1})
    report = opened.repair()
    assert report.ok
    assert report.rescued_packs == 1
    assert opened.objects.newest().condemned == {}
    assert lost_in(store) == set()


def test_condemned_and_damaged(store: Path) -> None:
    opened = Store(store)
    digest, place = damage_chunk(store, FROZEN)
    root = opened.objects.newest()
    assert succeed(opened.objects.backend, root, condemned={place.pack: root.seq + 1})
    opened.repair()
    assert opened.objects.newest().condemned == {}
    assert lost_in(store) == {digest}


def test_what_is_lost_can_be_deleted(store: Path) -> None:
    """A snapshot whose tree is lost stops a collector; without it all is well again."""
    opened = Store(store)
    place = listing_of(store).places(Digest(opened.row("b").manifest.digest))[0]
    change(store / pack_key(place.pack), flip(place.offset))
    opened.objects.index.facts.delete()
    assert named(repair(store)) == {"b"}
    with pytest.raises(DamagedError):
        collect(opened.objects, GcOptions(grace=0))
    Store(store).delete("b")
    assert collect(Store(store).objects, GcOptions(grace=0)).deleted_packs
    assert lost_in(store) == set()
    assert repair(store).ok
    assert Store(store).objects.newest().lost == b""


# --- the index --------------------------------------------------------------------------------


def test_the_whole_index(store: Path) -> None:
    """All segments are gone, and one chunk is damaged: the packs say what is where."""
    digest, _ = damage_chunk(store, WEIGHT)
    shutil.rmtree(store / "index")
    report = repair(store)
    assert (report.dropped_segments, report.adopted_packs) == (3, 6)
    assert named(report) == {"b"}
    assert lost_in(store) == {digest}
    assert broken(store) == {"b"}


def test_a_pack_that_left_the_index(store: Path) -> None:
    """What is needed is looked for in packs that no segment lists."""
    from casnap.segments import rewritten

    opened = Store(store)
    _, place = record_of(store, FROZEN)
    view = opened.objects.view()
    segments = rewritten(opened.objects, view, {PackId(place.pack)})
    assert succeed(opened.objects.backend, view.root, segments=segments)
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
    shutil.rmtree(store / "index")
    report = repair(store)
    assert named(report) == set(STEPS)
    assert repair(store).root == report.root


def test_a_footer_and_a_segment(store: Path) -> None:
    """What neither the index nor a footer lists is nowhere to be found."""
    _, place = record_of(store, WEIGHT)
    change(store / pack_key(place.pack), lambda raw: raw[:-40])
    shutil.rmtree(store / "index")
    report = repair(store)
    assert named(report) == {"b"}
    assert [why for why in report.skipped if PackId(place.pack).hex() in why]


# --- roots and storage ------------------------------------------------------------------------


def test_the_newest_root(store: Path) -> None:
    change(newest(store), flip(30))
    before = files(store)
    with pytest.raises(DamagedError, match="Restore this file from a backup; never delete it"):
        repair(store)
    assert files(store) == before
    assert "Restore this file" in failure("repair", store, "--yes")


def test_what_may_not_be_read_is_not_given_up(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, place = record_of(store, FROZEN)
    real = LocalBackend.size

    def size(self: LocalBackend, key: str) -> int:
        if key == pack_key(place.pack):
            raise BackendError(f"{key}: Permission denied") from PermissionError()
        return real(self, key)

    monkeypatch.setattr(LocalBackend, "size", size)
    root = Store(store).objects.newest()
    with pytest.raises(BackendError, match="Make it readable"):
        repair(store)
    assert Store(store).objects.newest() == root


def test_a_full_disk(store: Path) -> None:
    damage_chunk(store, FROZEN)
    root = Store(store).objects.newest()

    def full() -> None:
        raise BackendError("no space left")

    with backend_faults(0, full, ["write"]), pytest.raises(BackendError, match="no space"):
        repair(store)
    assert Store(store).objects.newest() == root
    assert len(repair(store).remaining) == 1


# --- sources ----------------------------------------------------------------------------------


def safetensors(file: Path, tensors: dict[str, torch.Tensor], **replace: object) -> Path:
    """Write a file as the safetensors library does."""
    header, at = {"__metadata__": {"format": "pt"}}, 0
    for name, tensor in tensors.items():
        described = {
            "dtype": "F32",
            "shape": list(tensor.shape),
            "data_offsets": [at, at + tensor.nbytes],
        }
        header[name] = {**described, **replace}  # type: ignore[dict-item]
        at += tensor.nbytes
    encoded = json.dumps(header).encode()
    raw = b"".join(tensor.numpy().tobytes() for tensor in tensors.values())
    file.write_bytes(struct.pack("<Q", len(encoded)) + encoded + raw)
    return file


def torch_file(file: Path, *, legacy: bool = False) -> Path:
    state = {"model": [{"weight": expected(1)["weight"]}, (expected(0)["frozen"],)]}
    torch.save(state, file, _use_new_zipfile_serialization=not legacy)
    return file


def numpy_file(file: Path, dtype: str = "<f4", order: str = "C") -> Path:
    for name in ("frozen", "weight"):
        array = np.asarray(expected(1)[name].numpy(), dtype, order=order)  # type: ignore[call-overload]
        np.save(file.with_stem(name), array)
    return file.parent


SOURCES: dict[str, Callable[[Path], Path]] = {
    "safetensors": lambda f: safetensors(f / "x.safetensors", dict(list(expected(1).items())[:2])),
    "torch": lambda f: torch_file(f / "x.pt"),
    "old torch": lambda f: torch_file(f / "x.pth", legacy=True),
    "numpy": lambda f: numpy_file(f / "x.npy"),
    "big endian": lambda f: numpy_file(f / "x.npy", ">f4"),
    "folder": lambda f: torch_file(f / "x.ckpt").parent,
    "store": lambda f: make(f / "store").objects.backend.folder,
}


@pytest.mark.parametrize("source", SOURCES)
def test_healed_from(store: Path, tmp_path: Path, source: str) -> None:
    damage_chunk(store, FROZEN)
    damage_chunk(store, WEIGHT)
    (tmp_path / "source").mkdir()
    where = SOURCES[source](tmp_path / "source")
    report = repair(store, where)
    assert report.ok
    assert report.healed_chunks == 2
    assert not report.skipped
    assert lost_in(store) == set()
    assert broken(store) == set()


def test_healed_long_after(store: Path, tmp_path: Path) -> None:
    """First lost, later found; a source may be a backup of this very store, and damaged itself."""
    backup = Path(shutil.copytree(store, tmp_path / "backup"))
    lost, _ = damage_chunk(backup, WEIGHT)
    for raw in (WEIGHT, FROZEN):
        (store / pack_key(record_of(store, raw)[1].pack)).unlink()
    assert named(repair(store)) == set(STEPS)
    report = repair(store, backup)
    assert report.healed_chunks > 10
    assert lost_in(store) == {lost}
    assert broken(store) == {"b"}


def test_trees_are_healed_from_the_cache(store: Path) -> None:
    """Nodes that this host remembers need no source."""
    opened = Store(store)
    for name, step in STEPS.items():
        opened[name].restore({KEY: StateDict(content(step))})
    for row in map(opened.row, STEPS):
        for place in listing_of(store).places(Digest(row.manifest.digest)):
            (store / pack_key(place.pack)).unlink(missing_ok=True)
    report = opened.repair()
    assert report.healed_chunks > 5
    assert report.ok
    assert broken(store) == set()


def test_a_table_that_is_lost(store: Path, tmp_path: Path, cache_dir: Path) -> None:
    """Without its table a store can do nothing; a backup has it."""
    backup = Path(shutil.copytree(store, tmp_path / "backup"))
    table = Store(store).objects.newest().table
    assert table is not None
    place = listing_of(store).places(Digest(table.digest))[0]
    change(store / pack_key(place.pack), flip(place.offset + 4))
    forget_cache(cache_dir)
    assert named(repair(store)) == {"*"}
    assert repair(store, backup).ok
    assert broken(store) == set()


def test_sources_that_cannot_be_used(store: Path, tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[Callable[[str], object], tuple[str]]:
            return Path.touch, (Path(tmp_path / "owned"),)  # type: ignore[return-value]

    digest, _ = damage_chunk(store, FROZEN)
    folder = tmp_path / "source"
    folder.mkdir()
    torch.save({"x": Evil()}, folder / "evil.pt")
    np.save(folder / "evil.npy", np.array([Evil()]), allow_pickle=True)
    (folder / "empty.safetensors").touch()
    (folder / "cut.safetensors").write_bytes(struct.pack("<Q", 1 << 40) + b"{}")
    safetensors(folder / "lies.safetensors", {"x": FROZEN}, shape=[1 << 40, 1 << 40])
    safetensors(folder / "beyond.safetensors", {"x": FROZEN}, data_offsets=[0, 1 << 40])
    safetensors(folder / "zero.safetensors", {"x": FROZEN}, shape=[0], data_offsets=[0, 0])
    safetensors(folder / "unknown.safetensors", {"x": FROZEN}, dtype="F4")
    (folder / "notes.txt").write_text("not looked at")
    torch.save(torch.ones(3).to_sparse(), folder / "sparse.pt")
    report = repair(store, folder, tmp_path / "nowhere", "memory://no-store-here")
    assert not (tmp_path / "owned").exists()
    assert {bytes.fromhex(d.digest) for d in report.remaining} == {digest}
    unusable = ("evil.pt", "evil.npy", "empty", "cut", "lies", "beyond", "nowhere", "memory://")
    assert len(report.skipped) == len(unusable)
    for name in unusable:
        assert any(name in why for why in report.skipped), name


# --- crashes and races ------------------------------------------------------------------------


def wreck(store: Path, *, index: bool) -> None:
    """Damage a chunk, cut off a pack, and maybe lose a segment."""
    damage_chunk(store, FROZEN)
    _, place = record_of(store, WEIGHT)
    change(store / pack_key(place.pack), lambda raw: raw[:-30])
    if index:
        sorted((store / "index").iterdir())[2].unlink()


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_killed_at_any_call(store: Path, cache_dir: Path, after: bool) -> None:
    """A repair that was killed harmed nothing, and the next one finishes."""
    wreck(store, index=not after)
    wrecked = Path(shutil.copytree(store, store.parent / "wrecked"))
    frozen = digest_of(FROZEN.numpy().tobytes())
    names = ["write", "copy", "put_if_absent", *([] if after else ["sync"])]
    forget_cache(cache_dir)
    hurt = broken(store)
    for k in itertools.count():
        shutil.rmtree(store)
        shutil.copytree(wrecked, store)
        forget_cache(cache_dir)

        def killed(k: int = k) -> None:
            with backend_faults(k, kill, names, after=after):
                repair(store)

        status = in_child(killed)
        assert broken(store) <= hurt
        forget_cache(cache_dir)
        report = repair(store)
        assert {d.digest for d in report.remaining} == {frozen.hex()}
        assert lost_in(store) == {frozen}
        if status == 0:
            assert k > 3
            break
        assert status == -signal.SIGKILL
    collect(Store(store).objects, GcOptions(grace=0))
    assert lost_in(store) == {frozen}
    assert torch.equal(Store(store)["b"].read_object(f"{KEY}/weight"), expected(1)["weight"])


def test_a_take_that_relied_on_a_damaged_pack(store: Path) -> None:
    """The repair commits while a take is about to: it starts again, and stores the chunk anew."""
    damage_chunk(store, FROZEN)
    reports: list[RepairReport] = []
    strike = lambda: reports.append(repair(store))  # noqa: E731
    with backend_faults(0, strike, ["put_if_absent"]):
        Store(store).take({KEY: StateDict(content(0))}, "again")
    assert len(reports[0].remaining) == 1
    assert lost_in(store) == set()
    assert broken(store) == set()


def test_a_take_meanwhile(store: Path) -> None:
    """A take commits while a repair is about to: the repair looks again."""
    damage_chunk(store, FROZEN)
    sorted((store / "index").iterdir())[2].unlink()
    taken: list[object] = []

    def take() -> None:
        # By a process that still remembers the lost segment.
        other = Store(store, create=False)
        taken.append(other.take({KEY: StateDict(content(7))}, "meanwhile"))

    with faults(LocalBackend, ["put_if_absent"], 1, take) as calls:
        report = repair(store)
    assert calls.struck
    assert taken
    assert "meanwhile" in named(report)
    assert torch.equal(
        Store(store)["meanwhile"].read_object(f"{KEY}/weight"), expected(7)["weight"]
    )
    assert lost_in(store) == {digest_of(FROZEN.numpy().tobytes())}


def test_beside_takes(store: Path) -> None:
    damage_chunk(store, WEIGHT)
    failed: list[BaseException] = []

    def take() -> None:
        try:
            for step in range(10):
                Store(store).take({KEY: StateDict(content(step))}, f"more/{step}")
        except BaseException as e:  # noqa: BLE001 - raised below
            failed.append(e)

    thread = threading.Thread(target=take)
    thread.start()
    while thread.is_alive():
        repair(store)
    thread.join()
    assert not failed
    repair(store)
    # One of the takes has the very bytes that were lost; it may have relied on them too early.
    assert lost_in(store) <= {digest_of(WEIGHT.numpy().tobytes())}


def test_a_collector_meanwhile(store: Path) -> None:
    """A collector raises the fence and deletes all that no root names: what was saved is moved."""
    damage_chunk(store, FROZEN)

    def collect_all() -> None:
        opened = Store(store, create=False)
        opened.delete("b")
        collect(opened.objects, GcOptions(grace=0))

    with backend_faults(0, collect_all, ["put_if_absent"]) as calls:
        report = repair(store)
    assert calls.struck
    assert named(report) == {"a", "run/c"}
    assert lost_in(store) == {digest_of(FROZEN.numpy().tobytes())}


def test_collected_afterwards(store: Path) -> None:
    """What a repair took out of the index is garbage, and what it saved is not."""
    damage_chunk(store, WEIGHT)
    shutil.rmtree(store / "index")
    repair(store)
    assert collect(Store(store).objects, GcOptions(grace=0)).deleted_packs == 6
    assert check(store).orphans == 0
    assert broken(store) == {"b"}


@settings(max_examples=25)
@given(seed=st.integers(0, 1 << 32))
def test_no_whole_chunk_is_lost(pristine: Path, seed: int) -> None:
    """Whatever is damaged: a chunk that is whole, and that the index or a footer lists, stays."""
    choose = random.Random(seed)
    store = pristine.parent / f"random-{os.getpid()}"
    shutil.rmtree(store, ignore_errors=True)
    shutil.copytree(pristine, store)
    listing = listing_of(store)
    targets = [f for f in objects_of(store) if f.parent.name == "index" or "packs" in f.parts]
    for file in choose.sample(targets, choose.randint(1, 4)):
        change(file, choose.choice(list(damages(file, choose))))
    survivors = _survivors(store, pristine, listing.packs)
    report = repair(store)
    found = listing_of(store)
    assert not {digest for digest in survivors if not found.places(digest)}
    lost = lost_in(store)
    assert not lost & survivors
    assert report.ok == (not lost)
    shutil.rmtree(store)


def _survivors(store: Path, pristine: Path, packs: tuple[PackId, ...]) -> set[Digest]:
    """Return what is whole and can be found, told without any code of a repair."""
    segments = [f.name for f in (pristine / "index").iterdir()]
    same = [n for n in segments if _bytes(store / "index" / n) == _bytes(pristine / "index" / n)]
    survivors: set[Digest] = set()
    whole = listing_of(pristine)
    for pack in packs:
        now, before = _bytes(store / pack_key(pack)), _bytes(pristine / pack_key(pack))
        footer = len(before) - len(whole.of_pack(pack)) * 49 - 44
        listed = any(pack in _bytes(store / "index" / name) for name in same)
        if listed or now[-(len(before) - footer) :] == before[footer:]:
            for digest, p in whole.of_pack(pack):
                if digest_of(now[p.offset : p.offset + p.stored]) == digest:
                    survivors.add(digest)
    return survivors


def _bytes(file: Path) -> bytes:
    return file.read_bytes() if file.exists() else b""


# --- the command ------------------------------------------------------------------------------


def test_a_dry_run(store: Path, tmp_path: Path) -> None:
    damage_chunk(store, FROZEN)
    damage_chunk(store, WEIGHT)
    source = safetensors(tmp_path / "x.safetensors", {"x": expected(1)["weight"]})
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
    sorted((store / "index").iterdir())[2].unlink()
    assert repair(store, dry_run=True).ok
    digest, _ = damage_chunk(store, WEIGHT)
    assert [d.digest for d in repair(store, dry_run=True).remaining] == [digest.hex()]
    assert "nothing needs it" not in invoke("check", store, "--data", status=1).stdout
    shutil.rmtree(store / "index")
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
    source = safetensors(tmp_path / "x.safetensors", {"x": expected(0)["frozen"]})
    absent = tmp_path / "absent"
    result = invoke("repair", store, "--from", source, "--from", absent, "--yes")
    assert "lost chunks found elsewhere: 1" in result.stdout
    assert "everything is whole" in result.stdout
    assert f"skipped: {absent} does not exist" in result.stderr
    assert "no damage found" in invoke("repair", store, "--yes").stdout


def test_command_on_old_roots(store: Path) -> None:
    (store / "roots/0/1").unlink()
    printed = invoke("repair", store, "--yes").stdout
    assert "older roots are damaged" in printed


@pytest.mark.parametrize(("answer", "status"), [("y", 0), ("n", 1)])
def test_command_asks(store: Path, answer: str, status: int) -> None:
    sorted((store / "index").iterdir())[0].unlink()
    root = Store(store).objects.newest()
    terminal = Terminal("repair", store)
    assert f"Repair {store}?" in terminal.read_until("[y/N]").replace("\r\n", "")
    os.write(terminal.master, f"{answer}\n".encode())
    assert terminal.rest()[0] == status
    assert (Store(store).objects.newest() == root) == (answer == "n")
