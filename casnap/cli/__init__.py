"""The command ``casnap``: it does from a shell what ``Store`` and ``Snapshot`` do from Python.

Each subcommand is a module that is imported when it is called. Only subcommands that decode tensors
and values import torch: ``import``, ``export``, ``pull --dtype``, ``diff --elements``, ``check``,
``repair``.

The highest layer: no other module but ``__main__`` imports it. It may import the public classes,
``view.py``, ``proving``, ``report``, ``integrations/folders``, and the public functions of lower
folders; the contract ``verbs`` in pyproject.toml lists these. Begin with ``__init__.py``, this
module; then read one subcommand, such as ``rm.py``.
"""

from __future__ import annotations

import errno
import importlib
import logging
import os
import re
import sys
from collections.abc import Sequence
from io import TextIOWrapper
from typing import TYPE_CHECKING

from casnap.runtime.descriptors import opened

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

try:
    import click

    import casnap
    from casnap.cli.output import CommandError, quote, say
    from casnap.errors import CasnapError, nearest
except KeyboardInterrupt:
    # The imports take most of a short command's time, and main() cannot catch an interrupt yet.
    sys.stderr.write("casnap: interrupted\n")
    sys.exit(130)

__all__ = ["cli", "main"]

COMMANDS = {
    "init": ("casnap.cli.init", "Make a store."),
    "ls": ("casnap.cli.ls", "List the snapshots of a store, the newest last."),
    "show": ("casnap.cli.show", "Show the contents of a snapshot, or one entry of it."),
    "diff": ("casnap.cli.diff", "Show the differences between two snapshots."),
    "du": ("casnap.cli.du", "Show disk usage of snapshots: logical, stored and unique bytes."),
    "report": ("casnap.cli.report", "Write a page that shows a store: sizes, metrics, changes."),
    "cp": ("casnap.cli.cp", "Copy snapshots into another store; send only what it lacks."),
    "mirror": ("casnap.cli.mirror", "Show which snapshots the mirror of a store lacks, and why."),
    "import": ("casnap.cli.import_", "Import safetensors, torch.save, DCP or TorchSnapshot files."),
    "pull": ("casnap.cli.pull", "Keep a folder of safetensors at the newest snapshot."),
    "followers": ("casnap.cli.followers", "Show who follows a store, and what each serves."),
    "export": ("casnap.cli.export", "Export a snapshot, or a part of one, to such files."),
    "rm": ("casnap.cli.rm", "Delete snapshots."),
    "rewind": ("casnap.cli.rewind", "Make a run go back to a snapshot, and go on from there."),
    "tag": ("casnap.cli.tag", "Add tags to a snapshot, remove them, or move them."),
    "prune": ("casnap.cli.prune", "Delete the snapshots that no rule keeps."),
    "thin": ("casnap.cli.thin", "Remove from older snapshots what only a resume needs."),
    "who": ("casnap.cli.who", "Say which snapshots hold the weights of a file or a snapshot."),
    "average": ("casnap.cli.average", "Write the mean of snapshots as a new snapshot."),
    "gc": ("casnap.cli.gc", "Collect garbage: delete what no snapshot needs."),
    "check": ("casnap.cli.check", "Check that a store is whole."),
    "repair": ("casnap.cli.repair", "Repair a damaged store as far as possible."),
    "run": ("casnap.cli.run_", "Run a command whose Trainers of Transformers save by casnap."),
    "doctor": ("casnap.cli.doctor", "Find out whether a folder or a bucket can hold a store."),
    "prove": ("casnap.cli.prove", "Prove that a training resumes: run it whole and killed."),
    "config": ("casnap.cli.config", "Show or change the settings of a store."),
    "cache": ("casnap.cli.cache", "Show, or clear, what this host keeps of stores."),
}

EXAMPLES = """\
\b
Examples:
  casnap init /ckpts                       all runs below /ckpts share one store
  casnap ls /ckpts run1                    the snapshots of one run
  casnap show /ckpts/run1/step_100         the contents of a snapshot
  casnap show /ckpts/run1/step_100 0/model/layer.weight
  casnap diff /ckpts/run1/step_100 step_200
  casnap du /ckpts --json                  for scripts: one JSON document
  casnap report /ckpts -o report.html      one page to look at, without reading tensors
  casnap cp /ckpts/run1 s3://bucket/ckpts  send what the bucket lacks of a run
  casnap import base.safetensors models/base/v1
  casnap import old/* models/run1/         many files or folders, each by its own name
  casnap export models/tuned/v1/model tuned.safetensors
  casnap tag /ckpts/run1/step_100 best     neither pruned nor overwritten
  casnap run trl sft --config sft.yaml     its checkpoints are snapshots
  casnap rewind /ckpts/run1/step_100       resume there; later ones are moved aside
  casnap prune /ckpts --keep-last 3 --dry-run
  casnap gc /ckpts --grace 1h              free unreferenced data, while runs go on

\b
A snapshot is named STORE/NAME, as in Python. Without STORE, a command uses the
store at or above the current folder. `casnap COMMAND --help` says more.
"""


