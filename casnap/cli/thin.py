"""``casnap thin``."""

from __future__ import annotations

import click

from casnap.cli.arguments import identity, open_store, store_fields, writing_options
from casnap.cli.garbage import show_what_waits
from casnap.cli.output import confirm, emit, safe, say
from casnap.runtime.sizes import amount
from casnap.view import view_of

EXAMPLES = """\
\b
Examples:
  casnap thin /ckpts 'optim/**' --keep-last 2 --dry-run
  casnap thin /ckpts 'optim*/**' 'scheduler' --prefix run1 --keep-last 5 --yes
"""


@click.command(epilog=EXAMPLES)
@click.argument("store")
@click.argument("patterns", metavar="PATTERN...", nargs=-1, required=True)
@click.option("--prefix", metavar="FOLDER", help="Only runs in and below this folder.")
@click.option(
    "--keep-last",
    type=click.IntRange(min=1),
    required=True,
    metavar="N",
    help="Leave the last N of each run whole.",
)
@click.option("--dry-run", is_flag=True, help="Only show what would be lost.")
@click.option("--yes", "-y", is_flag=True, help="Do not ask.")
@writing_options
def thin(
    store: str,
    patterns: tuple[str, ...],
    prefix: str | None,
    keep_last: int,
    dry_run: bool,
    yes: bool,
    as_json: bool,
) -> None:
    """Remove from older snapshots what only a resume needs, such as the optimizer.

    PATTERN names whole keys of the app state, such as 'optim/**'. A thinned snapshot keeps all
    other keys, its name and its metadata. Snapshots that have a tag, or that are not mirrored yet,
    stay whole. Then the command begins to free the bytes, as `casnap rm` does.
    """
    place = open_store(store)
    rules = dict.fromkeys(patterns, keep_last)
    try:
        plan = place.thin(rules, prefix=prefix, dry_run=True)
    except ValueError as e:
        raise click.UsageError(safe(str(e))) from e
    if plan and not (dry_run or yes):
        lines = [safe(f"{name}  {', '.join(keys)}") for name, keys in plan.items()]
        confirm(f"Thin {amount(len(plan), 'snapshot')}?", "--yes, or --dry-run to look", lines)
    thinned = plan if dry_run else place.thin(rules, prefix=prefix)
    if as_json:
        view = view_of(place)
        backend = view.repository.backend
        snapshots = [
            {**identity(backend, view.full_of(name), view.row_of(name).commit.hex())}
            | {"lost_keys": list(keys)}
            for name, keys in thinned.items()
        ]
        emit({**store_fields(place), "dry_run": dry_run, "snapshots": snapshots}, place)
        return
    for name, keys in thinned.items():
        say(safe(f"{name}  {', '.join(keys)}"))
    say(f"{amount(len(thinned), 'snapshot')} {'would be ' if dry_run else ''}thinned")
    if thinned and not dry_run:
        show_what_waits(place)
