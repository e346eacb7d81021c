"""Write docs/commands.md, the help of each command: ``python -m tools.commands_page``."""

from __future__ import annotations

from pathlib import Path

import click

from casnap.cli import COMMANDS, cli

PAGE = Path(__file__).resolve().parent.parent / "docs/commands.md"
WIDTH = 100

HEAD = """\
# All commands

You want to look up a command or an option. This page is what `casnap COMMAND --help` prints.
[Operating](guides/operating.md) says when to use which command, and
[how shells complete them](guides/operating.md#in-a-shell).

| command | |
|---|---|
"""


def page() -> str:
    """Return the page."""
    group = cli.make_context("casnap", ["--help"], resilient_parsing=True, terminal_width=WIDTH)
    rows = [f"| [{name}](#casnap-{name}) | {line} |" for name, (_, line) in COMMANDS.items()]
    parts = [HEAD + "\n".join(rows)]
    for name in COMMANDS:
        command = cli.get_command(group, name)
        assert command is not None
        text = command.get_help(click.Context(command, group, name))
        parts.append(f"## casnap {name}\n\n```text\n{text}\n```")
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
