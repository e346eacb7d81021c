"""Which snapshots the rules of a retention keep."""

from __future__ import annotations

import math
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from casnap import Retention, StateDict, Store
from casnap.format.records import NodeRef, Row, Stats
from casnap.storage.snapshots.retention import judge_runs

NOW = 1e9


def row(seq: int, age: float = 0.0, tags: tuple[str, ...] = (), **metadata: Any) -> Row:
    ref, stats = NodeRef(bytes(32), None), Stats(0, 0, 0)
    commit = seq.to_bytes(16, "big")
    return Row(commit, ref, seq, NOW - age, 1, stats, metadata, tags)


def kept(rows: dict[str, Row], **rules: Any) -> list[str]:
    return [v.name for v in judge_runs(rows.items(), Retention(**rules), NOW) if v.kept]


def reasons(rows: dict[str, Row], **rules: Any) -> dict[str, list[str]]:
    return {v.name: list(v.reasons) for v in judge_runs(rows.items(), Retention(**rules), NOW)}


def test_keep_last_goes_by_commits_and_counts_in_each_run() -> None:
    rows = {
        "a/9": row(1),
        "a/1": row(2),
        "a/5": row(3),
        "b/1": row(4),
        "top": row(5),
        "a/c/1": row(6),
    }
    assert kept(rows, keep_last=2) == ["a/1", "a/5", "b/1", "top", "a/c/1"]
    assert reasons(rows, keep_last=1)["a/5"] == ["last 1"]
    assert kept(rows, keep_last=10**30) == list(rows)


def test_keep_every_goes_by_steps() -> None:
    rows = {
        "run/step_100": row(1),
        "run/step_150": row(2),
        "run100/150": row(3),
        "run/v2-step_0200.pt": row(4),
        "run/epoch_100": row(5, step=7),
        "run/x": row(6, step=300),
        "run/y": row(7, step=-100),
        "run/z_100": row(8, step=True),
        "run/w_100": row(9, step=7.0),
        "run/0": row(10),
        "run/final": row(11),
    }
    found = reasons(rows, keep_every=100)
    forgotten = {name for name, why in found.items() if not why}
    assert forgotten == {"run/step_150", "run100/150", "run/epoch_100"}
    assert found["run/final"] == ["every 100: it has no step"]
    assert found["run/x"] == ["every 100"]


def test_a_name_of_many_digits_has_a_step() -> None:
    assert len(kept({f"run/{'1' * 10_000}": row(1)}, keep_every=1)) == 1


def test_keep_within_takes_the_future_and_nonsense_for_recent() -> None:
    ages = {
        "old": 3600.5,
        "edge": 3600,
        "new": 1,
        "future": -9e9,
        "nan": math.nan,
        "inf": -math.inf,
    }
    rows = {name: row(i, age) for i, (name, age) in enumerate(ages.items())}
    for within in (3600, 3600.0, timedelta(hours=1)):
        assert kept(rows, keep_within=within) == ["edge", "new", "future", "nan", "inf"]
    assert reasons(rows, keep_within=3600)["new"] == ["within 1h"]


def test_keep_best() -> None:
    losses = [3.0, math.nan, 1, True, "0", 1.0, None, 2, math.inf, [0]]
    rows = {f"run/{i}": row(i, loss=loss) for i, loss in enumerate(losses)}
    rows["run/none"] = row(99)
    assert kept(rows, keep_best=("loss", 1)) == ["run/5"], "the newer of equals"
    assert kept(rows, keep_best=("loss", 3)) == ["run/2", "run/5", "run/7"]
    assert kept(rows, keep_best=("loss", 1, "max")) == ["run/8"]
    assert kept(rows, keep_best=["loss", 2, "max"]) == ["run/0", "run/8"]
    assert kept(rows, keep_best=[("loss", 1), ("loss", 1, "max")]) == ["run/5", "run/8"]
    assert kept(rows, keep_best=("loss", 100)) == [f"run/{i}" for i in (0, 2, 5, 7, 8)]
    big = {"a": row(1, n=2**63), "b": row(2, n=2**63 + 1), "c": row(3, n=1e300)}
    assert kept(big, keep_best=("n", 1)) == ["a"]


