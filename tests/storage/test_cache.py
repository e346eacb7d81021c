"""A missing, damaged or unusable cache of the index costs time alone."""

from __future__ import annotations

import gc
import logging
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from unittest import mock
from weakref import ref

import lmdb
import pytest

from casnap import NewStore, Retention, StateDict, Store
from casnap.format.digest import Digest, digest_of
from casnap.format.records import ID_SIZE, PackId, Place, SegmentId
from casnap.runtime.environment import boot_id
from casnap.runtime.host_locks import locked
from casnap.storage.lookup import index_cache, lmdb_files
from casnap.storage.lookup.index_cache import LmdbCache
from casnap.storage.lookup.lmdb_files import open_environment
from tests.support.far import FarFolder
from tests.support.faults import (
    CHUNK,
    app_state,
    assert_holds,
    assert_store,
    in_child,
    kill,
    start,
    take,
    wait,
)
from tests.support.mounts import let_others_in


def use(path: Path, step: int) -> None:
    """Open a store as a new process does, take, and read everything."""

    def work() -> None:
        steps = {
            s.metadata.user["step"]
            for s in Store(path, create=NewStore(chunk_size=CHUNK)).snapshots()
        }
        stats = take(path, step).stats
        if steps:
            # What never changes is still known to be there.
            assert stats.new_bytes < 120_000
        assert_store(path, steps | {step})

    assert in_child(work) == 0


@pytest.fixture
def store(tmp_path: Path, cache_dir: Path) -> Path:
    """Return a store of three snapshots whose cache this process has not opened."""
    assert in_child(lambda: [take(tmp_path / "store", step) for step in range(3)]) == 0
    assert list(cache_dir.glob("*/data.mdb"))
    return tmp_path / "store"


def data_of(cache_dir: Path) -> Path:
    (data,) = cache_dir.glob("*/data.mdb")
    return data


def garbage(path: Path) -> None:
    path.write_bytes(random.Random(1).randbytes(path.stat().st_size))


def in_the_way(path: Path) -> None:
    shutil.rmtree(path)
    path.write_text("in the way")


@pytest.mark.parametrize(
    ("name", "harm"),
    [
        (".", shutil.rmtree),
        (".", in_the_way),
        *(
            (name, harm)
            for name in ("data.mdb", "lock.mdb", "boot")
            for harm in (Path.unlink, garbage)
        ),
        ("data.mdb", lambda path: path.unlink() or path.mkdir()),
        ("boot", lambda path: path.write_text("another boot")),
    ],
)
def test_what_becomes_of_a_cache(
    store: Path, cache_dir: Path, name: str, harm: Callable[[Path], object]
) -> None:
    harm((data_of(cache_dir).parent / name).resolve())
    use(store, 3)


def test_places_of_many_digests_are_in_their_order(tmp_path: Path) -> None:
    """One call of LMDB looks for many, and its answer leaves out those that it lacks."""
    cache = LmdbCache(tmp_path / "cache")
    pack, gone = PackId(b"p" * ID_SIZE), PackId(b"g" * ID_SIZE)
    digests = [digest_of(i.to_bytes(4, "big")) for i in range(3000)]
    known = {d: Place(pack, 1000 * i, 900, 900, 0) for i, d in enumerate(digests) if i % 3}
    records = [*known.items(), (digests[1], Place(gone, 0, 900, 900, 0))]
    cache.learn(SegmentId(b"s" * ID_SIZE), [pack, gone], records)
    wanted = random.Random(0).sample(digests, 3000) + digests[:3]
    assert cache.place(iter(wanted), {pack}) == [known.get(digest) for digest in wanted]
    assert cache.place([], {pack}) == []


def test_a_cache_deleted_while_it_is_open(store: Path, cache_dir: Path) -> None:
    def work() -> None:
        opened = Store(store)
        assert_holds(opened["step_0"], 0)
        shutil.rmtree(cache_dir)
        assert_holds(opened["step_1"], 1)
        take(opened, 3)
        assert_holds(Store(store)["step_2"], 2)
        take(Store(store), 4)
        assert_store(store, {0, 1, 2, 3, 4})

    assert in_child(work) == 0


