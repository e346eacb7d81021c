"""``casnap followers``."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Any

import click

from casnap.cli.arguments import open_whole_store, reading_options
from casnap.cli.output import emit, json_time, moment, print_requests, say, table
from casnap.runtime.sizes import amount
from casnap.serving.handshake import PHASES, FollowedVersion, FollowerState
from casnap.view import repository_of


@click.command()
@click.argument("store", required=False)
@click.option("--tag", metavar="TAG", help="Only those that follow this tag.")
@reading_options
def followers(store: str | None, tag: str | None, as_json: bool) -> None:
    """Show who follows a store, and which version each has staged and serves.

    Followers note that in the store every 30 seconds. VERSION is the number of the root that
    published the version. SINCE is when it was applied, by the follower's clock. PAUSE is how long
    the engine paused for that.

    A question mark marks a note that is older than 90 seconds, or whose time is in the future:
    the follower is dead, or its clock differs from this host's. `casnap gc` deletes such notes
    after a day.
    """
    place = open_whole_store(store)
    states = place.followers(tag)
    uri = repository_of(place).backend.uri
    if as_json:
        emit({"store": uri, "followers": [_facts_of(state) for state in states]}, place)
        return
    if states:
        header = ("FOLLOWER", "FOLLOWS", "VERSION", "SNAPSHOT", "SINCE", "PAUSE", "STAGED", "NOTED")
        rows = [_row_of(state) for state in states]
        table(header, rows, numbers={"VERSION", "PAUSE", "STAGED"}, cut="SNAPSHOT")
    what = f" of the tag {tag}" if tag else ""
    say(f"{uri} has {amount(len(states), 'follower')}{what} that noted itself there")
    print_requests(place.requests)


def _row_of(state: FollowerState) -> tuple[str, ...]:
    serving, staged = state.serving, state.staged
    times = {} if serving is None else serving.phases
    since, paused = times.get("applied"), times.get("paused")
    age = f"{abs(time.time() - state.noted_time):.0f} s ago"
    return (
        state.label,
        " ".join(part for part in (state.folder, f"#{state.tag}" if state.tag else "") if part),
        f"{serving.number}" if serving else "",
        serving.name if serving else "",
        "" if since is None else moment(since),
        "" if since is None or paused is None else f"{(since - paused) * 1000:.0f} ms",
        f"{staged.number}" if staged else "",
        f"{age}?" if state.is_silent or state.is_doubtful else age,
    )


def _facts_of(state: FollowerState) -> dict[str, Any]:
    facts = asdict(state) | {"process_id": state.pid, "tag": state.tag or None}
    del facts["pid"]
    times = {name: json_time(facts[name]) for name in ("began_time", "noted_time")}
    versions = {name: _version_facts(facts[name]) for name in ("staged", "serving")}
    return {**facts, **times, **versions}


def _version_facts(version: FollowedVersion | None) -> dict[str, Any] | None:
    if version is None:
        return None
    times = {f"{name}_time": json_time(version.phases.get(name)) for name in PHASES}
    return {"number": version.number, "name": version.name, "commit": version.commit, **times}
