"""The training processes of the demo: run to the end, or killed on the way."""

from __future__ import annotations

import json
import random
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field

from casnap.demo.plan import DemoError, Plan
from casnap.demo.screen import Event, Screen

_random = random.SystemRandom()


@dataclass
class Outcome:
    """What one training process reported before it ended or was killed.

    Attributes:
        rows: The takes that were also saved by ``torch.save``.
        losses: The loss of each step of the fine-tuning, by the number of the step.
        taken: The step of the last take that returned.
        last: The last event.
        restored: The event of the restore at the beginning, if there was one.
    """

    rows: list[Event] = field(default_factory=list)
    losses: dict[int, float] = field(default_factory=dict)
    taken: int = 0
    last: Event = field(default_factory=dict)
    restored: Event | None = None


@contextmanager
def training_process(plan: Plan) -> Iterator[subprocess.Popen[str]]:
    """Start a training process; on the way out, end it if it still runs."""
    command = [sys.executable, "-m", "casnap.demo.training", json.dumps(asdict(plan))]
    # In a session of its own, so that only this process gets Ctrl-C.
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()


def events(process: subprocess.Popen[str]) -> Iterator[Event]:
    """Yield the events of a process until it ends, except a line that its end has cut off."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.endswith("\n"):
            yield json.loads(line)


def note(outcome: Outcome, event: Event) -> None:
    """Record an event of a process."""
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
        DemoError: The process failed.
    """
    outcome = Outcome()
    with training_process(plan) as process:
        for event in events(process):
            note(outcome, event)
            screen.show(event, plan)
    screen.status("")
    if process.returncode != 0 or outcome.last.get("event") != "done":
        raise DemoError(
            f"the training process failed (exit status {process.returncode}); see above"
        )
    return outcome


def train_and_kill(plan: Plan, screen: Screen) -> Outcome:
    """Run a training process and kill it by SIGKILL at a random moment about half-way.

    Raises:
        DemoError: The process ended before that.
    """
    takes = plan.steps // plan.take_every
    victim = _random.randint(max(2, takes // 3), max(2, takes * 2 // 3)) * plan.take_every
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
        raise DemoError(f"the training process ended before it was killed ({status}); see above")
    return outcome


def kill_delay(began: list[float], rows: list[Event]) -> float:
    """Choose when to kill, in seconds after the start of a take.

    In half of the cases this is within the take, in the others before the next take begins.

    Args:
        began: The times at which takes began. The last one has just begun.
        rows: The takes that are complete.
    """
    take_seconds = statistics.median(row["seconds"] for row in rows)
    period = began[-1] - began[-2]
    return _random.uniform(0, _random.choice((take_seconds, period)))


def moment(event: Event) -> str:
    """Return what a process was doing when it was killed, by its last event."""
    match event["event"]:
        case "taking":
            return f"in the middle of the take of {event['name']}"
        case "taken":
            return f"just after the take of {event['name']}"
        case "saved":
            return f"in the step after the take of {event['name']}"
        case _:
            return f"after step {event['step']}"


def differences(killed: Outcome, resumed: Outcome, whole: Outcome) -> list[str]:
    """Compare the run that was killed and resumed with the one that ran through, bit for bit.

    Returns:
        A line for each difference.
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
