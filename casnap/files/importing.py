"""Import files as a snapshot."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from casnap.backends.local_files import exists, is_file, is_folder, matching
from casnap.errors import FileFormatError
from casnap.files.export_output import check_local
from casnap.files.export_selection import Part, content_of, named_tensors
from casnap.files.file_reports import ImportReport
from casnap.files.from_safetensors import read_safetensors
from casnap.files.from_torch import read_torch, read_torch_shards
from casnap.files.from_torch_checkpointing import (
    METADATA,
    files_of_items,
    read_torch_checkpointing,
)
from casnap.files.from_torchsnapshot import read_torchsnapshot
from casnap.files.safetensors_header import DTYPES
from casnap.files.shards import shards_with
from casnap.files.small_files import FILES, INDEX_SUFFIX, small_files
from casnap.files.sources import MODEL, SourceFiles, check_regular
from casnap.format.names import STORE_FOLDER, key_of
from casnap.state.flatten import flatten
from casnap.storage import Contents
from casnap.take.capture import DividedLeaves, StateSource
from casnap.take.comparison import entries_of, manifest_of

Take = Callable[[StateSource, "dict[str, Any]"], int]
"""Takes a snapshot of leaves with metadata; returns the bytes of chunks that the store lacked."""


def import_files(
    path: Path,
    name: str,
    take: Take | None,
    *,
    key: str | None,
    rank: int | None,
    metadata: dict[str, Any],
) -> ImportReport:
    """Take a snapshot of the tensors and values in files.

    Args:
        path: A file or a folder.
        name: The snapshot's name, for the report.
        take: Takes the snapshot; None for a dry run.
        key: The key for the state; None to use the top keys of an app state, or else ``model``.
        rank: The rank whose state to import, if a folder has several ranks.
        metadata: The user's metadata, which win over those of the files.

    Raises:
        FileFormatError: The files are malformed, or in no known format.
        CasnapError: The take failed; nothing was committed.
    """
    start = time.monotonic()
    source = read_source(path, key, rank)
    tensors, values, nbytes = source.count()
    metadata = {**source.metadata, **metadata}
    report = ImportReport(
        take is None,
        name,
        source.format,
        source.files,
        list(source.leaves),
        tensors,
        values,
        nbytes,
        metadata=metadata,
    )
    if take is not None:
        report.new_bytes = take(DividedLeaves(source.leaves), metadata)
    report.seconds = time.monotonic() - start
    return report


def is_imported(path: Path, contents: Contents, *, key: str | None, rank: int | None) -> bool:
    """Whether a snapshot equals the one that an import of files would take. This reads the files.

    Args:
        path: A file or a folder.
        contents: The snapshot.
        key: As for :func:`import_files`.
        rank: As for :func:`import_files`.

    Raises:
        FileFormatError: The files are malformed, or in no known format.
        DamagedError: The top of the snapshot is missing or damaged.
    """
    source = read_source(path, key, rank)
    known = contents.metadata
    if any(name not in known or known[name] != said for name, said in source.metadata.items()):
        return False
    chunk_size = contents.store.config.chunk_size
    return manifest_of(DividedLeaves(source.leaves), chunk_size) == contents.manifest


def has_weights_of(path: Path, contents: Contents, keys: Collection[str]) -> bool:
    """Whether files hold the weights of a snapshot, and no other tensors. This reads the files.

    Each tensor of the files must equal the snapshot's tensor of the same name, in dtype, shape and
    bytes. If the snapshot has no tensor of that name, as with an adapter, the tensor must equal any
    tensor of the snapshot. If the snapshot has all names of the files, each of its tensors must
    also equal one in the files, under any name: so the files may lack tied tensors.

    Args:
        path: As for :func:`import_files`. If there are several shards, one of them or their index.
        contents: The snapshot.
        keys: The keys of the snapshot that hold weights.

    Raises:
        FileFormatError: The files are malformed, or in no known format.
        DamagedError: A part of the snapshot is missing or damaged.
    """
    source = read_source(path, MODEL, None)
    leaves = {key: leaves for key, leaves in source.leaves.items() if key != FILES}
    taken = entries_of(DividedLeaves(leaves), contents.store.config.chunk_size)
    here = _tensors_in(Part(MODEL, taken), contents)
    stored = dict[str, set[object]]()
    for key, tree in contents.trees(0).items():
        if key_of(key) in keys:
            part = Part(key, {key + inner: entry for inner, entry in tree.items()})
            for name, tensor in _tensors_in(part, contents).items():
                stored.setdefault(name, set()).add(tensor)
    every = {tensor for named in stored.values() for tensor in named}
    is_whole = not here.keys() <= stored.keys() or every <= {*here.values()}
    return is_whole and all(tensor in stored.get(name, every) for name, tensor in here.items())


def with_shards(path: Path) -> frozenset[Path]:
    """Return a file and all other shards of its model. A folder is returned alone.

    Raises:
        FileFormatError: The index is malformed, or a file is missing.
    """
    return frozenset({path} if is_folder(path) else shards_with(path))


def _tensors_in(part: Part, contents: Contents) -> dict[str, object]:
    """Return name → content for each tensor of a part. Equal tensors have equal contents."""
    tensors, _ = named_tensors(part, DTYPES, contents.label)
    return {name: content_of(tensor.entry) for name, tensor in tensors.items()}


def read_source(path: Path, key: str | None, rank: int | None) -> SourceFiles:
    """Return the state in a file or folder, as leaves. Its tensors are mapped, not read.

    Args:
        path: The file or folder.
        key: The key for the state; None to use the top keys of an app state, or else ``model``.
        rank: The rank whose state to import, if a folder has several ranks.

    Raises:
        FileFormatError: The files are malformed, or in no format that casnap imports.
        OSError: A file cannot be read.
    """
    check_local(path, "and an import reads local files: download it first")
    if not is_folder(path):
        kind, file = "weights", path
    else:
        kind, file = _format_of_folder(path)
    if kind == "torchsnapshot":
        return read_torchsnapshot(path, key, rank)
    if kind == "torch_checkpointing":
        return read_torch_checkpointing(path, key, rank)
    if rank is not None:
        raise FileFormatError(
            f"{path}: rank= is for folders of TorchSnapshot and torch_checkpointing"
        )
    if kind == "dcp":
        from casnap.files.from_dcp import read_dcp

        return read_dcp(path, key)
    source = _read_weights(file, key)
    if file is not path and FILES not in source.leaves and (files := small_files(path)):
        source.leaves[FILES] = list(flatten(files, FILES))
        source.files += len(files)
    return source


def _read_weights(file: Path, key: str | None) -> SourceFiles:
    """Return the weights of a file, and of the other shards of the same model."""
    check_regular(file)
    shards = shards_with(file)
    formats = {_format_of(shard) for shard in shards}
    if len(formats) > 1:
        raise FileFormatError(f"{file}: some of its shards are safetensors, and others torch.save")
    if formats == {"safetensors"}:
        return read_safetensors(shards, key or MODEL)
    if [*shards] == [file]:
        return read_torch(file, key)
    return read_torch_shards(shards, key or MODEL)


def _format_of(file: Path) -> str:
    check_regular(file)
    with file.open("rb") as stream:
        head = stream.read(16)
    if head[:4] == b"PK\3\4":
        return "torch"
    if file.suffix == ".safetensors" or head[8:9] == b"{":
        return "safetensors"
    if head[:1] == b"\x80":
        return "torch"
    raise FileFormatError(
        f"{file} is neither a safetensors file nor one of torch.save; casnap imports these, and "
        "folders of safetensors shards, of torch.distributed.checkpoint, of TorchSnapshot and of "
        "torch_checkpointing"
    )


def _weights_in(folder: Path) -> list[Path]:
    """Return the files of weights in a folder, or the indexes of shards, if it has any.

    If the files are all shards of one model, only the first is returned.
    """
    for index, weights in (("*.safetensors", "*.safetensors"), ("*.bin", "*_model*.bin")):
        files = matching(folder, index + INDEX_SUFFIX) or matching(folder, weights)
        if files:
            return files[:1] if {*files} == {*shards_with(files[0])} else files
    return []


def _format_of_folder(folder: Path) -> tuple[str, Path]:
    """Return the format of a folder, and the file to begin with."""
    for name, kind in ((".metadata", "dcp"), (".snapshot_metadata", "torchsnapshot")):
        if is_file(folder / name):
            return kind, folder / name
    if exists(folder / STORE_FOLDER):
        raise FileFormatError(f"{folder} is a casnap store; `casnap cp` copies its snapshots")
    files = _weights_in(folder)
    if len(files) == 1:
        return "weights", files[0]
    if not files and (is_file(folder / METADATA) or files_of_items(folder)):
        return "torch_checkpointing", folder
    if not files:
        raise FileFormatError(
            f"{folder} holds no safetensors file, no pytorch_model.bin, no .metadata of "
            "torch.distributed.checkpoint, no .snapshot_metadata of TorchSnapshot and no "
            "model_0.pt or the like of torch_checkpointing; to import a file of torch.save, name it"
        )
    names = ", ".join(file.name for file in files[:4])
    raise FileFormatError(f"{folder} holds {names}: name the one to import, or its index")
