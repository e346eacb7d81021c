"""Small trainings as users write them, and faults that can be planted in their resumes.

Each fault replaces some lines of a script. ``FAULTS`` says what the cause is called that a proof
names first, and which words its text has.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

TRAININGS = ("mixed", "workers", "dense", "halves", "compiled", "slices")
SCRIPTS = Path(__file__).parents[1] / "guests/proving/trainings"
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node")


class Fault(NamedTuple):
    """What is wrong with a training.

    Attributes:
        role: What the cause that is named first is called.
        edits: The lines to replace, each with what it becomes.
        words: Words of the text of that cause.
        training: The script.
    """

    role: str
    edits: tuple[tuple[str, str], ...]
    words: str = ""
    training: str = "mixed"

    @property
    def is_alike_in_forks(self) -> bool:
        """Whether forks have it as well: they have the seed of hashes in common."""
        return self.role != "run" and self.training != "slices"

    def is_named_by(self, cause: Mapping[str, str]) -> bool:
        """Whether a cause is this one."""
        return cause["role"] == self.role and self.words in cause["text"]


def _after_restore(lines: str) -> tuple[tuple[str, str], ...]:
    """Return the edit that does something after the restore, and only then."""
    text = "\n".join(f"    {line}" for line in lines.splitlines())
    return (("# resumed\n", f"if last is not None:\n{text}\n"),)


FAULTS = {
    "fresh moments": Fault(
        "moments",
        _after_restore(
            "optimizer = torch.optim.AdamW(model.parameters(), lr=scheduler.get_last_lr()[0])\n"
            "state['optimizer'] = scheduler.optimizer = optimizer\n"
            "optimizer.param_groups[0]['initial_lr'] = 0.05"
        ),
    ),
    "optimizer left out": Fault("moments", (('    "optimizer": optimizer,\n', ""),)),
    "scheduler left out": Fault("scheduler", (('    "scheduler": scheduler,\n', ""),)),
    "scheduler made after the restore": Fault(
        "scheduler",
        _after_restore(
            "scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.8)\n"
            "state['scheduler'] = scheduler"
        ),
    ),
    "epoch not set": Fault(
        "loader",
        (
            ('self.epoch, self.position = state["epoch"]', "self.position = state"),
            ('= state, state["position"]', '= state["position"]'),
        ),
    ),
    "position not loaded": Fault(
        "loader", (('self.epoch, self.position = state["epoch"], state["position"]', "pass"),)
    ),
    "loader left out": Fault("loader", (('    "batches": batches,\n', ""),)),
    "seeded again": Fault("generators", _after_restore("torch.manual_seed(0)")),
    "no generators": Fault("generators", (('    "rng": RNGState(),\n', ""),)),
    "a generator of the device": Fault(
        "weights",
        (
            (
                "batches = Batches()",
                "device = torch.accelerator.current_accelerator() or torch.device('cpu')\n"
                "own = torch.Generator(device).manual_seed(5)\n"
                "batches = Batches()",
            ),
            (
                "    # forward\n",
                "    dropped = torch.rand(3, 4, generator=own, device=device) < 0.2\n"
                "    x = torch.where(dropped.cpu(), 0, x)\n",
            ),
        ),
        words="a generator of its own",
    ),
    "untied": Fault(
        "weights",
        _after_restore(
            "model.head.weight = torch.nn.Parameter(model.head.weight.detach().clone())\n"
            "optimizer.add_param_group({'params': [model.head.weight]})"
        ),
        words="tie",
    ),
    "untied without training it": Fault(
        "weights",
        _after_restore(
            "model.head.weight = torch.nn.Parameter(model.head.weight.detach().clone())"
        ),
        words="tie",
    ),
    "average begins anew": Fault(
        "weights",
        _after_restore("ema.update({n: p.detach().clone() for n, p in model.named_parameters()})"),
        words="averages",
    ),
    "scaler begins anew": Fault(
        "scaler",
        _after_restore(
            "scaler = torch.amp.GradScaler('cpu', init_scale=2.0, growth_interval=2)\n"
            "state['scaler'] = scaler"
        ),
    ),
    "batches counted anew": Fault(
        "counters", _after_restore("model.norm.num_batches_tracked.zero_()")
    ),
    "frozen part trains": Fault(
        "moments", _after_restore("model.base.requires_grad_(True)"), words="frozen"
    ),
    "renamed and not strict": Fault(
        "weights",
        (
            (
                "    last.restore(state)\n",
                "    model.embeddings, model.embedding = model.embedding, torch.nn.Identity()\n"
                "    model.embedding.forward = model.embeddings.forward\n"
                "    last.restore(state, strict=False)\n",
            ),
            *_after_restore("del optimizer.state[model.embeddings.weight]"),
        ),
        words="strict=False",
    ),
    "accumulation cut": Fault(
        "weights",
        (
            ("    optimizer.zero_grad()\n", ""),
            (
                "    scaler.step(optimizer)\n    scaler.update()\n",
                "    if step % 2 == 0:\n"
                "        scaler.step(optimizer)\n"
                "        scaler.update()\n"
                "        optimizer.zero_grad()\n",
            ),
        ),
        words="gradients that were being accumulated",
    ),
    "a hook that changes weights": Fault(
        "weights",
        (
            (
                "model = Model()\n",
                "model = Model()\n"
                "def half(module, keys):\n"
                "    with torch.no_grad():\n"
                "        module.norm.weight.mul_(0.5)\n"
                "model.register_load_state_dict_post_hook(half)\n",
            ),
        ),
        words="a hook",
    ),
    "worker seeds": Fault(
        "generators",
        (
            ("        own = torch.Generator().manual_seed(100 * self.epoch + index)\n", ""),
            ("torch.randn(8, generator=own)", "torch.randn(8)"),
            ("num_workers=2, generator=torch.Generator()", "num_workers=2"),
        ),
        training="workers",
    ),
    "rows of other ranks": Fault(
        "ranks",
        (
            ("own_keys = []", "own_keys = ['moments/**']"),
            ("kept.copy_(whole)", "kept.copy_(mine)"),
        ),
        words="moments",
        training="slices",
    ),
    "less precise products": Fault(
        "environment",
        _after_restore("torch.set_float32_matmul_precision('medium')"),
        words="tf32_matmul off → on",
        training="dense",
    ),
    "master weights lost": Fault(
        "weights",
        (
            ('    "masters": masters,\n', ""),
            *_after_restore(
                "for master, parameter in zip(masters, model.parameters(), strict=True):\n"
                "    master.data.copy_(parameter)"
            ),
        ),
        words="master weights in float32",
        training="halves",
    ),
    "stale graph": Fault(
        "weights",
        (("    last.restore(state)\n    torch.compiler.reset()\n", "    last.restore(state)\n"),),
        words="compiled graph",
        training="compiled",
    ),
    "order of hashes": Fault(
        "run", (("    # forward\n", "    x = x[[i % 3 for i in map(hash, map(str, range(3)))]]\n"),)
    ),
    "a set": Fault(
        "run", (("    # forward\n", "    x = x[[int(i) % 3 for i in set('0123456')][:3]]\n"),)
    ),
    "seeds by the clock": Fault(
        "run", (("torch.manual_seed(0)\n", "torch.manual_seed(time.time_ns())\n"),)
    ),
}


def write_script(path: Path, fault: Fault | None = None, training: str = "mixed") -> Path:
    """Write a training, with a fault or without."""
    text = (SCRIPTS / f"{training if fault is None else fault.training}.py").read_text()
    for old, new in () if fault is None else fault.edits:
        assert old in text, old
        text = text.replace(old, new)
    path.write_text(text)
    return path


def proof_of(script: Path, fault: Fault | None = None, training: str = "mixed") -> list[str]:
    """Return the last arguments of ``casnap prove``: a training by ranks goes on with another."""
    if training != "slices" and (fault is None or fault.training != "slices"):
        return ["--", sys.executable, str(script), "{store}"]
    before, after = ([sys.executable, *TORCHRUN, n, str(script), "{store}"] for n in "23")
    return ["--resume-with", shlex.join(after), "--", *before]