def test_an_open_store_opens_a_cache_in_place_of_one_that_others_deleted(
    store: Path, cache_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Others delete a cache that has outgrown its store, or that a process died writing."""
    opened = Store(store)
    take(opened, 3)
    shutil.rmtree(data_of(cache_dir).parent)
    use(store, 4)
    with caplog.at_level(logging.WARNING, "casnap"):
        # This process learns what the other one took, so it writes to the cache.
        assert_holds(opened["step_4"], 4)
    assert not caplog.records
    cache = opened._view.repository.index.cache
    assert isinstance(cache, LmdbCache)
    assert not cache.is_deleted()


def test_a_truncated_cache(store: Path, cache_dir: Path) -> None:
    size = data_of(cache_dir).stat().st_size
    for step, keep in enumerate([0, 4096, size // 2, size - 1], start=3):
        os.truncate(data_of(cache_dir), keep)
        use(store, step)


def test_a_cache_that_a_process_died_writing(store: Path, cache_dir: Path) -> None:
    folder = data_of(cache_dir).parent
    witness = folder / "witness"
    witness.touch()
    pid = start(lambda: None)
    wait(pid)
    (folder / f"writing-{os.getpid()}").touch()
    use(store, 3)
    assert witness.exists()
    (folder / f"writing-{pid}").touch()
    use(store, 4)
    assert not witness.exists()
    assert not (folder / f"writing-{pid}").exists()


def test_a_process_that_stands_still_while_it_writes_holds_no_other_up(
    store: Path, cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stand_still() -> None:
        cache = Store(store)._view.repository.index.cache
        assert isinstance(cache, LmdbCache)
        with cache._writing(1.0):
            os.kill(os.getpid(), signal.SIGSTOP)

    monkeypatch.setattr("casnap.storage.lookup.index_cache._PATIENCE", 0.1)
    monkeypatch.setattr("casnap.storage.lookup.index_cache._LITTLE", 0.1)
    stopped = start(stand_still)
    os.waitpid(stopped, os.WUNTRACED)
    use(store, 3)
    assert data_of(cache_dir).exists()
    os.kill(stopped, signal.SIGCONT)
    assert wait(stopped) == 0
    use(store, 4)


def test_a_cache_that_has_outgrown_its_store_is_made_anew(
    store: Path, cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sign = data_of(cache_dir).parent / "sign"
    sign.touch()
    use(store, 3)
    assert sign.exists()
    monkeypatch.setattr("casnap.storage.lookup.index._CACHE_BYTES", 0)
    monkeypatch.setattr("casnap.storage.lookup.index._BYTES_A_RECORD", 100)
    use(store, 4)
    assert not sign.exists()
    use(store, 5)


def test_a_cache_that_cannot_say_how_large_it_is_costs_time_alone(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def count(_: LmdbCache) -> int:
        raise lmdb.ReadersFullError("too many processes have it open")

    monkeypatch.setattr("casnap.storage.lookup.index._SMALL_CACHE_BYTES", 0)
    monkeypatch.setattr(LmdbCache, "count", count)
    use(store, 3)


def test_the_cache_of_a_long_run_levels_off(
    tmp_path: Path, cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("casnap.storage.lookup.index._SMALL_CACHE_BYTES", 64 << 10)
    store = Store(tmp_path / "store").make()
    sizes: list[int] = []
    for step in range(80):
        store.take({"s": StateDict(step=step)}, f"step_{step}", retention=Retention(keep_last=2))
        if step % 10 == 0:
            store.gc(grace=0)
        cache = store._view.repository.index.cache
        assert isinstance(cache, LmdbCache)
        sizes.append(cache.nbytes())
        del cache
    assert max(sizes) < 160 << 10
    assert len(list(cache_dir.glob("*/data.mdb"))) == 1
    # Those that were made anew are closed.
    gc.collect()
    assert not [
        line
        for line in Path("/proc/self/maps").read_text().splitlines()
        if "data.mdb (deleted)" in line and str(cache_dir) in line
    ]
    assert store.check().ok


def damage_at_random(data: Path, dice: random.Random) -> str:
    """Damage a few bytes or pages of a file, and say how."""
    size = data.stat().st_size
    kind = dice.choice(["bit", "bytes", "page", "zeros", "swap"])
    with data.open("r+b") as f:
        at = dice.randrange(size)
        if kind == "bit":
            f.seek(at)
            byte = f.read(1)[0]
            f.seek(at)
            f.write(bytes([byte ^ 1 << dice.randrange(8)]))
        elif kind == "bytes":
            f.seek(at)
            f.write(dice.randbytes(min(16, size - at)))
        else:
            pages = [dice.randrange(size // 4096) * 4096 for _ in range(2)]
            f.seek(pages[1])
            other = f.read(4096)
            f.seek(pages[0])
            f.write({"page": dice.randbytes(4096), "zeros": bytes(4096), "swap": other}[kind])
            at = pages[0]
    return f"{kind} at {at} of {size}"


def fuzz(store: Path, cache_dir: Path, seeds: range) -> list[str]:
    """Use a store again and again with a damaged cache; return what went wrong."""
    folder = data_of(cache_dir).parent
    whole = cache_dir.parent / "whole"
    shutil.copytree(folder, whole)
    bad = []
    for seed in seeds:
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(whole, folder)
        what = damage_at_random(folder / "data.mdb", random.Random(seed))

        def work() -> None:
            found = Store(store)
            for step in range(3):
                assert_holds(found[f"step_{step}"], step)
            take(found, 3, overwrite=True)
            take(found, 4, overwrite=True)
            assert_store(store, {0, 1, 2, 3, 4})

        status = in_child(work)
        if status:
            # LMDB aborts where it finds one of its pages in another's place; no process may be
            # hurt by the same damage again.
            if status == -signal.SIGABRT and in_child(work) == 0:
                continue
            bad.append(f"seed {seed}: {what}: {status}")
    return bad


def test_a_cache_damaged_at_random(store: Path, cache_dir: Path) -> None:
    assert fuzz(store, cache_dir, range(25, 31)) == []


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_cache_damaged_at_many_random_places(store: Path, cache_dir: Path) -> None:
    assert fuzz(store, cache_dir, range(1000, 2000)) == []


# --- folders ----------------------------------------------------------------------------------


def test_another_cache_folder(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CASNAP_CACHE_DIR", str(tmp_path / "deep" / "other"))
    use(store, 3)
    assert list((tmp_path / "deep" / "other").glob("*/data.mdb"))


def test_no_cache_folder_at_all(
    store: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    file = tmp_path / "file"
    file.touch()
    monkeypatch.setenv("CASNAP_CACHE_DIR", str(file))
    monkeypatch.setattr("tempfile.tempdir", str(file))
    use(store, 3)
    with caplog.at_level(logging.WARNING, "casnap"):
        assert_store(store, {0, 1, 2, 3})
    assert "memory" in caplog.text


def test_a_cache_folder_that_cannot_be_written(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root, to become another user")
    locked = tmp_path / "locked"
    locked.mkdir(mode=0o755)
    monkeypatch.setenv("CASNAP_CACHE_DIR", str(locked))
    monkeypatch.setattr("tempfile.tempdir", str(locked))
    let_others_in(tmp_path)

    def work() -> None:
        os.setuid(65534)
        assert_store(store, {0, 1, 2})

    assert in_child(work) == 0
    assert list(locked.iterdir()) == []


def test_a_cache_that_another_user_has_made(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """In a folder where all may write, it may say anything."""
    if os.geteuid() != 0:
        pytest.skip("needs root, to give files to another user")
    monkeypatch.setenv("CASNAP_CACHE_DIR", str(tmp_path / "all"))
    use(store, 3)
    [cache] = [path.parent for path in (tmp_path / "all").glob("*/data.mdb")]
    shutil.rmtree(cache)
    cache.mkdir(mode=0o777)
    os.chown(cache, 65534, 65534)
    with caplog.at_level(logging.WARNING, "casnap"):
        assert_store(store, {0, 1, 2, 3})
    assert "belongs to another user" in caplog.text
    assert list(cache.iterdir()) == []


# --- stores that share a cache ----------------------------------------------------------------


def test_copies_of_a_store_used_in_turn_by_one_process(store: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(store, copy)
    stores = [Store(store), Store(copy)]
    for step in range(3, 9):
        take(stores[step % 2], step)
        # The same state again, in the other: what the cache knows of one must not count here.
        take(stores[1 - step % 2], step)
    for opened in stores:
        assert_store(opened.uri, set(range(9)))


def test_a_store_that_is_rolled_back(store: Path, tmp_path: Path) -> None:
    backup = tmp_path / "backup"
    shutil.copytree(store, backup)
    opened = Store(store)
    for step in range(3, 6):
        take(opened, step)
    shutil.rmtree(store)
    shutil.copytree(backup, store)
    # The states that were lost, again: their chunks are known to the cache, and are not there.
    for step in range(3, 6):
        take(opened if step % 2 else store, step)
    assert_store(store, set(range(6)))


# --- processes --------------------------------------------------------------------------------


def test_processes_that_share_a_cache(store: Path) -> None:
    """A process that has the cache open sees what others put there, and the other way round."""
    opened = Store(store)
    assert_holds(opened["step_0"], 0)
    for step in range(3, 9):
        if step % 2:
            use(store, step)
        else:
            take(opened, step)
        assert_holds(opened[f"step_{step}"], step)
    assert_store(store, set(range(9)))


def test_processes_that_make_a_cache_at_once(store: Path, cache_dir: Path) -> None:
    for _ in range(2):
        shutil.rmtree(cache_dir)
        children = [start(lambda: assert_store(store, {0, 1, 2})) for _ in range(4)]
        assert [wait(pid) for pid in children] == [0, 0, 0, 0]


def test_a_cache_that_another_process_makes_longer_just_now(tmp_path: Path) -> None:
    """It is not cut short: whoever took it for that deleted it under the other process."""
    env = open_environment(tmp_path / "cache")

    class Growing:
        """What another process writes between both looks."""

        def info(self) -> dict[str, int]:
            with env.begin(write=True) as txn:
                txn.put(b"k", bytes(1 << 20))
            return dict(env.info())

        def stat(self) -> dict[str, int]:
            return dict(env.stat())

    size = data_of(tmp_path).stat().st_size
    assert not lmdb_files._cut_short(Growing(), tmp_path / "cache")
    assert data_of(tmp_path).stat().st_size > size
    env.close()


def test_a_cache_that_is_opened_is_never_seen_without_its_boot(tmp_path: Path) -> None:
    """Whoever saw it so took it for one of an earlier boot, and deleted it."""
    open_environment(tmp_path / "cache").close()
    seen = (tmp_path / "cache/boot").open()
    for _ in range(3):
        open_environment(tmp_path / "cache").close()
    # The file that is open was never written over: each reader of it had all of it.
    with seen:
        assert os.fstat(seen.fileno()).st_nlink == 0
        assert seen.read() == boot_id()
    assert (tmp_path / "cache/boot").read_text() == boot_id()
    assert sorted(p.name for p in (tmp_path / "cache").iterdir()) == [
        "boot",
        "data.mdb",
        "lock.mdb",
    ]


def test_a_fork_while_a_take_is_pending(store: Path) -> None:
    opened = Store(store)
    pending = opened.async_take(app_state(3), "step_3", metadata={"step": 3})

    def work() -> None:
        with pytest.raises(Exception, match="fork"):
            pending.wait()
        take(opened, 4)

    pid = start(work)
    assert_holds(pending.wait(), 3)
    assert wait(pid) == 0
    assert_store(store, {0, 1, 2, 3, 4})


def test_a_fork_leaves_the_cache_of_its_parent_alone(tmp_path: Path, cache_dir: Path) -> None:
    """LMDB does not open again in a fork; that is no reason to make the cache anew for all."""
    path = tmp_path / "store"
    take(Store(path), 0)
    caches = {file: file.stat().st_ino for file in cache_dir.glob("*/data.mdb")}
    assert caches

    def grandchild() -> None:
        take(Store(path), 2)
        assert_store(path, {0, 1, 2})

    def child() -> None:
        take(Store(path), 1)
        assert_store(path, {0, 1})
        assert in_child(grandchild) == 0

    assert in_child(child) == 0
    assert {file: file.stat().st_ino for file in caches} == caches
    assert_store(path, {0, 1, 2})


def test_a_store_without_users_is_freed_at_once(tmp_path: Path) -> None:
    """Its cache holds files open, and training often switches the garbage collector off."""
    gc.disable()
    try:
        store = Store(tmp_path / "store")
        snapshot = store.take({}, "x")
        freed, repository = ref(store), ref(store._view.repository)
        del store
        assert snapshot.store is freed()
        del snapshot
        assert freed() is None
        assert repository() is None
    finally:
        gc.enable()


def test_a_child_that_was_forked_meanwhile_holds_no_lock(tmp_path: Path) -> None:
    gate, end = os.pipe()
    with locked(tmp_path / "turn", 0):  # as of a take in the background
        child = start(lambda: os.read(gate, 1))
    try:
        with locked(tmp_path / "turn", 0):
            pass
    finally:
        os.write(end, b"1")
        wait(child)


def test_a_child_of_a_killed_process_holds_no_lock(tmp_path: Path) -> None:
    gate, end = os.pipe()

    def die_within() -> None:
        with locked(tmp_path / "turn", 0):
            start(lambda: os.read(gate, 1))
            kill()

    assert in_child(die_within) == -signal.SIGKILL
    with ExitStack() as stack:
        stack.callback(os.write, end, b"1")
        stack.enter_context(locked(tmp_path / "turn", 5))


def test_one_process_of_a_host_learns_what_is_new(tmp_path: Path) -> None:
    """The others wait, and then find it in the cache."""
    Store(FarFolder(tmp_path / "store"), create=NewStore(chunk_size=CHUNK)).make()
    take(Store(FarFolder(tmp_path / "store")), 1)

    def look() -> None:
        backend = FarFolder(tmp_path / "store")
        repository = Store(backend, create=False)._view.repository
        real = backend.read

        def slow(key: str, *most: int) -> bytes:
            if key.startswith("index/"):
                (tmp_path / f"read-{os.getpid()}").touch()
                time.sleep(0.3)
            return real(key, *most)

        with mock.patch.object(backend, "read", slow):
            assert repository.view().packs

    def look_anew() -> None:
        os.environ["CASNAP_CACHE_DIR"] = str(tmp_path / "cache")
        look()

    assert [wait(pid) for pid in [start(look_anew) for _ in range(4)]] == [0] * 4
    assert len(list(tmp_path.glob("read-*"))) == 1


def test_threads_keep_nodes_in_memory_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the trees of many snapshots of a bucket are read by many threads."""
    monkeypatch.setattr(index_cache, "_NODES_BYTES", 2000)
    interval = sys.getswitchinterval()
    cache = index_cache.MemoryCache()

    def keep(number: int) -> None:
        for i in range(5000):
            cache.keep_nodes([(Digest(b"%8d%8d" % (number, i)), b"x" * 50)])

    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(keep, range(8)))
    finally:
        sys.setswitchinterval(interval)


@pytest.mark.parametrize("in_memory", [False, True])
def test_the_nodes_that_a_cache_lacks(tmp_path: Path, *, in_memory: bool) -> None:
    cache = index_cache.MemoryCache() if in_memory else index_cache.LmdbCache(tmp_path / "cache")
    a, b, c = (digest_of(name) for name in (b"a", b"b", b"c"))
    assert cache.lacking([a, b]) == [a, b]
    cache.keep_nodes([(b, b"b")])
    assert cache.lacking([c, b, a]) == [c, a]
    assert cache.lacking([]) == []
