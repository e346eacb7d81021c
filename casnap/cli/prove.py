"""``casnap prove``."""

from __future__ import annotations

import os
import secrets
import shlex
import tempfile
from pathlib import Path
from typing import Any

import click

from casnap.cli.option_types import duration
from casnap.cli.output import emit, json_option, say, table
from casnap.cli.shell_command import EndingSignals
from casnap.proving.attempts import AttemptError
from casnap.proving.proof import Comparison, Options, Proof, Run, check_command, remove_room
from casnap.proving.proof import prove as proved
from casnap.runtime.environment import local_path
from casnap.runtime.sizes import amount

EXAMPLES = """\
\b
Examples:
  casnap prove -- python train.py {store} --steps 60
  casnap prove --kills 5 --snapshots 8 -- torchrun --nproc-per-node 2 train.py --out {store}
"""
_MOST_PATHS = 12


@click.command(epilog=EXAMPLES, context_settings={"allow_interspersed_args": False})
@click.option(
    "--kills",
    type=click.IntRange(1, 100),
    default=3,
    show_default=True,
    metavar="N",
    help="How often to kill the run, if it goes on that long.",
)
@click.option(
    "--snapshots",
    type=click.IntRange(min=2),
    metavar="N",
    help="End each run after N snapshots. By default the command ends by itself.",
)
@click.option("--seed", type=int, help="The seed of the moments of the kills [random].")
@click.option(
    "--resume-with",
    metavar="COMMAND",
    help="The command after a kill, such as one with another number of ranks.",
)
@click.option(
    "--room",
    metavar="FOLDER",
    help="A new folder for the store and the logs, which is kept [a temporary one].",
)
@click.option(
    "--timeout",
    type=duration,
    default="1h",
    show_default=True,
    metavar="TIME",
    help="How long the command may take, each time.",
)
@json_option
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def prove(
    kills: int,
    snapshots: int | None,
    seed: int | None,
    resume_with: str | None,
    room: str | None,
    timeout: float,
    as_json: bool,
    command: tuple[str, ...],
) -> None:
    """Prove that a training resumes: run COMMAND whole and killed, and compare all snapshots.

    COMMAND runs twice as it is, and once more while it is killed by SIGKILL at random moments, with
    all that it has started, and started again. In its arguments, {store} stands for a new folder
    for its snapshots. If two unbroken runs differ, that is said first. If the killed run differs,
    the table has the first snapshot and the paths that differ, and what that usually means.

    The runs share a store in a temporary folder, which is kept if they differ. COMMAND runs in the
    current folder; other files that it writes are not compared. The exit status is 1 if the killed
    run differs, or if unbroken runs differ in weights or moments.
    """
    try:
        resume = shlex.split(resume_with or "")
    except ValueError as e:
        raise click.BadParameter(f"{e}", param_hint="--resume-with") from e
    check_command(command, resume)
    signals = EndingSignals(once=True)
    temporary: Path | None = None
    try:
        if room is None:
            with signals.held():
                temporary = Path(tempfile.mkdtemp(prefix="casnap-prove-"))
        options = Options(
            command=command,
            environment=dict(os.environ),
            room=temporary or Path(local_path(room or "")),
            resume_command=resume,
            kills=kills,
            snapshots=snapshots,
            seed=secrets.randbelow(1 << 32) if seed is None else seed,
            timeout=timeout,
            say=lambda line: say(line, err=as_json),
            held=signals.held,
        )
        proof = proved(options)
    except AttemptError:  # it names a log in the room
        raise
    except BaseException:
        if temporary is not None:
            remove_room(temporary)
        raise
    if as_json:
        emit(_document(proof, options.room))
    else:
        _print(proof, options.room)
    if not proof.ok:
        raise click.exceptions.Exit(1)
    if temporary is not None:
        remove_room(temporary)


def _print(proof: Proof, place: Path) -> None:
    say()
    rows = [
        (proof.unbroken.name, amount(len(proof.unbroken.names), "snapshot"), ""),
        (proof.again.name, amount(len(proof.again.names), "snapshot"), _words(proof.noise)),
        (proof.killed.name, amount(len(proof.killed.names), "snapshot"), _words(proof.result)),
    ]
    table(("RUN", "TOOK", "COMPARED WITH THE FIRST"), rows, numbers=set())
    for name, comparison in ((proof.again.name, proof.noise), (proof.killed.name, proof.result)):
        if comparison.first is not None:
            say()
            first = comparison.differing[0]
            say(f"The first to differ are {proof.unbroken.name}/{first} and {name}/{first}:")
            _print_paths(comparison)
    if left_out := proof.result.left_out:
        say()
        say("These differ, and are not compared:")
        table(("ROLE", "PATH", "WHY"), left_out[:_MOST_PATHS], numbers=set())
        if (more := len(left_out) - _MOST_PATHS) > 0:
            say(f"… and {amount(more, 'path')} more")
    for hint in proof.hints:
        say()
        say(f"The app state leaves out {hint}")
    say()
    if proof.ok:
        kills = amount(len(proof.killed.kills), "kill")
        say(f"PROVEN: {'all else ' if left_out else ''}equal, bit for bit, after {kills}")
        return
    say("NOT PROVEN. This usually means:")
    for cause in proof.causes:
        say(f"  {cause.role}: {cause.text}")
    say(f"The runs and their logs are in {place}; the kills had --seed {proof.seed}")


def _print_paths(comparison: Comparison) -> None:
    assert comparison.first is not None
    rows = [
        (role, change.path, change.kind, change.difference)
        for role, changes in comparison.first.by_role().items()
        for change in changes[: max(1, _MOST_PATHS // len(comparison.first.by_role()))]
    ]
    table(("ROLE", "PATH", "", "DIFFERENCE"), rows, numbers=set())
    if more := len(comparison.first.changes) - len(rows):
        say(f"… and {amount(more, 'path')} more")


def _words(comparison: Comparison) -> str:
    parts = []
    if comparison.differing:
        parts.append(f"differs from {comparison.differing[0]} on")
    if comparison.lacking:
        names = ", ".join(comparison.lacking[:4])
        parts.append(f"only one has {names}")
    if not comparison.compared:
        parts.append("no snapshots to compare")
    return "; ".join(parts) or f"equal: {amount(comparison.compared, 'snapshot')}"


def _document(proof: Proof, place: Path) -> dict[str, Any]:
    return {
        "proven": proof.ok,
        "deterministic": proof.is_deterministic,
        "room": str(place),
        "seed": proof.seed,
        "runs": [
            {
                "name": run.name,
                "snapshot_count": len(run.names),
                "seconds": run.seconds,
                "kills": run.kills,
                "compared_count": None if found is None else found.compared,
                "differing_names": None if found is None else found.differing,
                "lacking_names": None if found is None else found.lacking,
                "paths": None if found is None else sorted(found.paths),
                "left_out": None if found is None else [each._asdict() for each in found.left_out],
            }
            for run, found in _compared_runs(proof)
        ],
        "hints": proof.hints,
        "causes": [{"role": cause.role, "text": cause.text} for cause in proof.causes],
    }


def _compared_runs(proof: Proof) -> list[tuple[Run, Comparison | None]]:
    return [(proof.unbroken, None), (proof.again, proof.noise), (proof.killed, proof.result)]
