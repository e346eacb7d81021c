"""Versions in the form that SGLang's ``POST /pull_weights`` reads: numbered checkpoints and deltas.

``weight_v000007/`` in a folder that all hosts of an engine see is a whole checkpoint, or holds the
XOR of each tensor with that of number 6, compressed, and a checksum of what it becomes. Each host
brings a checkpoint of its own to a number. The branch ``sglang-miles`` has that call; SGLang itself
has it under review. It was tried against a stub that reads as its sources do.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import zstandard
from blake3 import blake3

from casnap.backends.durability import sync_folder
from casnap.backends.local_paths import exists
from casnap.backends.system_errors import translated
from casnap.errors import CasnapError, DamagedError, FileFormatError
from casnap.files.safetensors_header import header_of
from casnap.serving.patches import version_of
from casnap.serving.version import StoredCell, Version

_INDEX, _WEIGHTS = "model.safetensors.index.json", "model.safetensors"
_NUMBERED = re.compile(r"weight_v([0-9]{6,})")
_CONTENT = "casnap_content"


def publish_version(source: Path, folder: Path, full_every: int = 20) -> int:
    """Publish a version that was pulled, unless it is the last one; return its number.

    Args:
        source: The folder of the numbered versions, which one process alone writes.
        folder: That of the version.
        full_every: After so many deltas, a whole checkpoint follows, so that a new host need not
            read more; what is older than the last but one is deleted.

    Raises:
        FileFormatError: It is no version of a pull.
        DamagedError: A file of it does not hold what was pulled.
        PlaceError: It cannot be read or written.
    """
    new = version_of(folder)
    if new is None:
        raise FileFormatError(f"{folder} is no version that a pull has made")
    with translated(str(source)):
        source.mkdir(exist_ok=True)
        numbers = sorted(_numbers(source))
        last = numbers[-1] if numbers else 0
        held = _content_of(source, last) if last else ""
        if held == new.content:
            return last
        chain = sum(1 for _ in _deltas_at_the_end(source, numbers))
        old = _sibling(new, held) if held and chain < full_every else None
        partial = source / f".{_name(last + 1)}.partial"
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        try:
            if old is not None and _differ_in_bytes_alone(old, new):
                _write_delta(partial, last + 1, old, new)
            else:
                _write_whole(partial, new)
            sync_folder(str(partial))
            partial.rename(source / _name(last + 1))
        finally:
            new.close()
            if old is not None:
                old.close()
            shutil.rmtree(partial, ignore_errors=True)
        sync_folder(str(source))
        _prune(source)
    return last + 1


def _name(number: int) -> str:
    return f"weight_v{number:06d}"


def _numbers(source: Path) -> Iterator[int]:
    for path in source.iterdir():
        match = _NUMBERED.fullmatch(path.name)
        if match:
            yield int(match[1])


def _metadata(source: Path, number: int) -> dict[str, Any]:
    try:
        metadata = json.loads((source / _name(number) / _INDEX).read_text())["metadata"]
    except (FileNotFoundError, ValueError, KeyError):
        return {}
    return metadata if isinstance(metadata, dict) else {}


def _content_of(source: Path, number: int) -> str:
    return str(_metadata(source, number).get(_CONTENT, ""))


def _is_delta(source: Path, number: int) -> bool:
    return "delta_encoding" in _metadata(source, number)


def _deltas_at_the_end(source: Path, numbers: list[int]) -> Iterator[int]:
    for number in reversed(numbers):
        if not _is_delta(source, number):
            return
        yield number


def _prune(source: Path) -> None:
    """Delete what lies before the last but one whole checkpoint."""
    numbers = sorted(_numbers(source))
    whole = [number for number in numbers if not _is_delta(source, number)]
    for number in numbers:
        if len(whole) > 1 and number < whole[-2]:
            shutil.rmtree(source / _name(number), ignore_errors=True)


def _sibling(version: Version, content: str) -> Version | None:
    """Return the version of a content that is kept beside another one."""
    for path in version.folder.parent.iterdir():
        other = version_of(path) if "@" in path.name else None
        if other is not None and other.content == content and other.is_whole():
            return other
    return None


def _differ_in_bytes_alone(old: Version, new: Version) -> bool:
    """Whether two versions have the same tensors, and equal files beside them."""

    def described(version: Version) -> Any:
        tensors = version.record.tensors
        files = version.record.files.items()
        small = {name: file.digest for name, file in files if not name.startswith("casnap-")}
        return {n: (t.dtype, t.shape, t.file, t.start) for n, t in tensors.items()}, small

    return bool(described(old) == described(new))


def _write_whole(to: Path, version: Version) -> None:
    damaged = version.damaged()
    if damaged:
        raise _damaged(version.folder, damaged[0])
    names = [name for name in version.record.files if not name.startswith("casnap-")]
    for name in names:
        shutil.copy2(version.folder / name, to / name)
        with (to / name).open("rb") as file:
            os.fsync(file.fileno())
    index = to / _INDEX
    about = json.loads(index.read_text()) if exists(index) else {}
    about.setdefault("weight_map", {n: t.file for n, t in version.record.tensors.items()})
    about["metadata"] = {**about.get("metadata", {}), _CONTENT: version.content}
    _write_index(to, about)


def _write_index(to: Path, about: dict[str, Any]) -> None:
    with (to / _INDEX).open("w") as file:
        json.dump(about, file)
        file.flush()
        os.fsync(file.fileno())


def _write_delta(to: Path, number: int, old: Version, new: Version) -> None:
    changed = set(new.record.changed_since(old.record))
    before = {name: list(cells) for name, cells in _cells(old, changed)}
    compressed, checksums = dict[str, bytes](), dict[str, str]()
    for name, cells in _cells(new, changed):
        compressed[name], checksums[name] = _xored(old, new, name, before.get(name, []), cells)
    missing = changed - compressed.keys()
    if missing:
        raise DamagedError(f"{new.folder} has no whole list of the chunks of {sorted(missing)}")
    described = {name: ("uint8", (len(raw),)) for name, raw in compressed.items()}
    head, starts, length = header_of(described, checksums)
    with (to / _WEIGHTS).open("wb") as file:
        file.write(head)
        for name, start in starts.items():
            file.seek(start)
            file.write(compressed[name])
        file.truncate(length)
        file.flush()
        os.fsync(file.fileno())
    metadata = {
        "version": f"{number:06d}",
        "base_version": f"{number - 1:06d}",
        "delta_encoding": "xor",
        "compression_format": "zstd",
        "checksum_format": "blake3",
        _CONTENT: new.content,
    }
    about = {"metadata": metadata, "weight_map": dict.fromkeys(compressed, _WEIGHTS)}
    _write_index(to, about)


def _cells(version: Version, names: set[str]) -> Iterator[tuple[str, list[StoredCell]]]:
    for name, cells in groupby(version.each_cell(), lambda each: each[0]):
        if name in names:
            yield name, [cell for *_, cell in cells]


def _xored(
    old: Version, new: Version, name: str, before: list[StoredCell], cells: list[StoredCell]
) -> tuple[bytes, str]:
    """Return the XOR of two tensors, compressed, and the checksum of the new one."""
    import numpy as np

    hashed = blake3()
    compressor = zstandard.ZstdCompressor(level=1).compressobj()
    parts = []
    if [cell.nbytes for cell in before] != [cell.nbytes for cell in cells]:
        raise CasnapError(f"{name} is cut into other chunks in {old.folder} than in {new.folder}")
    for was, cell in zip(before, cells, strict=True):
        now = _whole(new, cell, name)
        hashed.update(now)
        if was.digest == cell.digest:
            parts.append(compressor.compress(bytes(len(now))))
        else:
            then = np.frombuffer(_whole(old, was, name), np.uint8)
            parts.append(compressor.compress((np.frombuffer(now, np.uint8) ^ then).tobytes()))
    parts.append(compressor.flush())
    return b"".join(parts), hashed.hexdigest()


def _whole(version: Version, cell: StoredCell, name: str) -> bytearray:
    raw = version.verified(cell)
    if raw is None:
        raise _damaged(version.folder / cell.file, name)
    return raw


def _damaged(place: Path, name: str) -> DamagedError:
    return DamagedError(
        f"{place} does not hold what was pulled for {name}. `casnap pull --verify` tells all that "
        "is damaged, and the next pull makes it anew"
    )
