"""Kill a training, resume it, and look at the store: ``make demo``.

    python kill_and_resume.py [FOLDER] [options of train.py, such as --steps 200]

``train.py`` beside this file is killed by SIGKILL at a random moment, and resumed by the same
command. Another run goes through without being killed. Then the two are compared, bit for bit, and
adapters are fine-tuned on the result, and brought to a folder as engines load it. FOLDER may hold
the store of an earlier call.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

from casnap import Store

TRAIN = Path(__file__).with_name("train.py")
# With more threads, so small a model hardly trains faster.
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


def start(arguments: list[str]) -> subprocess.Popen[str]:
    """Start ``train.py`` in a process of its own."""
    print(f"\n$ python {shlex.join([os.path.relpath(TRAIN), *arguments])}", flush=True)
    command = [sys.executable, TRAIN, *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=ENVIRONMENT)


def train(arguments: list[str]) -> list[str]:
    """Run ``train.py`` to its end; return the lines that it printed."""
    lines = []
    with start(arguments) as process:
        for line in process.stdout:
            print(f"  {line}", end="", flush=True)
            lines.append(line)
    if process.returncode != 0:
        sys.exit(f"the training failed (exit status {process.returncode}); see above")
    return lines


def train_and_kill(arguments: list[str], takes: int) -> int:
    """Run ``train.py``, and kill it in the middle; return the step that was certainly stored."""
    victim = random.randint(takes // 3, takes // 2)
    moments = []
    with start(arguments) as process:
        for line in process.stdout:
            print(f"  {line}", end="", flush=True)
            moments.append(time.monotonic())
            if len(moments) == victim:
                # The next take has just begun: kill within it, or in a step after it.
                time.sleep(random.uniform(0, (moments[-1] - moments[0]) / (victim - 1)))
                process.send_signal(signal.SIGKILL)
                break
    if process.returncode != -signal.SIGKILL:
        sys.exit(f"the training ended before it was killed (exit status {process.returncode})")
    print("  killed by SIGKILL")
    return int(line.split()[0].removeprefix("step_"))


def casnap(*arguments: str) -> None:
    """Run a casnap command, and show it as a user would type it."""
    print(f"\n$ casnap {shlex.join(arguments)}", flush=True)
    subprocess.run([sys.executable, "-m", "casnap", *arguments], check=True)


def next_number(folder: Path) -> int:
    """Return the number of the next call, or exit if the folder is none for a store."""
    if not folder.exists():
        return 1
    if not folder.is_dir():
        sys.exit(f"{folder} is not a folder; name a new one")
    if not (folder / "casnap-store").exists() and any(folder.iterdir()):
        sys.exit(f"{folder} holds something other than a casnap store; name a new or empty folder")
    numbers = [re.fullmatch(r"killed(\d+)", path.name) for path in folder.iterdir()]
    return max((int(match[1]) for match in numbers if match), default=0) + 1


def main() -> None:
    """Train, kill, resume, compare, fine-tune, serve, look."""
    parser = argparse.ArgumentParser(description="Kill a training, resume it, compare.")
    parser.add_argument("folder", nargs="?", default="demo-store", help="the store [demo-store]")
    parser.add_argument("--steps", type=int, default=60, help="the last step [60]")
    parser.add_argument("--every", type=int, default=5, help="steps between snapshots [5]")
    args, more = parser.parse_known_args()
    if args.steps // args.every < 6:
        parser.error("--steps must be at least 6 times --every")
    number = next_number(Path(args.folder))
    killed, whole, tuned = (f"{run}{number}" for run in ("killed", "whole", "tuned"))
    options = ["--seed", str(number), *more]
    if (args.steps, args.every) != (60, 5):
        options += ["--steps", str(args.steps), "--every", str(args.every)]
    last = f"step_{args.steps:04d}"
    before = f"step_{(args.steps - 1) // args.every * args.every:04d}"
    began = time.monotonic()

    print("1. Train a small GPT, and kill it at a random moment.")
    if number == 1:
        casnap("init", args.folder)
    stored = train_and_kill([f"{args.folder}/{killed}", *options], args.steps // args.every)

    print("\n2. The same command again resumes from the newest complete snapshot.")
    lines = train([f"{args.folder}/{killed}", *options])
    resumed = re.fullmatch(r"resumed from step_(\d+)\n", lines[0])
    if resumed is None or int(resumed[1]) < stored:
        sys.exit(f"the snapshot of step {stored} was complete, and is lost")

    print(
        "\n3. The same training without a kill. Snapshots that the first run kept add nothing; "
        "those that it deleted are new again."
    )
    train([f"{args.folder}/{whole}", *options])
    casnap("diff", f"{args.folder}/{killed}/{last}", f"{args.folder}/{whole}/{last}")
    store = Store(args.folder)
    if store.diff(f"{killed}/{last}", f"{whole}/{last}"):
        sys.exit("the two runs are DIFFERENT")
    print("EQUAL, bit for bit: weights, optimizer, learning rate, random state, place in the data")

    print("\n4. Fine-tune adapters on the frozen model: each snapshot costs what changed.")
    train([f"{args.folder}/{tuned}", "--base", f"{args.folder}/{killed}/{last}", *options])
    casnap("diff", f"{args.folder}/{tuned}/{before}", last, "--limit", "4")

    print("\n5. Read a part of one tensor, without the rest.")
    snapshot = store[f"{tuned}/{last}"]
    handle = snapshot["model/blocks.0.up.weight"]
    print(f'\n>>> Store("{args.folder}")["{snapshot.name}"]["model/blocks.0.up.weight"][0, :4]')
    print(handle[0, :4])

    print("\n6. Serve the weights: a folder of safetensors, brought from one version to the next.")
    casnap("pull", f"{args.folder}/{tuned}/{before}", f"{args.folder}/live")
    casnap("pull", f"{args.folder}/{tuned}/{last}", f"{args.folder}/live")

    print("\n7. Look at the store. Retention has deleted some snapshots; gc frees what waits.")
    casnap("gc", args.folder, "--grace", "0")
    casnap("ls", args.folder)
    casnap("du", args.folder)
    casnap("check", args.folder, "--data")
    print(f"\nDone in {time.monotonic() - began:.0f} s. The store is left in {args.folder}.")


if __name__ == "__main__":
    main()
