"""A real server of vLLM on a CPU."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tests.support.engine_servers import Answer, Server


class VllmServer(Server):
    """A server of vLLM on loopback.

    Args:
        folder: The model.
        log: For what it says.
        more: Further options.
    """

    def __init__(self, folder: Path, log: Path, *more: str) -> None:
        program = Path(sys.executable).with_name("vllm")
        options = ["--dtype", "float32", "--enforce-eager", "--max-model-len", "512"]
        options += ["--gpu-memory-utilization", "0.1", "--served-model-name", "base", *more]
        environ = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
        super().__init__([program, "serve", folder, *options], environ, log)

    def ask(self, prompt: list[int], model: str = "base", tokens: int = 200) -> Answer:
        asked = {
            "model": model, "prompt": prompt, "max_tokens": tokens, "temperature": 0,
            "ignore_eos": True, "return_token_ids": True,
        }  # fmt: skip
        return prompt, json.loads(self.call("/v1/completions", asked))["choices"][0]["token_ids"]
