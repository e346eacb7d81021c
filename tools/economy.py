"""How many bytes runs take up and send where every weight moves: ``python -m tools.economy``.

Each run takes a snapshot a step. Shares are of the bytes of its states: at rest after ``casnap gc``
of all snapshots but the newest three, and sent by a copy of each step into a store that compresses.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from casnap import NewStore, StateDict, Store

_KEPT = 3
_VOCABULARY, _WIDTH, _LENGTH = 4096, 256, 64


def moving(share: float, elements: int = 8 << 20) -> Callable[[int], Iterator[dict[str, Any]]]:
    """Return a run of bf16 weights of which a share moves by one unit in the last place a step."""

    def run(steps: int) -> Iterator[dict[str, Any]]:
        weights = (torch.randn(elements) * 0.02).to(torch.bfloat16)
        bits = weights.view(torch.int16)
        for _ in range(steps):
            chosen = torch.rand(elements) < share
            bits[chosen] += torch.randint(0, 2, (int(chosen.sum()),), dtype=torch.int16) * 2 - 1
            yield {"model": StateDict(weights=weights)}

    return run


class _Transformer(torch.nn.Module):
    """A small language model."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = torch.nn.Embedding(_VOCABULARY, _WIDTH)
        layer = torch.nn.TransformerEncoderLayer(
            _WIDTH, 4, 4 * _WIDTH, dropout=0.0, batch_first=True, norm_first=True
        )
        self.layers = torch.nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.head = torch.nn.Linear(_WIDTH, _VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.layers(self.tokens(tokens)))
        return logits


