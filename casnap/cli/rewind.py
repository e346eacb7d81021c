"""``casnap rewind``."""

from __future__ import annotations

import click

from casnap.cli.arguments import identity_of, open_snapshot, writing_options
from casnap.cli.output import emit, say
from casnap.runtime.sizes import amount
from casnap.view import view_of


@click.command()
@click.argument("path", metavar="STORE/NAME")
@writing_options
def rewind(path: str, as_json: bool) -> None:
    """Make a run go back to a snapshot, and go on from there.

    Snapshots in the same folder that were committed after it are moved aside, to names below
    rewound-NUMBER there. They stay until a retention deletes them, as the oldest of the run. To go
    on from one of them after all, rewind to its new name. First end the processes that write to the
    run.
    """
    snapshot = open_snapshot(path)
    store = snapshot.store
    before = {s.commit_id: s.name for s in store.snapshots()}
    snapshot = store.rewind(snapshot.name)
    moved = [
        {**identity_of(s), "before": view_of(store).full_of(before[s.commit_id])}
        for s in store.snapshots()
        if before.get(s.commit_id, s.name) != s.name and s.row.is_rewound
    ]
    if as_json:
        emit({**identity_of(snapshot), "moved": moved}, store)
        return
    for each in moved:
        say(f"{each['before']} is {each['name']} now")
    aside = f"; {amount(len(moved), 'later snapshot')} moved aside" if moved else ""
    say(f"{snapshot.path} is what its run goes on from{aside}")
