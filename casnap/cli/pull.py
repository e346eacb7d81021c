"""``casnap pull``."""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import click
from click.core import ParameterSource

from casnap.cli.arguments import identity, open_or_above, reading_options
from casnap.cli.option_types import duration, size_in_bytes
from casnap.cli.output import (
    JSON_VERSION,
    CommandError,
    emit,
    json_time,
    json_values,
    print_warnings,
    progress_bars,
    report_fields,
    say,
    size,
)
from casnap.cli.shell_command import EndingSignals, run_command
from casnap.runtime.progress import Progress
from casnap.runtime.sizes import amount
from casnap.serving.options import FLOATS, FollowEvent, PullOptions, PullReport
from casnap.serving.version import RECORD, read_record, verify
from casnap.store import Store
from casnap.view import repository_of

EXAMPLES = """\
\b
Examples:
  casnap pull s3://bucket/run1 models/live                the newest snapshot
  casnap pull s3://bucket/run1 models/live --tag stable --follow
  casnap pull /ckpts models/live --match 'run1/*' --rename 's/^module\\.//'
  casnap pull s3://bucket/run1 models/live --follow --exec 'curl -fsS -m 60 localhost:3000/reload'
  casnap pull s3://bucket/run1 models/live --inplace      one folder, changed in place
  casnap pull s3://bucket/run1 models/live --verify       read what is there, and change nothing
"""


@click.command(epilog=EXAMPLES)
@click.argument("source", metavar="SOURCE")
@click.argument("folder", metavar="DIR")
@click.option("--tag", metavar="TAG", help="The newest snapshot with this tag.")
@click.option(
    "--match", metavar="GLOB", help="The newest snapshot whose name below SOURCE matches."
)
@click.option(
    "--path", default="model", metavar="PATH", help="What of the snapshot [model]; '' for all."
)
@click.option(
    "--rename", multiple=True, metavar="s/A/B/", help="Change names of tensors. May be repeated."
)
@click.option("--dtype", type=click.Choice(FLOATS), help="Cast tensors of floats to this dtype.")
@click.option(
    "--tied",
    multiple=True,
    metavar="NAME",
    help="Store this tensor only under another name with equal bytes. May be repeated.",
)
@click.option(
    "--max-shard-size",
    type=size_in_bytes,
    default="5GB",
    metavar="SIZE",
    help="More becomes several files with an index [5GB].",
)
@click.option(
    "--keep", type=click.IntRange(1), default=2, metavar="N", help="How many versions to keep [2]."
)
@click.option(
    "--inplace",
    is_flag=True,
    help="Make DIR a real folder, and write what has changed into its files, so that the disk "
    "needs no room for two versions. Who reads or has mapped them sees a mix meanwhile.",
)
@click.option("--verify", "only_verify", is_flag=True, help="Only read and verify what DIR holds.")
@click.option("--follow", is_flag=True, help="Keep running, and pull each new version.")
@click.option(
    "--interval", type=duration, default="5s", metavar="TIME", help="How often to look [5s]."
)
@click.option("--no-notes", is_flag=True, help="Note nothing in the store, for `casnap followers`.")
@click.option(
    "--exec", "command", metavar="CMD", help="Run this after each switch, until it succeeds."
)
@reading_options
def pull(
    source: str,
    folder: str,
    tag: str | None,
    match: str | None,
    path: str,
    rename: tuple[str, ...],
    dtype: str | None,
    tied: tuple[str, ...],
    max_shard_size: int,
    keep: int,
    inplace: bool,
    only_verify: bool,
    follow: bool,
    interval: float,
    no_notes: bool,
    command: str | None,
    as_json: bool,
) -> None:
    """Keep a folder of safetensors at the newest snapshot, for from_pretrained and engines.

    SOURCE is a store, a folder of snapshots in it, or a snapshot. DIR becomes a link to one whole
    version in DIR.versions; a new version replaces the link at once. Only changed tensors are
    fetched and written. With --inplace, DIR is a folder whose files are changed: let nobody read
    them meanwhile.

    With --follow, the command pulls each new version until SIGINT, SIGTERM or SIGHUP. After each,
    it runs the command of --exec in a shell, with CASNAP_FOLDER, CASNAP_SNAPSHOT and CASNAP_COMMIT
    in its environment and a JSON list of the changed tensors on its standard input. If that command
    fails, it runs again. A signal ends it and its children.
    """
    given = click.get_current_context().get_parameter_source
    for option, name in (("interval", "interval"), ("no_notes", "no-notes"), ("command", "exec")):
        if not follow and given(option) is not ParameterSource.DEFAULT:
            raise click.UsageError(f"--{name} is for --follow")
    if inplace and given("keep") is not ParameterSource.DEFAULT:
        raise click.UsageError("--inplace keeps one version; leave out --keep")
    if only_verify:
        if follow:
            raise click.UsageError("--verify only reads; leave out --follow")
        _verify(folder, as_json=as_json)
        return
    try:
        options = PullOptions(
            tag=tag,
            match=match,
            path=path or None,
            rename=rename,
            dtype=dtype,
            tied=tied,
            max_shard_size=max_shard_size,
            keep=keep,
            in_place=inplace,
        )
    except ValueError as e:
        raise click.UsageError(str(e).replace("rename=", "--rename")) from e
    store, inner = open_or_above(source, [])
    if follow:
        settings = _FollowSettings(interval, command, notes=not no_notes)
        _follow(store, inner, folder, options, settings, as_json=as_json)
        return
    with progress_bars() as progress:
        report = store.pull(folder, inner, options=options, progress=progress)
    if as_json:
        emit({"source": source, "output": folder, **_facts_of(report, store)}, store)
        return
    _show(report, folder)