def _train(
    model: _Transformer, optimizer: torch.optim.Optimizer, steps: int, factor: int
) -> Iterator[int]:
    """Train for some steps; yield after each."""
    for step in range(steps):
        # A language that can be learned: the next token is a function of the one before.
        tokens = torch.empty(8, _LENGTH + 1, dtype=torch.long)
        tokens[:, 0] = torch.randint(0, _VOCABULARY, (8,))
        for i in range(_LENGTH):
            tokens[:, i + 1] = (tokens[:, i] * factor + 7) % _VOCABULARY
        logits = model(tokens[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield step


def _bf16(model: torch.nn.Module) -> dict[str, Any]:
    return {"model": StateDict({k: v.to(torch.bfloat16) for k, v in model.state_dict().items()})}


def training(*, as_bf16: bool, warm_up: int = 20) -> Callable[[int], Iterator[dict[str, Any]]]:
    """Return a run that trains with AdamW, and keeps bf16 weights, or fp32 ones and the moments."""

    def run(steps: int) -> Iterator[dict[str, Any]]:
        torch.manual_seed(0)
        model = _Transformer()
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
        for step in _train(model, optimizer, warm_up + steps, 31):
            if step >= warm_up:
                yield _bf16(model) if as_bf16 else {"model": model, "optimizer": optimizer}

    return run


def measure_fine_tune(folder: Path, steps: int) -> list[str]:
    """Take and copy a base of bf16 weights, and what a fine-tune makes of it; return a row."""
    torch.manual_seed(0)
    model = _Transformer()
    for _ in _train(model, torch.optim.AdamW(model.parameters(), lr=3e-4), 200, 31):
        pass
    store = Store(folder / "run").make()
    copy = Store(folder / "copy", create=NewStore(codec="zstd")).make()
    store.take(_bf16(model), "models/base/1")
    nbytes = _pack_bytes(store)
    for _ in _train(model, torch.optim.AdamW(model.parameters(), lr=3e-5), steps, 17):
        pass
    store.take(_bf16(model), "models/tuned/1")
    store.copy("models/base/1", to=copy)
    sent = store.copy("models/tuned/1", to=copy).sent_bytes
    for _ in range(2):
        store.gc(grace=0, recode_after=0)
    with_base = _pack_bytes(store)
    store.delete("models/tuned/1")
    for _ in range(2):
        store.gc(grace=0, recode_after=0)
    return [f"{(with_base - _pack_bytes(store)) / nbytes:.3f}", f"{sent / nbytes:.3f}"]


RUNS: dict[str, Callable[[int], Iterator[dict[str, Any]]]] = {
    "1 % of bf16 weights move": moving(0.01),
    "3 %": moving(0.03),
    "10 %": moving(0.1),
    "all bf16 weights move by one": moving(1.0),
    "trained: bf16 weights": training(as_bf16=True),
    "trained: fp32 weights and moments": training(as_bf16=False),
}


def _bytes_below(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def _pack_bytes(store: Store) -> int:
    return _bytes_below(Path(store.uri) / "casnap-store/packs")


def measure(run: Callable[[int], Iterator[dict[str, Any]]], steps: int, folder: Path) -> list[str]:
    """Take, copy and recode one run; return the cells of its row."""
    store = Store(folder / "run").make()
    store.configure(gc="off")
    copy = Store(folder / "copy", create=NewStore(codec="zstd")).make()
    sent: list[int] = []
    copying = 0.0
    for step, state in enumerate(run(steps)):
        store.take(state, f"run/{step:03}")
        began = time.process_time()
        sent.append(store.copy(f"run/{step:03}", to=copy).sent_bytes)
        copying += time.process_time() - began
    nbytes = _pack_bytes(store) / steps
    began = time.process_time()
    store.gc(grace=0)
    recoding = time.process_time() - began
    store.gc(grace=0)
    older = steps - _KEPT
    at_rest = (_pack_bytes(store) - _KEPT * nbytes) / (older * nbytes)
    slowest = 0.0
    for step in range(older):
        seconds = []
        for _ in range(3):
            began = time.process_time()
            store[f"run/{step:03}"].read_objects("*")
            seconds.append(time.process_time() - began)
        slowest = max(slowest, min(seconds))
    return [
        f"{at_rest:.3f}",
        f"{sum(sent[1:]) / (len(sent) - 1) / nbytes:.3f}",
        f"{sent[0] / nbytes:.2f}",
        f"{older * nbytes / recoding / 1e9:.2f}",
        f"{steps * nbytes / copying / 1e9:.2f}",
        f"{nbytes / slowest / 1e9:.2f}",
    ]


def beside(run: Callable[[int], Iterator[dict[str, Any]]], steps: int, folder: Path) -> list[str]:
    """Have restic and borg back up the files of ``torch.save``, where they are installed.

    Returns:
        What each takes up a step but the first, as a share of a file; with their compression.
    """
    files, repository = folder / "files", folder / "repository"
    files.mkdir()
    password = {**os.environ, "RESTIC_PASSWORD": "none", "BORG_PASSPHRASE": "none"}
    commands = {
        "restic": (
            ["restic", "init", "--repo", str(repository / "restic")],
            ["restic", "backup", "--compression", "max", "--repo", str(repository / "restic")],
        ),
        "borg": (
            [
                "borg",
                "init",
                "--encryption",
                "none",
                "--make-parent-dirs",
                str(repository / "borg"),
            ],
            ["borg", "create", "--compression", "zstd", str(repository / "borg") + "::{utcnow}"],
        ),
    }
    tools = {name: each for name, each in commands.items() if shutil.which(name) is not None}
    sizes: dict[str, list[int]] = {name: [] for name in tools}
    for init, _ in tools.values():
        subprocess.run(init, env=password, check=True, capture_output=True)
    for state in run(steps):
        plain = {key: dict(part.state_dict()) for key, part in state.items()}
        torch.save(plain, files / "state.pt")
        for name, (_, backup) in tools.items():
            subprocess.run([*backup, str(files)], env=password, check=True, capture_output=True)
            sizes[name].append(_bytes_below(repository / name))
    nbytes = (files / "state.pt").stat().st_size
    shares = {name: (s[-1] - s[0]) / (steps - 1) / nbytes for name, s in sizes.items()}
    return [f"{name}: {share:.2f}" for name, share in shares.items()]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--only", help="rows whose name has this text")
    parser.add_argument("--beside", action="store_true", help="measure restic and borg, not casnap")
    parser.add_argument("--folder", type=Path, help="where to put the stores")
    options = parser.parse_args()
    # Threads of torch that wait for the next kernel would count as processor time.
    torch.set_num_threads(1)
    print("| run | at rest | sent a step | first | recode GB/s | copy GB/s | slowest read GB/s |")
    print("|---|---|---|---|---|---|---|")
    for steps in (10, 100):
        name = f"fine-tuned for {steps} steps: bf16 weights"
        if not options.beside and (options.only is None or options.only in name):
            with tempfile.TemporaryDirectory(dir=options.folder) as place:
                print(
                    f"| {name} | {' | '.join(measure_fine_tune(Path(place), steps))} |", flush=True
                )
    for name, run in RUNS.items():
        if options.only is not None and options.only not in name:
            continue
        folder = Path(tempfile.mkdtemp(dir=options.folder))
        try:
            cells = (beside if options.beside else measure)(run, options.steps, folder)
        finally:
            shutil.rmtree(folder)
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
