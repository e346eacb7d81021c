"""Read a store without casnap: all of docs/format.md that a reader on a disk needs.

    python tools/read_store.py STORE                        lists the snapshots
    python tools/read_store.py STORE SNAPSHOT               lists its entries
    python tools/read_store.py STORE SNAPSHOT ENTRY OUT     writes one entry

A tensor is written as .npy. numpy has no bfloat16, float8, float4 and complex32: it gets their
elements as unsigned integers of the same bytes, and a line says so. Of any other entry the bytes
are written as they are stored; those of the kind `object` are a file for `torch.load`. All of it is
verified first. Needs Python 3.10, blake3, msgpack, numpy and zstandard.
"""

from __future__ import annotations

import argparse
import json
import re
import struct
import sys
import time
from bisect import bisect_left
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from itertools import pairwise, starmap
from math import prod
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import zstandard
from blake3 import blake3

MOST_NODE_BYTES = 64 << 20
MOST_DELTAS, MOST_LISTS, MOST_DEPTH = 32, 31, 4
TABLE, ENTRIES = 16 * 8, 16 * 256  # the most items of a node: 16 times the m of the tree
NUMPY_HAS = """bool:|b1 uint8:|u1 int8:|i1 uint16:<u2 int16:<i2 uint32:<u4 int32:<i4 uint64:<u8
    int64:<i8 float16:<f2 float32:<f4 float64:<f8 complex64:<c8 complex128:<c16 quint8:|u1 qint8:|i1
    qint32:<i4"""
NUMPY_LACKS = """bfloat16:<u2 complex32:<u4 float8_e4m3fn:|u1 float8_e4m3fnuz:|u1 float8_e5m2:|u1
    float8_e5m2fnuz:|u1 float8_e8m0fnu:|u1 float4_e2m1fn_x2:|u1"""
RAW = dict(pair.split(":") for pair in NUMPY_LACKS.split())
TYPESTRS = RAW | dict(pair.split(":") for pair in NUMPY_HAS.split())
NUMPY_DTYPE = re.compile(
    r"\|(b1|[iu]1|[SV][1-9]\d{0,4})|[<>]([iu][248]|f[248]|c8|c16|[mM]8(\[\w+\])?|U[1-9]\d{0,4})"
)
EMPTY_ROOT = {"table": None, "segments": [], "condemned": {}, "read_features": []}
SHOWN = ("world_size", "tags", "notes", "features", "metadata")
TORCH_KINDS, NUMPY_KINDS = ("tensor", "parameter", "buffer"), ("ndarray", "numpy_scalar")


class DamagedError(Exception): ...  # the bytes are not what the page says


class UnsupportedError(Exception): ...  # the bytes are of a later version


WRONG = (ValueError, TypeError, AttributeError, OverflowError, LookupError, struct.error)
FAILURES = (DamagedError, OSError, zstandard.ZstdError, *WRONG)
decode = partial(msgpack.unpackb, strict_map_key=False)  # keys of maps may be bytes


def need(condition: bool, problem: str) -> None:
    if not condition:
        raise DamagedError(problem)


def know(condition: bool, what: str) -> None:
    if not condition:
        raise UnsupportedError(f"{what}: this store needs a later reader")


def unseal(kind: bytes, content: bytes, what: str) -> bytes:
    """Return the body of a root or segment."""
    need(len(content) >= 40 and content[:7] == b"CASNAP" + kind, f"{what} is no record")
    need(blake3(content[:-32]).digest() == content[-32:], f"{what} is damaged")
    know(content[7:8] == b"1", f"{what} is of format {content[7:8]!r}")
    return content[8:-32]


def split(digests: bytes) -> list[bytes]:
    need(len(digests) % 32 == 0, "some digests are cut off")
    return [digests[i : i + 32] for i in range(0, len(digests), 32)]


