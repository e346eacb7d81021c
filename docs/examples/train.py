"""Train a small GPT that may be killed at any moment: a script to copy.

    casnap init ckpts                 all runs in this folder share one store
    python train.py ckpts/run1        train; after a kill, the same command resumes
    python train.py ckpts/tuned1 --base ckpts/run1/step_0060
                                      fine-tune adapters on a frozen base

All that the next step depends on is in ``app_state``: weights, optimizer, learning rate, random
numbers, the place in the data, and the number of the step. So a run that was killed and resumed has
the same bits as one that ran through. Text and model are small; nothing is downloaded.
"""

from __future__ import annotations

import argparse
import inspect
import math
import random
from pydoc_data.topics import topics
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from casnap import PendingSnapshot, Retention, RNGState, Snapshot, StateDict, Stateful, Store

CONTEXT = 64
"""How many bytes of text the model sees at once."""

# --- the data ---------------------------------------------------------------------------------


class Batches:
    """Cuts a text into windows, and returns batches of them in a shuffled order.

    Its state is the place in the data. The order of an epoch follows from its number.
    """

    def __init__(self, text: str, size: int) -> None:
        data = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
        self.windows = data[: len(data) // (CONTEXT + 1) * (CONTEXT + 1)].view(-1, CONTEXT + 1)
        self.size, self.epoch, self.position = size, 0, 0

    def next(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the next inputs and targets: int64 [size, CONTEXT]."""
        if self.position + self.size > len(self.windows):
            self.epoch, self.position = self.epoch + 1, 0
        generator = torch.Generator().manual_seed(self.epoch)
        order = torch.randperm(len(self.windows), generator=generator)
        batch = self.windows[order[self.position : self.position + self.size]].long()
        self.position += self.size
        return batch[:, :-1], batch[:, 1:]

    def state_dict(self) -> dict[str, Any]:
        """Return the place in the data."""
        return {"epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a place in the data."""
        self.epoch, self.position = state["epoch"], state["position"]


# --- the model --------------------------------------------------------------------------------


class Block(nn.Module):
    """One transformer layer: causal attention, then a feed-forward net."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [batch, length, width] to the same shape."""
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, -1, 32).permute(2, 0, 3, 1, 4)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, width))
        y = self.down(functional.gelu(self.up(self.norm2(x))))
        return x + functional.dropout(y, 0.05, self.training)


class GPT(nn.Module):
    """A byte-level GPT."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, width), nn.Embedding(CONTEXT, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.head = nn.Linear(width, 256)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Score the next byte at each place: [batch, length] -> [batch, length, 256]."""
        x = self.bytes(tokens) + self.places.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Adapted(nn.Module):
    """A linear layer with a low-rank adapter (LoRA)."""

    def __init__(self, linear: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.linear = linear
        self.adapter = nn.Sequential(
            nn.Linear(linear.in_features, rank, bias=False),
            nn.Linear(rank, linear.out_features, bias=False),
        )
        nn.init.zeros_(self.adapter[1].weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [..., in_features] to [..., out_features]."""
        return self.linear(x) + self.adapter(x)


def add_adapters(model: GPT) -> None:
    """Freeze the model, and give each block adapters to train."""
    model.requires_grad_(False)
    for block in model.blocks:
        block.qkv, block.out = Adapted(block.qkv), Adapted(block.out)
        block.qkv.adapter.requires_grad_(True)
        block.out.adapter.requires_grad_(True)


# --- the training -----------------------------------------------------------------------------


def train(args: argparse.Namespace) -> None:
    """Train from the newest snapshot of the run to the last step."""
    torch.use_deterministic_algorithms(True)
    for seed in (torch.manual_seed, np.random.seed, random.seed):
        seed(args.seed)
    model = GPT(args.width, args.layers)
    if args.base is None:
        text = "\n".join(topics[name] for name in sorted(topics))  # the manual behind help()
    else:
        Snapshot(args.base).load_into(model, "model")  # reads only the model of that snapshot
        add_adapters(model)
        text = inspect.getsource(argparse)
    batches = Batches(text, args.batch)
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=args.lr)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: (1 + math.cos(math.pi * step / args.steps)) / 2
    )
    progress = StateDict(step=0)
    app_state: dict[str, Stateful] = {
        "model": model,
        "optimizer": optimizer,
        "scheduler": scheduler,
        "batches": batches,
        "progress": progress,
        "rng": RNGState(),
    }

    store = Store(args.run)
    last = store.latest()
    if last is not None:
        last.restore(app_state)
        print(f"resumed from {last.name}", flush=True)

    keep = Retention(keep_last=2, keep_every=4 * args.every)
    pending = None
    for step in range(progress["step"] + 1, args.steps + 1):
        inputs, targets = batches.next()
        loss = functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        progress["step"] = step
        if step % args.every == 0 or step == args.steps:
            report(pending)
            # Copies the state, and stores it while the training goes on.
            pending = store.async_take(
                app_state,
                f"step_{step:04d}",
                metadata={"step": step, "loss": loss.item()},
                retention=keep,
            )
    report(pending)


def report(pending: PendingSnapshot | None) -> None:
    """Wait until a snapshot is durable, or raise the error of its take; print what it added."""
    if pending is not None:
        snapshot = pending.wait()
        loss = snapshot.metadata.user["loss"]
        held, new = snapshot.stats.logical_bytes / 1e6, snapshot.stats.new_bytes / 1e6
        print(f"{snapshot.name}  loss {loss:.3f}  {held:5.1f} MB, {new:5.1f} MB new", flush=True)


def main() -> None:
    """Read the arguments, and train."""
    parser = argparse.ArgumentParser(description="Train a small GPT, with snapshots by casnap.")
    parser.add_argument("run", help="where the snapshots go: a folder, or a URI")
    parser.add_argument("--base", help="fine-tune adapters on the model of this snapshot")
    parser.add_argument("--steps", type=int, default=60, help="the last step [60]")
    parser.add_argument("--every", type=int, default=5, help="steps between snapshots [5]")
    parser.add_argument("--seed", type=int, default=0, help="seed of all random numbers [0]")
    parser.add_argument("--batch", type=int, default=16, help="windows of text in a step [16]")
    parser.add_argument("--lr", type=float, default=3e-3, help="the first learning rate [0.003]")
    parser.add_argument("--width", type=int, default=128, help="a multiple of 32 [128]")
    parser.add_argument("--layers", type=int, default=4, help="number of blocks [4]")
    train(parser.parse_args())


if __name__ == "__main__":
    main()
