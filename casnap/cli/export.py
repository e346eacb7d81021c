"""``casnap export``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from casnap.backends.local_files import is_taken
from casnap.cli.arguments import (
    identity_of,
    open_part,
    open_store,
    reading_options,
    snapshots_of,
    store_fields,
)
from casnap.cli.option_types import size_in_bytes
from casnap.cli.output import emit, print_warnings, progress_bars, say, size
from casnap.files.file_reports import FORMATS, ExportReport, format_of
from casnap.runtime.sizes import amount
from casnap.snapshot import Snapshot

EXAMPLES = """\
\b
Examples:
  casnap export models/tuned/v1/model tuned.safetensors
  casnap export models/tuned/v1/model tuned/ --max-shard-size 5GB
  casnap export runs/run1/step_100 step_100.pt
  casnap export runs/run1/step_100 step_100 --format dcp
  casnap export runs left/ --all                 left/run1/step_100.pt, ...
"""

_SUFFIX = {"torch": ".pt", "dcp": ".dcp", "safetensors": ".safetensors"}


@click.command(epilog=EXAMPLES)
@click.argument("part", metavar="STORE/NAME[/PATH]")
@click.argument("out")
@click.option(
    "--all",
    "is_all",
    is_flag=True,
    help="Export all snapshots of a store, or of a folder in it, by their names below OUT [torch].",
)
@click.option(
    "--format",
    "kind",
    type=click.Choice(FORMATS),
    help="What to write [torch for .pt, .pth, .bin, .ckpt; dcp for .dcp; else safetensors].",
)
@click.option(
    "--max-shard-size",
    type=size_in_bytes,
    metavar="SIZE",
    help="Make OUT a folder of files of up to this size (such as 5GB), and an index.",
)
@click.option("--tensors-only", is_flag=True, help="Leave out all that safetensors cannot hold.")
@click.option(
    "--tied",
    multiple=True,
    metavar="NAME",
    help="Store this tensor only under another name with equal bytes. May be repeated.",
)
@click.option("--dry-run", is_flag=True, help="Only show what would be written.")
@reading_options
def export(
    part: str,
    out: str,
    is_all: bool,
    kind: str | None,
    max_shard_size: int | None,
    tensors_only: bool,
    tied: tuple[str, ...],
    dry_run: bool,
    as_json: bool,
) -> None:
    """Export a snapshot, or the part at PATH, to files of another format.

    Every byte is verified. OUT must not exist: it appears when it is whole and synced. The names of
    tensors are the keys below PATH, joined by dots.

    With --all, OUT is a folder, which may exist. Snapshots that are there already are not exported
    again: repeat an interrupted export to go on with it.
    """
    kind = kind or "torch" if is_all else format_of(out, kind)
    if kind == "torch" and max_shard_size is not None:
        raise click.UsageError(
            "--max-shard-size is for safetensors and dcp: torch.save makes one file"
        )
    if kind == "dcp" and tied:
        raise click.UsageError("--tied is for safetensors and torch")
    if is_all and dry_run:
        raise click.UsageError("--all has no --dry-run; `casnap ls` lists what it exports")
    options = {
        "format": kind,
        "max_shard_size": max_shard_size,
        "tensors_only": tensors_only,
        "tied": tied,
        "dry_run": dry_run,
    }
    if is_all:
        suffix = "" if kind == "safetensors" and max_shard_size else _SUFFIX[kind]
        _export_all(part, Path(out), suffix, options, as_json=as_json)
        return
    snapshot, path = open_part(part)
    report = _exported(snapshot, out, {**options, "path": path})
    if as_json:
        emit(_facts_of(snapshot, path, out, report), snapshot.store)
    else:
        _show(report, out)


def _export_all(
    store: str, out: Path, suffix: str, options: dict[str, Any], *, as_json: bool
) -> None:
    place = open_store(store)
    exported, present = [], []
    for snapshot in snapshots_of(place, None):
        target = out / f"{snapshot.name}{suffix}"
        if is_taken(target):
            present.append(str(target))
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        report = _exported(snapshot, str(target), options)
        exported.append(_facts_of(snapshot, None, str(target), report))
        if not as_json:
            _show(report, str(target))
    if as_json:
        emit({**store_fields(place), "exported": exported, "present": present}, place)
    elif present:
        say(f"{amount(len(present), 'snapshot')} there already")


def _exported(snapshot: Snapshot, out: str, options: dict[str, Any]) -> ExportReport:
    with progress_bars() as progress:
        return snapshot.export(out, progress=progress, **options)


def _facts_of(
    snapshot: Snapshot, path: str | None, out: str, report: ExportReport
) -> dict[str, Any]:
    return {
        **identity_of(snapshot),
        "entry": path,
        "output": out,
        "dry_run": report.dry_run,
        "format": report.format,
        "files": [{"file": name, "file_bytes": nbytes} for name, nbytes in report.files.items()],
        "tensor_count": report.tensors,
        "logical_bytes": report.nbytes,
        "left_out": report.left_out,
        "tied": report.tied,
        "equal": report.equal,
        "seconds": report.seconds,
    }


def _show(report: ExportReport, out: str) -> None:
    would = "would be " if report.dry_run else ""
    tensors, files = amount(report.tensors, "tensor"), amount(len(report.files), "file")
    say(f"{out}: {tensors}, {size(report.nbytes)}, {would}exported to {files}")
    if report.left_out:
        say(f"{amount(len(report.left_out), 'value')} left out")
    for name, earlier in list(report.equal.items())[:1]:
        count = amount(len(report.equal), "tensor")
        print_warnings(
            [
                f"{name} has the bytes of {earlier}; if they are tied, --tied {name} leaves it out "
                f"({count} like that)"
            ]
        )
