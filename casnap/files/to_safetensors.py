"""Exporting safetensors: one file, or shards with an index, named as transformers names them."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

from casnap.errors import FileFormatError
from casnap.files.chosen import ChosenPart, ChosenTensor, equal_ones, tensors_of, without_tied
from casnap.files.chunks import Placed, Writer
from casnap.files.report import ExportOptions, ExportReport
from casnap.files.target import Target
from casnap.runtime.progress import Progress
from casnap.state.safetensors import DTYPES, header_of
from casnap.storage.contents import Contents

_MOST_NAMED = 10
_INDEX = "model.safetensors.index.json"


def export_safetensors(
    contents: Contents,
    part: ChosenPart,
    out: Path,
    options: ExportOptions,
    progress: Progress | None,
) -> ExportReport:
    """Export tensors.

    Raises:
        FileFormatError: There is something else than tensors of the dtypes that safetensors has.
    """
    tensors, left_out = tensors_of(part, DTYPES, contents.where)
    _check(contents.where, tensors, left_out, options)
    tensors, tied = without_tied(tensors, options.tied, contents.where)
    total = sum(chosen.entry.data.nbytes for chosen in tensors.values())
    report = ExportReport(options.dry_run, "safetensors", {}, len(tensors), total, left_out, tied)
    report.equal = {name: same for name, same in equal_ones(tensors) if name not in tied}
    shards = _shards(tensors, options.max_shard_size)
    notes = {**_as_text(contents.metadata), "format": "pt", **tied}
    headers = {file: header_of(_described(tensors, names), notes) for file, names in shards.items()}
    is_folder = options.max_shard_size is not None
    files = {file if is_folder else out.name: length for file, (_, _, length) in headers.items()}
    report.files = files
    if options.dry_run:
        return report
    writer = Writer(contents, total, progress)
    with Target(out, is_folder=is_folder, needed=sum(files.values())) as target:
        for name, (file, names) in zip(files, shards.items(), strict=True):
            head, starts, _ = headers[file]
            with target.file(name, files[name]) as fd:
                os.pwrite(fd, head, 0)
                writer.write(fd, [Placed(*tensors[n], starts[n]) for n in names])
        if len(shards) > 1:
            with target.file(_INDEX) as fd:
                os.pwrite(fd, _index(shards, total), 0)
    report.files = target.sizes
    return report


def _check(
    where: str, tensors: Mapping[str, ChosenTensor], left_out: list[str], options: ExportOptions
) -> None:
    if left_out and not options.tensors_only:
        more = len(left_out) - _MOST_NAMED
        named = ", ".join(left_out[:_MOST_NAMED]) + (f" and {more:,} more" if more > 0 else "")
        raise FileFormatError(
            f"{where}: safetensors holds only dense tensors of usual dtypes, so these cannot be "
            f"exported: {named}. Name a part by its path, such as 'model'; or leave them out with "
            "tensors_only=True (--tensors-only); or export the format torch"
        )
    if not tensors:
        raise FileFormatError(f"{where}: there is no tensor to export at this path")


def _described(
    tensors: Mapping[str, ChosenTensor], names: list[str]
) -> dict[str, tuple[str, tuple[int, ...]]]:
    return {name: (tensors[name].entry.dtype, tensors[name].entry.shape) for name in names}


def _as_text(metadata: Mapping[str, object]) -> dict[str, str]:
    """Return the metadata of a snapshot as safetensors can hold them."""
    return {k: v if isinstance(v, str) else json.dumps(v) for k, v in metadata.items()}


def _shards(tensors: Mapping[str, ChosenTensor], most: int | None) -> dict[str, list[str]]:
    """Return the names of the tensors in each file: as many as fit, in order."""
    shards: list[list[str]] = [[]]
    filled = 0
    for name, (_, entry) in tensors.items():
        if most is not None and shards[-1] and filled + entry.data.nbytes > most:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += entry.data.nbytes
    count = len(shards)
    if count == 1:
        return {"model.safetensors": shards[0]}
    return {f"model-{i:05}-of-{count:05}.safetensors": s for i, s in enumerate(shards, 1)}


def _index(shards: Mapping[str, list[str]], total: int) -> bytes:
    weights = {name: file for file, names in shards.items() for name in names}
    index = {"metadata": {"total_size": total}, "weight_map": weights}
    return json.dumps(index, indent=2, sort_keys=True).encode() + b"\n"
