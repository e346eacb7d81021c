"""vLLM loads what a follower pulls, while it answers: the real one, on a CPU."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest

from casnap import StateDict, Store
from casnap.errors import CasnapError
from casnap.integrations.engines import (
    PauseMode,
    reload_vllm,
    reload_vllm_async,
    reload_vllm_server,
)
from casnap.serving import PullOptions
from tests.support.engine_servers import PROMPTS, Answer, Trainer, clients
from tests.support.tiny_llamas import Judge, llama
from tests.support.vllm_engines import VllmServer

pytestmark = [pytest.mark.engines, pytest.mark.filterwarnings("default"), pytest.mark.timeout(900)]

OPTIONS = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 512,
    "gpu_memory_utilization": 0.1,  # of the host, for which it is checked as well
}
VERSIONS = 4
PATCHED = PullOptions(patches=True)
MODES: list[PauseMode] = ["wait", "keep"]


@pytest.fixture
def trainer(tmp_path: Path) -> Trainer:
    return Trainer(tmp_path, [llama(seed) for seed in range(VERSIONS)], PATCHED)


def cut_off(trainer: Trainer) -> Path:
    """Return a folder of a version whose file is cut off."""
    folder = trainer.live.with_name("cut_off")
    shutil.copytree(trainer.live.resolve(), folder)
    weights = folder / "model.safetensors"
    content = weights.read_bytes()
    weights.unlink()  # a hard link, perhaps
    weights.write_bytes(content[: len(content) // 2])
    return folder


def test_an_engine_of_this_process(trainer: Trainer) -> None:
    from vllm import LLM, SamplingParams

    llm = LLM(str(trainer.live), enable_prefix_caching=True, **OPTIONS)
    sampling = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)

    def ask() -> list[Answer]:
        asked = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
        outputs = llm.generate(asked, sampling, use_tqdm=False)
        return [
            (prompt, list(output.outputs[0].token_ids))
            for prompt, output in zip(PROMPTS, outputs, strict=True)
        ]

    assert trainer.of_last(ask())
    trainer.serve(lambda folder, _: forgetful(llm, folder))
    assert not trainer.of_last(ask())  # of the old prefixes
    callback = reload_vllm(llm)
    trainer.serve(callback)
    assert trainer.of_last(ask())
    with pytest.raises(CasnapError, match=r"did not load .*cut_off, and still has .*/2@"):
        callback(cut_off(trainer), [])
    assert trainer.of_last(ask())
    trainer.serve(callback)
    assert trainer.of_last(ask())


def forgetful(llm: Any, folder: Path) -> None:
    """Load weights, and keep the prefixes that the old ones have computed."""
    llm.collective_rpc("reload_weights", kwargs={"weights_path": str(folder)})


def test_an_asynchronous_engine(trainer: Trainer) -> None:
    from vllm import AsyncEngineArgs, SamplingParams
    from vllm.v1.engine.async_llm import AsyncLLM

    sampling = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
    numbers = iter(range(1 << 20))

    async def ask(engine: Any, prompt: list[int]) -> Answer:
        asked = {"prompt_token_ids": prompt}
        async for output in engine.generate(asked, sampling, f"r{next(numbers)}"):
            last = output
        return prompt, list(last.outputs[0].token_ids)

    async def client(engine: Any, prompt: list[int], ended: asyncio.Event) -> list[Answer]:
        answers = []
        while not ended.is_set():
            answers.append(await ask(engine, prompt))
        return answers

    async def main() -> None:
        engine = AsyncLLM.from_engine_args(AsyncEngineArgs(model=str(trainer.live), **OPTIONS))
        try:
            with pytest.raises(TypeError, match="AsyncLLM there is reload_vllm_async"):
                reload_vllm(engine)
            for mode in MODES:
                callback, ended = reload_vllm_async(engine, mode=mode), asyncio.Event()
                clients = [asyncio.create_task(client(engine, p, ended)) for p in PROMPTS]
                await asyncio.gather(*(ask(engine, prompt) for prompt in PROMPTS))
                await asyncio.to_thread(trainer.serve, callback)
                ended.set()
                trainer.check([a for some in await asyncio.gather(*clients) for a in some], mode)
                version = trainer.live.resolve().name
                assert await engine.get_weight_version() == version
                assert trainer.of_last([await ask(engine, prompt) for prompt in PROMPTS])
                with pytest.raises(CasnapError, match=r"wait for the event loop"):
                    callback(trainer.live.resolve(), [])
            with pytest.raises(CasnapError, match=r"did not load .*no_such"):
                await asyncio.to_thread(callback, trainer.live.with_name("no_such"), [])
            assert not await engine.is_paused()
            assert trainer.of_last([await ask(engine, prompt) for prompt in PROMPTS])
        finally:
            engine.shutdown()

    asyncio.run(main())


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Trainer, VllmServer]]:
    path = tmp_path_factory.mktemp("served")
    trainer = Trainer(path, [llama(seed) for seed in range(VERSIONS)], PATCHED)
    server = VllmServer(trainer.live, path / "log", "--enable-lora", "--max-lora-rank", "8")
    try:
        server.wait()
        yield trainer, server
    finally:
        server.stop()


@pytest.mark.parametrize("mode", MODES)
def test_a_server_that_answers_meanwhile(
    served: tuple[Trainer, VllmServer], mode: PauseMode
) -> None:
    trainer, server = served
    callback = reload_vllm_server(server.url, mode=mode)
    with clients(server.ask) as answers:
        trainer.serve(callback)
    trainer.check(answers, mode)
    assert trainer.of_last([server.ask(prompt) for prompt in PROMPTS])
    with urlopen(f"{server.url}/weight_info") as response:
        version = json.load(response)["weight_version"]
    assert version == trainer.live.resolve().name


def test_a_server_goes_on_if_a_folder_cannot_be_loaded(
    served: tuple[Trainer, VllmServer],
) -> None:
    trainer, server = served
    callback = reload_vllm_server(server.url)
    with pytest.raises(CasnapError, match=r"did not load .*cut_off, and still has .*/live"):
        callback(cut_off(trainer), [])
    assert trainer.of_last([server.ask(prompt) for prompt in PROMPTS])


def test_a_server_without_the_backend_takes_no_patches(
    served: tuple[Trainer, VllmServer],
) -> None:
    trainer, server = served
    callback = reload_vllm_server(server.url, patches=True)
    with pytest.raises(CasnapError, match=r"does not take patches .*--weight-transfer-config"):
        callback(trainer.live.resolve(), [])
    assert trainer.of_last([server.ask(prompt) for prompt in PROMPTS])


def test_a_server_loads_a_pulled_adapter(
    served: tuple[Trainer, VllmServer], tmp_path: Path
) -> None:
    import torch
    from peft import LoraConfig, get_peft_model, get_peft_model_state_dict

    trainer, server = served
    store, live, base = Store(tmp_path / "ckpts"), tmp_path / "live", trainer.taken - 1
    for step in range(2):
        config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
        model = get_peft_model(llama(base), config)
        torch.manual_seed(step)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter)
        model.peft_config["default"].save_pretrained(tmp_path / "config")
        text = (tmp_path / "config/adapter_config.json").read_text()
        files = StateDict({"adapter_config.json": text})
        adapter = StateDict(get_peft_model_state_dict(model))
        store.take({"model": adapter, "files": files}, f"adapter/{step}")
        folder = store.pull(live).folder
        asked = {"lora_name": "tuned", "lora_path": folder, "load_inplace": True}
        server.call("/v1/load_lora_adapter", asked)
        judge = Judge([model, trainer.models[base]])
        for prompt in PROMPTS:
            assert judge.versions(*server.ask(prompt, "tuned")) == [0]
            assert judge.versions(*server.ask(prompt)) == [1]
