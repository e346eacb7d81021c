"""Chunks that are read straight into tensors, and proven there."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from casnap import NewStore, StateDict, Store
from casnap.backends import LocalBackend
from casnap.backends.base import Target
from casnap.errors import DamagedError, MismatchError
from casnap.runtime.buffers import address_of
from tests.support.bitwise import assert_same
from tests.support.remote import RemoteDouble

CHUNK = 128 << 10


class Watched(LocalBackend):
    """Notes the addresses that it reads to, and may spoil what it has read, or will read."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.addresses: list[int] = []
        self.spoils = 0
        self.harm: Callable[[Path], object] | None = None

    def filled(self, key: str, targets: Sequence[Target], use: Callable[[int], None]) -> None:
        def spoil_first(number: int) -> None:
            view = targets[number][1]
            self.addresses.append(address_of(view))
            if self.spoils:
                self.spoils -= 1
                view[len(view) // 2] ^= 1
            use(number)
            if self.harm is not None and number == 2:
                harm, self.harm = self.harm, None
                harm(self.folder / "casnap-store" / key)

        super().filled(key, targets, spoil_first)


@pytest.fixture
def backend(tmp_path: Path) -> Watched:
    return Watched(tmp_path / "store")


@pytest.fixture
def store(backend: Watched) -> Store:
    return Store(backend, create=NewStore(chunk_size=CHUNK))


def taken(store: Store, x: torch.Tensor) -> torch.Tensor:
    store.take({"s": StateDict(x=x)}, "a")
    return x


def restored(store: Store, x: torch.Tensor) -> torch.Tensor:
    state = StateDict(x=x)
    store["a"].restore({"s": state})
    assert state["x"] is x
    return x


def test_chunks_are_read_into_the_tensor(store: Store, backend: Watched) -> None:
    x = taken(store, torch.randn(100, 5000))
    y = torch.zeros_like(x)
    assert_same(restored(store, y), x)
    inside = range(y.data_ptr(), y.data_ptr() + y.nbytes)
    rows = 4  # the greatest power of two whose bytes are no more than a chunk
    assert sorted(a for a in backend.addresses if a in inside) == [
        y.data_ptr() + i * 20_000 for i in range(0, 100, rows)
    ]


@pytest.mark.parametrize(
    "make",
    [
        lambda x: x.T.contiguous().T,
        lambda x: torch.zeros(x.shape[0], 2 * x.shape[1])[:, ::2],
        lambda x: x.double(),
    ],
    ids=["transposed", "strided", "another dtype"],
)
def test_other_tensors_are_filled_from_buffers(store, backend, make):
    x = taken(store, torch.randn(100, 5000))
    y = make(torch.zeros_like(x))
    assert_same(restored(store, y).to(x.dtype), x)
    span = range(y.data_ptr(), y.data_ptr() + y.untyped_storage().nbytes())
    assert not [a for a in backend.addresses if a in span]


def test_memory_that_is_written_to_meanwhile_is_no_damage(store, backend):
    """A chunk that is whole in the store is read again."""
    x = taken(store, torch.randn(100, 5000))
    backend.spoils = 7
    assert_same(restored(store, torch.zeros_like(x)), x)
    assert store.check(data=True).ok


def test_damage_is_named_wherever_it_is_among_many_chunks(tmp_path):
    # More chunks than are looked for before reading begins.
    store = Store(tmp_path / "store", create=NewStore(chunk_size=64 << 10))
    x, y = torch.randn(300 << 14), torch.randn(20 << 14)
    store.take({"s": StateDict(x=x, y=y)}, "a")
    for tensor in (x, y):
        spoil(tmp_path / "store/casnap-store/packs", tensor.numpy().tobytes()[:64])
    state = StateDict(x=torch.zeros_like(x), y=torch.zeros_like(y))
    with pytest.raises(DamagedError, match="may hold unverified bytes") as damaged:
        store["a"].restore({"s": state})
    assert [path.removeprefix("0/") for path in damaged.value.paths] == ["s/x", "s/y"]
    assert_same(state["x"][1 << 14 :], x[1 << 14 :])
    assert_same(state["y"][1 << 14 :], y[1 << 14 :])


def spoil(packs: Path, begin: bytes) -> None:
    """Change a byte of the chunk that begins so."""
    for pack in (path for path in packs.rglob("*") if path.is_file()):
        content = bytearray(pack.read_bytes())
        if (at := content.find(begin)) >= 0:
            content[at] ^= 1
            pack.write_bytes(content)


def flip_all(pack: Path) -> None:
    content = bytes(b ^ 1 for b in pack.read_bytes())
    with pack.open("r+b") as file:
        file.write(content)


def replace(pack: Path) -> None:
    other = pack.with_name("other")
    other.write_bytes(bytes(pack.stat().st_size))
    other.replace(pack)


# What is done to a pack while it is read into a tensor, what is said then, and what later.
HARM: dict[str, tuple[Callable[[Path], object], str, str]] = {
    "cut off": (lambda pack: os.truncate(pack, 70_000), "its pack is cut off", "is cut off"),
    "emptied": (lambda pack: os.truncate(pack, 0), "its pack is cut off", "is cut off"),
    "flipped": (flip_all, "its bytes differ", "its bytes differ"),
    "replaced": (replace, "", "its bytes differ"),  # the file that was opened is read on
    "deleted": (Path.unlink, "", "its pack is missing"),
}


@pytest.mark.parametrize("how", HARM)
@pytest.mark.parametrize("verb", ["restore", "read_object"])
def test_a_pack_that_is_harmed_while_it_is_read(store, backend, tmp_path, how, verb):
    x = taken(store, torch.randn(100, 5000))
    y = torch.zeros_like(x)

    def read() -> None:
        if verb == "restore":
            restored(store, y)
        else:
            store["a"].read_object("s/x", y)

    pack = max(
        (tmp_path / "store/casnap-store/packs").rglob("*"),
        key=lambda p: p.stat().st_size * p.is_file(),
    )
    whole = pack.read_bytes()
    harm, meanwhile, later = HARM[how]
    backend.harm = harm
    if meanwhile:
        with pytest.raises(DamagedError, match=f"{meanwhile}.* may hold unverified bytes") as e:
            read()
        assert [path.removeprefix("0/") for path in e.value.paths] == ["s/x"]
        assert_same(y[:8], x[:8])  # two chunks and more were whole when they were read
    else:
        read()
        assert_same(y, x)
    assert backend.harm is None
    with pytest.raises(DamagedError, match=later):
        read()
    pack.unlink(missing_ok=True)
    pack.write_bytes(whole)
    read()
    assert_same(y, x)


def test_small_chunks_are_read_beside_large_ones(tmp_path):
    """From a server, they would take a round trip more after them."""
    backend = RemoteDouble(str(tmp_path))
    store = Store(backend, create=NewStore(chunk_size=CHUNK))
    state = {"large": torch.randn(20_000), "small": torch.randn(500)}
    store.take({"s": StateDict(**state)}, "a")
    target = StateDict(**{name: torch.zeros_like(tensor) for name, tensor in state.items()})
    snapshot = store["a"]
    snapshot.restore({"s": target})
    backend.reset()
    backend.latency = 0.05
    snapshot.restore({"s": target})
    assert backend.requests["get"] <= 2
    assert backend.most_at_once == 2
    for name, tensor in state.items():
        assert_same(target[name], tensor)


@pytest.mark.parametrize("size", [1, 100_000])
def test_integers_that_do_not_fit_are_refused(store: Store, size: int) -> None:
    """They were cut to the bits of the tensor that is filled: other numbers, without a word."""
    large = torch.full((size,), 2**40 + 1)
    small = torch.full((size,), 7)
    store.take({"large": StateDict(n=large), "small": StateDict(n=small)}, "a")
    for dtype in (torch.int32, torch.uint8, torch.uint32):
        live = StateDict(n=torch.zeros(size, dtype=dtype))
        with pytest.raises(MismatchError, match=rf"large/n: integers of torch.int64 .* {dtype}"):
            store["a"].restore({"large": live})
        with pytest.raises(MismatchError, match="do not fit"):
            store["a"].read_object("large/n", obj_out=live["n"])
        given = live["n"]
        store["a"].restore({"small": live})
        assert live["n"] is given
        assert given.tolist() == small.tolist()
    module = torch.nn.Module()
    module.register_buffer("n", torch.zeros(size, dtype=torch.int16))
    with pytest.raises(MismatchError, match="do not fit"):
        store["a"].load_into(module, "large")
    store["a"].load_into(module, "small")
    assert module.n.tolist() == small.tolist()


def test_integers_that_would_change_their_sign_are_refused(store: Store) -> None:
    """A cast there and back gives -1 again: it hides that uint8 has no such number."""
    state = {
        "bytes": torch.tensor([5, -1], dtype=torch.int8),
        "longs": torch.tensor([2**63 + 5], dtype=torch.uint64),
        "good": torch.tensor([2**63 - 5, 0], dtype=torch.uint64),
    }
    store.take({"state": StateDict(state)}, "a")
    for name, dtype in (("bytes", torch.uint8), ("bytes", torch.uint64), ("longs", torch.int64)):
        with pytest.raises(MismatchError, match="do not fit"):
            store["a"].read_object(
                f"state/{name}", obj_out=torch.zeros_like(state[name], dtype=dtype)
            )
    good = store["a"].read_object("state/good", obj_out=torch.ones(2, dtype=torch.int64))
    assert good.tolist() == [2**63 - 5, 0]
