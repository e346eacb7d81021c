"""The rules of a retention, which say which snapshots to keep.

The rules are pure functions of the rows of a table and the time. ``pruning.py`` applies them to
stores.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import nsmallest
from typing import Literal, TypeAlias

from casnap.format.records import Row
from casnap.runtime.units import Duration, count_of, seconds_of
from casnap.storage.reading.table import Table
from casnap.storage.snapshots.runs import Run, runs_of
from casnap.storage.snapshots.thinning import check_rules

Best: TypeAlias = tuple[str, int] | tuple[str, int, Literal["min", "max"]]

# Python refuses to read very long numbers; no component of a name has more characters.
_NUMBER = re.compile("[0-9]{1,255}")
_NAMED_STEP = re.compile(r"(?<![a-zA-Z])step[=_]([0-9]{1,255})(?!\.?[0-9])")
_MODES = ("min", "max")
LAST_HEALTHY = "all later ones have NaN or infinite elements"
"""The reason to keep the last healthy snapshot of a run: the run may have to go back to it."""


@dataclass(frozen=True, kw_only=True)
class Retention:
    """Rules that say which snapshots to keep. A snapshot is kept if any rule keeps it.

    The rules apply to each *run* on its own: the snapshots of one folder, in the order of their
    commits. Tagged snapshots are always kept, and so are snapshots that wait for their copy in
    another store. If the last snapshot of a run is unhealthy (see :class:`HealthOptions`), the last
    healthy one is kept too, and is not thinned. Snapshots that a rewind has moved aside (see
    :meth:`Store.rewind`) count as the oldest of their run for ``keep_last``; ``keep_every`` and
    ``keep_best`` skip them.

    Args:
        keep_last: How many of the newest snapshots to keep.
        keep_every: Keep snapshots whose step is a multiple of this. The step is
            ``metadata["step"]`` if that is an int. Else it is the only number in the last component
            of the name; if there are several, the one after ``step=`` or ``step_``. A snapshot
            without a step is kept, and a warning says so once.
        keep_within: Keep snapshots that were taken at most this long ago, by the clocks of the
            writers: ``"7d"``, a ``timedelta``, or seconds. A snapshot with a time in the future is
            kept.
        keep_best: ``(metric, count)`` keeps the snapshots with the lowest ``metadata[metric]``;
            ``(metric, count, "max")`` keeps the snapshots with the highest. If values are equal,
            the newer snapshot counts as better. A list of such rules is possible. While no snapshot
            of a run has the metric as a number, all are kept.
        thin: ``{"optim/**": 2}`` lets the two newest snapshots of each run keep these keys of the
            app state. Older snapshots stay, but lose the keys; see :meth:`Store.thin`. Without
            another rule, all snapshots are kept.

    Raises:
        ValueError: There is no rule, so that nothing would be kept, or a rule is impossible.
        TypeError: ``keep_within`` is no time.
    """

    keep_last: int | None = None
    keep_every: int | None = None
    keep_within: Duration | None = None
    keep_best: Best | Sequence[Best] = ()
    thin: Mapping[str, int] | None = field(default=None, hash=False)

    def __post_init__(self) -> None:
        for rule in ("keep_last", "keep_every"):
            if (count := getattr(self, rule)) is not None:
                object.__setattr__(self, rule, count_of(rule, count))
        # One form for each rule, so that equal retentions compare equal.
        if self.keep_within is not None:
            seconds = seconds_of("keep_within", self.keep_within, above_zero=True)
            object.__setattr__(self, "keep_within", seconds)
        object.__setattr__(self, "keep_best", _best_rules(self.keep_best))
        if self.thin is not None:
            object.__setattr__(self, "thin", check_rules(self.thin))
        if all(not getattr(self, rule) for rule in self.__dataclass_fields__):
            raise ValueError(
                "a retention without a rule would delete everything; give at least one of "
                "keep_last, keep_every, keep_within, keep_best and thin"
            )

    @property
    def asks_metadata(self) -> bool:
        """Whether a rule depends on the metadata of snapshots."""
        return self.keep_every is not None or bool(self.keep_best)

    def reasons(self, run: Run, now: float) -> dict[str, list[str]]:
        """Return, for each snapshot of a run, the reasons to keep it; no reason if it is not kept.

        Args:
            run: The run. Snapshots that a rewind has moved aside come first.
            now: The time, in seconds since the epoch.

        Returns:
            The name of each snapshot → the reasons.
        """
        reasons: dict[str, list[str]] = {name: [] for name, _ in run.snapshots}
        for name, reason in self._reasons_to_keep(run, now):
            reasons[name].append(reason)
        return reasons

    def _reasons_to_keep(self, run: Run, now: float) -> Iterator[tuple[str, str]]:
        live = [(name, row) for name, row in run.snapshots if not row.is_rewound]
        yield from ((name, hold) for name, row in run.snapshots for hold in row.holds)
        if run.last_healthy:
            yield run.last_healthy, LAST_HEALTHY
        if not any((self.keep_last, self.keep_every, self.keep_within, self.keep_best)):
            yield from ((name, "only thinned") for name, _ in run.snapshots)
        if self.keep_last is not None:
            yield from ((name, f"last {self.keep_last}") for name, _ in run.newest(self.keep_last))
        if self.keep_every is not None:
            yield from _multiples(live, self.keep_every)
        if self.keep_within is not None:
            seconds = seconds_of("keep_within", self.keep_within)
            # Written so that a time of NaN counts as recent.
            recent = (name for name, row in run.snapshots if not now - row.time > seconds)
            yield from ((name, f"within {_duration(seconds)}") for name in recent)
        for rule in _best_rules(self.keep_best):
            yield from _best(live, *rule)


def _multiples(snapshots: Sequence[tuple[str, Row]], every: int) -> Iterator[tuple[str, str]]:
    for name, row in snapshots:
        step = step_of(name, row)
        if step is None:
            yield name, f"every {every}: it has no step"
        elif step % every == 0:
            yield name, f"every {every}"


def step_of(name: str, row: Row) -> int | None:
    """Return the step of a snapshot; None if neither its metadata nor its name tell it.

    If a name has several numbers, only one after ``step=`` or ``step_`` counts: others may be an
    epoch, a metric or a version.
    """
    step = row.metadata.get("step")
    if isinstance(step, int) and not isinstance(step, bool):
        return step
    base_name = name.rpartition("/")[2]
    numbers = _NUMBER.findall(base_name)
    if len(numbers) != 1:
        numbers = _NAMED_STEP.findall(base_name)
    return int(numbers[0]) if len(numbers) == 1 else None


def _best(
    snapshots: Sequence[tuple[str, Row]], metric: str, count: int, mode: str
) -> Iterator[tuple[str, str]]:
    reason = f"best {count} by {metric}"
    sign = 1 if mode == "min" else -1
    ranked = [
        (sign * value, -age, name)
        for age, (name, row) in enumerate(snapshots)
        if (value := _number(row.metadata.get(metric))) is not None
    ]
    if not ranked:
        reason = f"{reason}: none of the run has it"
        ranked = [(0, 0, name) for name, _ in snapshots]
        count = len(snapshots)
    yield from ((name, reason) for _, _, name in nsmallest(count, ranked))


def unknown_metrics(retention: Retention, rows: Iterable[Row]) -> list[str]:
    """Return the metrics of ``keep_best`` for which no row has a number.

    A rule by such a metric keeps all rows.
    """
    metadata = [row.metadata for row in rows]
    metrics = (metric for metric, *_ in _best_rules(retention.keep_best))
    return [m for m in metrics if all(_number(each.get(m)) is None for each in metadata)]


def _number(value: object) -> float | None:
    # Only NaN is not equal to itself; math.isnan refuses ints that no float can hold.
    if isinstance(value, int | float) and not isinstance(value, bool) and value == value:
        return value
    return None


def _duration(seconds: float) -> str:
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds % size == 0:
            return f"{seconds / size:g}{unit}"
    return f"{seconds:g}s"


# --- checking the arguments --------------------------------------------------------------------


def _best_rules(value: object) -> tuple[tuple[str, int, str], ...]:
    if not isinstance(value, list | tuple):
        raise _no_best_rule(value)
    rules = [value] if value and isinstance(value[0], str) else value
    return tuple(_best_rule(rule) for rule in rules)


def _best_rule(rule: object) -> tuple[str, int, str]:
    if not isinstance(rule, list | tuple) or not 2 <= len(rule) <= 3:
        raise _no_best_rule(rule)
    metric, count, mode = (*rule, "min")[:3]
    if not isinstance(metric, str) or not metric or mode not in _MODES:
        raise _no_best_rule(rule)
    return metric, count_of(f"the count of keep_best by {metric!r:.80}", count), mode


def _no_best_rule(value: object) -> ValueError:
    return ValueError(
        'keep_best is (metric, count), the lowest first, or (metric, count, "max"), such as '
        f'("loss", 3), or a list of such; got {value!r:.80}'
    )


def check_retention(retention: object) -> None:
    """Check that an argument is a :class:`Retention`.

    Raises:
        TypeError: The argument is something else.
    """
    if not isinstance(retention, Retention):
        raise TypeError(
            "retention is a casnap.Retention, such as Retention(keep_last=3); "
            f"got {retention!r:.80}"
        )


# --- verdicts ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Verdict:
    """The verdict on one snapshot: whether it is kept, and why.

    Attributes:
        name: The full name of the snapshot.
        row: The row of the snapshot.
        reasons: A line for each rule that keeps the snapshot; empty if no rule keeps it.
    """

    name: str
    row: Row
    reasons: tuple[str, ...]

    @property
    def kept(self) -> bool:
        """Whether a rule keeps the snapshot."""
        return bool(self.reasons)


@dataclass(frozen=True)
class PruneReport:
    """The result of pruning, or of a dry run.

    Attributes:
        verdicts: The verdict on each snapshot that was judged, in the order of their commits.
        dry_run: Whether nothing was changed.
        thinned: The name of each thinned snapshot → the keys that it lost.
    """

    verdicts: list[Verdict]
    dry_run: bool
    thinned: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def deleted(self) -> list[Verdict]:
        """The verdicts on the snapshots that no rule keeps."""
        return [v for v in self.verdicts if not v.kept]

    @property
    def kept(self) -> list[Verdict]:
        """The verdicts on the snapshots that a rule keeps."""
        return [v for v in self.verdicts if v.kept]


def judge_runs(
    rows: Iterable[tuple[str, Row]],
    retention: Retention,
    now: float,
    new_commit: bytes | None = None,
) -> list[Verdict]:
    """Return a verdict on each snapshot of some runs.

    Args:
        rows: The names and rows of all snapshots of the runs.
        retention: The rules.
        now: The time, in seconds since the epoch.
        new_commit: The commit id of a snapshot that was just taken, which is kept in any case.
    """
    ordered = Table.in_commit_order(rows)
    reasons = {}
    for run in runs_of(ordered):
        reasons.update(retention.reasons(run, now))
    for name, row in ordered:
        if row.commit == new_commit:
            reasons[name].append("just taken")
    return [Verdict(name, row, tuple(reasons[name])) for name, row in ordered]
