"""Bytes that change on their way to another rank: none that is not proven reaches a tensor."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from casnap import NewStore, StateDict, Store
from casnap.backends.base import Target
from casnap.backends.local.backend import LocalBackend
from casnap.errors import RankError
from casnap.ranks.group import Group
from tests.support.links import forget_links
from tests.support.ranks import World

Worlds = Callable[[int], World]

CHUNK = 64 << 10


@contextmanager
def flipping(at_least: int, most: int = 1 << 62) -> Iterator[list[int]]:
    """Flip one bit of what this rank sends in parts of some sizes, behind all checks of its own."""
    carry, flipped = Group._transfer, list[int]()

    def bad(group: Group, parts: Sequence[Any], *args: Any) -> Any:
        sent = list(parts)
        for rank, part in enumerate(parts):
            if rank != group.rank and at_least <= len(part) <= most:
                sent[rank] = memoryview(bytearray(part))
                sent[rank][len(part) // 2] ^= 4
                flipped.append(len(part))
        return carry(group, sent, *args)

    with mock.patch.object(Group, "_transfer", bad):
        yield flipped


@contextmanager
def flipping_in_memory() -> Iterator[list[int]]:
    """Flip one bit of each chunk that is read into memory for others, the first time."""
    read, flipped = LocalBackend._read_each, list[int]()
    keys = set[tuple[str, int]]()

    def bad(backend: LocalBackend, key: str, targets: Sequence[Target]) -> Iterator[int]:
        for (offset, target), nbytes in zip(targets, read(backend, key, targets), strict=True):
            if nbytes == CHUNK and (key, offset) not in keys:
                keys.add((key, offset))
                target[nbytes // 2] ^= 4
                flipped.append(nbytes)
            yield nbytes

    with mock.patch.object(LocalBackend, "_read_each", bad):
        yield flipped


@contextmanager
def by_sockets() -> Iterator[None]:
    """Let this rank share no memory."""
    forget_links()
    with mock.patch.object(os, "memfd_create", side_effect=PermissionError):
        yield
    forget_links()


def numbers(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def restore_damaged(folder: str, shared: bool) -> bool:
    store = Store(folder)
    inputs = {f"w{i}": torch.zeros(100_000) for i in range(4)}
    with ExitStack() as stack:
        if not shared:
            stack.enter_context(by_sockets())
        flipped = stack.enter_context(flipping_in_memory() if shared else flipping(CHUNK))
        store["s"].restore({"m": StateDict(inputs)}, read_once=True)
    for i in range(4):
        assert torch.equal(inputs[f"w{i}"], numbers(i, 100_000)), "damaged bytes reached a tensor"
    return bool(flipped)


@pytest.mark.parametrize("shared", [False, True])
def test_only_what_is_proven_is_passed_on(world: Worlds, tmp_path: Path, shared: bool) -> None:
    store = Store(tmp_path, create=NewStore(chunk_size=CHUNK))
    store.take({"m": StateDict({f"w{i}": numbers(i, 100_000) for i in range(4)})}, "s")
    assert any(world(3).run(restore_damaged, str(tmp_path), shared))


def take_damaged(folder: str, at_least: int, most: int) -> None:
    # The shards end within chunks, so parts of these are sent.
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = distribute_tensor(numbers(1, 100_003, 2), mesh, [Shard(0)], src_data_rank=None)
    state = {"m": StateDict(w=whole, same=numbers(2, 50_000))}
    with by_sockets(), flipping(at_least, most):
        Store(folder).take(state, "s", timeout=20)


@pytest.mark.parametrize(("at_least", "most"), [(1, 1 << 62), (4_000, 1 << 62), (100, 1_000)])
def test_a_take_believes_no_damaged_message(
    world: Worlds, tmp_path: Path, at_least: int, most: int
) -> None:
    Store(tmp_path, create=NewStore(chunk_size=CHUNK)).make()
    outcomes = world(3).run(take_damaged, str(tmp_path), at_least, most, expect_errors=True)
    assert all(isinstance(outcome, RankError) for outcome in outcomes), outcomes
    assert all(" sent came damaged to rank " in str(outcome) for outcome in outcomes)
    assert Store(tmp_path).snapshots() == []
