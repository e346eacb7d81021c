"""Patches: the elements in which a version differs from another one of this host.

An engine that holds the one comes to the other by them alone. They are made from the bytes of both
folders, whatever form the store has given to them, and each chunk is verified on the way.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from itertools import groupby
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from casnap.backends.file_io import read_file, write_cached
from casnap.backends.safe_paths import create_file, folder_at, unlink_at
from casnap.backends.system_errors import translated
from casnap.errors import DamagedError
from casnap.files.safetensors_header import header_of, itemsize_of, read_header
from casnap.format.digest import digest_of
from casnap.runtime.threads import cores, mapped
from casnap.serving.folder import FILE_MODE
from casnap.serving.version import RECORD, StoredCell, Version, VersionRecord, read_record

if TYPE_CHECKING:
    import numpy as np

_INDICES, _BEFORE, _VALUES = "indices/", "before/", "values/"
_MOST_BYTES = 1 << 44
_MENDED = "`casnap pull --verify` tells all that is damaged, and the next pull makes it anew"


class StagedPatches(NamedTuple):
    """A file of patches.

    Attributes:
        path: Where it is.
        digest: Its BLAKE3.
        base: The content that they apply to: :attr:`Version.content`.
        content: The content that they lead to.
        whole: Tensors that have changed, and are not in the file: a patch would be larger.
        nbytes: The length of the file.
    """

    path: Path
    digest: str
    base: str
    content: str
    whole: list[str]
    nbytes: int

    def remove(self) -> None:
        """Delete the file."""
        with suppress(OSError):
            self.path.unlink(missing_ok=True)


class Patch(NamedTuple):
    """The elements of a tensor that have changed.

    Attributes:
        dtype: Their dtype, by torch's name.
        indices: Where they are in the tensor, flat, in ascending order.
        before: What they were, as unsigned integers of their size.
        values: What they are now.
    """

    dtype: str
    indices: np.ndarray
    before: np.ndarray
    values: np.ndarray


def version_of(folder: Path) -> Version | None:
    """Return the version that a folder is; None if it is none.

    Raises:
        PlaceError: It cannot be looked at.
    """
    place = Path(os.path.realpath(folder))
    record = read_record(place / RECORD)
    return None if record is None else Version(place, record)


def stage(base: Path, folder: Path) -> StagedPatches | None:
    """Write what leads from one version to another, beside the latter; the next pull deletes it.

    Args:
        base: The folder of the one.
        folder: That of the other.

    Returns:
        The patches; None if there can be none: one of the two is no version, or they have other
        tensors, of other shapes or dtypes.

    Raises:
        DamagedError: A file of ``folder`` does not hold what was pulled.
        PlaceError: It cannot be read or written.
    """
    old, new = version_of(base), version_of(folder)
    if old is None or new is None or _described(old.record) != _described(new.record):
        return None
    try:
        patches = dict(_patches(old, new, new.record.changed_since(old.record)))
    finally:
        old.close()
        new.close()
    raw = _encoded(patches, {"base": old.content, "content": new.content})
    digest = digest_of(raw).hex()
    name = f".{digest}.patches.partial"
    place = new.folder.parent
    kept = f"{new.folder} stays as it is"
    with translated(str(place / name), kept), folder_at(str(place), listed=True) as at:
        with suppress(FileNotFoundError):
            unlink_at(name, at)
        fd = create_file(name, at, FILE_MODE)
        try:
            write_cached(fd, memoryview(raw), 0)
        finally:
            os.close(fd)
    whole = [name for name, patch in patches.items() if patch is None]
    return StagedPatches(place / name, digest, old.content, new.content, whole, len(raw))


def read_patches(path: Path, digest: str, base: str, content: str) -> dict[str, Patch]:
    """Return the patches of a file by the names of tensors.

    Args:
        path: The file.
        digest: Its BLAKE3.
        base: The content that they must apply to.
        content: That which they must lead to.

    Raises:
        DamagedError: It is another file, or damaged.
        FileNotFoundError: It is not there.
        PlaceError: It cannot be read.
    """
    import numpy as np

    raw, _ = read_file(str(path), _MOST_BYTES)
    if digest_of(raw).hex() != digest:
        raise DamagedError(f"{path} is damaged, or not the file that was meant")
    header = read_header(memoryview(raw))
    if header.metadata != {"base": base, "content": content}:
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


def _described(record: VersionRecord) -> dict[str, tuple[str, tuple[int, ...]]]:
    return {name: (tensor.dtype, tensor.shape) for name, tensor in record.tensors.items()}


class _Pair(NamedTuple):
    """A chunk that has changed: its tensor, its place there in elements, and where both are."""

    name: str
    at: int
    old: StoredCell | None
    new: StoredCell


def _patches(old: Version, new: Version, changed: list[str]) -> Iterator[tuple[str, Patch | None]]:
    """Yield each tensor that has changed, with its patch; with None where that would be larger."""
    import numpy as np

    def differences(pair: _Pair) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        size = itemsize_of(new.record.tensors[pair.name].dtype)
        now, before = new.verified(pair.new), pair.old and old.verified(pair.old)
        if now is None:
            raise DamagedError(
                f"{new.folder / pair.new.file} does not hold what was pulled for {pair.name}. "
                f"{_MENDED}"
            )
        there = np.frombuffer(now, f"u{size}")
        if before is None:
            # Nobody knows what the engine has read there.
            return np.empty(0, np.int64), there[:0], there
        was = np.frombuffer(before, there.dtype)
        at = np.flatnonzero(there != was)
        return at + pair.at, was[at], there[at]

    pairs = _pairs(old, new, set(changed))
    for name, found in groupby(mapped(differences, pairs, cores()), lambda each: each[0].name):
        tensor = new.record.tensors[name]
        size, count = itemsize_of(tensor.dtype), prod(tensor.shape)
        wide = count > np.iinfo(np.int32).max
        most = count * size // ((8 if wide else 4) + 2 * size)
        parts, total = list[tuple[np.ndarray, ...]](), 0
        for _, part in found:
            total += len(part[2])
            if len(part[0]) < len(part[2]):
                total = most + 1
            if total > most:
                parts.clear()
            else:
                parts.append(part)
        if total > most:
            yield name, None
        else:
            indices, before, values = (np.concatenate(each) for each in zip(*parts, strict=True))
            indices = indices.astype(np.int64 if wide else np.int32)
            yield name, Patch(tensor.dtype, indices, before, values)


def _pairs(old: Version, new: Version, changed: set[str]) -> Iterator[_Pair]:
    """Yield the chunks that have changed, in the order of the tensors."""
    before: dict[str, list[StoredCell]] = {}
    for name, _, _, cell in old.each_cell():
        if name in changed:
            before.setdefault(name, []).append(cell)
    seen = set[str]()
    for name, cells in groupby(new.each_cell(), lambda each: each[0]):
        if name not in changed:
            continue
        seen.add(name)
        here, there = before.get(name, []), [cell for *_, cell in cells]
        size = itemsize_of(new.record.tensors[name].dtype)
        # Another store may cut tensors in other places.
        alike = [cell.nbytes for cell in here] == [cell.nbytes for cell in there]
        at = 0
        for number, cell in enumerate(there):
            was = here[number] if alike else None
            if was is None or was.digest != cell.digest:
                yield _Pair(name, at, was, cell)
            at += cell.nbytes // size
    if seen != changed:
        raise DamagedError(
            f"{new.folder} has no whole list of the chunks of "
            f"{', '.join(sorted(changed - seen))[:200]}. {_MENDED}"
        )


def _encoded(patches: dict[str, Patch | None], about: dict[str, str]) -> bytearray:
    """Return a file of safetensors with patches."""
    arrays: dict[str, np.ndarray] = {}
    described: dict[str, tuple[str, tuple[int, ...]]] = {}
    for name, patch in patches.items():
        if patch is None:
            continue
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
