"""What is to be imported: which format it is, and its content as leaves of a take."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from casnap.errors import FileFormatError
from casnap.format.entries import ContainerEntry, TensorEntry, payload_of
from casnap.state.tensors import Leaf

MODEL = "model"
"""The key that a state without keys of its own gets."""


@dataclass
class Source:
    """What was found in files.

    Attributes:
        format: The format.
        files: How many files hold it.
        leaves: The leaves, by key.
        metadata: What the files say beside.
    """

    format: str
    files: int
    leaves: dict[str, list[Leaf]]
    metadata: dict[str, Any] = field(default_factory=dict)

    def count(self) -> tuple[int, int, int]:
        """Return the number of tensors, of other values, and the bytes of all leaves."""
        entries = [leaf.entry for leaves in self.leaves.values() for leaf in leaves]
        tensors = sum(isinstance(entry, TensorEntry) for entry in entries)
        containers = sum(isinstance(entry, ContainerEntry) for entry in entries)
        nbytes = sum(payload_of(entry).nbytes for entry in entries)
        return tensors, len(entries) - tensors - containers, nbytes


def read_source(path: Path, key: str | None, rank: int | None) -> Source:
    """Return what a file or folder holds. The tensors are mapped, not read.

    Args:
        path: The file or folder.
        key: The key to import it under, or None for keys of its own.
        rank: Whose view of a TorchSnapshot folder to import.

    Raises:
        FileFormatError: It is in no format that can be imported, or is malformed.
        OSError: It cannot be read.
    """
    read, where = _reader(path)
    if rank is not None and read is not _torchsnapshot:
        raise FileFormatError(f"{path}: rank= is for folders of TorchSnapshot of several ranks")
    return read(where, key, rank)


Reader = Callable[[Path, "str | None", "int | None"], Source]


def _reader(path: Path) -> tuple[Reader, Path]:
    """Return what reads a file or folder, and the file to begin with."""
    if path.is_dir():
        return _reader_of_folder(path)
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
    if (folder / "casnap.json").exists():
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


def _safetensors(path: Path, key: str | None, rank: int | None) -> Source:
    from casnap.files.from_safetensors import read_safetensors

    return read_safetensors(path, key or MODEL)


def _torch(path: Path, key: str | None, rank: int | None) -> Source:
    from casnap.files.from_torch import read_torch

    return read_torch(path, key)


def _dcp(path: Path, key: str | None, rank: int | None) -> Source:
    from casnap.files.from_dcp import read_dcp

    return read_dcp(path, key)


def _torchsnapshot(path: Path, key: str | None, rank: int | None) -> Source:
    from casnap.files.from_torchsnapshot import read_torchsnapshot

    return read_torchsnapshot(path, key, rank)


def below(folder: Path, name: str, what: str) -> Path:
    """Return a file that another file of the folder names.

    Raises:
        FileFormatError: The name leads out of the folder, or there is no such file.
    """
    parts = name.split("/")
    if not name or "\0" in name or any(part in ("", ".", "..") for part in parts):
        raise FileFormatError(f"{what} names {name!r:.200}, which is not below its folder")
    file = folder / name
    if not file.is_file():
        raise FileFormatError(f"{what} names {name!r:.200}, which is missing")
    return file
