"""What the processes of a soak were told, and what the store may hold after it."""

from __future__ import annotations

import contextlib
import json
import os
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from casnap.errors import FencedError, SnapshotExistsError, SnapshotNotFoundError

Event = dict[str, Any]
Taken = tuple[str, int]
"""The name of a snapshot, and which step of its taker it holds."""


class Journal:
    """What the processes told of, in one order: each line is one write at the end of a file."""

    def __init__(self, path: Path, who: str) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC)
        self._who = who

    def note(self, do: str, end: str = "", **more: Any) -> None:
        # A line that a kill cut short spoils no other, and counts as not written.
        line = json.dumps({"who": self._who, "do": do, "end": end, **more})
        os.write(self._fd, f"\n{line}".encode())

    @contextlib.contextmanager
    def noted(self, do: str, **more: Any) -> Iterator[Event]:
        """Note that something begins, then how it ended; what is added on the way is noted too."""
        self.note(do, "begun", **more)
        try:
            yield more
        except (FencedError, SnapshotExistsError, SnapshotNotFoundError) as e:
            self.note(do, type(e).__name__, **more)
        else:
            self.note(do, "done", **more)


def read_journal(path: Path) -> list[Event]:
    events = []
    for line in path.read_text().splitlines() if path.exists() else []:
        with contextlib.suppress(ValueError):
            events.append(json.loads(line))
    return events


# --- what follows from it ----------------------------------------------------------------------


class Expected:
    """What a store may hold after these events.

    Attributes:
        attempts: The takes under each name that may have been committed, in order, from the last
            that was told to be; and that it was.
        maybe_gone: Snapshots that a process began to delete, and may have deleted.
        gone: Snapshots that a process was told are deleted.
    """

    def __init__(self, events: list[Event]) -> None:
        self.attempts: dict[str, list[Taken]] = defaultdict(list)
        self.done: set[Taken] = set()
        self.maybe_gone: set[Taken] = set()
        self.gone: set[Taken] = set()
        self.problems: list[str] = []
        self._begun: set[Taken] = set()
        self._tagged: set[Taken] = set()
        self._tag_tried: set[str] = set()
        self._pruning: dict[str, tuple[str, set[Taken]]] = {}
        for event in events:
            self._follow(event)
        for who in list(self._pruning):
            self._prune_in_doubt(who)

    def _follow(self, event: Event) -> None:
        if event["who"] in self._pruning and event["do"] != "prune":
            # Killed before it was told anything; by now it can delete no more.
            self._prune_in_doubt(event["who"])
        rule = getattr(self, f"_{event['do']}", None)
        if rule is not None:
            rule(event["end"], (event.get("name", ""), event.get("step", 0)), event)

    def _take(self, end: str, taken: Taken, _event: Event) -> None:
        name = taken[0]
        if end == "begun":
            self._begun.add(taken)
            self.attempts[name].append(taken)
        elif end == "done":
            self.done.add(taken)
            at = self.attempts[name].index(taken)
            self.maybe_gone.update(self.attempts[name][:at])
            del self.attempts[name][:at]
        else:
            self.attempts[name].remove(taken)
            if end == "SnapshotExistsError" and name not in self._tag_tried:
                self.problems.append(f"{taken} was refused, though it had no tag")

    def _delete(self, end: str, taken: Taken, _event: Event) -> None:
        if end == "begun":
            self.maybe_gone.add(taken)
        elif end in ("done", "SnapshotNotFoundError"):
            self.gone.add(taken)

    def _prune(self, end: str, _taken: Taken, event: Event) -> None:
        who = event["who"]
        if end == "begun":
            if who in self._pruning:
                self._prune_in_doubt(who)
            self._pruning[who] = (f"{event['prefix']}/", set(self._tagged))
        elif end == "done":
            _, tagged = self._pruning.pop(who)
            gone = {(name, step) for name, step in event["gone"]}
            self.maybe_gone |= gone
            self.gone |= gone
            self.problems += [f"{taken} was tagged, but pruned" for taken in gone & tagged]
        else:
            del self._pruning[who]

    def _prune_in_doubt(self, who: str) -> None:
        prefix, tagged = self._pruning.pop(who)
        self.maybe_gone |= {t for t in self._begun - tagged if t[0].startswith(prefix)}

    def _tag(self, end: str, taken: Taken, _event: Event) -> None:
        # A tagged snapshot is not overwritten.
        self._tag_tried.add(taken[0])
        if end == "done":
            self._tagged.add(taken)

    def _restore(self, end: str, taken: Taken, _event: Event) -> None:
        overwritten = len(self.attempts[taken[0]]) > 1 or taken not in self.attempts[taken[0]]
        pruned = any(taken[0].startswith(prefix) for prefix, _ in self._pruning.values())
        if end == "SnapshotNotFoundError" and not (
            taken in self.maybe_gone or overwritten or pruned
        ):
            self.problems.append(f"a reader was told that {taken} is gone; no process deleted it")

    def problems_with(self, found: dict[str, int]) -> list[str]:
        """Return what is wrong with what a store holds: names and steps."""
        problems = list(self.problems)
        for name, step in found.items():
            if (name, step) not in self.attempts.get(name, ()):
                problems.append(f"{name} holds step {step}, which was not taken, or replaced")
            if (name, step) in self.gone:
                problems.append(
                    f"{name} of step {step} is there, but a process was told that it is not"
                )
        for name, attempts in self.attempts.items():
            sure = any(t in self.done for t in attempts)
            if name not in found and sure and self.maybe_gone.isdisjoint(attempts):
                problems.append(f"{name} is gone, and no process deleted it: {attempts}")
        return problems
