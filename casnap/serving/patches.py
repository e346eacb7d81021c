"""Patches: the elements in which a version differs from another version on this host.

An engine that holds one version needs only the patches to get the other. A pull knows what it
changes: from the deltas of the store, or by comparing the bytes that it replaces. If no pull has
written the patches, both folders are compared. Each chunk is verified on the way.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from casnap.backends.local_files import HeldFolder, read_file, translated, write_cached
from casnap.errors import PLACE_ERRORS, DamagedError, FileFormatError
from casnap.files.safetensors_header import header_of, itemsize_of, read_header
from casnap.format.delta import base_of, changed_by
from casnap.format.digest import digest_of
from casnap.runtime.fork import new_lock
from casnap.runtime.lazy_imports import ModuleLater
from casnap.runtime.threads import cores, mapped
from casnap.serving.folder import FILE_MODE
from casnap.serving.version import (
    StoredCell,
    Version,
    VersionTensor,
)

if TYPE_CHECKING:
    import numpy as np
else:
    np = ModuleLater("numpy")

PATCHES = "casnap-patches"
"""A pull puts patches into a version in a file of this name, followed by the file's BLAKE3."""
_WHOLE = "whole"
_MOST_INT32 = (1 << 31) - 1
_INDICES, _BEFORE, _VALUES = "indices/", "before/", "values/"
_MOST_BYTES = 1 << 44
_MENDED = "`casnap pull --verify` tells all that is damaged, and the next pull makes it anew"


class StagedPatches(NamedTuple):
    """A file of patches.

    Attributes:
        path: Where the file is.
        digest: Its BLAKE3.
        base: The :attr:`Version.content`, a digest, of the version that the patches apply to.
        content: The :attr:`Version.content` of the version that the patches lead to.
        whole: Changed tensors that are not in the file, since their patch would be larger.
        nbytes: The length of the file.
        is_of_version: Whether the file lies in the version that it leads to, and is deleted with
            it.
    """

    path: Path
    digest: str
    base: str
    content: str
    whole: list[str]
    nbytes: int
    is_of_version: bool = False

    @staticmethod
    def between(base: Path, folder: Path) -> StagedPatches | None:
        """Return the patches from one version to another: a pull's, or else made by comparing both.

        A comparison writes its patches beside the newer version; the next pull deletes them.

        Args:
            base: The folder of the older version.
            folder: The folder of the newer version.

        Returns: The patches; None if one of the two folders is no version, or if the tensors of the
        two differ in names, shapes or dtypes.

        Raises:
            DamagedError: A file of ``folder`` does not hold what was pulled.
            PlaceError: A file cannot be read or written.
        """
        old, new = Version.at(base), Version.at(folder)
        if old is None or new is None or not are_alike(old.record.tensors, new.record.tensors):
            return None
        try:
            made = _made_by_pull(new, old.content)
            if made is not None:
                return made
            raw = _compare(old, new)
        finally:
            old.close()
            new.close()
        digest = digest_of(raw).hex()
        name = f".{digest}.patches.partial"
        place = new.folder.parent
        kept = f"{new.folder} stays as it is"
        with translated(str(place / name), kept), HeldFolder(str(place)) as at:
            at.unlink(name)
            with at.create(name, FILE_MODE) as fd:
                write_cached(fd, memoryview(raw), 0)
        return _staged(place / name, digest, raw)

    def remove(self) -> None:
        """Delete the file, unless it belongs to a version of a pull: other engines may need it."""
        if self.is_of_version:
            return
        with suppress(OSError):
            self.path.unlink(missing_ok=True)


