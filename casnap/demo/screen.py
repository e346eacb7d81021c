"""The lines that the demo shows to the user."""

from __future__ import annotations

import sys
from typing import Any

import click

from casnap.demo.plan import Plan
from casnap.runtime.sizes import size

Event = dict[str, Any]
"""A message of a training process; its key ``event`` says what happened."""
HEADER = (
    f"  {'snapshot':<16}{'trained':<10}{'loss':>7}{'logical':>11}{'new':>11}{'casnap':>10}"
    f" | {'torch.save':>10}"
)


class Screen:
    """Prints lines for the user, and on a terminal a status line below them."""

    def __init__(self, *, silent: bool) -> None:
        """Write to stdout, or nowhere if ``silent``."""
        self.silent = silent
        self.live = not silent and sys.stdout.isatty()

    def say(self, text: str = "", *, bold: bool = False) -> None:
        """Print a line, or several."""
        if not self.silent:
            self.status("")
            click.echo(click.style(text, bold=True) if bold else text)
            sys.stdout.flush()

    def status(self, text: str) -> None:
        """On a terminal, show ``text`` until the next line or status."""
        if self.live:
            click.echo(f"\r\x1b[K{text}", nl=False)
            sys.stdout.flush()

    def show(self, event: Event, plan: Plan) -> None:
        """Show one event of a training process."""
        match event["event"]:
            case "base":
                self.status(f"  base model: step {event['step']}, loss {event['loss']:.3f}")
            case "step":
                self.status(f"  step {event['step']} of {plan.steps}, loss {event['loss']:.3f}")
            case "taking":
                self.status(f"  taking {event['name']}")
            case "model":
                self.status(f"  a GPT of {event['parameters'] / 1e6:.1f} million parameters")
            case "restored":
                self.say(
                    f"  {event['name']} is restored in {event['seconds']:.3f} s:"
                    f" on from step {event['step']}."
                )
            case "saved":
                self.say(row_text(event))


def row_text(row: Event) -> str:
    """Return one row of the table of takes."""
    return (
        f"  {row['name']:<16}{row['phase']:<10}{row['loss']:7.3f}{size(row['logical']):>11}"
        f"{size(row['new']):>11}{row['seconds']:8.3f} s"
        f" | {size(row['saved_bytes']):>10}{row['saved_seconds']:8.3f} s"
    )
