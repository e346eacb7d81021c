"""``casnap run``."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import IO

import click

from casnap.cli.output import quote, say
from casnap.errors import nearest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_AT_START = Path(__file__).parent / "at_start"
_SETTINGS = ("weights", "witness_steps", "on_mismatch")
"""The options that a file may set too; ``casnap.integrations.transformers.install`` takes them."""


def _read_settings(ctx: click.Context, _param: click.Parameter, file: IO[bytes] | None) -> None:
    """Take the settings of a file as the defaults of the options."""
    if file is None:
        return
    try:
        settings = tomllib.load(file)
    except ValueError as e:
        raise click.BadParameter(f"{quote(file.name)} is no TOML: {e}") from e
    for name in settings.keys() - {*_SETTINGS}:
        raise click.BadParameter(
            f"{quote(file.name)} has an unknown setting, {quote(name)}{nearest(name, _SETTINGS)}. "
            f"The settings are: {', '.join(_SETTINGS)}"
        )
    ctx.default_map = settings


@click.command("run", context_settings={"allow_interspersed_args": False})
@click.option(
    "--weights",
    type=click.Choice(["last", "all", "none"]),
    help="Which checkpoints' folders have a model.safetensors: the last one's and the best one's, "
    "all of them, or none [last].",
)
@click.option(
    "--witness-steps",
    type=click.IntRange(min=0),
    metavar="N",
    help="After each checkpoint, keep digests of N steps. A run that resumes compares its own [0].",
)
@click.option(
    "--on-mismatch",
    type=click.Choice(["warn", "raise"]),
    help="Whether a resumed run that computes something else is warned of, or ends [warn].",
)
@click.option(
    "--config",
    type=click.File("rb"),
    metavar="FILE",
    is_eager=True,
    expose_value=False,
    callback=_read_settings,
    help='A TOML file with these settings, such as: weights = "all". Options come before it.',
)
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def run_(command: tuple[str, ...], **settings: str | int | None) -> None:
    """Run a command whose Trainers of Transformers save and resume by casnap.

    No code of the command is changed: each transformers.Trainer that it makes, of a subclass too,
    stores its checkpoints as snapshots, as with CasnapTrainerMixin. That holds for all Python
    processes that the command starts, such as those of torchrun. Checkpoints that a Trainer itself
    has written are still loaded.

    The command replaces this process, so its exit status and signals are as without casnap. Its
    environment has one folder more in PYTHONPATH; a Python that ignores that variable (python -I)
    goes on without casnap.
    """
    folders = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    others = [folder for folder in folders if folder not in ("", str(_AT_START))]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(_AT_START), *others]),
        "CASNAP_RUN": str(os.getpid()),
    }
    if given := {name: value for name, value in settings.items() if value is not None}:
        environment["CASNAP_RUN_SETTINGS"] = json.dumps(given)
    sys.stdout.flush()
    try:
        os.execvpe(command[0], command, environment)
    except OSError as e:
        say(f"casnap: {quote(command[0])} cannot be run: {e.strerror}", err=True)
        # As a shell says it.
        sys.exit(127 if isinstance(e, FileNotFoundError) else 126)