class Patch(NamedTuple):
    """The elements of a tensor that have changed.

    Attributes:
        dtype: The dtype of the tensor, by torch's name.
        indices: The flat positions of the elements in the tensor, ascending.
        before: The old elements, as unsigned integers of the same size. Shape as ``indices``.
        values: The new elements, as ``before``.
    """

    dtype: str
    indices: np.ndarray
    before: np.ndarray
    values: np.ndarray

    @staticmethod
    def read(path: Path, digest: str, base: str, content: str) -> dict[str, Patch]:
        """Return the patches of a file by the names of tensors.

        Args:
            path: The file.
            digest: Its BLAKE3.
            base: The :attr:`Version.content` of the version that the patches must apply to.
            content: The :attr:`Version.content` of the version that the patches must lead to.

        Raises:
            DamagedError: The file is damaged, or another one.
            FileNotFoundError: The file does not exist.
            PlaceError: The file cannot be read.
        """
        raw = bytearray(read_file(str(path), _MOST_BYTES)[0])
        if digest_of(raw).hex() != digest:
            raise DamagedError(f"{path} is damaged, or not the file that was meant")
        header = read_header(memoryview(raw))
        if (header.metadata.get("base"), header.metadata.get("content")) != (base, content):
            raise DamagedError(f"{path} leads from another version, or to another one")
        found = {tensor.name: tensor for tensor in header.tensors}

        def elements(kind: str, name: str) -> np.ndarray:
            tensor = found[kind + name]
            sign = "i" if kind == _INDICES else "u"
            return np.frombuffer(raw, f"{sign}{tensor.itemsize}", tensor.shape[0], tensor.start)

        names = [name[len(_VALUES) :] for name in found if name.startswith(_VALUES)]
        return {
            name: Patch(
                found[_VALUES + name].dtype,
                elements(_INDICES, name),
                elements(_BEFORE, name),
                elements(_VALUES, name),
            )
            for name in names
        }


def _made_by_pull(new: Version, base: str) -> StagedPatches | None:
    """Return the patches that a pull has put into a version, if they apply to ``base``.

    Return None if there are none, or if they are damaged.

    Args:
        new: The version.
        base: The :attr:`Version.content` of the version that the patches have to apply to.
    """
    with translated(str(new.folder)):
        paths = list(new.folder.iterdir())
    for path in paths:
        start, _, digest = path.name.partition(".")
        if start != PATCHES:
            continue
        with suppress(FileNotFoundError, *PLACE_ERRORS, DamagedError, ValueError):
            raw, _ = read_file(str(path), _MOST_BYTES)
            if digest_of(raw).hex() == digest:
                staged = _staged(path, digest, raw)
                if (staged.base, staged.content) == (base, new.content):
                    return staged._replace(is_of_version=True)
    return None


def _staged(path: Path, digest: str, raw: bytes | bytearray) -> StagedPatches:
    about = read_header(memoryview(raw)).metadata
    if not {"base", "content", _WHOLE} <= about.keys():
        raise FileFormatError(f"{path} does not say what its patches lead to")
    whole = json.loads(about[_WHOLE])
    return StagedPatches(path, digest, about["base"], about["content"], whole, len(raw))


def are_alike(old: Mapping[str, VersionTensor], new: Mapping[str, VersionTensor]) -> bool:
    """Whether two versions have the same tensors, of the same shapes and dtypes."""
    described = [{n: (t.dtype, t.shape) for n, t in each.items()} for each in (old, new)]
    return described[0] == described[1]