def test_a_metric_that_no_snapshot_of_a_run_has_forgets_nothing_of_it() -> None:
    rows = {"a/1": row(1, loss=math.nan), "a/2": row(2), "b/1": row(3, loss=1), "b/2": row(4)}
    found = reasons(rows, keep_best=("loss", 1))
    assert found["a/1"] == found["a/2"] == ["best 1 by loss: none of the run has it"]
    assert found["b/1"] == ["best 1 by loss"]
    assert found["b/2"] == []


def test_rules_add_up_and_all_that_keep_are_told() -> None:
    rows = {
        "r/100": row(1, 99, loss=0),
        "r/101": row(2, 99, ("x",)),
        "r/102": row(3, 99),
        "r/200": row(4),
    }
    found = reasons(rows, keep_last=1, keep_every=100, keep_within=60, keep_best=("loss", 1))
    assert found == {
        "r/100": ["every 100", "best 1 by loss"],
        "r/101": ["tagged"],
        "r/102": [],
        "r/200": ["last 1", "every 100", "within 1m"],
    }


COUNT = "a whole number from 1 on"
BEST = r"keep_best is \(metric, count\)"


@pytest.mark.parametrize(
    ("rules", "problem"),
    [
        ({}, "would delete everything"),
        ({"keep_best": []}, "would delete everything"),
        *(({rule: n}, f"{rule} is {COUNT}") for rule in ("keep_last", "keep_every")
          for n in (0, -1, True, 1.5, "3", math.nan)),
        *(({"keep_within": t}, "keep_within is a time") for t in (
            0, -1, True, math.nan, math.inf, -math.inf, 1e300, 10**400, "7", "7 days", "0",
            timedelta(0), timedelta(-1),
        )),
        *(({"keep_best": b}, BEST) for b in (
            "loss", 3, {"loss": 3}, ("loss",), ("loss", 1, "least"), ("loss", 1, "max", 2),
            ("", 1), [3], [("loss", 1), "acc"], [(1, 2)], ("loss", 1, ["max"]), None,
        )),
        *(({"keep_best": ("loss", n)}, f"by 'loss' is {COUNT}") for n in (0, -1, True, "3", 1.0)),
    ],
)  # fmt: skip
def test_nonsense_is_refused(rules: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        Retention(**rules)


def test_equal_rules_are_equal() -> None:
    assert Retention(keep_best=("loss", 1)) == Retention(keep_best=[["loss", 1, "min"]])
    assert Retention(keep_within=60) == Retention(keep_within=timedelta(minutes=1))
    assert len({Retention(keep_last=1), Retention(keep_last=1)}) == 1


METRICS = st.one_of(
    st.none(),
    st.booleans(),
    st.just("1"),
    st.integers(-2, 2),
    st.sampled_from([0.5, math.nan, math.inf]),
)
ROWS = st.lists(
    st.tuples(
        st.sampled_from(["", "a/", "b/", "a/b/"]),
        st.sampled_from(["step_", "x"]),
        st.floats(-100, 100),
        st.sampled_from([(), (), ("best",)]),
        st.dictionaries(st.sampled_from(["loss", "acc", "step"]), METRICS),
    ),
    max_size=12,
).map(
    lambda drawn: {
        f"{folder}{stem}{i if stem != 'x' else 'yz'[i % 2] * i}": row(i, age, tags, **metadata)
        for i, (folder, stem, age, tags, metadata) in enumerate(drawn)
    }
)  # fmt: skip
COUNTS = st.integers(1, 4)
RULES = st.fixed_dictionaries(
    {},
    optional={
        "keep_last": COUNTS,
        "keep_every": COUNTS,
        "keep_within": st.floats(0.1, 100),
        "keep_best": st.lists(
            st.tuples(st.sampled_from(["loss", "acc"]), COUNTS, st.sampled_from(["min", "max"])),
            min_size=1,
            max_size=2,
        ),
    },
).filter(bool)


@given(rows=ROWS, rules=RULES)
def test_what_is_kept_is_what_any_single_rule_keeps(
    rows: dict[str, Row], rules: dict[str, Any]
) -> None:
    singles = [set(kept(rows, **{rule: value})) for rule, value in rules.items()]
    assert set(kept(rows, **rules)) == set().union(*singles)


@given(rows=ROWS, rules=RULES)
def test_pruning_again_forgets_nothing_more(rows: dict[str, Row], rules: dict[str, Any]) -> None:
    left = {name: rows[name] for name in kept(rows, **rules)}
    assert kept(left, **rules) == list(left)


@given(rows=ROWS, rules=RULES)
def test_tagged_and_just_taken_are_kept(rows: dict[str, Row], rules: dict[str, Any]) -> None:
    assert {n for n, r in rows.items() if r.tags} <= set(kept(rows, **rules))
    for name, each in rows.items():
        verdicts = judge_runs(rows.items(), Retention(**rules), NOW, each.commit)
        assert name in {v.name for v in verdicts if v.kept}


@given(rows=ROWS, rules=RULES, data=st.data())
def test_runs_do_not_know_each_other(
    rows: dict[str, Row], rules: dict[str, Any], data: st.DataObject
) -> None:
    whole = reasons(rows, **rules)
    shuffled = dict(data.draw(st.permutations(list(rows.items()))))
    assert reasons(shuffled, **rules) == whole
    assert list(whole) == list(rows)
    for run in {n.rpartition("/")[0] for n in rows}:
        own = {n: r for n, r in rows.items() if n.rpartition("/")[0] == run}
        assert reasons(own, **rules) == {n: whole[n] for n in own}


@given(rows=ROWS, count=COUNTS, mode=st.sampled_from(["min", "max"]))
def test_best_is_what_fewer_than_so_many_beat(rows: dict[str, Row], count: int, mode: str) -> None:
    rows = {n: r for n, r in rows.items() if not r.tags}

    def value(name: str) -> float | None:
        found = rows[name].metadata.get("loss")
        plain = type(found) in (int, float) and not math.isnan(found)
        return None if not plain else found if mode == "min" else -found

    expected = []
    for name, each in rows.items():
        run = [n for n in rows if n.rpartition("/")[0] == name.rpartition("/")[0]]
        ranked = {n: v for n in run if (v := value(n)) is not None}
        beaten_by = [
            n
            for n, v in ranked.items()
            if name in ranked and (v, -rows[n].seq) < (ranked[name], -each.seq)
        ]
        if not ranked or (name in ranked and len(beaten_by) < count):
            expected.append(name)
    assert kept(rows, keep_best=("loss", count, mode)) == expected


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("step_10", 10),
        ("checkpoint-20", 20),
        ("iter_0000030", 30),
        ("step=10-loss=0.41.ckpt", 10),
        ("epoch=3-step=40-v1.ckpt", 40),
        ("epoch_2_global_step_50", 50),
        ("epoch=1-loss=0.40", None),
        ("loss=0.40", None),
        ("lastep=10-v1", None),
        ("step_1-step_2", None),
        ("step=1.5-v2", None),
        ("best", None),
        ("20/best", None),
    ],
)
def test_the_step_of_a_name(
    name: str, step: int | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What a name does not say is not guessed: such a snapshot is kept, and that is said once."""
    store = Store(tmp_path)
    store.take({"s": StateDict(x=1)}, name)
    for every, is_kept in ((10, step is None or step % 10 == 0), (7, step is None)):
        [verdict] = store.prune(Retention(keep_every=every), dry_run=True).verdicts
        assert verdict.kept == is_kept
    warnings = [text for text in caplog.messages if "says its step" in text]
    assert len(warnings) == (step is None)
    store.take({"s": StateDict(x=1)}, "other-1-2", metadata={"step": 70})
    verdicts = store.prune(Retention(keep_every=7), dry_run=True).verdicts
    assert [v.kept for v in verdicts if v.name == "other-1-2"] == [True]
