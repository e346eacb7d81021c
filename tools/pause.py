"""How long new weights stop vLLM, and how soon it answers with them: ``python -m tools.pause``.

By the python of `make test-engines`, which has vLLM on the CPU:

    VLLM_CPU_KVCACHE_SPACE=1 TORCHDYNAMO_DISABLE=1 HF_HUB_OFFLINE=1 \
        .venv/engines/bin/python -m tools.pause --mb 222 --rounds 5 --s3

A trainer, a process of its own, takes steps, of which each moves 1 % of the elements of bf16
weights; a follower pulls each, and an engine of this process takes it: in turns by patches, and
whole by ``reload_weights``. Each round also measures vLLM's own ``load_checkpoint_weight_patches``
with the same patches, and ``save_pretrained`` with a reload of what that has written; and a pause
in which the engine has the version already, which is the part that no patch can save. At the end,
an engine without the backend reloads versions whole: on CPUs, it packs its weights. With ``--line
100``, the mirror and the follower share a line of so many MB a second to the S3 server, and
``save_pretrained``'s folder is copied at that rate. All share this machine.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import shutil
import socket
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch

from casnap import MirrorOptions, PendingSnapshot, Retention, StateDict, Store
from casnap.integrations.engines import OnVersion, reload_vllm_async
from casnap.serving import PullOptions
from casnap.serving.patches import Patch, StagedPatches
from casnap.serving.version import Version
from tests.support.servers import shared
from tests.support.tiny_llamas import small_files
from tools.line import Line, relay

_WIDTH, _WORDS = 1024, 2048
_PIECE = 1 << 20
# One token, and one in the answer: processors without bf16 take half a second for twenty.
_PROMPT = {"prompt_token_ids": [5]}


def llama(nbytes: int) -> Any:
    """Return a Llama of about so many bytes of bf16."""
    from transformers import LlamaConfig, LlamaForCausalLM

    width = _WIDTH if nbytes > 100e6 else _WIDTH // 4
    inner = width * 11 // 4
    layer = 2 * (4 * width * width + 3 * width * inner)
    words = 2 * 2 * _WORDS * width
    config = LlamaConfig(
        vocab_size=_WORDS, hidden_size=width, intermediate_size=inner,
        num_hidden_layers=max(1, round((nbytes - words) / layer)), num_attention_heads=width // 64,
        num_key_value_heads=width // 64, max_position_embeddings=512, bos_token_id=0,
        eos_token_id=1, dtype="bfloat16", architectures=["LlamaForCausalLM"],
    )  # fmt: skip
    return LlamaForCausalLM(config).to(torch.bfloat16).eval()


def _relayed(bucket: Any, rate: float) -> str:
    """Return the URL of a bucket's server behind a line of so many bytes a second."""
    listener = socket.create_server(("127.0.0.1", 0))
    address = urlsplit(bucket.server.endpoint)
    multiprocessing.get_context("fork").Process(
        target=relay,
        args=(listener, (address.hostname, address.port), rate),
        kwargs={"both_ways": True},
        daemon=True,
    ).start()
    return f"http://127.0.0.1:{listener.getsockname()[1]}"


