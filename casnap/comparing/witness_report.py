"""The report of a witness: whether a state is what it was at the same step before."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from casnap.state.roles import ROLES, Role

_MOST_NAMED = 8


@dataclass(frozen=True)
class WitnessReport:
    """The result of storing a witness, or of comparing a state with it.

    Attributes:
        name: Its name.
        stored: Whether it was stored now, since there was none of this name.
        count: How many paths differ from the witness that was there.
        differing: The first of these paths, by role. A role that can cause changes in other roles
            comes before these.
        environment: How the environment differs from that of the witness, in words; see
            :attr:`casnap.RestoreReport.environment`.
        not_compared: Why the state was not compared with the witness; empty if it was.
    """

    name: str
    stored: bool = False
    count: int = 0
    differing: dict[Role, list[str]] = field(default_factory=dict)
    environment: list[str] = field(default_factory=list)
    not_compared: str = ""

    @property
    def equal(self) -> bool:
        """Whether nothing is known to differ."""
        return not self.count

    def __str__(self) -> str:
        """Return the report in words."""
        if self.stored:
            return f"{self.name}: the witness is stored"
        if self.not_compared:
            return f"{self.name}: not compared: {self.not_compared}"
        if self.equal:
            return f"{self.name}: equal, bit for bit"
        roles = "; ".join(f"{role}: {', '.join(paths)}" for role, paths in self.differing.items())
        since = f". Since then: {', '.join(self.environment)}" if self.environment else ""
        return f"{self.name}: {self.count:,} paths differ, the first by role: {roles}{since}"


def first_of_each_role(found: Iterable[tuple[str, Role]]) -> Mapping[Role, list[str]]:
    """Return the first paths of each role, in the order of the roles."""
    by_role: dict[Role, list[str]] = {role: [] for role in ROLES}
    for path, role in found:
        if len(by_role[role]) < _MOST_NAMED:
            by_role[role].append(path)
    return {role: paths for role, paths in by_role.items() if paths}
