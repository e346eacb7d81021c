"""``casnap demo``: a real fine-tuning that is killed and resumed, in front of the user's eyes.

The training is :mod:`casnap.cli.demo_training`, in processes of its own: one that is killed by
SIGKILL, one that resumes from the newest snapshot, and one that runs through for comparison.
This module starts them, shows what they tell, and judges; it never imports torch.
"""

from __future__ import annotations

import json
import random
import re
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import click

from casnap.cli.output import Failure, emit, json_option, size

Event = dict[str, Any]

# More would hardly be faster for so small a model, and slower where cores are shared.
THREADS = 1
SHOWN_LINES, LAST_LINES = 14, 4
READ_PATH = "0/model/blocks.1.qkv.weight"
HEADER = (
    f"  {'snapshot':<16}{'trained':<10}{'loss':>7}{'logical':>11}{'new':>11}{'casnap':>10}"
    f" | {'torch.save':>10}"
)


@dataclass(frozen=True)
class Plan:
    """What a training process is to do.

    Attributes:
        store: The store's folder.
        run: The prefix of this run's snapshots.
        start: The snapshot to start from; None for the newest of the run, if any.
        takes: Whether snapshots are taken on the way.
        scratch: The folder that ``torch.save`` writes to.
        seed: The seed of everything random.
        threads: The number of threads that torch uses.
        base_steps: Steps of the training before the fine-tuning.
        steps: Steps of the fine-tuning.
        adapter_steps: How many of them train the adapters alone.
        take_every: Steps from one take to the next.
        width: Width of the model, a multiple of 32.
        layers: Number of transformer layers.
        context: Bytes of text that the model sees at once.
        batch: Windows of text in a step.
    """

    store: str
    run: str
    start: str | None
    takes: bool
    scratch: str
    seed: int
    threads: int
    base_steps: int
    steps: int
    adapter_steps: int
    take_every: int
    width: int = 256
    layers: int = 6
    context: int = 64
    batch: int = 8


@dataclass
class Outcome:
    """What one training process told before it ended or was killed.

    Attributes:
        rows: The takes that were also saved by ``torch.save``.
        losses: The loss of each step of the fine-tuning, by its number.
        taken: The step of the newest snapshot that a take has returned.
        last: The last event.
        restored: The event of the restore that it began with, if it did.
    """

    rows: list[Event] = field(default_factory=list)
    losses: dict[int, float] = field(default_factory=dict)
    taken: int = 0
    last: Event = field(default_factory=dict)
    restored: Event | None = None


class Screen:
    """Lines for the user, and on a terminal one line that tells what goes on right now."""

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


# --- training processes -----------------------------------------------------------------------


@contextmanager
def training_process(plan: Plan) -> Iterator[subprocess.Popen[str]]:
    """Start a training process; on the way out none is left."""
    command = [sys.executable, "-m", "casnap.cli.demo_training", json.dumps(asdict(plan))]
    # In a session of its own, so that Ctrl-C is answered once, and here.
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()


def events(process: subprocess.Popen[str]) -> Iterator[Event]:
    """Yield what a process tells until it ends; a line cut short by its end is left out."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.endswith("\n"):
            yield json.loads(line)


def note(outcome: Outcome, event: Event) -> None:
    """Add an event to what is known of a process."""
    outcome.last = event
    match event["event"]:
        case "taken":
            outcome.taken = event["step"]
        case "saved":
            outcome.rows.append(event)
        case "step":
            outcome.losses[event["step"]] = event["loss"]
        case "restored":
            outcome.restored = event


def train(plan: Plan, screen: Screen) -> Outcome:
    """Run a training process to its end.

    Raises:
        Failure: It failed.
    """
    outcome = Outcome()
    with training_process(plan) as process:
        for event in events(process):
            note(outcome, event)
            screen.show(event, plan)
    screen.status("")
    if process.returncode != 0 or outcome.last.get("event") != "done":
        text = f"the training process failed (exit status {process.returncode}); see above"
        raise Failure(text)
    return outcome


def train_and_kill(plan: Plan, screen: Screen) -> Outcome:
    """Run a training process and kill it by SIGKILL at some moment about half-way.

    Raises:
        Failure: It ended before that.
    """
    takes = plan.steps // plan.take_every
    victim = random.randint(max(2, takes // 3), max(2, takes * 2 // 3)) * plan.take_every
    outcome = Outcome()
    began: list[float] = []
    timer: threading.Timer | None = None
    with training_process(plan) as process:
        for event in events(process):
            note(outcome, event)
            screen.show(event, plan)
            if event["event"] == "taking":
                began.append(time.perf_counter())
                if event["step"] == victim:
                    delay = kill_delay(began, outcome.rows)
                    timer = threading.Timer(delay, process.send_signal, (signal.SIGKILL,))
                    timer.start()
    if timer is not None:
        timer.cancel()
    screen.status("")
    if process.returncode != -signal.SIGKILL:
        status = f"exit status {process.returncode}"
        text = f"the training process ended before it was killed ({status}); see above"
        raise Failure(text)
    return outcome


def kill_delay(began: list[float], rows: list[Event]) -> float:
    """Choose a moment after the start of a take: half of the time within it, else up to the next.

    Args:
        began: When takes began, in seconds; the last of them has just begun.
        rows: The takes that are complete.
    """
    take_seconds = statistics.median(row["seconds"] for row in rows)
    period = began[-1] - began[-2]
    return random.uniform(0, random.choice((take_seconds, period)))


def moment(event: Event) -> str:
    """Say what a process was doing when it was killed, by its last event."""
    match event["event"]:
        case "taking":
            return f"in the middle of the take of {event['name']}"
        case "taken":
            return f"just after the take of {event['name']}"
        case "saved":
            return f"in the step after the take of {event['name']}"
        case _:
            return f"after step {event['step']}"


# --- what came of it --------------------------------------------------------------------------


def say_totals(rows: list[Event], screen: Screen) -> None:
    """Say what casnap and ``torch.save`` wrote, in each phase and in all."""
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


def differences(killed: Outcome, resumed: Outcome, whole: Outcome) -> list[str]:
    """Compare the run that was killed and resumed to the one that ran through, bit for bit.

    Returns:
        A line for each difference; empty when there is none.
    """
    lines = []
    if resumed.restored is None or resumed.restored["step"] < killed.taken:
        lines.append(f"the snapshot of step {killed.taken}, which was complete, is not found")
    curve = resumed.last["losses"]
    for step, expected in enumerate(whole.last["losses"], 1):
        told = (curve[step - 1], killed.losses.get(step), resumed.losses.get(step))
        lines += [
            f"step {step}: the loss is {loss!r}, in the run that went through {expected!r}"
            for loss in told
            if loss is not None and loss != expected
        ]
    if resumed.last["digest"] != whole.last["digest"]:
        lines.append("the final weights or the final state of the optimizer differ")
    return lines


def say_verdict(resumed: Outcome, different: list[str], screen: Screen) -> None:
    """Say whether the two runs are equal."""
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
    """Run a command and show the first and the last lines of what it prints.

    Raises:
        Failure: It failed.
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
        text = f"`{name}` failed (exit status {done.returncode}); see above"
        raise Failure(text)


