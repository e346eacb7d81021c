"""BLAKE3 in Triton, for cells in a device's memory; imported only where Triton is installed.

A *leaf* is what BLAKE3 calls a chunk: up to 1,024 bytes of a cell. A *node* is the chaining value
of a leaf or of two nodes: eight words. A lane, one element of a block of Triton's, makes one node
at a time.

Nodes lie in *slots*. The first words of all slots come first, then all second words, and so on, so
that neighbouring lanes read and write neighbouring words. On level k, node p of the batch's cell c
has the slot ``(base >> k) + c + p``, where ``base`` is the number of leaves of the batch's cells
before c. So slots of cells never overlap, on any level, and a lane finds its cell by a search among
the bases. A last node without a neighbour goes up a level unchanged.

After its eight words, each node has a tag, which names the call and the cell. Two nodes with the
same tag make a node with that tag. If their tags differ, the node gets ``NO_TAG``, which no cell
has.
"""

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from casnap.state.device_hash import Batch

LEAF_BYTES = tl.constexpr(1024)
NODE_WORDS = tl.constexpr(9)
LANES = 128
NO_TAG = tl.constexpr(0)

_START, _END, _PARENT, _ROOT = (tl.constexpr(1 << i) for i in range(4))
_IV0, _IV1, _IV2, _IV3 = map(tl.constexpr, (0x6A09E667, 0xBB67AE85, 0x3C6EF372, 0xA54FF53A))
_IV4, _IV5, _IV6, _IV7 = map(tl.constexpr, (0x510E527F, 0x9B05688C, 0x1F83D9AB, 0x5BE0CD19))


@triton.jit
def _mix(a, b, c, d, x, y):
    """Return the words ``a`` to ``d`` of the state, mixed with ``x`` and ``y`` of the message."""
    # False lets a sum overflow, also where TRITON_DEBUG makes Triton look for overflows.
    a = tl.add(tl.add(a, b, False), x, False)
    d ^= a
    d = (d >> 16) | (d << 16)
    c = tl.add(c, d, False)
    b ^= c
    b = (b >> 12) | (b << 20)
    a = tl.add(tl.add(a, b, False), y, False)
    d ^= a
    d = (d >> 8) | (d << 24)
    c = tl.add(c, d, False)
    b ^= c
    b = (b >> 7) | (b << 25)
    return a, b, c, d


@triton.jit
def _compress(h, m, counter, size, flags):
    """Compress a chaining value and a block of 16 words into the next chaining value."""
    zero = h[0] ^ h[0]
    v0, v1, v2, v3, v4, v5, v6, v7 = h
    v8, v9, va, vb = zero | _IV0, zero | _IV1, zero | _IV2, zero | _IV3
    vc, vd, ve, vf = zero | counter, zero, zero | size, zero | flags
    for _ in tl.static_range(7):
        v0, v4, v8, vc = _mix(v0, v4, v8, vc, m[0], m[1])
        v1, v5, v9, vd = _mix(v1, v5, v9, vd, m[2], m[3])
        v2, v6, va, ve = _mix(v2, v6, va, ve, m[4], m[5])
        v3, v7, vb, vf = _mix(v3, v7, vb, vf, m[6], m[7])
        v0, v5, va, vf = _mix(v0, v5, va, vf, m[8], m[9])
        v1, v6, vb, vc = _mix(v1, v6, vb, vc, m[10], m[11])
        v2, v7, v8, vd = _mix(v2, v7, v8, vd, m[12], m[13])
        v3, v4, v9, ve = _mix(v3, v4, v9, ve, m[14], m[15])
        first = m[2], m[6], m[3], m[10], m[7], m[0], m[4], m[13]
        second = m[1], m[11], m[12], m[5], m[9], m[14], m[15], m[8]
        m = first + second
    return v0 ^ v8, v1 ^ v9, v2 ^ va, v3 ^ vb, v4 ^ vc, v5 ^ vd, v6 ^ ve, v7 ^ vf


@triton.jit
def _begin(zero):
    """Return BLAKE3's initial chaining value as eight blocks, each of the shape of ``zero``."""
    first = zero | _IV0, zero | _IV1, zero | _IV2, zero | _IV3
    second = zero | _IV4, zero | _IV5, zero | _IV6, zero | _IV7
    return first + second