class PathOrName(click.types.StringParamType):
    """The type of an argument that names a store, a snapshot or a file. Shells complete a path."""

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        """Let the shell itself complete the argument, as a path."""
        from click.shell_completion import CompletionItem

        return [CompletionItem(incomplete, type="file")]


class Commands(click.Group):
    """Imports a command when it is called, and turns casnap's errors into messages."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of all commands, in the order of the help."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import a command."""
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(COMMANDS[cmd_name][0])
        command: click.Command = getattr(module, module.__name__.rpartition(".")[2])
        for parameter in command.params:
            if isinstance(parameter, click.Argument) and parameter.type is click.STRING:
                parameter.type = PathOrName()
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the command that the arguments name; suggest a name if there is none."""
        name = args[0]
        if name not in COMMANDS and not name.startswith("-"):
            raise click.UsageError(f"No such command {quote(name)}{nearest(name, COMMANDS)}", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write one line of help for each command, without importing the commands."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in COMMANDS.items()])

    def invoke(self, ctx: click.Context) -> object:
        """Run a command; print an error of casnap or the system as one message."""
        try:
            return super().invoke(ctx)
        except CasnapError as e:
            raise CommandError(self._with_flags(ctx, str(e))) from e
        except OSError as e:
            if e.errno == errno.EPIPE:
                raise
            prefix = f"{quote(os.fsdecode(e.filename))}: " if e.filename else ""
            raise CommandError(f"{prefix}{e.strerror or e}") from e

    def _with_flags(self, ctx: click.Context, message: str) -> str:
        """Replace Python arguments in a message by the flags of the command that was called.

        ``overwrite=True`` becomes ``--overwrite``, and ``rank=0 (--rank 0)`` becomes ``--rank 0``.
        """
        command = self.get_command(ctx, ctx.invoked_subcommand or "")
        options = [] if command is None else command.params
        flags = {o.name: o.opts[0] for o in options if o.opts[0].startswith("--")}
        message = re.sub(r"\b[a-z_]+=\w* \((--[a-z-]+[^)]*)\)", r"\1", message)

        def flag(match: re.Match[str]) -> str:
            return flags.get(match[1], match[0])

        return re.sub(r"(?<=[ (])([a-z_]+)=(?:True\b|(?=[ ,;)]|$))", flag, message)


_SETTINGS = {"max_content_width": 100, "help_option_names": ["-h", "--help"]}


@click.group("casnap", cls=Commands, epilog=EXAMPLES, context_settings=_SETTINGS)
@click.version_option(casnap.__version__, message="%(prog)s %(version)s")
def cli() -> None:
    """A content-addressed, deduplicating checkpoint store for PyTorch."""


class _EscapedLog(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        """Print a line of a log, escaped as all other output is."""
        say(record.getMessage(), err=True)


def main() -> None:
    """Run the command line, and exit with its status."""
    # Warnings contain names from a store, so they are escaped too.
    logging.lastResort = _EscapedLog(logging.WARNING)
    sys.exit(run(sys.argv[1:]))


def run(arguments: Sequence[str]) -> int:
    """Run the command line and return its status: 0, 1 (error), 2 (usage) or 130 (interrupt)."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        status = cli.main(list(arguments), prog_name="casnap", standalone_mode=False)
        sys.stdout.flush()
    except click.ClickException as e:
        e.show()
        return e.exit_code
    except (click.Abort, KeyboardInterrupt):
        say("casnap: interrupted", err=True)
        return 130
    except BrokenPipeError:
        # The reader of stdout is gone. Drop the rest of the buffer, so that exit does not fail too.
        with opened(os.devnull, os.O_WRONLY) as fd:
            os.dup2(fd, sys.stdout.fileno())
        return 1
    except Exception as e:
        if os.environ.get("CASNAP_TRACEBACK"):
            raise
        error = f"{type(e).__name__}: {e}"
        say(f"casnap: unexpected {error} (CASNAP_TRACEBACK=1 says more)", err=True)
        return 1
    return status if isinstance(status, int) else 0