def show_read(path: str, screen: Screen) -> None:
    """Read one tensor of the snapshot at ``path`` in a new process, by code that is shown."""
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


# --- the command ------------------------------------------------------------------------------


def next_run(folder: Path) -> int:
    """Return the number of the first run that ``folder`` does not hold yet.

    Raises:
        Failure: Something else is there.
    """
    if not folder.exists():
        return 1
    if not folder.is_dir():
        text = f"{folder} is not a folder; name a new one"
        raise Failure(text)
    if not folder.joinpath("casnap.json").exists() and any(folder.iterdir()):
        text = f"{folder} holds something else than a casnap store; name a new or an empty folder"
        raise Failure(text)
    found = (re.fullmatch(r"run(\d+)", path.name) for path in folder.iterdir())
    return max((int(match[1]) for match in found if match), default=0) + 1


def plan_for(folder: str, number: int, *, steps: int, quick: bool, seed: int | None) -> Plan:
    """Plan the run; ``scratch`` is still to be named."""
    every = max(1, steps // 20)
    plan = Plan(
        store=folder,
        run=f"run{number}",
        start=None,
        takes=True,
        scratch="",
        seed=number if seed is None else seed,
        threads=THREADS,
        base_steps=60,
        steps=steps,
        adapter_steps=max(1, steps * 3 // 4 // every) * every,
        take_every=every,
    )
    return replace(plan, base_steps=4, width=64, layers=2) if quick else plan


def perform(plan: Plan, screen: Screen) -> dict[str, Any]:
    """Train, kill, resume, compare.

    Returns:
        What happened, for ``--json``.
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
        "takes": rows,
        "killed": moment(killed.last),
        "resumed_from": resumed.restored["name"] if resumed.restored else None,
        "losses": resumed.last["losses"],
        "equal": not different,
        "differences": different,
    }


def show_store(plan: Plan, screen: Screen) -> None:
    """Read one tensor, and look at the store by commands."""
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
    """Return what the user types to run casnap: its path where it is not on the PATH."""
    here = Path(sys.argv[0])
    if here.name != "casnap" or shutil.which("casnap") is not None:
        return "casnap"
    return shlex.quote(str(here))


@click.command("demo")
@click.argument("folder", type=click.Path(), default="casnap-demo")
@click.option("--steps", type=click.IntRange(min=8), help="Steps of the fine-tuning [80].")
@click.option("--quick", is_flag=True, help="A tiny model and a few steps.")
@click.option("--seed", type=int, help="Seed of everything random [the number of the run].")
@json_option
def demo(folder: str, steps: int | None, quick: bool, seed: int | None, as_json: bool) -> None:
    """Fine-tune a small GPT, kill it, resume it, and look at the store in FOLDER.

    FOLDER is ./casnap-demo unless another is named. It may hold the store of an earlier demo:
    the snapshots of this one are then run2/…, run3/… Nothing is downloaded.
    """
    started = time.perf_counter()
    screen = Screen(silent=as_json)
    number = next_run(Path(folder))
    if not Path(folder, "casnap.json").exists():
        show_command(["init", folder], screen)
    plan = plan_for(folder, number, steps=steps or (12 if quick else 80), quick=quick, seed=seed)
    # In the store's folder, so that torch.save writes to the same disk.
    with tempfile.TemporaryDirectory(prefix=".demo-", dir=folder) as scratch:
        result = perform(replace(plan, scratch=scratch), screen)
    if as_json:
        emit(result)
    else:
        show_store(plan, screen)
        screen.say(f"\nDone in {time.perf_counter() - started:.0f} s.")
    if not result["equal"]:
        sys.exit(1)


if __name__ == "__main__":
    demo()
