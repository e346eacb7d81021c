"""Writes hostile stores: all seals are right, and the content is not true."""

from __future__ import annotations

import os
import resource
import signal
import struct
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec
import torch
import zstandard

from casnap import NewStore, StateDict, Store
from casnap.errors import CasnapError
from casnap.format.codec import Codec
from casnap.format.digest import DIGEST_SIZE, Digest, digest_of
from casnap.format.names import STORE_FOLDER
from casnap.format.records import (
    DeltaPlace,
    PackId,
    Place,
    count_deltas,
    encode,
    pack_footer,
    pack_key,
    root_key,
    seal,
    segment_key,
)
from tests.support.faults import CHUNK, files, in_child, memory_folder

MEMORY = 512 << 20
SECONDS = 20
ABSENT = bytes(DIGEST_SIZE)
HUGE = 1 << 62


def one_plane(raw: bytes = b"", frame: bytes | None = None) -> bytes:
    """Return the stored form of a compressed chunk: one plane, which is this frame of zstd."""
    frame = zstandard.compress(raw) if frame is None else frame
    return struct.pack("<BI", 1, len(frame)) + frame


class Forger:
    """Writes one more commit into a store, with the content that it is given.

    Attributes:
        row: Fields of the snapshot's row to replace.
        root: Fields of the root to replace.
        places: Places to give in the index, by digest.
        more: Further records of the index: digests and places.
        rows: Further rows of the table, by name.
        table: The digest of a table to give instead.
        body: Changes the body of the segment before it is sealed.
        footer: Changes the footer of the pack.
        count: The number of records that the root claims of the segment, if that is not true.
        deltas: The number of deltas, likewise.
    """

    def __init__(self, folder: Path) -> None:
        """Begin a commit into the store in a folder; if there is none, into a new one."""
        if not (folder / STORE_FOLDER).exists():
            for key, content in _good_store().items():
                (folder / key).parent.mkdir(parents=True, exist_ok=True)
                (folder / key).write_bytes(content)
        store = Store(folder)
        self.folder = folder
        self.pack = PackId(b"\0" * 5 + b"\1" + os.urandom(10))
        self.row: dict[str, Any] = {}
        self.root: dict[str, Any] = {}
        self.places: dict[bytes, tuple[Any, ...]] = {}
        self.more: list[tuple[bytes, tuple[Any, ...]]] = []
        self.rows: dict[str, Any] = {}
        self.table: bytes | None = None
        self.body: Callable[[bytes], bytes] = bytes
        self.footer: Callable[[bytes], bytes] = bytes
        self.count: Any = None
        self.deltas: Any = None
        self._newest = store._view.repository.newest()
        self._good = msgspec.to_builtins(store._view.row_of("good"), builtin_types=(bytes,))
        self._body = bytearray()
        self._records: list[tuple[Digest, Place]] = []

    def add(
        self, raw: bytes, stored: bytes | None = None, size: int | None = None, codec: int = 0
    ) -> bytes:
        """Put a chunk or node into the pack; return its digest."""
        stored = raw if stored is None else stored
        place = Place(self.pack, len(self._body), len(stored), size or len(raw), codec)
        self._body += stored
        self._records.append((digest_of(raw), place))
        return digest_of(raw)

    def delta(self, digest: bytes, base: bytes, stored: bytes, size: int) -> None:
        """Put a delta into the pack."""
        place = DeltaPlace(self.pack, len(self._body), len(stored), size, int(Codec.DELTA), base)
        self._body += stored
        self._records.append((Digest(digest), place))

    @property
    def good_packs(self) -> list[bytes]:
        """The ids of the packs of the honest snapshot."""
        names = (path.name for path in (self.folder / "casnap-store/packs").rglob("?" * 32))
        return [bytes.fromhex(name) for name in names]

    def keep_good(self) -> None:
        """Keep the honest snapshot in the table."""
        self.rows["good"] = self._good

    def tree(self, *items: Any) -> bytes:
        return self.add(encode(["l", list(items)]))

    def publish(self, key_trees: dict[str, bytes], manifest: Any = None) -> None:
        """Write pack, segment and root; the snapshot is called ``evil``."""
        top = manifest if manifest is not None else {"global": key_trees, "ranks": {"0": {}}}
        digest = self.add(encode(top))
        stats = [100, 100, 3, 0.5]
        row = {
            "commit": b"c" * 16,
            "manifest": [digest, None],
            "seq": self._newest.seq + 1,
            "time": 1.8e9,
            "world_size": 1,
            "stats": stats,
        }
        rows = sorted({"evil": row | self.row, **self.rows}.items())
        table = self.table or self.tree(*map(list, rows))
        segment = b"\0" * 5 + b"\1" + os.urandom(10)
        footer = pack_footer(b"p", self._records)
        self._write(pack_key(self.pack), bytes(self._body) + self.footer(footer))
        self._write(segment_key(segment), self._segment())
        count = len(self._records) + len(self.more) if self.count is None else self.count
        deltas = count_deltas(self._records) if self.deltas is None else self.deltas
        root = {
            "seq": self._newest.seq + 1,
            "commit": b"c" * 16,
            "time": 1.8e9,
            "fence": 0,
            "table": [table, None],
            "segments": [*self._newest.segments, [segment, count, deltas]],
            "condemned": {},
        }
        self._write(root_key(self._newest.seq + 1), seal(b"r", encode(root | self.root)))

    def _segment(self) -> bytes:
        packed = [
            struct.pack(
                "<32sIQIIB",
                d,
                *self.places.get(d, (0, p.offset, p.stored_size, p.raw_size, p.codec)),
            )
            for d, p in self._records
        ]
        base_of = {
            record: p.base
            for record, (_, p) in zip(packed, self._records, strict=True)
            if isinstance(p, DeltaPlace)
        }
        records = sorted([*packed, *(struct.pack("<32sIQIIB", d, *f) for d, f in self.more)])
        bases = sorted(
            struct.pack("<32sQ", base_of[record], index)
            for index, record in enumerate(records)
            if record in base_of
        )
        head = struct.pack("<IQQ", 1, len(records), len(bases))
        return seal(b"s", self.body(b"".join([head, self.pack, *records, *bases])))

    def _write(self, key: str, content: bytes) -> None:
        path = self.folder / "casnap-store" / key
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)


