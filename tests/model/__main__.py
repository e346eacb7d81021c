"""Search every scenario and print what was found: ``python -m tests.model [--long]``."""

from __future__ import annotations

import sys

from tests.model.explorer import explore
from tests.model.scenarios import BREAKS, HOLDS, HOLDS_LONG

for title, scenario in (HOLDS | (HOLDS_LONG if "--long" in sys.argv else {})).items():
    print(f"{title}: {explore(scenario.model(reduced=True))}", flush=True)
for rules, scenario, _ in BREAKS:
    print("\nIf " + ", and ".join(rule.value for rule in rules) + ":", flush=True)
    print(explore(scenario.model(rules, reduced=False)))
