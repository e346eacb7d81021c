"""What a follower receives that has missed versions: ``python -m tools.missed --mb 40``.

A trainer moves 1 % of its bf16 weights a step, at random places, each by one up or down; with
``--adam``, it rounds weights that noise moves as Adam does, so that elements go back and forth. One
bucket gets each step, by a mirror. Others get every n-th step alone, so that what lies between is
one difference. A follower of each pulls one version, and then the next one that it is to serve. All
is in memory; bytes are those that are read of objects, with nodes of trees and parts of the index.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
from pathlib import Path

import torch

from casnap import StateDict, Store
from tests.support.remote import RemoteDouble


class Trainer:
    """Takes one step after the other.

    Attributes:
        store: Its store, whose mirror is a bucket.
    """

    def __init__(self, folder: Path, nbytes: int, *, is_adam: bool) -> None:
        self._dice = torch.Generator().manual_seed(0)
        elements = nbytes // 2 // 4
        self._masters = [torch.randn(elements, generator=self._dice) * 0.02 for _ in range(4)]
        self._moments = [torch.zeros(elements) for _ in range(4)]
        self._weights = {f"layers.{i}": w.bfloat16() for i, w in enumerate(self._masters)}
        self._move = self._move_as_adam if is_adam else self._move_at_random
        for _ in range(20 * is_adam):
            self._move()
        self.store = Store(folder / "run", mirror=RemoteDouble("each"))
        self._steps = 0

    def _move_at_random(self) -> None:
        for weight in self._weights.values():
            bits = weight.view(torch.int16)
            chosen = torch.randint(len(bits), (len(bits) // 100,), generator=self._dice)
            ups = torch.randint(0, 2, chosen.shape, generator=self._dice, dtype=torch.int16)
            bits[chosen] += ups * 2 - 1

    def _move_as_adam(self) -> None:
        for weight, master, moment in zip(
            self._weights.values(), self._masters, self._moments, strict=True
        ):
            moment.mul_(0.9).add_(torch.randn(len(moment), generator=self._dice), alpha=0.1)
            master.sub_(moment, alpha=1e-6)
            weight.copy_(master)

    def step(self) -> str:
        """Take the next step, and return its name."""
        self._move()
        name = f"run/step_{self._steps}"
        self._steps += 1
        self.store.take({"model": StateDict(self._weights)}, name)
        self.store.wait_mirrored(600)
        return name


class Follower:
    """A host that pulls from a bucket, with a cache of its own."""

    def __init__(self, folder: Path, bucket: str) -> None:
        folder.mkdir()
        self._folder = folder
        self._backend = RemoteDouble(bucket)
        self._store = Store(self._backend)

    def pull(self) -> tuple[int, int]:
        """Pull the newest version; return how many bytes and requests that took."""
        os.environ["CASNAP_CACHE_DIR"] = str(self._folder / "cache")
        self._backend.reset()
        self._store.pull(self._folder / "live", "run")
        return self._backend.read_bytes, self._backend.count


def measure(folder: Path, nbytes: int, missed: list[int], *, is_adam: bool) -> None:
    """Print what followers receive.

    Args:
        folder: Where stores and folders are.
        nbytes: How large the model is.
        missed: How many versions are missed.
        is_adam: How the weights move.
    """
    trainer = Trainer(folder, nbytes, is_adam=is_adam)
    trainer.step()
    first = trainer.step()
    of_each = {n: Follower(folder / f"each{n}", "each") for n in missed}
    of_some = {n: Follower(folder / f"some{n}", f"some{n}") for n in missed}
    for n in missed:
        trainer.store.copy(first, to=Store(RemoteDouble(f"some{n}")))
        of_each[n].pull()
        of_some[n].pull()
    one = 0
    print(f"{nbytes / 1e6:g} MB; received in MB (and as many times one step), requests")
    for step in range(1, max(missed) + 1):
        name = trainer.step()
        if step not in missed:
            continue
        received, requests = of_each[step].pull()
        one = one or received
        sent = trainer.store.copy(name, to=Store(RemoteDouble(f"some{step}"))).sent_bytes
        alone, requests_alone = of_some[step].pull()
        print(
            f"{step:3} missed: each step copied {received / 1e6:.2f} ({received / one:.1f} x), "
            f"{requests}; only these copied {alone / 1e6:.2f} ({alone / one:.1f} x), "
            f"{requests_alone}; sent for that {sent / 1e6:.2f}"
        )
    for bucket in ("each", f"some{max(missed)}"):
        received, requests = Follower(folder / f"new-{bucket}", bucket).pull()
        print(f"a new host of {bucket!r}: {received / 1e6:.2f}, {requests}")


def main() -> None:
    """Read the arguments, and measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mb", type=float, default=40)
    parser.add_argument("--missed", type=int, nargs="+", default=[1, 5, 10, 20])
    parser.add_argument("--adam", action="store_true")
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="casnap-missed-"))
    os.environ["CASNAP_CACHE_DIR"] = str(folder / "cache")
    try:
        measure(folder, int(args.mb * 1e6), args.missed, is_adam=args.adam)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