class Differences:
    """Collects the elements in which a new version differs from an old one, chunk by chunk.

    Args:
        old: The older version.
        new: The tensors of the newer version, by name.
        sizes: Each tensor that has changed → the lengths of its chunks in bytes.
    """

    def __init__(
        self, old: Version, new: Mapping[str, VersionTensor], sizes: Mapping[str, list[int]]
    ) -> None:
        self._old = old
        self._new = new
        # Only tensors that both versions cut alike: another store may cut them in other places.
        self._cells = {
            name: old.cells_of[name]
            for name, wanted in sizes.items()
            if [cell.nbytes for _, cell in old.cells_of.get(name, [])] == wanted
        }
        self._parts: dict[str, dict[int, _ChunkPatch]] = {name: {} for name in sizes}
        self._counts = dict.fromkeys(sizes, 0)
        self._whole = dict.fromkeys(sizes, False)
        self._lock = new_lock()

    def note(
        self, name: str, number: int, raw: memoryview, stored_form: memoryview | None = None
    ) -> None:
        """Note a verified chunk of the newer version. Any thread may call this.

        Args:
            name: The tensor.
            number: The number of the chunk in the tensor.
            raw: The bytes of the chunk.
            stored_form: The delta from which the bytes were made; None if there was none.

        Raises:
            DamagedError: The delta cannot have made these bytes.
        """
        if self._whole.get(name, True):
            return
        tensor = self._new[name]
        size, count = itemsize_of(tensor.dtype), prod(tensor.shape)
        is_wide = count > _MOST_INT32
        part = self._part(name, number, raw, size, stored_form)
        with self._lock:
            if self._whole[name]:
                return  # another chunk has shown meanwhile that the tensor is sent whole
            if part is not None:
                self._counts[name] += len(part.indices)
                index_type = "i8" if is_wide else "i4"
                self._parts[name][number] = part._replace(indices=part.indices.astype(index_type))
            most = count * size // ((8 if is_wide else 4) + 2 * size)
            if part is None or self._counts[name] > most:
                self._whole[name] = True
                self._parts[name].clear()

    def _part(
        self, name: str, number: int, raw: memoryview, size: int, stored_form: memoryview | None
    ) -> _ChunkPatch | None:
        """Return the elements of a chunk that differ; None if the old chunk cannot be verified.

        Args:
            name: The tensor.
            number: The number of the chunk in the tensor.
            raw: The bytes of the new chunk.
            size: The bytes of an element.
            stored_form: The delta from which the bytes were made; None if there was none.
        """
        if name not in self._cells:
            return None
        source, cell = self._cells[name][number]
        first = (cell.start - self._old.record.tensors[name].start) // size
        if stored_form is not None and base_of(stored_form) == source:
            found = changed_by(stored_form, raw, size)
            if found is not None:
                return _ChunkPatch(found[0] + first, *found[1:])
        # If the old chunk is damaged, the engine may hold any bytes.
        before = self._old.verified(cell)
        if before is None:
            return None
        there = np.frombuffer(raw, f"<u{size}")
        was = np.frombuffer(before, there.dtype)
        at = np.flatnonzero(there != was)
        return _ChunkPatch(at + first, was[at], there[at])

    def encoded(self, content: str) -> bytearray:
        """Return the collected differences as the content of a file of patches.

        Args:
            content: The :attr:`Version.content` of the newer version.
        """
        patches = {}
        for name, parts in self._parts.items():
            if parts:
                columns = zip(*(part for _, part in sorted(parts.items())), strict=True)
                joined = (np.concatenate(column) for column in columns)
                patches[name] = Patch(self._new[name].dtype, *joined)
        whole = [name for name, is_whole in self._whole.items() if is_whole]
        about = {"base": self._old.content, "content": content, _WHOLE: json.dumps(whole)}
        return _encoded(patches, about)


class _ChunkPatch(NamedTuple):
    """The elements of a chunk that differ: as in :class:`Patch`, but without the dtype."""

    indices: np.ndarray
    before: np.ndarray
    values: np.ndarray


def _compare(old: Version, new: Version) -> bytearray:
    """Compare two versions chunk by chunk; return the content of a file of patches."""
    changed = new.record.changed_since(old.record)
    if lost := [name for name in changed if name not in new.cells_of]:
        raise DamagedError(
            f"{new.folder} has no whole list of the chunks of {', '.join(lost)[:200]}. {_MENDED}"
        )
    sizes = {name: [cell.nbytes for _, cell in new.cells_of[name]] for name in changed}
    differences = Differences(old, new.record.tensors, sizes)

    def compare(item: tuple[str, int, StoredCell]) -> None:
        name, number, cell = item
        raw = new.verified(cell)
        if raw is None:
            raise DamagedError(
                f"{new.folder / cell.file} does not hold what was pulled for {name}. {_MENDED}"
            )
        differences.note(name, number, memoryview(raw))

    def differing() -> Iterator[tuple[str, int, StoredCell]]:
        for name in changed:
            before = [cell.digest for _, cell in old.cells_of.get(name, [])]
            for number, (_, cell) in enumerate(new.cells_of[name]):
                if before[number : number + 1] != [cell.digest]:
                    yield name, number, cell

    for _ in mapped(compare, differing(), cores()):
        continue
    return differences.encoded(new.content)


def _encoded(patches: Mapping[str, Patch], about: dict[str, str]) -> bytearray:
    """Return patches as the content of a safetensors file, with ``about`` as its metadata."""
    arrays: dict[str, np.ndarray] = {}
    described: dict[str, tuple[str, tuple[int, ...]]] = {}
    for name, patch in patches.items():
        for kind, array in (
            (_INDICES, patch.indices), (_BEFORE, patch.before), (_VALUES, patch.values),
        ):  # fmt: skip
            dtype = array.dtype.name if kind == _INDICES else patch.dtype
            arrays[kind + name], described[kind + name] = array, (dtype, array.shape)
    head, starts, length = header_of(described, about)
    raw = bytearray(length)
    raw[: len(head)] = head
    for name, array in arrays.items():
        raw[starts[name] : starts[name] + array.nbytes] = array.tobytes()
    return raw
