"""Faults in the resumes of trainings: does ``casnap prove`` find each, and name its kind?

::

    python -m tools.faults                          # each once, with the default number of kills
    python -m tools.faults --kills 1 3 --seeds 10 --forked

A row says how often a fault was found, and how often the cause that is named first is the right
one; other causes stand below it. The trainings without a fault come last: each must be proven.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from tests.support.faulty_trainings import FAULTS, TRAININGS, Fault, proof_of, write_script
from tests.support.scripts import run_program


class Verdict(NamedTuple):
    """What a proof has said.

    Attributes:
        is_found: Whether the resume was not proven.
        is_named: Whether the cause that is named first is the fault.
        words: The cause that is named first, or the error.
    """

    is_found: bool
    is_named: bool
    words: str


def main() -> None:
    """Read the arguments, prove, and print a table."""
    parser = argparse.ArgumentParser(description="Plant faults in resumes, and prove each.")
    parser.add_argument("--kills", type=int, nargs="+", default=[3], help="kills of a proof [3]")
    parser.add_argument("--seeds", type=int, default=1, help="proofs of each, by seed [1]")
    parser.add_argument("--only", nargs="+", help="the names of faults, or of trainings [all]")
    parser.add_argument(
        "--forked",
        action="store_true",
        help="fork each process from one that has imported torch, where that changes nothing",
    )
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    is_right = True
    for name in args.only or [*FAULTS, *TRAININGS]:
        began, fault = time.monotonic(), FAULTS.get(name)
        cells = [name, f"{fault.role}: {fault.words}".strip(": ") if fault else "no fault"]
        others = Counter[str]()
        for kills in args.kills:
            verdicts = [verdict_of(name, kills, seed, args.forked) for seed in range(args.seeds)]
            found, named = (
                sum(getattr(verdict, key) for verdict in verdicts)
                for key in ("is_found", "is_named")
            )
            cells.append(f"{kills} kills: found {found}, named {named} of {len(verdicts)}")
            others.update(v.words for v in verdicts if v.is_found and not v.is_named)
            if kills == max(args.kills):
                is_right &= named == (len(verdicts) if fault else 0) and found == named
        print(f"| {' | '.join(cells)} | {time.monotonic() - began:.0f} s |", flush=True)
        for words, count in others.items():
            print(f"    {count} × {words}", flush=True)
    sys.exit(not is_right)


def verdict_of(name: str, kills: int, seed: int, forked: bool) -> Verdict:
    """Prove a training with a fault, or one without."""
    fault: Fault | None = FAULTS.get(name)
    with tempfile.TemporaryDirectory(prefix="casnap-faults-") as folder:
        script = write_script(Path(folder) / "train.py", fault, name)
        options = ["--json", "--kills", str(kills), "--seed", str(seed), "--room", f"{folder}/room"]
        command = ["-m", "casnap", "prove", *options, *proof_of(script, fault, name)]
        if forked and (fault is None or fault.is_alike_in_forks):
            done = run_program(*command, timeout=1e9)
        else:
            done = subprocess.run(
                [sys.executable, *command], capture_output=True, text=True, check=False
            )
    if not done.stdout:
        return Verdict(is_found=True, is_named=False, words=done.stderr[-400:])
    document = json.loads(done.stdout)
    if document["proven"]:
        return Verdict(is_found=False, is_named=False, words="")
    cause = document["causes"][0]
    is_named = fault is not None and fault.is_named_by(cause)
    return Verdict(is_found=True, is_named=is_named, words=f"{cause['role']}: {cause['text']}")


if __name__ == "__main__":
    main()
