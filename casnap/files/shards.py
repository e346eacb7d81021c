"""The files that hold one model together.

Transformers and its like write ``model-00001-of-00004.safetensors`` or
``pytorch_model-00001-of-00004.bin``, and an index: the name of each tensor and of its file.
"""

from __future__ import annotations

import re
from pathlib import Path

import msgspec

from casnap.backends.local.local_paths import is_file
from casnap.errors import FileFormatError
from casnap.files.safetensors_header import MOST_HEADER
from casnap.files.small_files import INDEX_SUFFIX
from casnap.files.sources import path_below
from casnap.format.decoding import json_decoder

_SHARD = re.compile(r"(.+)-([0-9]+)-of-([0-9]+)(\.[a-z]+)", re.DOTALL)

Shards = dict[Path, "set[str] | None"]
"""Files, and the names of the tensors in each; None if no index says them."""


class _ShardIndex(msgspec.Struct):
    weight_map: dict[str, str]


def shards_with(path: Path) -> Shards:
    """Return all files that hold a model: those that an index names, or of which a file is one.

    Args:
        path: An index, or any other file, which may be alone.

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
    # Checked one by one: the number may be any.
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
    # The cache of the Hugging Face hub is made of links.
    return {path_below(index.parent, file, index.name, links=True): n for file, n in names.items()}


def check_names(file: Path, found: set[str], expected: set[str] | None, others: set[str]) -> None:
    """Check the names of the tensors in one of several files.

    Args:
        file: The file.
        found: The names there.
        expected: Those that the index says.
        others: Those of the files before it.

    Raises:
        FileFormatError: The index says others, or another file has one of them.
    """
    if expected is not None and (odd := found ^ expected):
        raise FileFormatError(
            f"{file} and the index beside it disagree on {min(odd)!r:.200}: only one of them has it"
        )
    if twice := found & others:
        raise FileFormatError(f"{file} and a file before it both have {min(twice)!r:.200}")
