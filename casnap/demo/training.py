"""The training that ``casnap demo`` runs, kills and resumes: a small GPT on Python's own text.

A byte-level GPT is first trained on sources of the standard library and taken as ``base``. It
is then fine-tuned on the prose behind ``help()``: adapters on a frozen backbone, then all
weights. The process reports each event on stdout, as one JSON object a line.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from casnap import RNGState, Snapshot, StateDict, Store
from casnap.demo.plan import Plan

VOCABULARY = 256
HEAD_WIDTH = 32
ADAPTER_RANK = 8
DROPOUT = 0.05
LEARNING_RATE = {"base": 1e-3, "adapters": 4e-3, "all": 3e-4}
SOURCES = ("argparse", "ast", "collections", "dataclasses", "inspect", "tarfile", "typing")


def tell(event: str, **fields: Any) -> None:
    """Print one event as a line of JSON; floats keep every bit."""
    print(json.dumps({"event": event, **fields}), flush=True)


# --- the model --------------------------------------------------------------------------------


class AdaptedLinear(nn.Linear):
    """A linear layer that can have a low-rank adapter (LoRA)."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__(in_features, out_features)
        self.down: nn.Parameter | None
        self.up: nn.Parameter | None
        self.register_parameter("down", None)
        self.register_parameter("up", None)

    def add_adapter(self, rank: int) -> None:
        """Add the adapter. Until it is trained, the layer computes the same as before."""
        self.down = nn.Parameter(torch.randn(rank, self.in_features) / math.sqrt(rank))
        self.up = nn.Parameter(torch.zeros(self.out_features, rank))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [..., in_features] to [..., out_features]."""
        y = super().forward(x)
        if self.down is None or self.up is None:
            return y
        dropped = functional.dropout(x, DROPOUT, self.training)
        return y + functional.linear(functional.linear(dropped, self.down), self.up)


class Block(nn.Module):
    """One transformer layer: causal attention, then a feed-forward net."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = AdaptedLinear(width, 3 * width)
        self.out = AdaptedLinear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [batch, length, width] to the same shape."""
        batch, length, width = x.shape
        heads = self.qkv(self.attention_norm(x)).view(batch, length, 3, -1, HEAD_WIDTH)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, width))
        y = self.mlp(self.mlp_norm(x))
        return x + functional.dropout(y, DROPOUT, self.training)


class GPT(nn.Module):
    """A byte-level GPT."""

    def __init__(self, width: int, layers: int, context: int) -> None:
        super().__init__()
        self.bytes = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        nn.init.zeros_(self.positions.weight)

    def add_adapters(self) -> None:
        """Add an adapter to every layer that can have one."""
        for module in self.modules():
            if isinstance(module, AdaptedLinear):
                module.add_adapter(ADAPTER_RANK)

    def adapters(self) -> Iterator[nn.Parameter]:
        """Yield the parameters of the adapters."""
        for module in self.modules():
            if isinstance(module, AdaptedLinear) and module.down is not None:
                yield from (p for p in (module.down, module.up) if p is not None)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Score the next byte at each place: [batch, length] -> [batch, length, 256]."""
        x = self.bytes(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        scores: torch.Tensor = self.head(self.norm(x))
        return scores


# --- the text ---------------------------------------------------------------------------------


def base_text() -> bytes:
    """Return sources of the standard library."""
    specs = (importlib.util.find_spec(name) for name in SOURCES)
    origins = [spec.origin for spec in specs if spec is not None and spec.origin is not None]
    return b"\n".join(Path(origin).read_bytes() for origin in origins)


def tuning_text() -> bytes:
    """Return the prose of Python's reference, as ``help("topics")`` has it."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics)).encode()


class Sampler:
    """Cuts a text into windows, and yields batches of them in a shuffled order."""

    def __init__(self, text: bytes, length: int, seed: int) -> None:
        tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self.windows = tokens[: len(tokens) // length * length].view(-1, length)
        self.seed, self.epoch, self.position = seed, 0, 0
        self._shuffle()

    def _shuffle(self) -> None:
        generator = torch.Generator().manual_seed(self.seed * 1_000 + self.epoch)
        self.order = torch.randperm(len(self.windows), generator=generator)

    def batch(self, size: int) -> torch.Tensor:
        """Return the next ``size`` windows: int64 [size, length]."""
        if self.position + size > len(self.order):
            self.epoch, self.position = self.epoch + 1, 0
            self._shuffle()
        chosen = self.order[self.position : self.position + size]
        self.position += size
        return self.windows[chosen].long()

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the sampler."""
        return {"seed": self.seed, "epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to the position of another sampler of the same text."""
        self.seed, self.epoch, self.position = state["seed"], state["epoch"], state["position"]
        self._shuffle()


# --- the training -----------------------------------------------------------------------------


class Training:
    """The state of a training. To continue exactly, a run must restore all of it."""

    def __init__(self, plan: Plan) -> None:
        torch.set_num_threads(plan.threads)
        torch.use_deterministic_algorithms(True)
        torch.manual_seed(plan.seed)
        self.plan = plan
        self.model = GPT(plan.width, plan.layers, plan.context)
        self.sampler = Sampler(base_text(), plan.context + 1, plan.seed)
        self.progress = StateDict(step=0, losses=torch.zeros(plan.steps, dtype=torch.float64))
        self.enter("base")

    def enter(self, phase: str) -> None:
        """Choose the parameters to train, and make a new optimizer for them."""
        self.phase = phase
        for parameter in self.model.parameters():
            parameter.requires_grad_(phase != "adapters")
        for parameter in self.model.adapters():
            parameter.requires_grad_(True)
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=LEARNING_RATE[phase], betas=(0.9, 0.95))

    def begin_tuning(self) -> None:
        """Put adapters on the base model, and switch to the other text."""
        torch.manual_seed(self.plan.seed + 1)
        self.model.add_adapters()
        self.sampler = Sampler(tuning_text(), self.plan.context + 1, self.plan.seed)
        self.enter("adapters")

    def app_state(self) -> dict[str, Any]:
        """Return the app state for a snapshot."""
        return {
            "model": self.model,
            "optim": self.optimizer,
            "progress": self.progress,
            "sampler": self.sampler,
            "rng": RNGState(),
        }

    def train_step(self) -> float:
        """Train on the next batch; return its loss."""
        batch = self.sampler.batch(self.plan.batch)
        scores = self.model(batch[:, :-1])
        loss = functional.cross_entropy(scores.flatten(0, 1), batch[:, 1:].flatten())
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        return loss.item()

    def digest(self) -> str:
        """Return a digest of every bit of the model and its optimizer."""
        digest = hashlib.blake2b(digest_size=16)
        moments = self.optimizer.state_dict()["state"]
        for state in (self.model.state_dict(), *(moments[key] for key in sorted(moments))):
            for name in sorted(state):
                digest.update(name.encode() + state[name].detach().numpy().tobytes())
        return digest.hexdigest()


def train_base(training: Training) -> float:
    """Train the base model; return the mean of its last losses."""
    losses = []
    for step in range(1, training.plan.base_steps + 1):
        losses.append(training.train_step())
        tell("base", step=step, loss=losses[-1])
    return statistics.fmean(losses[-10:])


def resume(training: Training, snapshot: Snapshot) -> None:
    """Restore the state of ``snapshot``; of the base snapshot, only the model."""
    started = time.perf_counter()
    user = snapshot.metadata.user
    if user["phase"] == "base":
        snapshot.restore({"model": training.model})
        training.begin_tuning()
    else:
        training.begin_tuning()
        training.enter(user["phase"])
        snapshot.restore(training.app_state())
    seconds = time.perf_counter() - started
    tell("restored", name=snapshot.name, step=training.progress["step"], seconds=seconds)


def take(training: Training, store: Store, name: str, loss: float) -> None:
    """Take a snapshot, and save the same state by ``torch.save`` for the comparison.

    Args:
        training: The training to take.
        store: The store.
        name: The name of the snapshot.
        loss: The mean loss since the take before.
    """
    app_state = training.app_state()
    tell("taking", name=name, step=training.progress["step"])
    started = time.perf_counter()
    metadata = {"step": training.progress["step"], "phase": training.phase, "loss": loss}
    snapshot = store.take(app_state, name, metadata=metadata)
    seconds = time.perf_counter() - started
    tell("taken", name=name, step=training.progress["step"])
    saved_bytes, saved_seconds = torch_save(app_state, Path(training.plan.scratch, "saved.pt"))
    tell(
        "saved",
        name=name,
        phase=training.phase,
        step=training.progress["step"],
        loss=loss,
        logical=snapshot.stats.logical_bytes,
        new=snapshot.stats.new_bytes,
        seconds=seconds,
        saved_bytes=saved_bytes,
        saved_seconds=saved_seconds,
    )


def torch_save(app_state: dict[str, Any], path: Path) -> tuple[int, float]:
    """Save durably by ``torch.save``; return the file's bytes and the seconds."""
    started = time.perf_counter()
    with path.open("wb") as file:
        torch.save({key: value.state_dict() for key, value in app_state.items()}, file)
        file.flush()
        os.fsync(file.fileno())
    seconds = time.perf_counter() - started
    size = path.stat().st_size
    path.unlink()
    return size, seconds


def tune(training: Training, store: Store | None) -> None:
    """Fine-tune to the end; if a store is given, take a snapshot every few steps."""
    plan, progress = training.plan, training.progress
    for step in range(progress["step"], plan.steps):
        phase = "adapters" if step < plan.adapter_steps else "all"
        if phase != training.phase:
            training.enter(phase)
        loss = training.train_step()
        progress["losses"][step] = loss
        progress["step"] = step + 1
        tell("step", step=step + 1, loss=loss)
        if store is not None and (step + 1) % plan.take_every == 0:
            mean = progress["losses"][step + 1 - plan.take_every : step + 1].mean().item()
            take(training, store, f"{plan.run}/step_{step + 1:04d}", mean)


def main(plan: Plan) -> None:
    """Train as ``plan`` says, from the newest snapshot of the run if there is one."""
    training = Training(plan)
    parameters = sum(p.numel() for p in training.model.parameters())
    tell("model", parameters=parameters)
    store = Store(plan.store)
    start = store[plan.start] if plan.start else store.latest(plan.run)
    if start is None:
        take(training, store, f"{plan.run}/base", train_base(training))
        training.begin_tuning()
    else:
        resume(training, start)
    tune(training, store if plan.takes else None)
    tell("done", losses=training.progress["losses"].tolist(), digest=training.digest())


if __name__ == "__main__":
    main(Plan(**json.loads(sys.argv[1])))
