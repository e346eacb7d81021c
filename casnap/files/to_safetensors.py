"""Export safetensors: one file, or shards with an index, named as transformers names them."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping

from casnap.errors import FileFormatError
from casnap.files.export_output import ExportOutput
from casnap.files.export_selection import (
    Part,
    equal_tensors,
    named_tensors,
    shards_by_size,
    without_tied,
)
from casnap.files.file_reports import ExportOptions, ExportPlan, ExportReport
from casnap.files.safetensors_header import DTYPES, header_of
from casnap.files.tensor_writer import Placed, TensorWriter
from casnap.storage import Contents

_MOST_NAMED = 10
INDEX = "model.safetensors.index.json"
"""The name of the index of shards."""


def plan_safetensors(
    contents: Contents, part: Part, name: str, options: ExportOptions
) -> ExportPlan:
    """Plan an export of tensors.

    Raises:
        FileFormatError: The part holds other values than tensors of safetensors' dtypes.
    """
    tensors, left_out = named_tensors(part, DTYPES, contents.label)
    if left_out and not options.tensors_only:
        more = len(left_out) - _MOST_NAMED
        names = ", ".join(left_out[:_MOST_NAMED]) + (f" and {more:,} more" if more > 0 else "")
        raise FileFormatError(
            f"{contents.label}: safetensors holds only dense tensors of usual dtypes, so these "
            f"cannot be exported: {names}. Name a part by its path, such as 'model'; or leave them "
            "out with tensors_only=True (--tensors-only); or export the format torch"
        )
    if not tensors:
        raise FileFormatError(f"{contents.label}: there is no tensor to export at this path")
    tensors, tied_to = without_tied(tensors, options.tied, contents.label)
    sizes = {name: tensor.entry.payload.nbytes for name, tensor in tensors.items()}
    total = sum(sizes.values())
    report = ExportReport(
        options.dry_run, "safetensors", tensors=len(tensors), nbytes=total, left_out=left_out
    )
    report.tied, report.equal = tied_to, equal_tensors(tensors, tied_to)
    groups = shards_by_size(sizes, options.max_shard_size)
    # safetensors holds only texts as metadata, so other values become JSON.
    texts = {k: v if isinstance(v, str) else json.dumps(v) for k, v in contents.metadata.items()}
    headers = [
        header_of(
            {n: (tensors[n].entry.dtype, tensors[n].entry.shape) for n in names},
            {**texts, "format": "pt", **tied_to},
        )
        for names in groups
    ]
    files = [name] if options.max_shard_size is None else shard_names(len(groups))
    report.files = {file: length for file, (_, _, length) in zip(files, headers, strict=True)}

    def write(output: ExportOutput, writer: TensorWriter) -> None:
        for file, names, (head, starts, length) in zip(files, groups, headers, strict=True):
            with output.file(file, length) as fd:
                os.pwrite(fd, head, 0)
                writer.write(fd, [Placed(*tensors[n], starts[n]) for n in names])
        if len(groups) > 1:
            with output.file(INDEX) as fd:
                shards = {n: file for file, names in zip(files, groups, strict=True) for n in names}
                os.pwrite(fd, index_of(shards, total), 0)

    return ExportPlan(report, write)


def shard_names(count: int) -> list[str]:
    """Return the names of ``count`` files; a single file gets the name of an unsharded model."""
    if count == 1:
        return ["model.safetensors"]
    return [f"model-{i:05}-of-{count:05}.safetensors" for i in range(1, count + 1)]


def index_of(shards: Mapping[str, str], total: int) -> bytes:
    """Return the content of the index of shards.

    Args:
        shards: The name of each tensor → the name of its file.
        total: The bytes of all tensors.
    """
    index = {"metadata": {"total_size": total}, "weight_map": shards}
    return json.dumps(index, indent=2, sort_keys=True).encode() + b"\n"
