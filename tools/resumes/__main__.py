"""Prove each training, and print a table."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from tests.support.faulty_trainings import write_script
from tests.support.scripts import run_program

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = Path(__file__).with_name("trainings")
RANKS = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
LAUNCHER = (
    "torch.distributed.elastic.agent.server.local_elastic_agent",
    "torch.distributed.elastic.rendezvous.c10d_rendezvous_backend",
    "torch.distributed.elastic.rendezvous.dynamic_rendezvous",
    "torch.distributed.launcher.api",
)
PL = ("lightning",)
HF = ("transformers.trainer", "peft")
SMALL = ("--every", "1", "--width", "32", "--layers", "1", "--batch", "2")


class Training(NamedTuple):
    """A training that resumes as it should.

    Attributes:
        what: What it has, in words.
        command: What Python runs; ``{steps}`` stands for how many snapshots to take.
        modules: What to import before all attempts, if they are forked.
    """

    what: str
    command: tuple[str, ...]
    modules: tuple[str, ...] = ()


def trainings(folder: Path) -> dict[str, Training]:
    """Return all trainings; one script is written into a folder."""
    mixed = write_script(folder / "mixed.py")
    place = ("{store}", "{steps}")
    gpt = (str(ROOT / "docs/examples/train.py"), "{store}", "--steps", "{steps}", *SMALL)
    scripts = {
        name: str(SCRIPTS / f"{name}.py")
        for name in (
            ("images", "replay", "replicas", "shards", "hf_trainer", "lightning_", "accelerated")
        )
    }
    return {
        "mixed": Training("AdamW, GradScaler, an average, tied weights", (str(mixed), *place)),
        "gpt": Training("a small GPT, takes in the background, retention", gpt),
        "images": Training("a DataLoader that is skipped, numpy", (scripts["images"], *place)),
        "replay": Training("reinforcement learning", (scripts["replay"], *place)),
        "replicas": Training("DDP, 2 ranks", (*RANKS, scripts["replicas"], *place), LAUNCHER),
        "shards": Training(
            "FSDP2, 2 ranks, takes in the background", (*RANKS, scripts["shards"], *place), LAUNCHER
        ),
        "transformers": Training("Trainer of Transformers", (scripts["hf_trainer"], *place), HF),
        "lora": Training("the same with LoRA", (scripts["hf_trainer"], *place, "lora"), HF),
        "lightning": Training(
            "Trainer of Lightning", (scripts["lightning_"], *place), ("lightning",)
        ),
        "accelerate": Training("Accelerate's loop", (scripts["accelerated"], *place), HF),
    }


def main() -> None:
    """Read the arguments, and prove."""
    parser = argparse.ArgumentParser(description="Kill right trainings, and prove each resume.")
    parser.add_argument("--kills", type=int, default=100, help="kills of each training [100]")
    parser.add_argument("--only", nargs="+", help="the names of the trainings [all]")
    parser.add_argument("--seed", type=int, default=0, help="the seed of the moments [0]")
    parser.add_argument(
        "--forked",
        action="store_true",
        help="fork each process from one that has imported all, in a tenth of the time",
    )
    args = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    alarms = 0
    with tempfile.TemporaryDirectory(prefix="casnap-resumes-") as folder:
        chosen = trainings(Path(folder))
        for name in args.only or chosen:
            alarms += not proven(name, chosen[name], args.kills, args.seed, forked=args.forked)
    sys.exit(bool(alarms))


def proven(name: str, training: Training, kills: int, seed: int, *, forked: bool) -> bool:
    """Prove a training, print a row of the table, and return whether it was proven."""
    steps = str(kills + 4)
    room = Path(tempfile.mkdtemp(prefix=f"casnap-resumes-{name}-"))
    options = ("--json", "--kills", str(kills), "--seed", str(seed), "--room", str(room))
    command = [word.replace("{steps}", steps) for word in training.command]
    began = time.monotonic()
    prove = ("-m", "casnap", "prove", *options, "--", sys.executable, *command)
    if forked:
        done = run_program(*prove, modules=training.modules, timeout=1e9)
    else:
        done = subprocess.run([sys.executable, *prove], capture_output=True, text=True, check=False)
    if not done.stdout:
        print(f"| {name} | {training.what} | {done.stderr.strip().splitlines()[-1]} |", flush=True)
        return False
    document = json.loads(done.stdout)
    killed = document["runs"][2]
    words = "equal" if document["proven"] else f"NOT PROVEN: {document['causes']}; see {room}"
    print(
        f"| {name} | {training.what} | {len(killed['kills'])} kills | {killed['compared_count']} "
        f"snapshots | {words} | {time.monotonic() - began:.0f} s |",
        flush=True,
    )
    if document["proven"]:
        shutil.rmtree(room, ignore_errors=True)
    return bool(document["proven"])


if __name__ == "__main__":
    main()
