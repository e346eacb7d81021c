"""What the store holds already is neither copied nor written, no matter which take stored it."""

from __future__ import annotations

import threading
from pathlib import Path

import torch

from casnap import NewStore, Snapshot, StateDict, Store
from tests.support.bitwise import assert_same

CHUNK = 64 << 10
TREE = 16 << 10
"""More than the nodes of these small states take."""


def frozen_and_trained():
    torch.manual_seed(0)
    return {
        "backbone": StateDict(w=torch.randn(64, 16384)),  # a row is a chunk
        "adapter": StateDict(a=torch.randn(4, 16384), b=torch.randn(30)),
        "progress": StateDict(step=0),
    }


def chunk_packs(store):
    """Return how many bytes of files there are below ``packs/``."""
    backend = store._view.repository.backend
    return sum(
        backend.size(f"packs/{folder}/{name}")
        for folder in backend.names("packs")
        for name in backend.names(f"packs/{folder}")
    )


def test_an_unchanged_take_writes_no_chunk(store):
    state = frozen_and_trained()
    store.take(state, "step_0")
    for take in (store.take, lambda *a: store.async_take(*a).wait()):
        before = chunk_packs(store)
        snapshot = take(state, f"again_{before}")
        assert snapshot.stats.new_bytes < TREE
        assert chunk_packs(store) - before < TREE
        assert snapshot.stats.logical_bytes == store["step_0"].stats.logical_bytes
    first, last = store.snapshots()[0], store.latest()
    assert first.contents.manifest == last.contents.manifest


def test_one_changed_row_costs_one_chunk(store):
    state = frozen_and_trained()
    store.take(state, "step_0")
    state["backbone"]["w"][17, 5] += 1
    state["progress"]["step"] = 1
    snapshot = store.take(state, "step_1")
    assert CHUNK <= snapshot.stats.new_bytes < CHUNK + TREE
    a, b = (
        store[n].contents.digests(
            store[n].get_manifest()["0/backbone/w"].payload, grid_of_backbone(), "w"
        )
        for n in ("step_0", "step_1")
    )
    differing = [i for i in range(64) if a[32 * i : 32 * i + 32] != b[32 * i : 32 * i + 32]]
    assert differing == [17]


def grid_of_backbone():
    from casnap.format.grid import grid_of

    return grid_of((64, 16384), 4, CHUNK)


def test_equal_bytes_under_other_names_cost_nothing(store):
    """Key, path, kind, container and dtype do not matter, only the bytes."""
    state = frozen_and_trained()
    store.take(state, "step_0")
    w = state["backbone"]["w"]
    other = StateDict(
        module={"layers": [w.clone(), torch.nn.Parameter(w.clone())]},
        bits=w.view(torch.int32),
        array=w.numpy(),
        turned_twice=w.t().contiguous().t(),
    )
    snapshot = store.take({"elsewhere": other}, "run_2/step_0")
    assert snapshot.stats.new_bytes < TREE


def test_across_runs_names_and_stores_opened_anew(tmp_path):
    root = tmp_path / "all"
    Store(root, create=NewStore(chunk_size=CHUNK)).make()
    state = frozen_and_trained()
    first = Snapshot.take(root / "run_1" / "step_0", state)
    assert first.stats.new_bytes > 68 * CHUNK
    for path in (root / "run_1" / "step_1", root / "run_2" / "deep" / "step_0", root / "alone"):
        assert Snapshot.take(path, state).stats.new_bytes < TREE
    below = Store(root / "run_3")
    assert below.take(state, "step_0").stats.new_bytes < TREE
    assert "run_3/step_0" in Store(root)


def test_after_a_snapshot_was_deleted_or_overwritten(store):
    """A take may reuse bytes of a deleted snapshot; other snapshots stay whole."""
    state = frozen_and_trained()
    store.take(state, "step_0")
    state["adapter"]["b"] += 1
    store.take(state, "step_1")
    store.delete("step_0")
    state["progress"]["step"] = 5
    again = store.take(state, "step_1", overwrite=True)
    assert again.stats.new_bytes < TREE
    assert [s.name for s in store.snapshots()] == ["step_1"]
    assert_same(again.get_state_dict_for_key("backbone"), dict(state["backbone"]))


def test_compressed_stores(tmp_path):
    """Chunks are equal if their raw bytes are; casts and odd strides read compressed chunks too."""
    plain = Store(tmp_path / "store", create=NewStore(chunk_size=CHUNK))
    packed = Store(tmp_path / "store")
    packed.configure(codec="zstd")
    x = torch.arange(100_000, dtype=torch.float64).reshape(100, 1000)
    first = packed.take({"s": StateDict(x=x)}, "packed")
    assert first.stats.new_bytes < x.nbytes / 2
    packed.configure(codec="raw")
    assert plain.take({"s": StateDict(x=x)}, "plain").stats.new_bytes < TREE
    for name in ("packed", "plain"):
        assert_same(plain[name].read_object("s/x"), x)
        assert_same(
            plain[name].read_object("s/x", index=(slice(5, 90, 3), 7)), x[5:90:3, 7].clone()
        )
        for out in (torch.zeros(100, 1000), torch.zeros(1000, 100, dtype=torch.float64).t()):
            plain[name].restore({"s": StateDict(x=out)})
            assert torch.equal(out, x.to(out.dtype))


def test_a_small_tensor_that_a_thread_writes_to_is_taken(tmp_path: Path) -> None:
    """A count of samples, say. The take hashes and stores one copy of it."""
    store, numbers = Store(tmp_path), [torch.arange(3000.0) for _ in range(300)]
    state = {"s": StateDict({f"x{i}": number for i, number in enumerate(numbers)})}
    store.take(state, "step_0")
    is_over = threading.Event()

    def count() -> None:
        while not is_over.is_set():
            for number in numbers:
                number.add_(1)

    thread = threading.Thread(target=count)
    thread.start()
    try:
        for step in range(1, 4):
            store.take(state, f"step_{step}")
    finally:
        is_over.set()
        thread.join()
    assert store.check(data=True).ok