class Trainer:
    """Takes steps of a model."""

    def __init__(self, folder: Path, nbytes: int, mirror: str, options: dict[str, Any]) -> None:
        self.model = llama(nbytes)
        self.nbytes = sum(parameter.nbytes for parameter in self.model.parameters())
        self._files = small_files(self.model, folder / "files")
        self._folder = folder
        there = MirrorOptions(mirror, storage_options=options) if mirror else None
        self._store = Store(folder / "ckpts", mirror=there)
        self._is_mirrored = bool(mirror)
        self._taken = 0

    def step(self) -> None:
        """Change the last bit of 1 % of the elements."""
        with torch.no_grad():
            for parameter in self.model.parameters():
                bits = parameter.view(-1).view(torch.int16)
                chosen = torch.randint(len(bits), (len(bits) // 100 + 1,))
                bits[chosen] ^= 1

    def take(self, *, in_background: bool = False) -> tuple[str, float]:
        """Take a step; return its name, and how long that blocked."""
        self.step()
        name = f"run/step_{self._taken}"
        self._taken += 1
        state = {"model": self.model, "files": StateDict(self._files)}
        take = self._store.async_take if in_background else self._store.take
        start = time.perf_counter()
        taken = take(state, name, retention=Retention(keep_last=2))
        blocked = time.perf_counter() - start
        if isinstance(taken, PendingSnapshot):
            taken.wait()
        return name, blocked

    def save(self) -> tuple[Path, float]:
        """Take a step, and have Transformers save it; return where, and how long that blocked."""
        self.step()
        folder = self._folder / f"saved_{self._taken}"
        shutil.copytree(self._folder / "files", folder)
        start = time.perf_counter()
        self.model.save_pretrained(folder)
        return folder, time.perf_counter() - start

    def collect(self) -> None:
        """Delete what retention let go, which a collector else keeps for a day: memory is short."""
        if self._is_mirrored:
            self._store.wait_mirrored(600)
        self._store.gc(grace=0, recode_after=None)


def _train(orders: Connection, *about: Any) -> None:
    """Be a trainer that another process orders what to do."""
    trainer = Trainer(*about)
    orders.send(trainer.nbytes)
    while order := orders.recv():
        name, options = order
        orders.send(getattr(trainer, name)(**options))


class TrainerProcess:
    """A trainer in a process of its own, as :class:`Trainer`; it ends with this one."""

    def __init__(self, *about: Any) -> None:
        self._orders, theirs = multiprocessing.Pipe()
        context = multiprocessing.get_context("spawn")
        context.Process(target=_train, args=(theirs, *about), daemon=True).start()
        theirs.close()
        self.nbytes: int = self._orders.recv()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def ordered(**options: Any) -> Any:
            self._orders.send((name, options))
            return self._orders.recv()

        return ordered


class Follower:
    """Brings the weights to this host."""

    def __init__(self, folder: Path, source: str, options: dict[str, Any], line: float) -> None:
        self._source = Store(source, storage_options=options or None)
        self._line = Line(line) if line else None
        self.live = folder / "live"
        self.pulled = 0.0

    def follow(self, name: str, callback: OnVersion) -> None:
        """Follow until a callback was called for a snapshot."""
        options = PullOptions(patches=True)
        for event in self._source.follow(
            self.live, "run", interval=0.05, on_version=callback, options=options
        ):
            if event.error is not None:
                print(event.error)
            if event.event == "switched" and event.report:
                self.pulled = event.report.seconds
            if event.event == "called" and event.report and event.report.snapshot == name:
                return

    def copied(self, folder: Path) -> Path:
        """Copy a folder over the line, if there is one; return the copy."""
        if self._line is None:
            return folder
        copy = folder.with_name(f"{folder.name}_copy")
        copy.mkdir()
        for file in folder.iterdir():
            with file.open("rb") as source, (copy / file.name).open("wb") as target:
                while piece := source.read(_PIECE):
                    self._line.carry(len(piece))
                    target.write(piece)
        shutil.rmtree(folder)
        return copy


class Pauses:
    """Measures the pauses of an engine."""

    def __init__(self, engine: Any) -> None:
        self.seconds = 0.0
        pause, resume = engine.pause_generation, engine.resume_generation

        async def pause_generation(**options: Any) -> None:
            self._start = time.perf_counter()
            await pause(**options)

        async def resume_generation() -> None:
            await resume()
            self.seconds = time.perf_counter() - self._start

        engine.pause_generation, engine.resume_generation = pause_generation, resume_generation


def apply_by_vllm(
    worker: Any, path: str, digest: str, base: str, content: str, shapes: dict[str, list[int]]
) -> float:
    """Apply patches by vLLM's own function, in a worker; return how long that takes."""
    from vllm.model_executor.model_loader.checkpoint_weight_patch import (
        CheckpointWeightPatch,
        load_checkpoint_weight_patches,
    )

    start = time.perf_counter()
    patches = [
        CheckpointWeightPatch(
            name,
            tuple(shapes[name]),
            torch.bfloat16,
            torch.tensor(patch.values.view("i2")).view(torch.bfloat16),
            torch.tensor(patch.indices),
        )
        for name, patch in Patch.read(Path(path), digest, base, content).items()
    ]
    load_checkpoint_weight_patches(worker.model_runner.get_model(), patches)
    return time.perf_counter() - start


def _engine(live: Path, **options: Any) -> Any:
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    about = AsyncEngineArgs(
        model=str(live.resolve()), dtype="bfloat16", enforce_eager=True, max_model_len=128,
        gpu_memory_utilization=0.1, **options,
    )  # fmt: skip
    return AsyncLLM.from_engine_args(about)


async def _answer(engine: Any) -> None:
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    async for _ in engine.generate(_PROMPT, sampling, f"r{time.perf_counter_ns()}"):
        pass


async def measure(folder: Path, nbytes: int, rounds: int, bucket: Any, line: float) -> None:
    """Print all figures."""
    mirror, options = "", dict[str, Any]()
    if bucket:
        mirror, options = f"{bucket.uri}/run", bucket.storage_options
        if line:
            options = {**options, "endpoint_url": _relayed(bucket, line)}
    trainer = TrainerProcess(folder, nbytes, mirror, options)
    name, _ = trainer.take()
    trainer.collect()
    follower = Follower(folder, mirror or str(folder / "ckpts"), options, line)
    follower.follow(name, lambda *_: None)
    live = follower.live
    print(f"a model of {trainer.nbytes / 1e6:,.0f} MB of bf16")
    engine = _engine(live, weight_transfer_config={"backend": "casnap"})
    pauses = Pauses(engine)
    by_patches, whole = reload_vllm_async(engine, patches=True), reload_vllm_async(engine)

    async def served(callback: OnVersion) -> tuple[float, float, float]:
        """Return how long a take blocks, the pause is, and the first answer comes after it."""
        await asyncio.to_thread(trainer.collect)
        name, blocked = await asyncio.to_thread(trainer.take)
        start = time.perf_counter()
        await asyncio.to_thread(follower.follow, name, callback)
        await _answer(engine)
        return blocked, pauses.seconds, time.perf_counter() - start

    def keeping_stage(callback: OnVersion, kept: list[StagedPatches]) -> Callable[..., None]:
        def on_version(version: Path, changed: list[str]) -> None:
            callback(version, changed)
            base = version.parent / before.name
            again = StagedPatches.between(base, version)
            assert again is not None
            kept.append(again)

        before = live.resolve()
        return on_version

    rows: list[dict[str, float]] = []
    try:
        await _answer(engine)
        await served(by_patches)
        for _ in range(rounds):
            row: dict[str, float] = {}
            row["taken"], row["patches"], row["answer"] = await served(by_patches)
            row["pulled"] = follower.pulled
            start = time.perf_counter()
            await _answer(engine)
            row["asked"] = time.perf_counter() - start
            await asyncio.to_thread(by_patches, live.resolve(), [])
            row["nothing"] = pauses.seconds
            kept: list[StagedPatches] = []
            await served(keeping_stage(by_patches, kept))
            version = Version.at(live)
            assert version is not None
            shapes = {n: list(tensor.shape) for n, tensor in version.record.tensors.items()}
            path, *about = kept[0][:4]
            row["by vllm"] = max(
                await engine.collective_rpc(apply_by_vllm, args=(str(path), *about, shapes))
            )
            kept[0].remove()
            _, row["whole"], row["answer, whole"] = await served(whole)
            _, row["taken, async"] = await asyncio.to_thread(trainer.take, in_background=True)
            saved, row["saved"] = await asyncio.to_thread(trainer.save)
            start = time.perf_counter()
            saved = await asyncio.to_thread(follower.copied, saved)
            await asyncio.to_thread(whole, saved, [])
            await _answer(engine)
            row["answer, saved"] = time.perf_counter() - start + row["saved"]
            shutil.rmtree(saved)
            # The engine learns again which version it has.
            await served(by_patches)
            rows.append(row)
            print(", ".join(f"{name} {seconds:.3f}" for name, seconds in row.items()), flush=True)
    finally:
        engine.shutdown()
    engine = _engine(live)
    try:
        pauses, whole = Pauses(engine), reload_vllm_async(engine)
        for row in rows:
            await served(whole)
            row["whole, packed"] = pauses.seconds
    finally:
        engine.shutdown()
    middle = {name: statistics.median(row[name] for row in rows) for name in rows[0]}

    def ratio(name: str, other: str) -> str:
        return f"{statistics.median(row[name] / row[other] for row in rows):.3f}"

    print(f"medians of {rounds} rounds, in s:")
    print(
        f"the pause: by patches {middle['patches']:.3f}, by reload_weights {middle['whole']:.3f}: "
        f"{ratio('patches', 'whole')} of that; by an engine that packs its weights "
        f"{middle['whole, packed']:.3f}: {ratio('patches', 'whole, packed')} of that; with nothing "
        f"to write {middle['nothing']:.3f}; vLLM's own function alone takes "
        f"{middle['by vllm']:.3f}"
    )
    print(
        f"take returned to first answer: {middle['answer']:.2f}, of which the pull "
        f"{middle['pulled']:.2f}, and an answer by itself "
        f"{middle['asked']:.2f}; with a whole reload "
        f"{middle['answer, whole']:.2f}; save_pretrained and a reload of its folder "
        f"{middle['answer, saved']:.2f}, of which the trainer is blocked for {middle['saved']:.2f}"
    )
    print(f"that is {ratio('answer, saved', 'answer')} times as long as with patches")
    print(
        f"the trainer is blocked: {ratio('taken', 'saved')} of save_pretrained's time, "
        f"by async_take {ratio('taken, async', 'saved')}"
    )


def main() -> None:
    """Read the arguments, and measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mb", type=float, default=222)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--s3", action="store_true", help="by way of a mirror on an S3 server")
    parser.add_argument("--line", type=float, default=0.0, help="MB a second, with --s3")
    parser.add_argument("--dir", type=Path, default=Path("/dev/shm"))
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="casnap-pause-", dir=args.dir))
    os.environ["CASNAP_CACHE_DIR"] = str(folder / "cache")
    # Functions are sent to workers.
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
    try:
        with ExitStack() as stack:
            bucket = None
            if args.s3:
                server = stack.enter_context(shared("seaweedfs", folder))
                bucket = stack.enter_context(server.bucket())
                os.environ.update(bucket.environment)
            nbytes, line = int(args.mb * 1e6), args.line * 1e6
            asyncio.run(measure(folder, nbytes, args.rounds, bucket, line))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