@triton.jit
def _halves(pair):
    """Split two words of 64 bits, given as pairs, into four words of 32 bits."""
    a, b = tl.split(pair)
    low, high = a.to(tl.uint32), (a >> 32).to(tl.uint32)
    return low, high, b.to(tl.uint32), (b >> 32).to(tl.uint32)


@triton.jit
def _block_of_whole_leaf(start, exists):
    """Load 64 bytes from an address that is a multiple of 16; return them as 32-bit words."""
    pointers = start.to(tl.pointer_type(tl.uint64))[:, None] + tl.arange(0, 2)[None, :]
    pointers = tl.max_contiguous(tl.multiple_of(pointers, (1, 16)), (1, 2))
    mask = exists[:, None]
    a, b = tl.load(pointers, mask, 0), tl.load(pointers + 2, mask, 0)
    c, d = tl.load(pointers + 4, mask, 0), tl.load(pointers + 6, mask, 0)
    return _halves(a) + _halves(b) + _halves(c) + _halves(d)


@triton.jit
def _word(start, left, index: tl.constexpr):
    """Return one word of a block that has ``left`` bytes; bytes after its end count as zeros."""
    left -= 4 * index
    pointers = start.to(tl.pointer_type(tl.uint32)) + index
    word = tl.load(pointers, left > 0, 0)
    behind = (tl.minimum(tl.maximum(4 - left, 0), 3) * 8).to(tl.uint32)
    return (word << behind) >> behind


@triton.jit
def _four_words(start, left, index: tl.constexpr):
    a, b = _word(start, left, index), _word(start, left, index + 1)
    c, d = _word(start, left, index + 2), _word(start, left, index + 3)
    return a, b, c, d


@triton.jit
def _block(start, left):
    """Load up to 64 bytes that begin at a multiple of 4; return them as 16 words.

    No word after the last byte is read.
    """
    a, b = _four_words(start, left, 0), _four_words(start, left, 4)
    c, d = _four_words(start, left, 8), _four_words(start, left, 12)
    return a + b + c + d


@triton.jit
def _cell_of(lane, bases, cells, steps, level):
    """Return the cell of each lane's slot: the last cell that does not begin after the slot.

    Args:
        lane: The slots.
        bases: For each cell, the leaves of the cells before it.
        cells: The number of cells.
        steps: The number of bits of ``cells``.
        level: The level of the slots.
    """
    low, high = lane * 0, lane * 0 + cells
    for _ in range(steps):
        middle = (low + high) >> 1
        is_behind = (tl.load(bases + middle) >> level) + middle <= lane
        low = tl.where(is_behind, middle, low)
        high = tl.where(is_behind, high, middle)
    return low


@triton.jit
def _put(nodes, room, slot, exists, h, tag):
    """Write nodes and their tags into slots of a level.

    Args:
        nodes: The memory of the level.
        room: The number of slots of the level.
        slot: The slot of each lane.
        exists: Whether each lane has a node.
        h: The eight words of each node.
        tag: The tag of each node.
    """
    for i in tl.static_range(8):
        tl.store(nodes + i * room + slot, h[i], exists)
    tl.store(nodes + 8 * room + slot, tag.to(tl.uint32), exists)


@triton.jit
def _get(nodes, room, slot, exists):
    """Return the nodes in slots of a level, and their tags.

    Args:
        nodes: The memory of the level.
        room: The number of slots of the level.
        slot: The slot of each lane.
        exists: Whether each lane has a slot. A lane without a slot gets zeros.
    """
    a = tl.load(nodes + slot, exists, 0), tl.load(nodes + room + slot, exists, 0)
    b = tl.load(nodes + 2 * room + slot, exists, 0), tl.load(nodes + 3 * room + slot, exists, 0)
    c = tl.load(nodes + 4 * room + slot, exists, 0), tl.load(nodes + 5 * room + slot, exists, 0)
    d = tl.load(nodes + 6 * room + slot, exists, 0), tl.load(nodes + 7 * room + slot, exists, 0)
    return a + b + c + d, tl.load(nodes + 8 * room + slot, exists, 0)


