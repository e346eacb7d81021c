"""Nodes that continue one another's run at one mirror, with every interleaving of a few."""

from __future__ import annotations

import pytest

from tests.model.explorer import explore
from tests.model.succession import Rule, SuccessionModel

ALL = {
    "told",
    "takes over",
    "replaces later ones",
    "replaces unseen ones",
    "comes back to what others did",
}
HOLDS = {
    "three nodes": SuccessionModel((2, 3, 3)),
    "a node comes back": SuccessionModel((3, 4), comebacks=(1, 0)),
    "a node comes back twice": SuccessionModel((3, 3), comebacks=(2, 0), keep_here=2),
    "rollbacks": SuccessionModel((3, 3), keep_there=3),
}
TWO = {"steps": (2, 3)}
BREAKS = [
    (Rule.SEEN, TWO, "a run was taken over by a node that had not seen it"),
    (Rule.BY_SNAPSHOT, {"steps": (3, 4), "comebacks": (1, 0)}, "branches mix"),
    (Rule.OWN_LIFE, {"steps": (3, 3), "comebacks": (2, 0), "keep_here": 2}, "branches mix"),
    (Rule.LATER_GO, {"steps": (3, 3), "keep_there": 3}, "branches mix"),
    (Rule.UNSEEN_GO, {"steps": (3, 4), "comebacks": (1, 0)}, "branches mix"),
    (Rule.ONE_COMMIT, TWO, "the mirror lost the run"),
]


@pytest.mark.parametrize(
    "title", [pytest.param("three nodes", marks=pytest.mark.slow), *list(HOLDS)[1:]]
)
def test_branches_never_mix(title: str) -> None:
    model = HOLDS[title]
    found = explore(model)
    print(found)
    assert found.violation is None, str(found)
    expected = ALL if any(model.comebacks) else ALL - {"comes back to what others did"}
    assert model.happened == expected


@pytest.mark.parametrize(
    ("rule", "bounds", "expected"), BREAKS, ids=[rule.name for rule, _, _ in BREAKS]
)
def test_without_a_rule_they_do(rule: Rule, bounds: dict[str, object], expected: str) -> None:
    found = explore(SuccessionModel(**bounds, without=frozenset([rule])))  # type: ignore[arg-type]
    print(found)
    assert found.violation is not None, f"nothing happens when {rule} is dropped"
    assert found.violation.startswith(expected), str(found)


def test_every_rule_is_dropped() -> None:
    assert {rule for rule, _, _ in BREAKS} == set(Rule)
