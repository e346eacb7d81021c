"""The demo: train, kill, resume, compare, and look at the store."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from casnap.demo.plan import DemoError, Plan
from casnap.demo.processes import Outcome, differences, moment, train, train_and_kill
from casnap.demo.screen import HEADER, Event, Screen
from casnap.runtime.sizes import size

SHOWN_LINES, LAST_LINES = 14, 4
READ_PATH = "0/model/blocks.1.qkv.weight"


def perform(plan: Plan, screen: Screen) -> dict[str, Any]:
    """Train, kill, resume, compare.

    Returns:
        The results, for ``--json``.
    """
    screen.say("\n1. A base model is trained on Python's sources, then fine-tuned on its manual:")
    screen.say("   adapters on a frozen backbone, then all weights; a take every few steps.")
    screen.say("   The process will be killed by SIGKILL at a random moment.\n")
    screen.say(HEADER, bold=True)
    killed = train_and_kill(plan, screen)
    screen.say(f"  SIGKILL {moment(killed.last)}", bold=True)

    screen.say("\n2. A new process resumes from store.latest():\n")
    resumed = train(plan, screen)
    rows = killed.rows + resumed.rows
    say_totals(rows, screen)

    screen.say("\n3. A third process runs through from the base model, without a take:\n")
    whole = train(replace(plan, start=f"{plan.run}/base", takes=False), screen)
    different = differences(killed, resumed, whole)
    say_verdict(resumed, different, screen)
    return {
        "store": plan.store,
        "run": plan.run,
        "takes": list(map(_take_fields, rows)),
        "killed": moment(killed.last),
        "resumed_from": resumed.restored["name"] if resumed.restored else None,
        "losses": resumed.last["losses"],
        "equal": not different,
        "differences": different,
    }


def _take_fields(row: Event) -> dict[str, Any]:
    kept = ("name", "phase", "step", "loss", "seconds", "saved_seconds", "saved_bytes")
    amounts = {"logical_bytes": row["logical"], "new_bytes": row["new"]}
    return {**{key: row[key] for key in kept}, **amounts}


def show_store(plan: Plan, screen: Screen) -> None:
    """Read one tensor, and run commands that show the store."""
    run, every = f"{plan.store.rstrip('/')}/{plan.run}", plan.take_every
    first, second, last = (f"{run}/step_{take * every:04d}" for take in (1, 2, plan.steps // every))
    screen.say("\n4. One tensor is read; only its chunks are touched:\n")
    show_read(last, screen)
    screen.say("\n5. The store, by commands:")
    show_command(["ls", plan.store], screen)
    show_command(["du", plan.store], screen)
    show_command(["diff", first, second], screen)
    screen.say(f"\nThe store is left in {plan.store}. To try next:", bold=True)
    typed = _as_typed()
    screen.say(f"  {typed} show {shlex.quote(last)} {READ_PATH}")
    screen.say(f"  {typed} rm {shlex.quote(first)}")
    screen.say(f"  {typed} demo {shlex.quote(plan.store)}    # another run in the same store")


def _as_typed() -> str:
    """Return the command that runs casnap: with its path where it is not on the PATH."""
    here = Path(sys.argv[0])
    if here.name != "casnap" or shutil.which("casnap") is not None:
        return "casnap"
    return shlex.quote(str(here))


def say_totals(rows: list[Event], screen: Screen) -> None:
    """Show how much casnap and ``torch.save`` wrote, for each phase and in all."""
    screen.say()
    for phase in ("base", "adapters", "all", None):
        chosen = [row for row in rows if phase in (row["phase"], None)]
        if not chosen:
            continue
        new, saved = (sum(row[key] for row in chosen) for key in ("new", "saved_bytes"))
        seconds, saved_seconds = (
            sum(row[key] for row in chosen) for key in ("seconds", "saved_seconds")
        )
        screen.say(
            f"  {'in all' if phase is None else phase:<9}{len(chosen):>3} takes:"
            f" casnap {size(new):>9} in {seconds:6.2f} s,"
            f" torch.save {size(saved):>9} in {saved_seconds:6.2f} s;"
            f" bytes {saved / max(new, 1):5.1f} : 1",
            bold=phase is None,
        )


def say_verdict(resumed: Outcome, different: list[str], screen: Screen) -> None:
    """Show whether the two runs are equal."""
    if not different:
        count = len(resumed.last["losses"])
        screen.say(f"  {count} of {count} losses are equal bit for bit, and so are the final")
        screen.say(f"  weights and optimizer (digest {resumed.last['digest']}).")
        screen.say("  Verdict: EQUAL. Being killed has changed nothing.", bold=True)
        return
    for line in different[:SHOWN_LINES]:
        screen.say(f"  {line}")
    screen.say(f"  Verdict: DIFFERENT in {len(different)} places.", bold=True)


def show_command(arguments: list[str], screen: Screen) -> None:
    """Run a casnap command, and show it as a user would type it."""
    command = f"casnap {shlex.join(arguments)}"
    screen.say(f"\n$ {command}", bold=True)
    show_output(command, [sys.executable, "-m", "casnap.cli", *arguments], screen)


def show_output(name: str, command: list[str], screen: Screen) -> None:
    """Run a command and show the first and the last lines of its output.

    Raises:
        DemoError: The command failed.
    """
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    lines = done.stdout.splitlines()
    left_out = len(lines) - SHOWN_LINES
    if left_out > 1:
        middle = f"… {left_out} lines …"
        lines = [*lines[: SHOWN_LINES - LAST_LINES], middle, *lines[-LAST_LINES:]]
    for line in lines:
        screen.say(line)
    if done.returncode != 0:
        raise DemoError(f"`{name}` failed (exit status {done.returncode}); see above")


def show_read(path: str, screen: Screen) -> None:
    """Read one tensor of the snapshot at ``path`` in a new process, and show the code."""
    code = f"""\
import time, torch
from casnap import Snapshot
start = time.perf_counter()
weight = Snapshot({path!r}).read_object("{READ_PATH}")
seconds = time.perf_counter() - start
print(weight.dtype, tuple(weight.shape), f"{{weight.nbytes:,}} bytes in {{seconds:.4f}} s")"""
    for line in code.splitlines():
        screen.say(f">>> {line}")
    show_output("python", [sys.executable, "-c", code], screen)
