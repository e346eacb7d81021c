"""Each number of the format too large, too small, twice or missing, in stores that are sealed anew.

Whatever is done with such a store works, or raises a typed error, soon and in little memory. No
value is another one, nothing that could be read is lost, and a check finds what a read refuses.
"""

from __future__ import annotations

import random
import signal

import pytest

from tests.support.assault import too_long
from tests.support.faults import in_child, memory_folder
from tests.support.forger import limit_memory
from tests.support.gauntlet import run_cases
from tests.support.golden import unpack
from tests.support.mutations import ALL_CASES, Parts

pytestmark = pytest.mark.filterwarnings("ignore:.*quantize:UserWarning")
FEW, MANY = 2, 300
_A_CHILD = 25


def run(name: str, part: str, count: int) -> None:
    """Forge a golden store in some of the ways in which a part of the format can be wrong."""
    with memory_folder() as work:
        unpack(name, work / "pristine")
        cases = list(ALL_CASES[part](Parts(work / "pristine")))
        cases = random.Random(f"{name} {part}").sample(cases, min(count, len(cases)))
        told = work / "told"
        told.touch()
        for start in range(0, len(cases), _A_CHILD):
            some = cases[start : start + _A_CHILD]

            def child(some=some) -> None:  # type: ignore[no-untyped-def]
                limit_memory()
                signal.signal(signal.SIGPROF, too_long)
                run_cases(work / "pristine", some, work, tell)

            def tell(what: str, problems: list[str]) -> None:
                with told.open("a") as file:
                    file.writelines(f"{what}: {problem}\n" for problem in problems)

            assert in_child(child) == 0
        assert told.read_text() == ""


@pytest.mark.parametrize("part", ALL_CASES)
def test_some_numbers(part: str) -> None:
    run("small", part, FEW)


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("part", ALL_CASES)
@pytest.mark.parametrize("name", ["small", "codecs", "ranks", "copied", "many", "kinds"])
def test_many_numbers(name: str, part: str) -> None:
    run(name, part, MANY)
