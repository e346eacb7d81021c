"""``casnap demo``."""

from __future__ import annotations

import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import click

from casnap.cli.output import emit, json_option
from casnap.demo.plan import next_run, plan_for
from casnap.demo.screen import Screen
from casnap.demo.show import perform, show_command, show_store


@click.command("demo")
@click.argument("folder", type=click.Path(), default="casnap-demo")
@click.option("--steps", type=click.IntRange(min=8), help="Steps of the fine-tuning [80].")
@click.option("--quick", is_flag=True, help="A tiny model and a few steps.")
@click.option("--seed", type=int, help="Seed of everything random [the number of the run].")
@json_option
def demo(folder: str, steps: int | None, quick: bool, seed: int | None, as_json: bool) -> None:
    """Fine-tune a small GPT, kill it, resume it, and look at the store in FOLDER.

    FOLDER is ./casnap-demo unless another is named. It may hold the store of an earlier demo:
    the snapshots of this one are then run2/…, run3/… Nothing is downloaded.
    """
    started = time.perf_counter()
    screen = Screen(silent=as_json)
    number = next_run(Path(folder))
    if not Path(folder, "casnap-store").exists():
        show_command(["init", folder], screen)
    plan = plan_for(folder, number, steps=steps or (12 if quick else 80), quick=quick, seed=seed)
    # In the store's folder, so that torch.save writes to the same disk.
    with tempfile.TemporaryDirectory(prefix=".demo-", dir=folder) as scratch:
        result = perform(replace(plan, scratch=scratch), screen)
    if as_json:
        emit(result)
    else:
        show_store(plan, screen)
        screen.say(f"\nDone in {time.perf_counter() - started:.0f} s.")
    if not result["equal"]:
        sys.exit(1)
