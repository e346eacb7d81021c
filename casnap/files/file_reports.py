"""The options and reports of imports and exports."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from casnap.errors import FileFormatError
from casnap.runtime.environment import given_path

if TYPE_CHECKING:
    from casnap.files.export_output import ExportOutput
    from casnap.files.tensor_writer import TensorWriter

FORMATS = ("safetensors", "torch", "dcp")
"""The formats that can be exported."""
SUFFIXES = {
    ".safetensors": "safetensors",
    **dict.fromkeys((".pt", ".pth", ".bin", ".ckpt"), "torch"),
    ".dcp": "dcp",
}
"""The format that each suffix of a name stands for."""
_OTHERS = (".gguf", ".onnx", ".h5", ".msgpack", ".npz", ".npy", ".pkl", ".tflite", ".tar", ".zip")
"""The suffixes of other formats, which casnap does not write."""


def format_of(out: str | os.PathLike[str], format: str | None) -> str:
    """Return the format of an export: the one that was asked for, or the one of the suffix.

    Args:
        out: The path to write to.
        format: The format that was asked for; None: go by the suffix of ``out``.

    Raises:
        FileFormatError: The two differ, or the suffix is of a format that casnap does not write.
        ValueError: There is no such format.
    """
    name = given_path(out)
    suffix = Path(name).suffix.lower()
    by_suffix = SUFFIXES.get(suffix)
    if suffix in _OTHERS:
        raise FileFormatError(
            f"{name}: casnap writes no {suffix} files, but {', '.join(FORMATS)}; choose a name "
            "that ends in .safetensors, say, and convert that"
        )
    if format is None:
        return by_suffix or "safetensors"
    if format not in FORMATS:
        raise ValueError(f"format= is one of {', '.join(FORMATS)}; got {format!r}")
    if by_suffix is not None and by_suffix != format:
        raise FileFormatError(
            f"{name}: a name that ends in {suffix} is for the format {by_suffix}, not {format}; "
            "choose another name, or leave the format out"
        )
    return format


@dataclass
class ImportReport:
    """The outcome of an import; with ``dry_run``, what it would be.

    Attributes:
        dry_run: Whether nothing was changed.
        name: The name of the snapshot.
        format: The format of the files: ``safetensors``, ``torch``, ``dcp``, ``torchsnapshot`` or
            ``torch_checkpointing``.
        files: How many files were read.
        keys: The keys of the snapshot.
        tensors: How many tensors it has.
        values: How many other values it has.
        logical_bytes: The bytes of all tensors and values.
        new_bytes: The bytes of the chunks that the store did not have; 0 for a dry run.
        metadata: The metadata of the snapshot.
        seconds: How long the import took.
    """

    dry_run: bool
    name: str
    format: str
    files: int
    keys: list[str]
    tensors: int
    values: int
    logical_bytes: int
    new_bytes: int = 0
    metadata: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """The options of :meth:`casnap.Snapshot.export`, which describes them."""

    path: str | None = None
    format: str = "safetensors"
    max_shard_size: int | None = None
    tensors_only: bool = False
    tied: Sequence[str] = ()
    dry_run: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.tied, str):
            raise TypeError(f"tied is a list of names, such as [{self.tied!r}]; got a str")
        if self.max_shard_size is not None and self.format == "torch":
            raise ValueError(
                "torch.save makes one file; leave max_shard_size= out, or export safetensors or dcp"
            )
        if self.tied and self.format == "dcp":
            raise ValueError("DCP stores each name by itself; leave tied= out")


def tied_names(tied: Any) -> Sequence[str]:
    """Return the tied names of a module: all names of a parameter except its first.

    Args:
        tied: The module; or the names, which are returned as they are.
    """
    if not hasattr(tied, "named_parameters"):  # a look that imports no torch
        names: Sequence[str] = tied
        return names
    unique = {name for name, _ in tied.named_parameters()}
    every = (name for name, _ in tied.named_parameters(remove_duplicate=False))
    return [name for name in every if name not in unique]


@dataclass
class ExportReport:
    """The outcome of an export; with ``dry_run``, what it would be.

    Attributes:
        dry_run: Whether nothing was written.
        format: The format.
        files: The name of each file in the output folder, or of the output file → its length. A dry
            run of the formats torch and dcp counts only the bytes of their tensors.
        tensors: How many tensors were written.
        nbytes: The bytes of these tensors.
        left_out: With ``tensors_only``, the paths of values that the format cannot hold. An export
            of the whole snapshot also lists here the keys that only ranks other than rank 0 have.
        tied: Each name that was left out → the name of the equal tensor that was written.
        equal: The name of each written tensor that has the bytes of an earlier one → the name of
            the earliest one: perhaps tied weights.
        seconds: How long the export took.
    """

    dry_run: bool
    format: str
    files: dict[str, int] = field(default_factory=dict)
    tensors: int = 0
    nbytes: int = 0
    left_out: list[str] = field(default_factory=list)
    tied: dict[str, str] = field(default_factory=dict)
    equal: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0


class ExportPlan(NamedTuple):
    """A planned export.

    Attributes:
        report: The report of the export.
        write: Writes the files of the output.
    """

    report: ExportReport
    write: Callable[[ExportOutput, TensorWriter], None]