@lru_cache
def _good_store() -> dict[str, bytes]:
    """Return the files of a store of one honest snapshot."""
    with memory_folder() as folder:
        store = Store(folder / "store", create=NewStore(chunk_size=CHUNK))
        store.take({"good": StateDict(x=torch.arange(100_000))}, "good")
        return {key: (folder / "store" / key).read_bytes() for key in files(folder / "store")}


def limit_memory() -> None:
    """Let this process take :data:`MEMORY` more than it has, from now on.

    The memory that it may write to is meant, not its addresses: the allocator reserves many of
    these for each new thread, how many depends on the threads that there were.
    """
    data = int(Path("/proc/self/statm").read_text().split()[5])
    limit = data * resource.getpagesize() + MEMORY
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def assert_refused(folder: Path, *, readable: bool = False) -> None:
    """Call every operation with little memory and time: each error is typed, the restore fails.

    Args:
        folder: The store.
        readable: Whether single reads may succeed where a restore fails.
    """

    def work() -> None:
        limit_memory()
        # Of processor time, since the machine may be busy; what hangs meets the time-out.
        signal.setitimer(signal.ITIMER_PROF, SECONDS)
        state = StateDict()
        results: dict[str, Callable[[Store], object]] = {
            "restore": lambda s: s["evil"].restore({"s": state}),
            "read": lambda s: s["evil"].read_object("s"),
            "entry": lambda s: s["evil"].read_object("s/x"),
            "part": lambda s: s["evil"].read_object("s/x", index=slice(0, 2)),
            "in place": lambda s: s["evil"].read_object("s/x", torch.zeros(4)),
            "absent": lambda s: s["evil"].read_object("s/nowhere"),
            "manifest": lambda s: s["evil"].get_manifest(),
            "list": lambda s: repr(s.snapshots()),
            "diff": lambda s: s.diff("evil", "evil"),
            "usage": lambda s: s.usage(),
            "take": lambda s: s.take({"s": StateDict(y=1)}, "evil/below"),
        }
        refused = set()
        for name, step in results.items():
            try:
                step(Store(folder, create=False))
            except CasnapError as e:
                assert len(str(e)) < 5_000  # noqa: PT017
                refused.add(name)
        assert not state.data
        assert refused >= {"restore", "absent"} | (set() if readable else {"read"}), refused

    assert in_child(work) == 0


# --- entries and trees ------------------------------------------------------------------------


def tensor(
    shape: list[int],
    payload: list[Any],
    dtype: str = "float32",
    kind: str = "tensor",
    quantization: Any = None,
) -> list[Any]:
    return ["t", payload, dtype, shape, kind, False, quantization]


def value(kind: str, data: bytes) -> list[Any]:
    return ["v", [len(data), data, b"", 0], kind]


def container(kind: str, count: int, spec: bytes = b"") -> list[Any]:
    return ["c", [len(spec), spec, b"", 0], kind, count]


def inline(data: bytes) -> list[Any]:
    return [len(data), data, b"", 0]


def chunks(nbytes: int, digests: bytes, depth: int = 0) -> list[Any]:
    return [nbytes, b"", digests, depth]


GOOD = tensor([4], inline(bytes(16)))
STATE = ["", container("dict", 1, encode([["x"], None, None]))]


def branch(forger: Forger, *children: Any) -> bytes:
    return forger.add(encode(["b", list(children)]))