def grid(shape: list[int], itemsize: int, chunk_size: int) -> tuple[int, int, int, int]:
    """Return how many chunks a tensor has, in rows of how many; bytes of each, and of the last."""
    if 0 in shape:
        return 0, 1, 0, 0
    if not shape:
        return 1, 1, itemsize, itemsize
    slices = [itemsize * prod(shape[i + 1 :]) for i in range(len(shape))]
    axis = next(i for i, nbytes in enumerate(slices) if nbytes <= chunk_size)
    step = min(shape[axis], 1 << (chunk_size // slices[axis]).bit_length() - 1)
    rows = -(-shape[axis] // step)
    last = shape[axis] - step * (rows - 1)
    return rows * prod(shape[:axis]), rows, step * slices[axis], last * slices[axis]


def known(entry: list[Any], sorts: str) -> list[Any]:
    """Return an entry of one of these sorts, if it has no elements of a later version."""
    more = entry[{"t": 7, "v": 3, "c": 4}.get(entry[0], 0) :] + entry[1][4:]
    know(entry[0] in sorts and more == [None] * len(more), f"an entry {entry[0]!r} with {more}")
    return entry


def join_planes(stored: bytes, nbytes: int) -> tuple[np.ndarray, int]:
    """Return the raw bytes of some planes, and how many stored bytes the planes take."""
    width = stored[0]
    need(width in (1, 2, 4, 8), "planes of an unknown width")
    at, raw = 1 + 4 * width, np.empty(nbytes, np.uint8)
    for i, length in enumerate(struct.unpack_from(f"<{width}I", stored, 1)):
        plane, count = stored[at : at + length], len(range(i, nbytes, width))
        need(len(plane) == length, "a plane is cut off")
        if length != count:
            need(zstandard.frame_content_size(plane) == count, "a plane has another length")
            plane = zstandard.ZstdDecompressor().decompress(plane, count)
        raw[i::width] = np.frombuffer(plane, np.uint8)
        at += length
    return raw, at


def apply_delta(stored: bytes, base: bytes) -> bytes:
    """Return the chunk that a delta makes of its base."""
    _, form, width, count = struct.unpack_from("<32sBBI", stored)
    body, nbytes = stored[38:], len(base)
    need(width in (1, 2, 4, 8) and nbytes % width == 0, "a delta of an impossible width")
    elements = np.frombuffer(base, f"<u{width}").copy()
    middle = np.frombuffer(b"\x80" * width, f"<u{width}")
    if form == count == 0:
        differences, end = join_planes(body, nbytes)
        elements += differences.view(f"<u{width}") - middle
    else:
        need(form == 1 and count <= len(elements), "a delta of an unknown form, or with too much")
        need(body[0] in (2, 4), "a delta with distances of an impossible width")
        distances, start = join_planes(body, body[0] * count)
        differences, end = join_planes(body[start:], width * count)
        end += start
        at = np.cumsum(distances.view(f"<u{body[0]}"), dtype=np.int64)
        need(not count or at[-1] < len(elements), "a delta changes what is beyond the end")
        elements[at] += differences.view(f"<u{width}") - middle
    need(end == len(body), "a delta has another length than its parts")
    return elements.tobytes()


class Store:
    """A store on a disk, as its newest root has it."""

    def __init__(self, path: Path) -> None:
        self._folder = path / "casnap-store"
        self.root = root = {**EMPTY_ROOT, **self._newest_root()}
        know(not root["read_features"], f"the features {root['read_features']}")
        store = json.loads(self._read("casnap.json"))
        know((store["format"], store.get("digest")) == (1, "blake3"), f"{store}")
        self.chunk_size = store["chunk_size"]
        is_possible = self.chunk_size in [1 << n for n in range(16, 27)]
        need(is_possible and len(bytes.fromhex(store["store_id"])) == 16, "an impossible record")
        self._segments = [self._segment(*ref[:3]) for ref in root["segments"]]
        rows = self._items(root["table"][0], TABLE) if root["table"] else []
        self.snapshots = {n: r for n, r in rows if "witness" not in r.get("notes", ())}

    def _read(self, key: str) -> bytes:
        try:
            return (self._folder / key).read_bytes()
        except OSError as e:
            raise DamagedError(f"{key} cannot be read: {e}") from e

    def _numbers(self, folder: str) -> list[int]:
        names = (path.name for path in (self._folder / folder).glob("*"))
        return sorted(int(n) for n in names if re.fullmatch("0|[1-9][0-9]*", n))

    def _root(self, seq: int) -> dict[str, Any]:
        """Return a root, or its copy if it is damaged."""
        for key in (f"roots/{seq // 1000}/{seq}", f"roots/copies/{seq}"):
            with suppress(DamagedError):
                root = decode(unseal(b"r", self._read(key), key))
                need(root["seq"] == seq < 1 << 48, f"{key} is of another root")
                return root
        raise DamagedError(f"root {seq} is damaged or lost, and has no whole copy")

    def _newest_root(self) -> dict[str, Any]:
        folders = reversed(self._numbers("roots"))
        numbers = next(filter(None, (self._numbers(f"roots/{n}") for n in folders)), [])
        need(bool(numbers), f"{self._folder} is no store: it has no root")
        if (copied := max(self._numbers("roots/copies"), default=-1)) > numbers[-1]:
            copy = self._root(copied)
            # Without its segments it comes from copying a store during a write.
            if all((self._folder / "index" / ref[0].hex()).exists() for ref in copy["segments"]):
                return copy
        return self._root(numbers[-1])

    def _segment(self, ident: bytes, records: int, deltas: int) -> tuple[bytes, range]:
        """Return the body of a segment, and where its records lie."""
        body = unseal(b"s", self._read(f"index/{ident.hex()}"), f"segment {ident.hex()}")
        packs, *counts = struct.unpack_from("<IQQ", body)
        at = 20 + 16 * packs
        is_named = counts == [records, deltas] and len(body) == at + 53 * records + 40 * deltas
        need(is_named, f"segment {ident.hex()} is not the one that the root names")
        return body, range(at, at + 53 * records, 53)

    def _places(self, digest: bytes) -> Iterator[tuple[bytes, int, int, int, int]]:
        """Yield pack, offset, stored length, raw length and codec of each place of a digest."""
        for body, records in self._segments:
            for at in records[bisect_left(records, digest, key=lambda at: body[at : at + 32]) :]:
                found, number, *place = struct.unpack_from("<32sIQIIB", body, at)
                if found != digest:
                    break
                pack = body[20 + 16 * number :][:16]
                need(20 + 16 * number < records.start, "a record names a pack that is not listed")
                yield pack, *place

    def fetch(self, digest: bytes, nbytes: int | None = None) -> bytes:
        """Return a chunk of so many bytes, or (None) a node; verified."""
        return self._fetch(digest, nbytes, {})

    def _fetch(self, digest: bytes, nbytes: int | None, failed: dict[bytes, str]) -> bytes:
        # Packs that are condemned last: they may be deleted. What is no delta first.
        condemned = self.root["condemned"]
        failed[digest] = "it is nowhere"
        places = self._places(digest)
        for place in sorted(places, key=lambda p: (p[4] > 2, p[0] in condemned, p[4])):
            try:
                raw = self._fetch_at(place, nbytes, failed)
                need(blake3(raw).digest() == digest, "its bytes are not those of its digest")
            except FAILURES as e:
                failed[digest] = str(e)
            else:
                del failed[digest]
                return raw
        raise DamagedError(f"{digest.hex()} cannot be read: {failed[digest]}")

    def _fetch_at(self, place: Any, nbytes: int | None, failed: dict[bytes, str]) -> bytes:
        pack, offset, stored_size, raw_size, codec = place
        most = MOST_NODE_BYTES if nbytes is None else max(self.chunk_size, 1 << 16)
        need(raw_size == (raw_size if nbytes is None else nbytes), "it has another length")
        need(max(stored_size, raw_size) <= most, "its place has an impossible length")
        know(codec <= 2, f"codec {codec}")
        with (self._folder / "packs" / pack.hex()[-2:] / pack.hex()).open("rb") as file:
            file.seek(offset)
            stored = file.read(stored_size)
        need(len(stored) == stored_size, "its pack is cut off")
        if codec == 0:
            return stored
        if codec == 1:
            raw, end = join_planes(stored, raw_size)
            need(end == len(stored), "its planes have another length")
            return raw.tobytes()
        base = stored[:32]
        # Two deltas may stand on each other: then another place of one is no delta.
        need(nbytes is not None and base not in failed, "its chain of deltas does not end")
        need(len(failed) <= MOST_DELTAS, "its chain of deltas is too long")
        return apply_delta(stored, self._fetch(base, raw_size, failed))

    def _items(self, digest: bytes, most: int, depth: int = 0) -> list[list[Any]]:
        """Return the items of a tree: pairs of key and value."""
        sort, entries, *_ = decode(self.fetch(digest))
        know(sort in ("l", "b"), f"a node of the sort {sort!r}")
        need(len(entries) <= most and depth <= MOST_LISTS, "a node has too much, or lies too deep")
        items = entries if sort == "l" else []
        if sort == "b":
            for first, child, count, *_ in entries:
                below = self._items(child, most, depth + 1)
                need(len(below) == count > 0 and below[0][0] == first, "a node is not as listed")
                items += below
        need(all(a[0] < b[0] for a, b in pairwise(items)), "a tree is out of order")
        return items

    def entries(self, name: str, rank: int = 0) -> dict[str, list[Any]]:
        """Return what a rank sees of a snapshot: entries by path, such as `model/layer.weight`."""
        row = self.snapshots[name]
        know(not row.get("features"), f"the snapshot {name!r} has {row.get('features')}")
        manifest = decode(self.fetch(row["manifest"][0]))
        found: dict[str, list[Any]] = {}
        for trees in (manifest["global"], manifest["ranks"].get(str(rank), {})):
            for key, digest in trees.items():
                found.update((key + path, entry) for path, entry in self._items(digest, ENTRIES))
        return dict(sorted(found.items()))

    def content(self, entry: list[Any]) -> bytes:
        """Return the bytes of a value or container."""
        known(entry, "vc")
        return self._payload(entry[1], [entry[1][0]], 1)

    def tensor(self, entry: list[Any]) -> np.ndarray:
        """Return a tensor; one whose dtype numpy lacks as integers of the same bytes."""
        _, payload, dtype, shape, kind, *_ = known(entry, "t")
        know(kind in TORCH_KINDS + NUMPY_KINDS, f"a tensor of the kind {kind!r}")
        its_own = dtype if NUMPY_DTYPE.fullmatch(dtype) else None
        typestr = its_own if kind in NUMPY_KINDS else TYPESTRS.get(dtype)
        know(typestr is not None, f"the dtype {dtype!r}")
        content = self._payload(payload, shape, np.dtype(typestr).itemsize)
        return np.frombuffer(content, typestr).reshape(shape)

    def _payload(self, payload: list[Any], shape: list[int], itemsize: int) -> bytes:
        nbytes, inline, digests, depth, *_ = payload
        need(0 < itemsize <= 1 << 16 and all(n >= 0 for n in shape), "an impossible shape")
        need(nbytes == itemsize * prod(shape), "a tensor has another length than its shape")
        if nbytes <= 64:
            need(len(inline) == nbytes, "an entry has other bytes than it says")
            return inline
        need(0 <= depth <= MOST_DEPTH, "lists of digests lie too deep")
        count, rows, full, last = grid(shape, itemsize, self.chunk_size)
        for _ in range(depth):
            need(len(digests) <= 32 * count, "an entry has too many chunks")
            digests = b"".join(map(self.fetch, split(digests)))
        need(len(digests) == 32 * count, "an entry has another number of chunks")
        sizes = (full if i % rows else last for i in range(1, count + 1))
        return b"".join(map(self.fetch, split(digests), sizes))


def line_of_row(name: str, row: dict[str, Any]) -> str:
    taken = time.strftime("%Y-%m-%d %H:%M:%SZ", time.gmtime(row["time"]))
    facts = [f"{k}: {row[k]}" for k in SHOWN if k in row]
    return f"{name}  {taken}  {row['stats'][0]:,} bytes  {row['commit'].hex()}  {'  '.join(facts)}"


def line_of_entry(path: str, entry: list[Any]) -> str:
    sort, (nbytes, *_), *facts = entry
    what = {"t": "tensor", "v": "value", "c": "container"}.get(sort, f"unknown sort {sort!r}")
    return f"{path}  {what}  {'  '.join(map(str, facts))}  {nbytes:,} bytes"


def main() -> None:
    parser = argparse.ArgumentParser(description="Read a store of casnap, without casnap.")
    parser.add_argument("store", type=Path, help="the folder that holds casnap-store")
    parser.add_argument("snapshot", nargs="?", help="the name of a snapshot")
    parser.add_argument("entry", nargs="?", help="the path of an entry, like model/layer.weight")
    parser.add_argument("out", nargs="?", type=Path, help="the file to write")
    parser.add_argument("--rank", type=int, default=0, help="the rank that reads; 0 if not given")
    store = Store((args := parser.parse_args()).store)
    if args.snapshot is None:
        print(*starmap(line_of_row, store.snapshots.items()), sep="\n")
    elif args.out is None:
        print(*starmap(line_of_entry, store.entries(args.snapshot, args.rank).items()), sep="\n")
    elif (entry := store.entries(args.snapshot, args.rank)[args.entry])[0] != "t":
        args.out.write_bytes(store.content(entry))
    else:
        tensor = store.tensor(entry)
        with args.out.open("wb") as file:
            np.save(file, tensor, allow_pickle=False)
        if entry[2] in RAW:
            print(f"numpy has no {entry[2]}: {args.out} holds {tensor.dtype} of the same bytes")


if __name__ == "__main__":
    try:
        main()
    except (UnsupportedError, *FAILURES) as e:
        sys.exit(f"{type(e).__name__}: {e}")