class _FollowSettings(NamedTuple):
    """The settings of ``pull --follow``.

    Attributes:
        interval: The seconds between two looks.
        command: The shell command to run after each switch; None for none.
        notes: Whether to note in the store which version is served.
    """

    interval: float
    command: str | None
    notes: bool


def _verify(folder: str, *, as_json: bool) -> None:
    # Resolved once: a pull may replace the link meanwhile.
    version = Path(folder).resolve()
    damaged = verify(version)
    record = read_record(version / RECORD)
    commit = None if record is None else record.commit
    if as_json:
        emit({"output": folder, "commit": commit, "damaged": damaged})
    if damaged:
        names = ", ".join(damaged[:10]) + (" …" if len(damaged) > 10 else "")
        raise CommandError(f"{folder} is damaged: {names}. The next pull makes it whole")
    if not as_json:
        say(f"{folder}: all of {record and record.snapshot} is whole")


def _follow(
    store: Store,
    inner: str | None,
    folder: str,
    options: PullOptions,
    settings: _FollowSettings,
    *,
    as_json: bool,
) -> None:
    """Pull each new version until a signal comes.

    Args:
        store: The store.
        inner: The snapshot or folder in the store; None for all.
        folder: The folder to keep at the newest version.
        options: The options of each pull.
        settings: The settings of following.
        as_json: Whether to print each event as JSON.
    """
    command = settings.command

    def on_version(version: Path, changed: list[str]) -> None:
        assert command is not None
        record = read_record(version / RECORD)
        about = {"CASNAP_FOLDER": str(version)}
        if record is not None:
            about |= {"CASNAP_SNAPSHOT": record.snapshot, "CASNAP_COMMIT": record.commit}
        # The output of the command must not mix with the events on stdout.
        output = sys.stderr if as_json else None
        run_command(command, json.dumps(changed), about, signals, output)

    bars = ExitStack()
    bar: Progress | None = None

    def progress(phase: str, done: int, total: int) -> None:
        nonlocal bar
        # Each pull has a bar of its own, which goes at its end.
        bar = bar or bars.enter_context(progress_bars())
        if bar is not None:
            bar(phase, done, total)

    events = store.follow(
        folder,
        inner,
        options=options,
        interval=settings.interval,
        on_version=on_version if command else None,
        notes=settings.notes,
        progress=progress if sys.stderr.isatty() else None,
    )
    signals = EndingSignals()
    try:
        with bars:
            for event in events:
                bars.close()
                bar = None
                if as_json:
                    click.echo(json.dumps(json_values(_event_facts(event, store))))
                else:
                    _print_event(event, folder)
                sys.stdout.flush()
    except KeyboardInterrupt:
        pass


def _event_facts(event: FollowEvent, store: Store) -> dict[str, Any]:
    facts: dict[str, Any] = {"version": JSON_VERSION, "event": event.event}
    if event.report is not None:
        facts |= _facts_of(event.report, store)
    return facts | ({} if event.error is None else {"error": event.error})


def _print_event(event: FollowEvent, folder: str) -> None:
    if event.event == "switched" and event.report is not None:
        _show(event.report, folder)
    elif event.event == "called" and event.report is not None:
        say(f"{event.report.snapshot}: the command succeeded")
    elif event.event == "call_failed":
        say(f"the command failed, and is run again: {event.error}", err=True)
    else:
        say(f"the pull failed, and is tried again: {event.error}", err=True)


def _facts_of(report: PullReport, store: Store) -> dict[str, Any]:
    facts = report_fields(report, "tensors")
    facts["published_time"] = json_time(facts["published_time"])
    snapshot = identity(repository_of(store).backend, facts.pop("snapshot"), facts.pop("commit"))
    return {**snapshot, **facts}


def _show(report: PullReport, folder: str) -> None:
    if not report.switched:
        say(f"{folder} is at {report.snapshot} already")
        return
    tensors, changed = amount(report.tensors, "tensor"), len(report.changed)
    say(f"{folder} is now {report.snapshot}: {tensors}, {changed:,} of them changed")
    say(
        f"{size(report.linked_bytes)} linked, {size(report.copied_bytes)} copied, "
        f"{size(report.received_bytes)} received for {size(report.fetched_bytes)} from the store"
    )
    print_warnings(
        [f"{path} is left out: safetensors cannot hold it" for path in report.left_out[:8]]
    )
