"""Recoding: older snapshots as chains of deltas, which read as before."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from casnap import NewStore, Retention, StateDict, Store
from casnap.errors import DamagedError
from casnap.format.codec import Codec
from casnap.format.delta import MOST_LINKS, encode_delta
from casnap.format.digest import Digest
from casnap.format.records import DeltaPlace, Place, Record, pack_key
from casnap.maintenance.usage import disk_usage
from casnap.storage.lookup.chains import chains_below
from casnap.storage.packs.chunk_reads import Want
from casnap.storage.reading.repository import Repository
from casnap.storage.writing.copying import ChunkBuffer
from tests.support.ranks import World
from tests.support.written import change_of, commit

CHUNK = 64 << 10
SIZE = 4 * CHUNK


def disk_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def weights(seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(SIZE // 2, generator=generator) * 0.02).to(torch.bfloat16)


def moved(tensor: torch.Tensor, share: float, seed: int) -> torch.Tensor:
    """Return a tensor of which a share of the elements moved by one unit in the last place."""
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.rand(tensor.shape, generator=generator) < share
    bits = tensor.view(torch.int16).clone()
    bits[chosen] += 1
    return bits.view(torch.bfloat16)


def taken(store: Store, count: int, share: float = 0.02, run: str = "run") -> list[torch.Tensor]:
    """Take a run of snapshots; return the weights of each."""
    states, tensor = [], weights()
    for step in range(count):
        tensor = moved(tensor, share, step)
        store.take({"m": StateDict(w=tensor, step=step)}, f"{run}/{step:03}")
        states.append(tensor)
    return states


def restored(store: Store, name: str) -> torch.Tensor:
    state = {"m": StateDict(w=torch.zeros(SIZE // 2, dtype=torch.bfloat16), step=-1)}
    store[name].restore(state)
    tensor: torch.Tensor = state["m"]["w"]
    return tensor


def check_all(store: Store, states: list[torch.Tensor], names: list[int] | None = None) -> None:
    for step in range(len(states)) if names is None else names:
        assert torch.equal(
            restored(store, f"run/{step:03}").view(torch.int16), states[step].view(torch.int16)
        )
    assert store.check(data=True).ok


def places(store: Store, name: str) -> list[Place]:
    """Return the newest place of each chunk of the weights."""
    contents = store[name].contents
    path, entry, _ = contents.entry("m/w")
    digests = [digest for digest, _ in contents.chunks(path, entry)]
    return [chain[0][1] for chain in newest_chains(contents.store, digests)]


def newest_chains(store: Repository, digests: list[Digest]) -> list[list[Record]]:
    """Return some chunks with all that they stand on, each at its newest place."""
    chains = chains_below(digests, partial(store.index.find_newest, store.view()))
    return [chains[digest] for digest in digests]


def new_store(path: Path, codec: str = "auto") -> Store:
    return Store(path / "s", create=NewStore(chunk_size=CHUNK, codec=codec)).make()


@pytest.mark.parametrize(("share", "most"), [(0.01, 0.15), (0.1, 0.2), (1.0, 0.45)])
def test_older_snapshots_become_small_and_stay_whole(
    tmp_path: Path, share: float, most: float
) -> None:
    store = new_store(tmp_path)
    states = taken(store, 12, share)
    report = store.gc(grace=0)
    assert report.recoded_snapshots == 9
    assert report.recoded_chunks == 9 * 4
    store.gc(grace=0)
    packs = disk_bytes(tmp_path / "s/casnap-store/packs")
    # The newest three stay as they are.
    assert packs - 3 * SIZE < most * 9 * SIZE
    for step in range(9):
        assert Codec.RAW not in {place.codec for place in places(store, f"run/{step:03}")}
    for step in range(9, 12):
        assert {place.codec for place in places(store, f"run/{step:03}")} == {Codec.RAW}
    check_all(store, states)
    check_all(Store(tmp_path / "s"), states)


def test_recoding_again_changes_nothing(tmp_path: Path) -> None:
    store = new_store(tmp_path)
    states = taken(store, 6)
    assert store.gc(grace=0).recoded_chunks == 12
    store.gc(grace=0)
    seq = store._view.repository.newest().seq
    report = store.gc(grace=0)
    assert (report.recoded_snapshots, report.recoded_chunks, report.copied_bytes) == (0, 0, 0)
    assert store._view.repository.newest().seq == seq
    # What grew old since is recoded then.
    store.take({"m": StateDict(w=weights(5), step=0)}, "run/999")
    assert store.gc(grace=0).recoded_snapshots == 1
    check_all(store, states)


@pytest.mark.parametrize("codec", ["raw", "zstd"])
def test_the_codec_decides(tmp_path: Path, codec: str) -> None:
    store = new_store(tmp_path, codec)
    states = taken(store, 6)
    report = store.gc(grace=0)
    assert (report.recoded_snapshots > 0) == (codec != "raw")
    # What takes have compressed is not compressed again, but the deltas are smaller.
    assert (places(store, "run/002")[0].codec == Codec.DELTA) == (codec != "raw")
    assert report.recoded_chunks == (0 if codec == "raw" else 8)
    check_all(store, states)


def test_a_part_of_a_tensor(tmp_path: Path) -> None:
    store = new_store(tmp_path)
    states = taken(store, 8)
    store.gc(grace=0)
    handle = store["run/004"]["m/w"]
    assert torch.equal(handle[1000:50_000], states[4][1000:50_000])
    assert torch.equal(store["run/003"].read_object("m/w", index=slice(5, 6)), states[3][5:6])
    small = store["run/002"].read_object("m/w", memory_budget_bytes=1)
    assert torch.equal(small, states[2])


def test_a_chain_outlives_the_snapshots_that_it_came_from(tmp_path: Path) -> None:
    store = new_store(tmp_path)
    states = taken(store, 10)
    store.gc(grace=0)
    for name in ("run/000", "run/003", "run/005"):
        store.delete(name)
    for _ in range(3):
        store.gc(grace=0)
    check_all(store, states, [1, 2, 4, 6, 7, 8, 9])
    store.prune(Retention(keep_last=2))
    for _ in range(3):
        store.gc(grace=0)
    check_all(store, states, [8, 9])
    assert disk_bytes(tmp_path / "s/casnap-store/packs") < 2.2 * SIZE


def test_chains_are_bounded(tmp_path: Path) -> None:
    store = new_store(tmp_path)
    states = taken(store, 40, 0.005)
    store.gc(grace=0)
    longest = 0
    for step in range(37):
        contents = store[f"run/{step:03}"].contents
        path, entry, _ = contents.entry("m/w")
        digests, lengths = zip(*contents.chunks(path, entry), strict=True)
        chains = newest_chains(contents.store, list(digests))
        for chain, nbytes in zip(chains, lengths, strict=True):
            assert sum(place.stored_size for _, place in chain) <= 2 * nbytes
            longest = max(longest, len(chain) - 1)
    assert 8 < longest <= MOST_LINKS
    check_all(store, states)


def test_weights_that_come_back(tmp_path: Path) -> None:
    """A chunk is never a delta of what stands on it."""
    store = new_store(tmp_path)
    first, second = weights(1), moved(weights(1), 0.02, 1)
    states = [first, second, first, second, first, weights(2), weights(3), weights(4)]
    for step, tensor in enumerate(states):
        store.take({"m": StateDict(w=tensor, step=step)}, f"run/{step:03}")
    for _ in range(3):
        store.gc(grace=0)
    check_all(store, states)


def test_a_take_relies_on_chains(tmp_path: Path) -> None:
    """What old snapshots hold is not stored again, and the chain lives as long as it is needed."""
    store = new_store(tmp_path)
    states = taken(store, 8)
    for _ in range(2):
        store.gc(grace=0)
    before = disk_bytes(tmp_path / "s/casnap-store/packs")
    store.take({"m": StateDict(w=states[3], step=99)}, "other/again")
    assert disk_bytes(tmp_path / "s/casnap-store/packs") - before < CHUNK
    for step in range(8):
        store.delete(f"run/{step:03}")
    for _ in range(3):
        store.gc(grace=0)
    assert torch.equal(restored(store, "other/again"), states[3])
    assert store.check(data=True).ok


def test_a_take_relies_on_a_chain_while_its_snapshots_go(tmp_path: Path) -> None:
    """All packs of the chain are condemned between the base of the take and its commit."""
    store = new_store(tmp_path)
    states = taken(store, 8)
    for _ in range(2):
        store.gc(grace=0)
    with change_of(store) as session:
        contents = store["run/004"].contents
        path, entry, _ = contents.entry("m/w")
        chunks = [digest for digest, _ in contents.chunks(path, entry)]
        assert all(session.rely_on(chunks))
        row, manifest = contents.row, Digest(contents.row.manifest.digest)
        trees = [manifest, Digest(contents.manifest.shared["m"])]
        assert None not in session.rely_on(trees)
        other = Store(tmp_path / "s")
        other.prune(Retention(keep_last=1))
        assert other.gc(grace=3600).condemned_packs > 0
        commit(session, {"other/again": row})
    for _ in range(3):
        other.gc(grace=0)
    assert torch.equal(restored(store, "other/again"), states[4])
    assert store.check(data=True).ok


def add_delta(store: Store, digest: Digest, base: Digest) -> None:
    """Store a chunk as a delta of another one, as another process may."""
    repository = store._view.repository
    raws: dict[Digest, bytes] = {}
    for each in (digest, base):
        repository.fetch([Want(each, -1, lambda raw, d=each: raws.update({d: bytes(raw)}), "")])  # type: ignore[misc]
    stored = encode_delta(raws[digest], raws[base], base)
    assert stored is not None
    with change_of(repository) as session:
        session.new_packs.copy_stored(digest, stored, len(raws[digest]), Codec.DELTA)
        commit(session)


def chunks_of(store: Store, name: str) -> list[Digest]:
    contents = store[name].contents
    path, entry, _ = contents.entry("m/w")
    return [digest for digest, _ in contents.chunks(path, entry)]


def test_a_circle_of_two_writers_loses_nothing(tmp_path: Path) -> None:
    """Each of two chunks was stored as a delta of the other: one of them has to stay as it is."""
    store = new_store(tmp_path)
    states = taken(store, 2)
    for one, other in zip(chunks_of(store, "run/000"), chunks_of(store, "run/001"), strict=True):
        add_delta(store, one, other)
        add_delta(store, other, one)
    # A collector that believed the newest places would free all packs that hold the chunks alone.
    for _ in range(4):
        store.gc(grace=0, repack=1.0)
        check_all(Store(tmp_path / "s"), states)
    check_all(store, states)


def test_two_collectors_at_once(tmp_path: Path) -> None:
    store = new_store(tmp_path)
    states = taken(store, 10)
    store.gc(grace=0)
    store.delete("run/000")
    errors: list[BaseException] = []

    def collect() -> None:
        try:
            for _ in range(3):
                Store(tmp_path / "s").gc(grace=0, recode_after=2)
        except BaseException as e:  # noqa: BLE001 - it is raised below
            errors.append(e)

    threads = [threading.Thread(target=collect) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    check_all(store, states, list(range(1, 10)))


def test_a_damaged_base_names_all_that_stand_on_it(tmp_path: Path) -> None:
    store = new_store(tmp_path)
    states = taken(store, 8)
    for _ in range(2):
        store.gc(grace=0)
    [chain, *_] = newest_chains(store._view.repository, chunks_of(store, "run/004"))
    place = chain[-1][1]
    file = tmp_path / "s/casnap-store" / pack_key(place.pack)
    content = bytearray(file.read_bytes())
    content[place.offset + place.stored_size // 2] ^= 0xFF
    file.chmod(0o600)
    file.write_bytes(content)
    hurt = {h.snapshot for damage in store.check(data=True).damages for h in damage.hurts}
    assert hurt == {f"run/{step:03}" for step in range(5)}
    with pytest.raises(DamagedError, match="m/w"):
        restored(Store(tmp_path / "s"), "run/004")
    # What does not stand on it is whole, and what does is healed from another copy.
    assert torch.equal(restored(store, "run/007"), states[7])
    other = Store(tmp_path / "other", create=NewStore(chunk_size=CHUNK))
    for step, tensor in enumerate(states):
        other.take({"m": StateDict(w=tensor, step=step)}, f"run/{step:03}")
    store.repair(sources=[other])
    check_all(Store(tmp_path / "s"), states)


def test_the_bases_stand_in_the_footers(tmp_path: Path) -> None:
    """An index that is rebuilt from the packs knows them, so that no collector frees a base."""
    store = new_store(tmp_path)
    states = taken(store, 8)
    for _ in range(2):
        store.gc(grace=0)
    for file in (tmp_path / "s/casnap-store/index").iterdir():
        file.unlink()
    again = Store(tmp_path / "s")
    again.repair()
    found = [p for step in range(5) for p in places(again, f"run/{step:03}")]
    assert any(isinstance(place, DeltaPlace) for place in found)
    again.delete("run/000")
    for _ in range(3):
        again.gc(grace=0)
    check_all(again, states, list(range(1, 8)))


def codecs_in(store: Store, name: str) -> set[int]:
    return {place.codec for place in places(store, name)}


@pytest.mark.parametrize("recode_first", [True, False])
def test_a_copy_sends_deltas_where_the_other_store_compresses(
    tmp_path: Path, recode_first: bool
) -> None:
    store = new_store(tmp_path)
    states = taken(store, 8)
    if recode_first:
        store.gc(grace=0)
    other = Store(tmp_path / "other", create=NewStore(chunk_size=CHUNK, codec="zstd")).make()
    # One after the other, as a mirror does; the third stands on the second, over one that is not
    # copied.
    for step in (0, 1, 3, 4, 5):
        report = store.copy(f"run/{step:03}", to=other)
        if step:
            assert report.sent_bytes < 0.2 * SIZE
            assert codecs_in(other, f"run/{step:03}") == {Codec.DELTA}
        else:
            assert codecs_in(other, f"run/{step:03}") == {Codec.PLANES}
    check_all(other, states, [0, 1, 3, 4, 5])
    # What stands on a snapshot that goes keeps what it needs.
    other.delete("run/000")
    other.delete("run/003")
    for _ in range(3):
        other.gc(grace=0)
    check_all(other, states, [1, 4, 5])
    again = store.copy(to=other)
    assert set(again.copied) == {"run/000", "run/002", "run/003", "run/006", "run/007"}
    check_all(other, states)


@pytest.mark.parametrize("codec", [None, "auto", "zstd", "raw"])
def test_a_mirror_on_a_disk_gets_deltas(tmp_path: Path, codec: str | None) -> None:
    if codec is not None:
        Store(tmp_path / "mirror", create=NewStore(chunk_size=CHUNK, codec=codec)).make()
    store = Store(
        tmp_path / "s", create=NewStore(chunk_size=CHUNK), mirror=tmp_path / "mirror"
    ).make()
    states = taken(store, 6)
    store.wait_mirrored(timeout=60)
    is_small = disk_bytes(tmp_path / "mirror/casnap-store/packs") < 2 * SIZE
    assert is_small is (codec != "raw")
    check_all(Store(tmp_path / "mirror"), states)


def test_an_interrupted_recoding_goes_on(tmp_path: Path) -> None:
    store = new_store(tmp_path)
    states = taken(store, 8)

    def stop(phase: str, done: int, _total: int) -> None:
        if phase == "recoding" and done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        store.gc(grace=0, progress=stop)
    check_all(store, states)
    assert store.gc(grace=0).recoded_snapshots == 3
    check_all(store, states)


def test_a_delta_whose_base_went_with_its_snapshots(tmp_path: Path) -> None:
    """It lies in a pack that is needed for other chunks; then its bytes are taken again."""
    store = new_store(tmp_path)
    tensor = weights()
    for step in range(5):
        tensor = moved(tensor, 0.02, step)
        state = StateDict(w=tensor[: CHUNK // 2], other=weights(100 + step), step=step)
        store.take({"m": state}, f"run/{step:03}")
        if step == 1:
            second = state
    store.gc(grace=0)
    store.take({"m": StateDict(other=second["other"])}, "kept/other")
    for step in range(5):
        store.delete(f"run/{step:03}")
    for _ in range(3):
        store.gc(grace=0)
    assert store.check(data=True).ok
    store.take({"m": second}, "again")
    for _ in range(3):
        store.gc(grace=0)
    again = {"m": StateDict(w=torch.zeros_like(second["w"]), other=weights(), step=-1)}
    store["again"].restore(again)
    assert torch.equal(again["m"]["w"], second["w"])
    assert store.check(data=True).ok


def add_pack(store: Store, digest: Digest, base: Digest, others: list[Digest]) -> None:
    """Store a chunk as a delta of another one in a pack that holds other chunks too."""
    chunks = ChunkBuffer(1 << 20).read(store._view.repository, [digest, base, *others])
    stored = encode_delta(chunks[digest], chunks[base], base)
    assert stored is not None
    with change_of(store) as session:
        assert all(session.rely_on([base]))
        session.new_packs.copy_stored(digest, stored, len(chunks[digest]), Codec.DELTA)
        for each in others:
            session.new_packs.copy_stored(each, chunks[each], len(chunks[each]), Codec.RAW)
        commit(session)


def test_a_copy_out_of_a_pack_stands_on_nothing_that_stands_on_it(tmp_path: Path) -> None:
    """Of two deltas of a chunk, the older one has a base that is stored as a delta of the chunk."""
    store = new_store(tmp_path, "raw")
    first = weights()[: CHUNK // 2]
    states = [first, moved(first, 0.02, 1), moved(first, 0.02, 2), weights(3), weights(4)]
    for step, tensor in enumerate(states):
        store.take({"m": StateDict(w=tensor)}, f"run/{step:03}")
    one, other, third = (chunks_of(store, f"run/{step:03}")[0] for step in range(3))
    add_pack(store, other, one, chunks_of(store, "run/003"))
    add_pack(store, other, third, chunks_of(store, "run/004"))
    for _ in range(2):
        store.gc(grace=0)
    add_pack(store, one, other, [])
    store.gc(grace=3600)
    store.delete("run/004")
    store.gc(grace=3600)
    for _ in range(3):
        store.gc(grace=0)
    assert store.check(data=True).ok
    for step, tensor in enumerate(states[:3]):
        state = {"m": StateDict(w=torch.zeros_like(first))}
        Store(tmp_path / "s")[f"run/{step:03}"].restore(state)
        assert torch.equal(state["m"]["w"], tensor)


def test_a_fine_tune_stands_on_its_base_in_another_folder(tmp_path: Path) -> None:
    """The others have another shape, another path, or came later."""
    store = new_store(tmp_path)
    base, tuned = weights(), moved(weights(), 0.05, 1)
    store.take({"m": StateDict(w=weights(7)[:1000])}, "others/1")
    store.take({"m": StateDict(w=base)}, "models/base/1")
    store.take({"m": StateDict(v=tuned)}, "others/2")
    for step in range(2):
        store.take({"m": StateDict(w=moved(tuned, 0.05, step))}, f"models/tuned/{step}")
    store.take({"m": StateDict(w=weights(8))}, "later/1")
    there = Store(tmp_path / "there", create=NewStore(chunk_size=CHUNK, codec="zstd")).make()
    store.copy("models/base/1", to=there)
    assert store.copy("models/tuned/0", to=there).sent_bytes < 0.2 * SIZE
    assert store.gc(grace=0, recode_after=1).saved_bytes > 0.8 * SIZE
    for each in (store, there):
        each.delete("models/base/1")
        for _ in range(2):
            each.gc(grace=0)
        assert torch.equal(each["models/tuned/0"].read_object("m/w"), moved(tuned, 0.05, 0))
        assert each.check(data=True).ok


def test_usage_counts_what_deltas_stand_on_and_what_they_save(tmp_path: Path) -> None:
    store = new_store(tmp_path)
    states = taken(store, 8)
    for _ in range(2):
        store.gc(grace=0)
    unique = {u.name: u.unique_bytes for u in store.usage()}
    stored = {u.name: u.stored_bytes for u in store.usage()}
    # All others of the chain stand on the first ones.
    assert unique["run/000"] < 0.1 * SIZE
    assert stored["run/001"] > 0.6 * SIZE
    disk = disk_usage(store._view.repository)
    assert 0 < 5 * SIZE - disk.saved_bytes < disk.kept_bytes - 3 * SIZE
    assert unique["run/007"] >= SIZE
    for name in ("run/003", "run/004"):
        before = disk.kept_bytes
        store.delete(name)
        for _ in range(2):
            store.gc(grace=0, recode_after=None)
        disk = disk_usage(store._view.repository)
        assert abs(before - disk.kept_bytes - unique[name]) < 0.05 * SIZE
    check_all(store, states, [0, 1, 2, 5, 6, 7])


def test_a_mirror_that_lost_its_bases_gets_chunks_that_stand_on_none(tmp_path: Path) -> None:
    there = Store(tmp_path / "there", create=NewStore(chunk_size=CHUNK, codec="zstd")).make()
    store = new_store(tmp_path)
    states = taken(store, 5)
    for step in range(3):
        store.copy(f"run/{step:03}", to=there)
    assert Codec.DELTA in codecs_in(there, "run/002")
    for place in places(there, "run/001"):
        pack = tmp_path / "there/casnap-store" / pack_key(place.pack)
        pack.unlink(missing_ok=True)
    again = Store(tmp_path / "there")
    for step in (3, 4):
        store.copy(f"run/{step:03}", to=again)
    for step in (0, 3, 4):
        name = f"run/{step:03}"
        assert torch.equal(restored(again, name).view(torch.int16), states[step].view(torch.int16))
    assert codecs_in(again, "run/004") == {Codec.DELTA}
    hurt = {h.snapshot for damage in again.check(data=True).damages for h in damage.hurts}
    assert hurt == {"run/001", "run/002"}


def test_chains_from_another_folder_stay_short(tmp_path: Path) -> None:
    """What a fine-tune stands on is recoded later, and does not lengthen its chains."""
    store = new_store(tmp_path)
    states = taken(store, MOST_LINKS + 1, 0.001)
    tensor = states[-1]
    for step in range(100, 104):
        tensor = moved(tensor, 0.001, step)
        store.take({"m": StateDict(w=tensor, step=step)}, f"tuned/{step}")
    store.gc(grace=0)
    assert codecs_in(store, "tuned/100") == {Codec.DELTA}
    for step in range(MOST_LINKS + 1, MOST_LINKS + 5):
        states.append(moved(states[-1], 0.001, step))
        store.take({"m": StateDict(w=states[-1], step=step)}, f"run/{step:03}")
    for _ in range(2):
        store.gc(grace=0)
    # A chain that is too long has no place.
    assert codecs_in(store, "tuned/100") == {Codec.DELTA}
    assert Codec.RAW not in codecs_in(store, f"run/{MOST_LINKS:03}")
    check_all(store, states)


@pytest.mark.parametrize("lost", ["footers", "deltas"])
def test_a_repair_where_deltas_are_lost(tmp_path: Path, lost: str) -> None:
    """Footers are written anew; chunks that are lost come from a copy, with all below them."""
    store = new_store(tmp_path)
    states = taken(store, 8)
    for _ in range(2):
        store.gc(grace=0)
    store.copy(to=tmp_path / "copy")
    for place in places(store, "run/002"):
        pack = tmp_path / "s/casnap-store" / pack_key(place.pack)
        content = bytearray(pack.read_bytes())
        if lost == "footers":
            content[-40:] = bytes(40)
        else:
            content[place.offset + 40] ^= 255
        pack.chmod(0o600)
        pack.write_bytes(content)
    again = Store(tmp_path / "s")
    assert not again.check(data=True).ok
    again.repair(sources=[tmp_path / "copy"])
    check_all(Store(tmp_path / "s"), states)


def read_by_ranks(path: str) -> torch.Tensor:
    state = {"m": StateDict(w=torch.zeros(SIZE // 2, dtype=torch.bfloat16), step=-1)}
    Store(path)["run/004"].restore(state, read_once=True)
    tensor: torch.Tensor = state["m"]["w"]
    return tensor


def test_ranks_read_deltas_once(tmp_path: Path, world: Callable[[int], World]) -> None:
    store = new_store(tmp_path)
    states = taken(store, 8)
    for _ in range(2):
        store.gc(grace=0)
    for tensor in world(2).run(read_by_ranks, str(tmp_path / "s")):
        assert torch.equal(tensor.view(torch.int16), states[4].view(torch.int16))
