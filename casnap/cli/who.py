"""``casnap who``."""

from __future__ import annotations

from pathlib import Path

import click

from casnap.backends.local_files import is_folder, is_taken
from casnap.cli.arguments import check_folder, open_store, reading_options, store_fields
from casnap.cli.check import print_equal_weights
from casnap.cli.output import emit, safe, say
from casnap.errors import InvalidNameError, NotAStoreError
from casnap.snapshot import Snapshot
from casnap.store import Store
from casnap.view import repository_of

EXAMPLES = """\
\b
Examples:
  casnap who model.safetensors --store /ckpts
  casnap who llama/ --store s3://bucket/ckpts --prefix run1
  casnap who run1/step_300 --store /ckpts        which other steps hold the same
  casnap who --store /ckpts --prefix run1        steps whose weights are all equal
"""


@click.command(epilog=EXAMPLES)
@click.argument("what", metavar="[FILE_OR_DIR_OR_NAME]", required=False)
@click.option(
    "--store",
    metavar="STORE",
    help="The store [at or above the current folder; if none is there, at or above the file].",
)
@click.option("--prefix", metavar="FOLDER", help="Only snapshots below this folder.")
@click.option("--key", metavar="KEY", help="The key of the state in a file [model].")
@reading_options
def who(
    what: str | None, store: str | None, prefix: str | None, key: str | None, as_json: bool
) -> None:
    """Say which snapshots hold the weights of a file or a snapshot.

    The command compares digests. It hashes the tensors of the file, and finds them under any path.
    It reads little of the store but the trees of its snapshots.

    Without an argument, it lists groups of snapshots. The snapshots of one group have equal
    weights: if they are steps of one run, the training has changed no weight between them.

    If there are a snapshot and a file of one name, the snapshot is meant: write ./NAME for the
    file.

    The exit status is 1 if no snapshot holds all of the tensors.
    """
    place = _store_for(what) if store is None else open_store(store)
    if prefix:
        check_folder(place, prefix)
    if what is None:
        groups = place.equal_weights(prefix)
        if as_json:
            emit({**store_fields(place), "equal_names": groups}, place)
            return
        print_equal_weights(groups)
        return
    report = place.who(_source(place, what), key=key, prefix=prefix)
    if as_json:
        holders = [
            {"name": each.name, "found_count": each.found, "lacking": list(each.lacking)}
            for each in report.holders
        ]
        facts = {
            "tensor_count": report.tensors,
            "holders": holders,
            "elsewhere": [
                {"entry": path, "names": names} for path, names in report.elsewhere.items()
            ],
            "cast": [{"entry": path, "dtype": dtype} for path, dtype in report.cast.items()],
            "rounded": [{"entry": path, "dtype": dtype} for path, dtype in report.rounded.items()],
            "renamed": [{"entry": path, "there": there} for path, there in report.renamed.items()],
        }
        emit({**store_fields(place), **facts}, place)
    else:
        for line in str(report).splitlines():
            say(safe(line))
    if not report.whole:
        raise click.exceptions.Exit(1)


def _store_for(what: str | None) -> Store:
    """Return the store at or above the current folder; if there is none, at or above a file.

    It is limited to the folder, as the stores of other commands are. But if no snapshot is below
    the folder, as where exported files lie, all snapshots of the store are looked at.

    Args:
        what: The argument of the command.

    Raises:
        StoreError: There is no store, or it cannot be used.
    """
    try:
        place = open_store(None)
    except NotAStoreError:
        if what is None or not is_taken(Path(what)):
            raise
        here = Path(what).absolute()
        place = open_store(str(here if is_folder(here) else here.parent))
        say(f"{what} lies in {repository_of(place).backend.uri}", err=True)
    return place if place.snapshots() else place.whole()


def _source(place: Store, what: str) -> str | Snapshot:
    """Return the snapshot that an argument names, or else the path of a file.

    At the name of each snapshot of a local store there is a file, too: its marker.

    Raises:
        SnapshotNotFoundError: There is neither.
    """
    try:
        is_snapshot = what in place
    except InvalidNameError:
        is_snapshot = False
    return what if not is_snapshot and is_taken(Path(what)) else place[what]
