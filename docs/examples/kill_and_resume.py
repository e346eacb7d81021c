"""Prove that a training resumes, and look at its store: ``make demo``.

    python kill_and_resume.py [FOLDER] [options of train.py, such as --steps 200]

``casnap prove`` runs ``train.py`` beside this file as it is, and kills it by SIGKILL at random
moments; then all snapshots are compared, bit for bit. Adapters are fine-tuned on the result, and
brought to a folder as engines load it. Each call makes a store of its own in FOLDER.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

from casnap import Store

TRAIN = Path(__file__).with_name("train.py")
# With more threads, so small a model hardly trains faster.
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


def run(shown: str, *command: str | Path) -> None:
    """Run Python with a command, and show it as a user would type it."""
    print(f"\n$ {shown}", flush=True)
    done = subprocess.run([sys.executable, *command], env=ENVIRONMENT, check=False)
    if done.returncode != 0:
        sys.exit(f"this failed (exit status {done.returncode}); see above")


def casnap(*arguments: str) -> None:
    """Run a casnap command."""
    run(shlex.join(["casnap", *arguments]), "-m", "casnap", *arguments)


def new_folder(folder: Path) -> Path:
    """Return a folder for the store of this call, or exit if there can be none."""
    if folder.exists() and not folder.is_dir():
        sys.exit(f"{folder} is not a folder; name a new one")
    names = {path.name for path in folder.iterdir()} if folder.exists() else set[str]()
    if not all(map(str.isdigit, names)):
        sys.exit(f"{folder} holds something other than demos; name a new or empty folder")
    return folder / str(max(map(int, names), default=0) + 1)


def main() -> None:
    """Prove, fine-tune, serve, look."""
    parser = argparse.ArgumentParser(description="Kill a training, resume it, compare.")
    parser.add_argument("folder", nargs="?", default="demo-store", help="for stores [demo-store]")
    parser.add_argument("--steps", type=int, default=60, help="the last step [60]")
    parser.add_argument("--every", type=int, default=5, help="steps between snapshots [5]")
    args, more = parser.parse_known_args()
    if args.steps // args.every < 6:
        parser.error("--steps must be at least 6 times --every")
    store = new_folder(Path(args.folder))
    options = ["--steps", str(args.steps), "--every", str(args.every), "--seed", store.name, *more]
    last = f"step_{args.steps:04d}"
    before = f"step_{(args.steps - 1) // args.every * args.every:04d}"
    train = os.path.relpath(TRAIN)
    began = time.monotonic()

    print(
        "1. Train a small GPT twice, and once more: killed at random moments, and started again by "
        "the same command. Are all snapshots equal, bit for bit?"
    )
    prove = ["prove", "--kills", "2", "--room", str(store), "--"]
    command = [train, "{store}", *options]
    shown = f"casnap {shlex.join(prove)} python {' '.join(command)}"
    run(shown, "-m", "casnap", *prove, sys.executable, *command)

    print("\n2. The run that was killed printed this, in all its attempts. Each went on.")
    log = store / "logs/killed.log"
    print(f"\n$ cat {log}\n{log.read_text()}", end="")

    print("\n3. Fine-tune adapters on the frozen model: each snapshot costs what changed.")
    tuning = [f"{store}/tuned", "--base", f"{store}/killed/{last}", *options]
    run(shlex.join(["python", train, *tuning]), train, *tuning)
    casnap("diff", f"{store}/tuned/{before}", last, "--limit", "4")

    print("\n4. Read a part of one tensor, without the rest.")
    snapshot = Store(store)[f"tuned/{last}"]
    handle = snapshot["model/blocks.0.up.weight"]
    print(f'\n>>> Store("{store}")["{snapshot.name}"]["model/blocks.0.up.weight"][0, :4]')
    print(handle[0, :4])

    print("\n5. Serve the weights: a folder of safetensors, brought from one version to the next.")
    casnap("pull", f"{store}/tuned/{before}", f"{store}/live")
    casnap("pull", f"{store}/tuned/{last}", f"{store}/live")

    print("\n6. Look at the store. Retention has deleted some snapshots; gc frees what waits.")
    casnap("gc", str(store), "--grace", "0")
    casnap("ls", str(store))
    casnap("du", str(store))
    casnap("check", str(store), "--data")
    print(f"\nDone in {time.monotonic() - began:.0f} s. The store is left in {store}.")


if __name__ == "__main__":
    main()
