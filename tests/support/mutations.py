"""Stores with one number changed, and all seals made anew: too large, too small, twice, missing."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from casnap.format.codec import decompress
from casnap.format.digest import DIGEST_SIZE, Digest, digest_of
from casnap.format.records import (
    DeltaPlace,
    PackId,
    Place,
    Record,
    Segment,
    SegmentId,
    decode_segment,
    encode_segment,
    pack_footer,
    pack_key,
    root_key,
    seal,
    segment_key,
)

HUGE = (1 << 63) - 1


class Pairs:
    """A map that may have a key twice."""

    def __init__(self, *pairs: tuple[Any, Any]) -> None:
        self.pairs = pairs


def _encode_pairs(value: Any) -> msgspec.Raw:
    assert isinstance(value, Pairs)
    body = b"".join(encode(part) for pair in value.pairs for part in pair)
    return msgspec.Raw(b"\xde" + struct.pack(">H", len(value.pairs)) + body)


encode = msgspec.msgpack.Encoder(enc_hook=_encode_pairs).encode

Mutation = tuple[str, Any]
"""What was changed, in words, and what the whole is then."""


def _of_int(n: int) -> list[Any]:
    return [-1, 0, n - 1, n + 1, 2 * n + 2, 1 << 32, HUGE, (1 << 64) - 1, -HUGE, 1.5]


def _of_float(_: float) -> list[Any]:
    return [float("nan"), float("inf"), -1e300, 7]


def _of_bytes(data: bytes) -> list[Any]:
    flipped = bytes([data[0] ^ 1]) + data[1:] if data else b"\0"
    return [b"", data[:-1], data + b"\0", 2 * data, bytes(len(data)), flipped]


def _of_text(text: str) -> list[Any]:
    return ["", text + "x", 2 * text, "../x", "\0", "x" * 5000]


_OTHERS: dict[type, Callable[[Any], list[Any]]] = {
    bool: lambda b: [not b, 2],
    int: _of_int,
    float: _of_float,
    bytes: _of_bytes,
    str: _of_text,
    type(None): lambda _: [],
    list: lambda items: [[], 0],
    dict: lambda items: [{}, []],
}


def mutations(value: Any, most: int = 200) -> Iterator[Mutation]:
    """Yield a value with one number, text or part of it changed, missing or there twice.

    Args:
        value: What was decoded.
        most: Of longer arrays the ends alone are changed.
    """
    other_type: list[Any] = [None if value is not None else 1, "x" if value != "x" else "y"]
    for other in [*_OTHERS[type(value)](value), *other_type]:
        if _is_another(other, value):
            yield f"{other!r:.40}", other
    if isinstance(value, list):
        yield from _mutations_of_list(value, most)
    elif isinstance(value, dict):
        yield from _mutations_of_map(value, most)


def _is_another(other: Any, value: Any) -> bool:
    """Whether another value differs, and can be stored at all."""
    with suppress(OverflowError):
        return type(other) is not type(value) or bool(encode(other) != encode(value))
    return False


def _mutations_of_list(items: list[Any], most: int) -> Iterator[Mutation]:
    chosen = range(len(items)) if len(items) <= most else (0, len(items) // 2, len(items) - 1)
    for i in chosen:
        for what, other in mutations(items[i], most):
            yield f"[{i}]{what}", [*items[:i], other, *items[i + 1 :]]
        yield f"[{i}] missing", [*items[:i], *items[i + 1 :]]
        yield f"[{i}] twice", [*items[: i + 1], *items[i:]]
    if len(items) > 1:
        yield " reversed", items[::-1]
    yield " longer", [*items, 1]


def _mutations_of_map(items: dict[Any, Any], most: int) -> Iterator[Mutation]:
    chosen = list(items) if len(items) <= most else list(items)[:3]
    for key in chosen:
        for what, other in mutations(items[key], most):
            yield f".{key!r:.20}{what}", {**items, key: other}
        yield f".{key!r:.20} missing", {k: v for k, v in items.items() if k != key}
        yield f".{key!r:.20} twice", Pairs(*items.items(), (key, items[key]))
    for key in chosen[:2]:
        for what, other_key in mutations(key):
            if isinstance(other_key, str | bytes | int):
                others = [(other_key if k == key else k, v) for k, v in items.items()]
                yield f" key {key!r:.20}{what}", Pairs(*others)


@dataclass
class Parts:
    """A store on a disk, taken apart.

    Attributes:
        folder: The store.
        seq: The number of its newest root.
        root: The fields of that.
        segments: Its segments.
        places: The places of each digest.
    """

    folder: Path
    seq: int = 0
    root: dict[str, Any] = field(default_factory=dict)
    segments: dict[bytes, Segment] = field(default_factory=dict)
    places: dict[bytes, list[Place]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        roots = (self.folder / "casnap-store/roots").glob("[0-9]*/*")
        self.seq = max(int(path.name) for path in roots)
        self.root = msgspec.msgpack.decode(self.read(root_key(self.seq))[8:-DIGEST_SIZE])
        for ident, *_ in self.root["segments"]:
            self.segments[ident] = decode_segment(self.read(segment_key(ident)), "a segment")
            for digest, place in self.segments[ident].records:
                self.places.setdefault(digest, []).append(place)

    def read(self, key: str) -> bytes:
        return (self.folder / "casnap-store" / key).read_bytes()

    def write(self, key: str, content: bytes) -> None:
        path = self.folder / "casnap-store" / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        path.write_bytes(content)

    def stored(self, place: Place) -> bytes:
        return self.read(pack_key(place.pack))[place.offset :][: place.stored_size]

    def node(self, digest: bytes) -> bytes:
        place = self.places[digest][0]
        stored = memoryview(self.stored(place))
        return bytes(decompress(place.codec, stored, place.raw_size))

    def kind_of(self, pack: bytes) -> bytes:
        """Return ``p`` for a pack of chunks, ``t`` for one of nodes."""
        return self.read(pack_key(pack))[-34:-33]

    def nodes(self) -> dict[bytes, bytes]:
        """Return the nodes that the root needs, by digest, those above others first."""
        tops = [self.root["table"][0], *(copy[0][0] for copy in self.root["copies"].values())]
        found: dict[bytes, bytes] = {}
        known = {d for d, places in self.places.items() if self.kind_of(places[0].pack) == b"t"}
        while tops:
            digest = tops.pop(0)
            if digest not in found:
                raw = found[digest] = self.node(digest)
                inner = (raw[at : at + DIGEST_SIZE] for at in range(len(raw) - DIGEST_SIZE + 1))
                tops += [part for part in inner if part in known]
        return found

    # --- and put together again ---

    def put_config(self, config: dict[str, Any], *, in_root: bool = False) -> None:
        """Put another ``casnap.json``, perhaps with the copy of it in the root."""
        self.write("casnap.json", msgspec.json.encode(config))
        if in_root:
            self.put_root({**self.root, "store": config})

    def put_root(self, root: Any) -> None:
        """Put a root in place of the newest one, which has no copy then."""
        for copy in (self.folder / "casnap-store/roots/copies").glob("*"):
            copy.unlink()
        self.write(root_key(self.seq), seal(b"r", encode(root)))

    def put_segment(self, ident: bytes, content: bytes, counts: list[int]) -> None:
        """Put a segment in place of another one, and say so in the root."""
        self.write(segment_key(ident), content)
        refs = [[i, *(counts if i == ident else rest)] for i, *rest in self.root["segments"]]
        self.root["segments"] = refs
        self.put_root(self.root)

    def replace_node(self, old: bytes, raw: bytes) -> None:
        """Put another node in place of one, and with its digest all nodes above it."""
        nodes = self.nodes()
        swaps, added = {old: digest_of(raw)}, [raw]
        root = encode(self.root)
        pending = [old]
        while pending:
            one = pending.pop()
            for digest, content in nodes.items():
                if one in content and digest not in swaps:
                    pending.append(digest)
                    swaps[digest] = Digest(b"")
        for digest in reversed([d for d in nodes if d in swaps and d != old]):
            content = nodes[digest]
            for one, other in swaps.items():
                if other:
                    content = content.replace(one, other)
            swaps[digest] = digest_of(content)
            added.append(content)
        for one, other in swaps.items():
            root = root.replace(one, other)
        self.root = msgspec.msgpack.decode(root)
        self.add_pack(b"t", [(digest_of(raw), raw, len(raw), 0, b"") for raw in added])

    def add_pack(self, kind: bytes, things: list[tuple[Digest, bytes, int, int, bytes]]) -> None:
        """Add a pack, its segment, and the root that names it.

        Args:
            kind: ``p`` or ``t``.
            things: Digest, stored bytes, raw length, codec and base of each.
        """
        pack = PackId(bytes(6) + os.urandom(10))
        body, records = b"", list[Record]()
        for digest, stored, raw_size, codec, base in things:
            place = (pack, len(body), len(stored), raw_size, codec)
            records.append((digest, DeltaPlace(*place, base) if codec == 2 else Place(*place)))
            body += stored
        self.write(pack_key(pack), body + pack_footer(kind, records))
        segment, ident = Segment((pack,), records), SegmentId(bytes(6) + os.urandom(10))
        self.root["segments"].append([ident, 0, 0])
        self.put_segment(ident, encode_segment(segment), [len(records), segment.deltas])

    def replace_stored(self, digest: bytes, stored: bytes, codec: int, base: bytes = b"") -> None:
        """Store a chunk or node in another way, at one place alone."""
        raw_size = self.places[digest][0].raw_size
        kind = self.kind_of(self.places[digest][0].pack)
        for ident, segment in self.segments.items():
            kept = [record for record in segment.records if record[0] != digest]
            if len(kept) < len(segment.records):
                other = Segment(segment.packs, kept)
                self.put_segment(ident, encode_segment(other), [len(kept), other.deltas])
        self.add_pack(kind, [(Digest(digest), stored, raw_size, codec, base)])


# --- what is changed --------------------------------------------------------------------------

Case = tuple[str, Callable[[Parts], None]]
"""What is changed, and how."""


def cases_of_config(parts: Parts) -> Iterator[Case]:
    fields = msgspec.json.decode(parts.read("casnap.json"))
    for what, changed in mutations(fields):
        if isinstance(changed, dict):
            yield f"casnap.json{what}", partial(Parts.put_config, config=changed)
            yield (
                f"casnap.json and root{what}",
                partial(Parts.put_config, config=changed, in_root=True),
            )


def cases_of_root(parts: Parts) -> Iterator[Case]:
    for what, changed in mutations(parts.root):
        yield f"root{what}", partial(Parts.put_root, root=changed)


def cases_of_nodes(parts: Parts, most: int = 200) -> Iterator[Case]:
    """All numbers of rows, manifests, trees, entries, lists and metadata."""
    for digest, raw in parts.nodes().items():
        for what, changed in _mutations_of_node(raw, most):
            yield (
                f"node {digest.hex()[:6]}{what}",
                partial(Parts.replace_node, old=digest, raw=changed),
            )


def _mutations_of_node(raw: bytes, most: int) -> Iterator[tuple[str, bytes]]:
    try:
        node = msgspec.msgpack.decode(raw)
        is_list = encode(node) != raw
    except (msgspec.DecodeError, ValueError):
        is_list = True
    if is_list:
        lists = ((what, changed) for what, changed in mutations(raw) if isinstance(changed, bytes))
        yield from ((f" list {what}", changed) for what, changed in lists)
        return
    for what, changed in mutations(node, most):
        yield what, encode(changed)
    if isinstance(node, list) and node[0] == "l":
        for i, (key, value) in enumerate(node[1]):
            for what, changed in _mutations_inside(value):
                items = [*node[1][:i], [key, changed], *node[1][i + 1 :]]
                yield f"[1][{i}] {key} {what}", encode(["l", items])


def _mutations_inside(entry: Any) -> Iterator[Mutation]:
    """Yield an entry whose bytes, if they are an array, have one thing changed."""
    if not isinstance(entry, list) or entry[0] not in ("c", "v") or not entry[1][1]:
        return
    try:
        inner = msgspec.msgpack.decode(entry[1][1])
    except (msgspec.DecodeError, ValueError):
        return
    if not isinstance(inner, list) or encode(inner) != entry[1][1]:
        return
    for what, changed in mutations(inner):
        data = encode(changed)
        if len(data) <= 64:
            yield f"spec{what}", [entry[0], [len(data), data, b"", 0], *entry[2:]]


_HEAD, _RECORD, _BASE = struct.Struct("<IQQ"), struct.Struct("<32sIQIIB"), struct.Struct("<32sQ")
_IN_FOOTER = struct.Struct("<32sQIIB")


def _typical(records: list[list[Any]]) -> list[int]:
    """Return the numbers of one record of each codec, and of the last one."""
    first = {record[-1]: i for i, record in reversed(list(enumerate(records)))}
    return sorted({*first.values(), len(records) - 1})


def _fitting(layout: struct.Struct, values: Any) -> bytes:
    """Return packed values; nothing where they do not fit."""
    try:
        return layout.pack(*values)
    except (struct.error, TypeError):
        return b""


def _mutations_of_array(items: list[Any], chosen: list[int]) -> Iterator[Mutation]:
    for i in chosen:
        for what, other in mutations(items[i]):
            yield f"[{i}]{what}", [*items[:i], other, *items[i + 1 :]]
        yield f"[{i}] missing", [*items[:i], *items[i + 1 :]]
        yield f"[{i}] twice", [*items[: i + 1], *items[i:]]
    if len(items) > 1:
        yield " reversed", items[::-1]


def cases_of_segments(parts: Parts) -> Iterator[Case]:
    for ident in parts.segments:
        body = parts.read(segment_key(ident))[8:-DIGEST_SIZE]
        p, r, b = _HEAD.unpack_from(body)
        at, end = 20 + 16 * p, 20 + 16 * p + 53 * r
        whole = {
            "counts": [p, r, b],
            "packs": [body[i : i + 16] for i in range(20, at, 16)],
            "records": [list(each) for each in _RECORD.iter_unpack(body[at:end])],
            "bases": [list(each) for each in _BASE.iter_unpack(body[end:])],
        }
        chosen = {
            "counts": [0, 1, 2],
            "packs": [0],
            "records": _typical(whole["records"]),
            "bases": list(range(b))[:1],
        }
        for name, numbers in chosen.items():
            for what, changed in _mutations_of_array(whole[name], numbers):
                for fixed in (False, True):
                    content = _segment({**whole, name: changed}, name, fixed=fixed)
                    if content and content != body:
                        label = f"segment {ident.hex()[-4:]} {name}{what}{' in order' * fixed}"
                        counts = list(struct.unpack_from("<QQ", content, 4))
                        sealed = seal(b"s", content)
                        yield (
                            label,
                            partial(Parts.put_segment, ident=ident, content=sealed, counts=counts),
                        )


def _segment(whole: dict[str, Any], name: str, *, fixed: bool) -> bytes:
    """Return the body of a segment; nothing if it cannot be written.

    Args:
        whole: What it has.
        name: What was changed.
        fixed: Whether to put records and bases in order, and have bases name their records.
    """
    packs, bases = whole["packs"], whole["bases"]
    records = [_fitting(_RECORD, each) for each in whole["records"]]
    if fixed:
        if name == "records":
            of_bases = [(base, records[i]) for base, i in bases if i < len(records)]
            bases = [[base, sorted(records).index(record)] for base, record in of_bases]
        records.sort()
    packed = [_fitting(_BASE, each) for each in bases]
    counts = [len(packs), len(records), len(packed)]
    head = _fitting(_HEAD, whole["counts"] if name == "counts" else counts)
    parts = [head, *packs, *records, *(sorted(packed) if fixed else packed)]
    are_packs = all(isinstance(pack, bytes) and len(pack) == 16 for pack in packs)
    return b"".join(parts) if are_packs and all(parts) else b""


def cases_of_footers(parts: Parts) -> Iterator[Case]:
    packs = sorted({place.pack for places in parts.places.values() for place in places})
    for pack in packs:
        content = parts.read(pack_key(pack))
        r, b, magic = struct.unpack("<II8s", content[-48:-32])
        at = len(content) - 48 - 32 * b - 49 * r
        end = at + 49 * r
        whole = {
            "counts": [r, b],
            "magic": [magic],
            "records": [list(each) for each in _IN_FOOTER.iter_unpack(content[at:end])],
            "bases": [content[i : i + 32] for i in range(end, end + 32 * b, 32)],
        }
        chosen = {
            "counts": [0, 1],
            "magic": [0],
            "records": _typical(whole["records"]),
            "bases": list(range(b))[:1],
        }
        for name, numbers in chosen.items():
            for what, changed in _mutations_of_array(whole[name], numbers):
                footer = _footer({**whole, name: changed}, name)
                if footer and footer != content[at:]:
                    yield (
                        f"footer {pack.hex()[-4:]} {name}{what}",
                        partial(Parts.write, key=pack_key(pack), content=content[:at] + footer),
                    )
        for what, raw in (("gap", content[:at] + bytes(5) + content[at:]), ("cut", content[1:])):
            yield (
                f"pack {pack.hex()[-4:]} {what}",
                partial(Parts.write, key=pack_key(pack), content=raw),
            )


def _footer(whole: dict[str, Any], name: str) -> bytes:
    records = [_fitting(_IN_FOOTER, each) for each in whole["records"]]
    bases, magics = whole["bases"], whole["magic"]
    if not all(records) or not all(isinstance(each, bytes) for each in (*bases, *magics)):
        return b""
    counts = whole["counts"] if name == "counts" else [len(records), len(bases)]
    counted = _fitting(struct.Struct("<II"), counts)
    head = b"".join([*records, *bases, counted, *magics])
    return head + digest_of(head) if counted else b""


def cases_of_places(parts: Parts) -> Iterator[Case]:
    """Footer and segment say the same of a place, and it is not true."""
    for digest, places in parts.places.items():
        place = places[0]
        if not _is_typical(parts, digest):
            continue
        base = getattr(place, "base", b"")
        record = [place.offset, place.stored_size, place.raw_size, place.codec, base]
        for what, changed in mutations(record):
            if isinstance(changed, list) and len(changed) == 5:
                yield (
                    f"place {digest.hex()[:6]}{what}",
                    partial(_move, digest=digest, record=changed),
                )


def _is_typical(parts: Parts, digest: bytes) -> bool:
    """Whether a thing is the first of its codec, and kind of pack."""
    seen = set()
    for other, (place, *_) in parts.places.items():
        key = (place.codec, parts.kind_of(place.pack))
        if other == digest:
            return key not in seen
        seen.add(key)
    return False


def _move(parts: Parts, digest: bytes, record: list[Any]) -> None:
    """Have all places of a digest be these, in footers and segments."""
    offset, stored, raw, codec, base = record

    def changed(found: Record) -> Record:
        if found[0] != digest:
            return found
        fields = (found[1].pack, offset, stored, raw, codec)
        return found[0], DeltaPlace(*fields, base) if codec == 2 else Place(*fields)

    struct.pack("<QIIB32s", offset, stored, raw, codec, base)
    for ident, segment in parts.segments.items():
        records = list({changed(record): None for record in segment.records})
        other = Segment(segment.packs, records)
        parts.put_segment(ident, encode_segment(other), [len(records), other.deltas])
    for pack in {place.pack for place in parts.places[digest]}:
        content = parts.read(pack_key(pack))
        r, b = struct.unpack("<II", content[-48:-40])
        at = len(content) - 48 - 32 * b - 49 * r
        own = [rec for s in parts.segments.values() for rec in s.records if rec[1].pack == pack]
        own.sort(key=lambda rec: rec[1].offset)
        footer = pack_footer(parts.kind_of(pack), list(map(changed, own)))
        parts.write(pack_key(pack), content[:at] + footer)


def cases_of_stored(parts: Parts) -> Iterator[Case]:
    """Planes and deltas whose own numbers are wrong."""
    for digest, (place, *_) in parts.places.items():
        stored = parts.stored(place)
        base = getattr(place, "base", b"")
        for what, changed in _mutations_of_stored(stored, place.codec):
            if changed != stored:
                yield (
                    f"stored {digest.hex()[:6]} {what}",
                    partial(
                        Parts.replace_stored,
                        digest=digest,
                        stored=changed,
                        codec=place.codec,
                        base=base,
                    ),
                )


def _mutations_of_stored(stored: bytes, codec: int) -> Iterator[tuple[str, bytes]]:
    if codec == 1:
        yield from _mutations_of_planes(stored)
    if codec != 2:
        return
    layout = struct.Struct("<32sBBI")
    for what, changed in mutations(list(layout.unpack_from(stored))):
        if head := _fitting(layout, changed if isinstance(changed, list) else []):
            yield f"head{what}", head + stored[38:]
    for what, changed in _mutations_of_planes(stored[38:]):
        yield f"first {what}", stored[:38] + changed
    if stored[32] == 1:
        second = 38 + _planes_end(stored[38:])
        for what, changed in _mutations_of_planes(stored[second:]):
            yield f"second {what}", stored[:second] + changed


def _planes_end(stored: bytes) -> int:
    width = stored[0]
    return 1 + 4 * width + int(sum(struct.unpack_from(f"<{width}I", stored, 1)))


def _mutations_of_planes(stored: bytes) -> Iterator[tuple[str, bytes]]:
    width = stored[0]
    lengths = list(struct.unpack_from(f"<{width}I", stored, 1))
    rest = stored[1 + 4 * width :]
    for what, changed in mutations(width):
        if isinstance(changed, int) and 0 <= changed < 256:
            yield f"width {what}", bytes([changed]) + stored[1:]
    for what, changed in mutations(lengths):
        values = changed if isinstance(changed, list) else []
        if packed := _fitting(struct.Struct(f"<{len(values)}I"), values):
            yield f"lengths{what}", bytes([width]) + packed + rest
    yield "longer", stored + b"\0"
    yield "shorter", stored[:-1]
    yield "empty", b""


ALL_CASES: dict[str, Callable[[Parts], Iterator[Case]]] = {
    "config": cases_of_config,
    "root": cases_of_root,
    "nodes": cases_of_nodes,
    "segments": cases_of_segments,
    "footers": cases_of_footers,
    "places": cases_of_places,
    "stored": cases_of_stored,
}
