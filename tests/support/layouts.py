"""The regions of every kind of object, as they follow from the format."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterator
from itertools import chain, pairwise
from typing import NamedTuple

import msgspec

from casnap.format.digest import DIGEST_SIZE
from casnap.format.records import ID_SIZE, PACK_TAIL_SIZE, PackId, footer_length
from casnap.maintenance.survey import Survey


class Region(NamedTuple):
    """A run of bytes of an object, and which check has to find it damaged ("" for none)."""

    name: str
    start: int
    stop: int
    found_by: str


class Layout(NamedTuple):
    """An object, what its parts are, which check has to find it cut off, and its names."""

    key: str
    regions: list[Region]
    found_by: str
    names: set[str]


def laid_out(start: int, fields: list[tuple[str, int]], found_by: str) -> Iterator[Region]:
    """Yield regions that follow each other."""
    for name, nbytes in fields:
        yield Region(name, start, start + nbytes, found_by)
        start += nbytes


def sealed(content: bytes, body: list[tuple[str, int]], found_by: str) -> list[Region]:
    frame = [("magic", 6), ("kind", 1), ("version", 1), *body, ("digest", DIGEST_SIZE)]
    regions = list(laid_out(0, frame, found_by))
    assert regions[-1].stop == len(content)
    return regions


def map_fields(encoded: bytes) -> list[tuple[str, int]]:
    """Return the fields of a msgpack map, with their names, and their lengths."""
    fields = msgspec.msgpack.decode(encoded, type=dict[str, msgspec.Raw])
    parts = [(k, len(msgspec.msgpack.encode(k)), len(bytes(raw))) for k, raw in fields.items()]
    head = len(encoded) - sum(k + v for _, k, v in parts)
    named = [((f"name of {key}", k), (key, v)) for key, k, v in parts]
    return [("head of the map", head), *chain.from_iterable(named)]


def root_layout(key: str, content: bytes) -> Layout:
    return Layout(
        key, sealed(content, map_fields(content[8:-DIGEST_SIZE]), "structure"), "structure", set()
    )


def segment_layout(key: str, content: bytes) -> Layout:
    n_packs, n_records, n_deltas = struct.unpack_from("<IQQ", content, 8)
    fields = [("digest", 32), ("number", 4), ("offset", 8), ("stored", 4), ("raw", 4), ("codec", 1)]
    body = [("packs", 4), ("records", 8), ("deltas", 8)]
    body += [(f"id {i}", ID_SIZE) for i in range(n_packs)]
    body += [(f"{name} of record {i}", n) for i in range(n_records) for name, n in fields]
    based = [("base", 32), ("index", 8)]
    body += [(f"{name} of delta {i}", n) for i in range(n_deltas) for name, n in based]
    start = 8 + 20 + n_packs * ID_SIZE
    digests = {content[start + 53 * i :][:32].hex() for i in range(n_records)}
    return Layout(key, sealed(content, body, "structure"), "structure", {key[-32:], *digests})


def node_fields(node: bytes) -> tuple[str, list[tuple[str, int]]]:
    """Return what kind of node this is, and its parts."""
    try:
        record = msgspec.msgpack.decode(node)
    except msgspec.DecodeError:
        record = None
    if isinstance(record, dict):
        return "manifest", map_fields(node)
    if not isinstance(record, list) or record[0] not in ("l", "b"):
        assert len(node) % DIGEST_SIZE == 0
        return "list of digests", [(f"digest {i}", 32) for i in range(len(node) // DIGEST_SIZE)]
    _, items = msgspec.msgpack.decode(node, type=tuple[str, list[msgspec.Raw]])
    sizes = [len(bytes(item)) for item in items]
    head = len(node) - sum(sizes)
    if record[0] == "b":
        return "list of leaves", [("head", head), *(("child", n) for n in sizes)]
    if record[1] and isinstance(record[1][0][1], dict):
        rows = [msgspec.msgpack.decode(bytes(i), type=tuple[str, msgspec.Raw]) for i in items]
        fields = [("head", head)]
        for item, (name, row) in zip(items, rows, strict=True):
            fields.append((f"name {name}", len(bytes(item)) - len(bytes(row))))
            fields += [(f"{field} of the row", n) for field, n in map_fields(bytes(row))]
        return "leaf of the table", fields
    return "leaf of a tree", [("head", head), *(("entry", n) for n in sizes)]


def pack_layout(key: str, content: bytes, survey: Survey) -> Layout:
    pack = PackId(bytes.fromhex(key[-32:]))
    listed = pack in survey.index.packs
    count, deltas = struct.unpack_from("<II", content, len(content) - PACK_TAIL_SIZE)
    end = len(content) - footer_length(content)
    regions: list[Region] = []
    at = 0
    names = {key[-32:]}
    records = survey.index.of_pack(pack) if listed else []
    for digest, place in records:
        names.add(digest.hex())
        if place.offset > at:
            regions.append(Region("gap", at, place.offset, ""))
        at = place.offset + place.stored_size
        if content[-DIGEST_SIZE - 2 : -DIGEST_SIZE - 1] != b"t":
            kind = "compressed chunk" if place.codec else "raw chunk"
            regions.append(Region(kind, place.offset, at, "data"))
            continue
        node = content[place.offset : at]
        kind, fields = ("node", [("compressed", len(node))]) if place.codec else node_fields(node)
        found_by = "structure" if digest in survey.needed else "data"
        named = [(f"{kind}: {name}", n) for name, n in fields]
        regions += laid_out(place.offset, named, found_by)
    if not listed:
        regions.append(Region("content", 0, end, ""))
    footer = [("digest", 32), ("offset", 8), ("stored", 4), ("raw", 4), ("codec", 1)]
    tail = [(f"{n} of record {i} of the footer", size) for i in range(count) for n, size in footer]
    tail += [(f"base of delta {i} of the footer", DIGEST_SIZE) for i in range(deltas)]
    tail += [("records", 4), ("deltas", 4), ("magic of the pack", 8)]
    tail += [("digest of the footer", DIGEST_SIZE)]
    found_by = "structure" if listed else ""
    regions += laid_out(end, tail, found_by)
    assert regions[-1].stop == len(content)
    return Layout(key, regions, found_by, names)


def config_layout(key: str, content: bytes) -> Layout:
    """``casnap.json`` has no digest: most of what is changed in it cannot be told."""
    edges = sorted({0, len(content), *(m.start() for m in re.finditer(rb'[{},:]|"', content))})
    regions = [Region(content[a:b].decode(), a, b, "") for a, b in pairwise(edges)]
    assert json.loads(content)["format"] == 1
    return Layout(key, regions, "", set())


def plain_layout(key: str, content: bytes) -> Layout:
    return Layout(key, [Region("content", 0, len(content), "")], "", set())
