"""Find the shards of a model: several files that hold its tensors together.

Transformers and its like write ``model-00001-of-00004.safetensors`` or
``pytorch_model-00001-of-00004.bin``, and an index, which names the file of each tensor.
"""

from __future__ import annotations

import re
from pathlib import Path

import msgspec

from casnap.backends.local_files import is_file
from casnap.errors import FileFormatError
from casnap.files.safetensors_header import MOST_HEADER
from casnap.files.small_files import INDEX_SUFFIX
from casnap.files.sources import path_below
from casnap.format.decoding import json_decoder

_SHARD = re.compile(r"(.+)-([0-9]+)-of-([0-9]+)(\.[a-z]+)", re.DOTALL)

Shards = dict[Path, "set[str] | None"]
"""File → the names of its tensors; None if no index lists them."""


class _ShardIndex(msgspec.Struct):
    weight_map: dict[str, str]


def shards_with(path: Path) -> Shards:
    """Return all shards of a model, given its index or one of its files.

    Args:
        path: An index, or a file of weights, which may be the only one.

    Raises:
        FileFormatError: The index is malformed, or a file is missing.
    """
    if path.name.endswith(INDEX_SUFFIX):
        return _indexed(path)
    match = _SHARD.fullmatch(path.name)
    if match is None or int(match[3]) < 2:
        return {path: None}
    stem, _, count, suffix = match.groups()
    index = path.with_name(f"{stem}{suffix}{INDEX_SUFFIX}")
    if is_file(index):
        return _indexed(index)
    # The count is untrusted, so each file is checked before the next number is tried.
    shards: Shards = {}
    for number in range(1, int(count) + 1):
        shard = path.with_name(f"{stem}-{number:0{len(count)}}-of-{count}{suffix}")
        if not is_file(shard):
            raise FileFormatError(
                f"{path} is one of {int(count)} files that hold a model together, and {shard.name} "
                "is missing beside it, as is an index; put all of them into one folder"
            )
        shards[shard] = None
    return shards


def _indexed(index: Path) -> Shards:
    if index.stat().st_size > MOST_HEADER:
        raise FileFormatError(f"{index} is too long to be the index of shards")
    text = index.read_bytes()
    try:
        weights = json_decoder(_ShardIndex).decode(text).weight_map
    except (ValueError, RecursionError) as e:
        raise FileFormatError(f"{index} is not an index of shards: {e}") from e
    names: dict[str, set[str]] = {}
    for name, file in weights.items():
        names.setdefault(file, set()).add(name)
    if not names:
        raise FileFormatError(f"{index} names no tensors")
    # Links are followed: the cache of the Hugging Face hub consists of them.
    return {path_below(index.parent, file, index.name, links=True): n for file, n in names.items()}


def check_names(file: Path, found: set[str], expected: set[str] | None, others: set[str]) -> None:
    """Check the names of the tensors in one of several files.

    Args:
        file: The file.
        found: The names of the tensors in the file.
        expected: The names that the index lists for the file; None without an index.
        others: The names of the tensors in the files before it.

    Raises:
        FileFormatError: The index lists other names, or an earlier file has one of these names.
    """
    if expected is not None and (odd := found ^ expected):
        raise FileFormatError(
            f"{file} and the index beside it disagree on {min(odd)!r:.200}: only one of them has it"
        )
    if twice := found & others:
        raise FileFormatError(f"{file} and a file before it both have {min(twice)!r:.200}")
