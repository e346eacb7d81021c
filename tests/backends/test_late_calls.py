"""What a store on a local disk pays for the look at calls that servers answer late."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

_SCRIPT = """
import sys

reads = []
sys.addaudithook(
    lambda event, args: event == "open" and args[0] == "/proc/self/mountinfo" and reads.append(1)
)
from casnap import StateDict, Store

for step in range(3):
    Store(sys.argv[1]).take({"s": StateDict(x=step)}, f"step_{step}")
    Store(sys.argv[1]).latest().restore({"s": StateDict(x=0)})
print(len(reads))
"""


def test_the_list_of_mounts_is_read_once(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _SCRIPT, str(tmp_path / "store")]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert int(printed) == 1
