"""``casnap run``."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import click

from casnap.cli.output import quote, say

_AT_START = Path(__file__).parent / "at_start"


@click.command("run", context_settings={"allow_interspersed_args": False})
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def run_(command: tuple[str, ...]) -> None:
    """Run a command whose Trainers of Transformers save and resume by casnap.

    No code of the command is changed: each transformers.Trainer that it makes, of a subclass too,
    stores its checkpoints as snapshots, as with CasnapTrainerMixin. That holds for all Python
    processes that the command starts, such as those of torchrun. Checkpoints that a Trainer itself
    has written are still loaded.

    The command gets this process, so its exit status and signals are as without casnap. Its
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
    sys.stdout.flush()
    try:
        os.execvpe(command[0], command, environment)
    except OSError as e:
        say(f"casnap: {quote(command[0])} cannot be run: {e.strerror}", err=True)
        # As a shell says it.
        sys.exit(127 if isinstance(e, FileNotFoundError) else 126)
