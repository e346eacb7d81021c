"""Importing files as a snapshot."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from casnap.errors import FileFormatError
from casnap.files.mapped import check_regular
from casnap.files.report import ImportReport
from casnap.files.source import MODEL, SourceFiles
from casnap.files.target import check_local
from casnap.format.names import STORE_FOLDER
from casnap.take.capturable import Capturable, GivenLeaves

Take = Callable[[Capturable, "dict[str, Any]"], int]
"""Takes a snapshot of some leaves with some metadata; returns the new bytes."""


def import_files(
    path: Path,
    name: str,
    take: Take | None,
    *,
    key: str | None,
    rank: int | None,
    metadata: dict[str, Any],
) -> ImportReport:
    """Take a snapshot of what files hold.

    Args:
        path: A file or a folder.
        name: The snapshot's name, for the report.
        take: Takes it; None to only look.
        key: The key to import it under, or None for keys of its own.
        rank: The rank of a TorchSnapshot folder whose state to import.
        metadata: Goes into the snapshot's metadata, before what the files say.

    Raises:
        FileFormatError: The files are malformed, or in no known format.
        CasnapError: The take failed; nothing was committed.
    """
    started = time.monotonic()
    source = read_source(path, key, rank)
    tensors, values, nbytes = source.count()
    kept = {**source.metadata, **metadata}
    report = ImportReport(
        take is None,
        name,
        source.format,
        source.files,
        list(source.leaves),
        tensors,
        values,
        nbytes,
        metadata=kept,
    )
    if take is not None:
        report.new_bytes = take(GivenLeaves(source.leaves), kept)
    report.seconds = time.monotonic() - started
    return report


# --- which format it is -----------------------------------------------------------------------


def read_source(path: Path, key: str | None, rank: int | None) -> SourceFiles:
    """Return what a file or folder holds. The tensors are mapped, not read.

    Args:
        path: The file or folder.
        key: The key to import it under, or None for keys of its own.
        rank: The rank of a TorchSnapshot folder whose state to import.

    Raises:
        FileFormatError: It is in no format that can be imported, or is malformed.
        OSError: It cannot be read.
    """
    read, where = _reader(path)
    if rank is not None and read is not _torchsnapshot:
        raise FileFormatError(f"{path}: rank= is for folders of TorchSnapshot of several ranks")
    return read(where, key, rank)


Reader = Callable[[Path, "str | None", "int | None"], SourceFiles]


def _reader(path: Path) -> tuple[Reader, Path]:
    """Return what reads a file or folder, and the file to begin with."""
    check_local(path, "and an import reads local files: download it first")
    if path.is_dir():
        return _reader_of_folder(path)
    check_regular(path)
    with path.open("rb") as stream:
        head = stream.read(16)
    if path.name.endswith(".index.json"):
        return _safetensors, path
    if head[:4] == b"PK\3\4":
        return _torch, path
    if path.suffix == ".safetensors" or head[8:9] == b"{":
        return _safetensors, path
    if head[:1] == b"\x80":
        return _torch, path
    raise FileFormatError(
        f"{path} is neither a safetensors file nor one of torch.save; casnap imports these, and "
        "folders of safetensors shards, of torch.distributed.checkpoint and of TorchSnapshot"
    )


def _reader_of_folder(folder: Path) -> tuple[Reader, Path]:
    for name, reader in ((".metadata", _dcp), (".snapshot_metadata", _torchsnapshot)):
        if (folder / name).is_file():
            return reader, folder
    if (folder / STORE_FOLDER).exists():
        raise FileFormatError(f"{folder} is a casnap store; `casnap cp` copies its snapshots")
    indices = sorted(folder.glob("*.safetensors.index.json"))
    found = indices or sorted(folder.glob("*.safetensors"))
    if len(found) == 1:
        return _safetensors, found[0]
    if not found:
        raise FileFormatError(
            f"{folder} holds no safetensors file, no .metadata of torch.distributed.checkpoint and "
            "no .snapshot_metadata of TorchSnapshot; to import a file of torch.save, name it"
        )
    names = ", ".join(each.name for each in found[:4])
    raise FileFormatError(f"{folder} holds {names}: name the one to import, or its index")


def _safetensors(path: Path, key: str | None, rank: int | None) -> SourceFiles:
    from casnap.files.from_safetensors import read_safetensors

    return read_safetensors(path, key or MODEL)


def _torch(path: Path, key: str | None, rank: int | None) -> SourceFiles:
    from casnap.files.from_torch import read_torch

    return read_torch(path, key)


def _dcp(path: Path, key: str | None, rank: int | None) -> SourceFiles:
    from casnap.files.from_dcp import read_dcp

    return read_dcp(path, key)


def _torchsnapshot(path: Path, key: str | None, rank: int | None) -> SourceFiles:
    from casnap.files.from_torchsnapshot import read_torchsnapshot

    return read_torchsnapshot(path, key, rank)