@triton.jit
def _chosen(condition, a, b):
    """For each lane, return the node of ``a`` if its condition is true, else the node of ``b``."""
    first = tl.where(condition, a[0], b[0]), tl.where(condition, a[1], b[1])
    second = tl.where(condition, a[2], b[2]), tl.where(condition, a[3], b[3])
    third = tl.where(condition, a[4], b[4]), tl.where(condition, a[5], b[5])
    fourth = tl.where(condition, a[6], b[6]), tl.where(condition, a[7], b[7])
    return first + second + third + fourth


# These numbers differ from take to take. Triton compiles one kernel for all of them.
_NUMBERS = ("of_all", "first", "cells", "steps", "room", "room_below", "level", "call", "ends")


@triton.jit(do_not_specialize=_NUMBERS)
def hash_leaves(
    table,
    of_all,
    first,
    cells,
    steps,
    nodes,
    room,
    call,
    ends,
    whole: tl.constexpr,
    lanes: tl.constexpr,
):
    """Hash leaves of the cells of a batch.

    Args:
        table: As for :func:`hash_batch`.
        of_all: The number of cells in the table.
        first: The first cell of the batch in the table.
        cells: The number of cells in the batch.
        steps: The number of bits of ``cells``.
        nodes: The slots of level 0, to be written.
        room: The number of slots.
        call: The number of the call, for tags.
        ends: 1 to hash the last leaf of each cell only, and only if it is not whole; else 0.
        whole: Whether to hash only whole leaves, of cells that begin at a multiple of 16 bytes.
        lanes: The lanes of a program.
    """
    lane = tl.program_id(0) * lanes + tl.arange(0, lanes)
    addresses, sizes, bases = table + first, table + of_all + first, table + 2 * of_all + first
    cell = _cell_of(lane, bases, cells, steps, 0)
    cell = tl.where(ends != 0, tl.minimum(lane, cells - 1), cell)
    nbytes, base = tl.load(sizes + cell), tl.load(bases + cell)
    leaf = tl.where(ends != 0, (nbytes - 1) // LEAF_BYTES, lane - base - cell)
    left = nbytes - leaf * LEAF_BYTES
    if whole:
        exists = left >= LEAF_BYTES
    else:
        exists = tl.where(ends != 0, (left < LEAF_BYTES) & (lane < cells), left > 0)
    left = tl.where(exists, tl.minimum(left, LEAF_BYTES), 0).to(tl.int32)
    start = tl.load(addresses + cell) + leaf * LEAF_BYTES
    root = tl.where(nbytes <= LEAF_BYTES, _ROOT, 0)
    counter = leaf.to(tl.uint32)
    h = _begin(counter ^ counter)
    for block in range(LEAF_BYTES // 64):
        flags = tl.where(block == 0, _START, 0) | tl.where(left <= 64, _END | root, 0)
        if whole:
            m = _block_of_whole_leaf(start, exists)
            h = _compress(h, m, counter, 64, flags.to(tl.uint32))
        else:
            m = _block(start, left)
            size = tl.minimum(tl.maximum(left, 0), 64)
            after = _compress(h, m, counter, size.to(tl.uint32), flags.to(tl.uint32))
            h = _chosen(left > 0, after, h)
        left -= 64
        start += 64
    _put(nodes, room, base + cell + leaf, exists, h, call + first + cell)


@triton.jit(do_not_specialize=_NUMBERS)
def join_nodes(
    table, of_all, first, cells, steps, below, room_below, nodes, room, level, lanes: tl.constexpr
):
    """Make the nodes of a level from the nodes of the level below.

    Args:
        table: As for :func:`hash_leaves`.
        of_all: As for :func:`hash_leaves`.
        first: As for :func:`hash_leaves`.
        cells: As for :func:`hash_leaves`.
        steps: As for :func:`hash_leaves`.
        below: The slots of the level below.
        room_below: The number of slots below.
        nodes: The slots of this level, to be written.
        room: The number of slots of this level.
        level: This level, at least 1.
        lanes: The lanes of a program.
    """
    slot = tl.program_id(0) * lanes + tl.arange(0, lanes)
    sizes, bases = table + of_all + first, table + 2 * of_all + first
    cell = _cell_of(slot, bases, cells, steps, level)
    base = tl.load(bases + cell)
    leaves = (tl.load(sizes + cell) + LEAF_BYTES - 1) // LEAF_BYTES
    count_below = (leaves + (1 << (level - 1)) - 1) >> (level - 1)
    left = 2 * (slot - (base >> level) - cell)
    exists, is_pair = left < count_below, left + 1 < count_below
    slot_below = (base >> (level - 1)) + cell + left
    a, tag = _get(below, room_below, slot_below, exists)
    b, tag_b = _get(below, room_below, slot_below + 1, is_pair)
    zero = a[0] ^ a[0]
    flags = _PARENT | tl.where(count_below == 2, _ROOT, 0)
    h = _chosen(is_pair, _compress(_begin(zero), a + b, zero, 64, flags.to(tl.uint32)), a)
    tag = tl.where(is_pair & (tag != tag_b), NO_TAG, tag)
    _put(nodes, room, slot, exists, h, tag)


@triton.jit(do_not_specialize=_NUMBERS)
def put_digests(table, of_all, first, cells, nodes, room, level, digests, lanes: tl.constexpr):
    """Write the digest of each cell of a batch, its node on the highest level, into a table.

    Args:
        table: As for :func:`hash_leaves`.
        of_all: As for :func:`hash_leaves`; also the number of digests.
        first: As for :func:`hash_leaves`.
        cells: As for :func:`hash_leaves`.
        nodes: The slots of the highest level, where each cell has one node.
        room: The number of these slots.
        level: The number of the highest level.
        digests: As for :func:`hash_batch`.
        lanes: The lanes of a program.
    """
    cell = tl.program_id(0) * lanes + tl.arange(0, lanes)
    exists = cell < cells
    slot = (tl.load(table + 2 * of_all + first + cell, exists, 0) >> level) + cell
    for i in tl.static_range(NODE_WORDS):
        word = tl.load(nodes + i * room + slot, exists, 0)
        tl.store(digests + i * of_all + first + cell, word, exists)


def hash_batch(
    table: torch.Tensor, batch: "Batch", call: int, digests: torch.Tensor, lanes: int = LANES
) -> None:
    """Launch the kernels that hash a batch of cells, on the current stream.

    Args:
        table: int64, on the device: a column for each cell. The three rows have the cell's
            address, its bytes, and its base: how many leaves of its batch come before it.
        batch: The batch.
        call: The number of the call: cell i gets the tag ``call + i``.
        digests: int32, on the device: a column for each cell, to be written. The nine rows get the
            eight words of the cell's digest, and its tag.
        lanes: The lanes of a program; the interpreter is as fast with many as with few.
    """
    of_all, first, cells = table.shape[1], batch.first, batch.cells
    of_batch = table, of_all, first, cells

    def nodes_of(level: int) -> tuple[torch.Tensor, int]:
        room = (batch.leaves >> level) + cells
        return table.new_empty(NODE_WORDS.value * room, dtype=torch.uint32), room

    def programs(count: int) -> tuple[int]:
        return (triton.cdiv(count, lanes),)

    steps = cells.bit_length()
    nodes, room = nodes_of(0)
    hash_leaves[programs(room)](*of_batch, steps, nodes, room, call, 0, batch.is_aligned, lanes)
    if batch.is_aligned and batch.has_ends:
        hash_leaves[programs(cells)](*of_batch, steps, nodes, room, call, 1, False, lanes)
    for level in range(1, batch.levels + 1):
        below, room_below = nodes, room
        nodes, room = nodes_of(level)
        join_nodes[programs(room)](*of_batch, steps, below, room_below, nodes, room, level, lanes)
    put_digests[programs(cells)](*of_batch, nodes, room, batch.levels, digests, lanes)


def runs_on(device: torch.device) -> bool:
    """Whether Triton launches kernels on a device of this kind."""
    active: torch.device = triton.runtime.driver.active.get_active_torch_device()
    return active.type == device.type
