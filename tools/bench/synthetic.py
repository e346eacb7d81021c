"""Stores of many snapshots with many chunks, made without the chunks' bytes.

Trees, segments and roots are real, written by the same code as those of takes. Packs of chunks are
files of the right length with nothing in them: a collector never reads them.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from casnap import NewStore, Store
from casnap.format.digest import Digest
from casnap.format.entries import Manifest, Payload, TensorEntry
from casnap.format.records import PackId, Place, Row, Stats, encode, pack_key
from casnap.format.tree import build
from casnap.runtime.threads import Crew, run_shielded
from casnap.storage.reading.table import Table
from casnap.storage.writing.session import Session

_CHUNK = 1 << 20
_TENSORS = 100
_PER_PACK = 44


class Synthetic:
    """A store that grows snapshot by snapshot, each with one tensor in a hundred changed.

    Args:
        folder: Where to make it.
        chunks: How many chunks a snapshot has.
    """

    def __init__(self, folder: Path, chunks: int) -> None:
        self.store = Store(folder, create=NewStore(chunk_size=_CHUNK))
        self._folder = folder
        self._rows = chunks // _TENSORS
        self._tensors = [os.urandom(32 * self._rows) for _ in range(_TENSORS)]
        self._new = list(range(_TENSORS))
        self._step = 0

    def take(self, name: str | None = None) -> None:
        """Commit one more snapshot."""
        run_shielded(lambda crew: self._commit(name or f"run/step_{self._step}", crew))
        self._step += 1
        self._new = [self._step % _TENSORS]
        self._tensors[self._new[0]] = os.urandom(32 * self._rows)

    def _commit(self, name: str, crew: Crew) -> None:
        with Session(self.store._view.repository, crew) as session:
            self._add_chunks(session)
            lists = [session.put_node(digests) for digests in self._tensors]
            entries = {
                f"/layer.{i}": TensorEntry(
                    Payload(self._rows * _CHUNK, b"", digest, 1), "uint8", (self._rows, _CHUNK)
                )
                for i, digest in enumerate(lists)
            }
            tree = build(entries, session.put_node)
            manifest = session.put_node(encode(Manifest({"model": tree}, {"0": {}})))

            def change(_table: Table, seq: int) -> dict[str, Row]:
                ref = session.ref(manifest)
                return {name: Row(session.commit_id, ref, seq, time.time(), 1, Stats())}

            session.commit(change)

    def _add_chunks(self, session: Session) -> None:
        """List the new chunks in packs of about 44 MiB."""
        writer = session.new_packs._chunks
        joined = b"".join(self._tensors[i] for i in self._new)
        digests = [Digest(joined[at : at + 32]) for at in range(0, len(joined), 32)]
        for first in range(0, len(digests), _PER_PACK):
            pack: PackId = writer.new_pack()
            some = digests[first : first + _PER_PACK]
            writer.packs.append(pack)
            writer.records += [
                (d, Place(pack, i * _CHUNK, _CHUNK, _CHUNK, 0)) for i, d in enumerate(some)
            ]
            path = self._folder / "casnap-store" / pack_key(pack)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
            os.truncate(path, len(some) * _CHUNK)
