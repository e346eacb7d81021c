"""The protocol of commits and collections, with every interleaving of a few processes.

`tests/model` explains the model; ``python -m tests.model`` prints all counts and traces.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.model.explorer import explore
from tests.model.protocol import CommitModel
from tests.model.records import State
from tests.model.rules import Rule
from tests.model.scenarios import BREAKS, HOLDS, HOLDS_LONG, IMPLIED, Scenario


def search(scenario: Scenario) -> None:
    model = scenario.model(reduced=True)
    found = explore(model)
    print(found)
    assert found.violation is None, str(found)
    assert scenario.happens <= model.happened, "the scenario does not show what it is for"


# These have most of the states. The model changes seldom, and then ``make soak`` is to be run.
LARGE = {
    "two takes, two collectors, a delete",
    "merge",
    "a repack passes a take",
    "rebase, two collectors",
    "a take that is seen and a repack",
    "repacks, condemned and freed at once",
    "two recode",
    "copies of a delta",
    "thinning",
    "a reader and two repacks",
    "condemned and freed at once",
}
LARGE_BREAKS = {Rule.CHAINS_END, Rule.COPIES_HAVE_END}


def seldom(params: object, is_large: bool) -> Any:
    return pytest.param(params, marks=[pytest.mark.slow] if is_large else [])


@pytest.mark.parametrize("title", [seldom(title, title in LARGE) for title in HOLDS])
def test_the_protocol_holds_in_every_state(title: str) -> None:
    search(HOLDS[title])


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("title", HOLDS_LONG)
def test_the_protocol_holds_in_every_state_of_a_larger_search(title: str) -> None:
    search(HOLDS_LONG[title])


@pytest.mark.parametrize(
    "broken",
    [seldom(broken, not LARGE_BREAKS.isdisjoint(broken[0])) for broken in BREAKS],
    ids=["-".join(rule.name for rule in rules) for rules, _, _ in BREAKS],
)
def test_without_a_rule_the_protocol_breaks(broken: tuple[tuple[Rule, ...], Scenario, str]) -> None:
    rules, scenario, expected = broken
    found = explore(scenario.model(rules, reduced=False))
    print(found)
    assert found.violation is not None, f"nothing happens when {rules} are dropped"
    assert found.violation.startswith(expected), str(found)


def test_every_rule_is_dropped_somewhere() -> None:
    alone = {rules[0] for rules, _, _ in BREAKS if len(rules) == 1}
    assert alone | {rule for rule, _ in IMPLIED} == set(Rule)


@pytest.mark.parametrize(
    ("rule", "scenario"), IMPLIED, ids=[f"{rule.name}-{n}" for n, (rule, _) in enumerate(IMPLIED)]
)
def test_what_other_rules_make_up_for(rule: Rule, scenario: Scenario) -> None:
    found = explore(scenario.model([rule], reduced=True))
    assert found.violation is None, str(found)


class Recording(CommitModel):
    """Notes every newest root together with who is done and who gave up."""

    def violation(self, state: State) -> str | None:
        outcomes = tuple(p.at for p in state.processes if p.at in ("done", "fenced"))
        self.__dict__.setdefault("roots_seen", set()).add((state.newest, outcomes))
        return super().violation(state)


@pytest.mark.parametrize("title", ["take", seldom("late puts", True), seldom("lost answers", True)])
def test_the_reduction_loses_no_root(title: str) -> None:
    scenario, seen = HOLDS[title], []
    for reduced in (True, False):
        model = Recording(
            scenario.root,
            scenario.specs,
            scenario.roots,
            lost_answers=scenario.lost_answers,
            late_puts=scenario.late_puts,
            reduced=reduced,
        )
        assert explore(model).violation is None
        seen.append(model.__dict__["roots_seen"])
    assert seen[0] == seen[1]


def test_a_trace_tells_the_whole_story() -> None:
    found = explore(HOLDS["take"].model([Rule.MARK_AGAIN], reduced=False))
    assert found.trace == [
        "T1 bases itself on root 1, relies on a in P@0, will write c",
        "T1 writes pack T1@1=c",
        "D reads root 1, drafts root 2 with no old",
        "D puts root 2: snapshots -; listed P@0=ab",
        "T1 reads root 2, drafts root 3",
        "T1 writes segment T1/segment2@1",
        "C1 marks in root 2, would condemn P@0",
        "T1 puts root 3: snapshots t1=ac; listed P@0=ab, T1@1=c",
        "C1 loses number 3",
        "C1 marks in root 3, would condemn P@0",
        "C1 puts root 4: snapshots t1=ac; listed P@0=ab, T1@1=c; condemned P@0 at 4",
    ]


def test_the_search_stops_at_its_bound() -> None:
    with pytest.raises(MemoryError, match="more than 3 states"):
        explore(HOLDS["take"].model(reduced=True), at_most=3)
