"""``casnap import``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

from casnap.backends.local_files import exists, is_folder
from casnap.backends.uris import store_uri
from casnap.cli.arguments import (
    identity,
    is_exclusive,
    options_for,
    snapshot_at,
    writing_options,
)
from casnap.cli.output import CommandError, emit, progress_bars, say, size
from casnap.errors import CasnapError, FileFormatError, NotAStoreError, SnapshotNotFoundError
from casnap.files.file_reports import SUFFIXES, ImportReport
from casnap.format.names import STORE_FOLDER, check_name
from casnap.runtime.environment import local_path
from casnap.runtime.sizes import amount
from casnap.snapshot import Snapshot
from casnap.storage import Location, open_at
from casnap.store import Store, import_snapshot
from casnap.view import View, view_above

EXAMPLES = """\
\b
Examples:
  casnap import model.safetensors models/base/v1
  casnap import model.safetensors models/        by its own name: models/model
  casnap import llama/ models/llama/v1           a folder of shards with their index
  casnap import checkpoint.pt models/run1/step_100
  casnap import dcp/step_100 models/run1/step_100
  casnap import old/step_100 models/run1/step_100 --rank 0      TorchSnapshot, of many ranks
  casnap import old/* models/run1/               each by its own name: models/run1/step_100, ...
"""


@click.command("import", epilog=EXAMPLES)
@click.argument("sources", metavar="FILE_OR_DIR...", nargs=-1, required=True)
@click.argument("target", metavar="STORE/NAME")
@click.option(
    "--key", metavar="KEY", help="The snapshot's key to import under [model, or the file's keys]."
)
@click.option(
    "--rank",
    type=click.IntRange(min=0),
    help="The rank whose state to import, of TorchSnapshot or torch_checkpointing.",
)
@click.option("--overwrite", is_flag=True, help="Replace a snapshot of this name.")
@click.option("--dry-run", is_flag=True, help="Only show what would be imported.")
@writing_options
def import_(
    sources: tuple[str, ...],
    target: str,
    dry_run: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Import safetensors, torch.save, DCP, TorchSnapshot or torch_checkpointing as a snapshot.

    The store is found, or made, as for a take. Chunks that it has are not stored again. No code in
    a file runs: a file that needs pickle is refused.

    The last argument names the snapshot. In four cases it names a store, or a folder in one: there
    are several files or folders, it ends in a slash, a store is there, or it has no slash and no
    store is above. Then each file or folder becomes a snapshot of its own name, without .pt and the
    like.

    If some of several cannot be imported, an error names them, and none is imported. A snapshot
    that is there already is compared, and not stored again: repeat an interrupted import to go on
    with it.
    """
    reach = options_for(target)  # raises for a dry run, too
    is_many = len(sources) > 1 or target.endswith("/")
    is_below = is_many or _is_store(target)
    targets = _targets_below(target, sources) if is_below else {target: sources[0]}
    if len(targets) > 1:
        _check_all(targets, reach, **options)
    imported: list[dict[str, Any]] = []
    present: list[str] = []
    different: dict[str, str] = {}
    stores: list[Store] = []
    made: set[str] = set()
    for snapshot, source in targets.items():
        there = _find(snapshot, reach) if is_many and not options["overwrite"] else None
        if there is not None:
            if not _is_imported(source, there, **options):
                different[snapshot] = source
                continue
            present.append(snapshot)
            if not as_json:
                say(f"{snapshot}: there already, with the same content")
            continue
        report, places = _import(source, snapshot, reach, dry_run=dry_run, **options)
        stores += (Store._of(view) for view, _ in places)
        which = _place_of(snapshot, reach, *places)
        which["made_store"] &= which["store"] not in made
        made.add(which["store"])
        if as_json:
            imported.append({**which, **_facts_of(report)})
        else:
            _show(report, snapshot, which["store"] if which["made_store"] else None)
    if as_json:
        many = {"imported": imported, "present": present, "different": [*different]}
        emit(many if is_many else imported[0], *stores)
    if different:
        pairs = ", ".join(f"{source} ({snapshot})" for snapshot, source in different.items())
        raise CommandError(
            f"not imported, since a snapshot of this name holds something else: {pairs}; import "
            "them into another folder, or replace the snapshots by --overwrite"
        )


def _is_store(target: str) -> bool:
    """Whether the last argument names a store rather than a snapshot.

    It does if a store is at this local path, or if it has no slash and no store is above it. Else
    it names a snapshot in its folder, as in a take.
    """
    if store_uri(target) is not None:
        return False
    if exists(local_path(target) + "/" + STORE_FOLDER):
        return True
    return "/" not in target and Location.of_snapshot(target, is_typed=True).exists is False


def _check_all(targets: dict[str, str], reach: dict[str, Any] | None, **options: Any) -> None:
    """Check that all files can be imported, before any is.

    Args:
        targets: Path of each snapshot to make → file or folder.
        reach: The storage options of the store.
        options: The options of the import.

    Raises:
        FileFormatError: Some files cannot be imported; the message names them.
    """
    refused: dict[str, CasnapError] = {}
    for snapshot, source in targets.items():
        try:
            _import(source, snapshot, reach, **options, dry_run=True)
        except CasnapError as e:
            refused[source] = e
    if refused:
        raise FileFormatError(
            f"nothing is imported, since {len(refused)} of {len(targets)} cannot be: leave out "
            f"{', '.join(refused)}. Why, for the first one: {next(iter(refused.values()))}"
        )


def _targets_below(folder: str, sources: tuple[str, ...]) -> dict[str, str]:
    """Return the path of each snapshot to make → the file or folder to import.

    The name of the snapshot is that of the file or folder, without its suffix.

    Args:
        folder: The store, or a folder in it.
        sources: The files and folders to import.

    Raises:
        CommandError: Two sources have one name, or a source is one shard of a model.
        InvalidNameError: A snapshot cannot have the name of a source.
    """
    from casnap.files.shards import shards_with

    targets: dict[str, str] = {}
    for source in sources:
        path = Path(os.path.abspath(local_path(source)))  # noqa: PTH100 - a link keeps its name
        if not is_folder(path) and [*shards_with(path)] != [path]:
            raise CommandError(f"{source} is a part of a model in several files; name its folder")
        name = check_name(path.stem if path.suffix.lower() in SUFFIXES else path.name)
        snapshot = f"{folder.rstrip('/')}/{name}"
        if snapshot in targets:
            raise CommandError(
                f"{targets[snapshot]} and {source} would both become {snapshot}; import them one "
                "by one"
            )
        targets[snapshot] = source
    return targets


def _import(
    source: str,
    snapshot: str,
    reach: dict[str, Any] | None,
    *,
    overwrite: bool,
    dry_run: bool,
    **options: Any,
) -> tuple[ImportReport, list[tuple[View, str]]]:
    """Import a file or folder.

    Args:
        source: The file or folder.
        snapshot: The path of the snapshot to make.
        reach: The storage options of the store.
        overwrite: Whether to replace a snapshot of this name.
        dry_run: Whether to import nothing.
        options: Further options of the import.

    Returns:
        The report; and a list with the view and name of the snapshot, empty for a dry run.
    """
    places: list[tuple[View, str]] = []

    def find() -> tuple[View, str]:
        place = view_above(snapshot, reach, create=True, is_typed=True, exclusive=is_exclusive())
        places.append(place)
        return place

    with progress_bars() as progress:
        options_of_take = {"overwrite": overwrite, "progress": progress}
        place = None if dry_run else find
        report = import_snapshot(source, snapshot, place, options_of_take, metadata={}, **options)
    return report, places


def _find(snapshot: str, reach: dict[str, Any] | None) -> Snapshot | None:
    try:
        return snapshot_at(snapshot, reach)
    except (NotAStoreError, SnapshotNotFoundError):
        return None


def _is_imported(
    source: str, there: Snapshot, *, key: str | None, rank: int | None, **_: Any
) -> bool:
    from casnap.files.importing import is_imported

    with there.contents.reading():
        return is_imported(Path(local_path(source)), there.contents, key=key, rank=rank)


def _show(report: ImportReport, snapshot: str, new_store: str | None) -> None:
    would = "would be " if report.dry_run else ""
    if new_store is not None:
        say(f"{new_store} {'would become' if report.dry_run else 'is'} a new store")
    values = f" and {amount(report.values, 'value')}" if report.values else ""
    files = amount(report.files, "file")
    say(
        f"{snapshot}: {amount(report.tensors, 'tensor')}{values} of {files} "
        f"({report.format}) {would}imported"
    )
    new_text = "" if report.dry_run else f", {size(report.new_bytes)} new"
    say(f"{size(report.logical_bytes)}{new_text}, below {', '.join(report.keys[:8])}")


def _place_of(
    path: str, reach: dict[str, Any] | None, place: tuple[View, str] | None = None
) -> dict[str, Any]:
    """Return, for JSON, the fields that identify a snapshot, and whether its store is new.

    Args:
        path: The path of the snapshot.
        reach: The storage options of the store.
        place: The view and name of the snapshot, if it was made; None after a dry run.
    """
    if place is not None:
        view, name = place
        commit = view.row_of(name).commit.hex()
        which = identity(view.repository.backend, view.full_of(name), commit)
        return {**which, "made_store": view.is_new}
    location = Location.of_snapshot(path, reach, is_typed=True)
    is_new = location.exists is False
    if location.exists is None:
        try:
            open_at(location._replace(name=""), create=False, exclusive=is_exclusive())
        except NotAStoreError:
            is_new = True
    return {**identity(location.backend, location.name, None), "made_store": is_new}


def _facts_of(report: ImportReport) -> dict[str, Any]:
    return {
        "dry_run": report.dry_run,
        "format": report.format,
        "key_names": report.keys,
        "file_count": report.files,
        "tensor_count": report.tensors,
        "value_count": report.values,
        "logical_bytes": report.logical_bytes,
        "new_bytes": report.new_bytes,
        "metadata": report.metadata,
        "seconds": report.seconds,
    }
