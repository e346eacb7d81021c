"""A real server of SGLang on a CPU."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from tests.support.engine_servers import Answer, Server

_OPTIONS = {
    "device": "cpu",
    "attention-backend": "torch_native",
    "sampling-backend": "pytorch",
    "cuda-graph-backend-decode": "disabled",
    "cuda-graph-backend-prefill": "disabled",
    "dtype": "float32",
    "max-total-tokens": "8192",
}


class SglangServer(Server):
    """A server of SGLang on loopback, whose kernels are torch's.

    Args:
        folder: The model.
        log: For what it says.
    """

    tokens = 64  # of each answer, unless it is aborted

    def __init__(self, folder: Path, log: Path) -> None:
        command = [sys.executable, "-m", "tests.support.sglang_server", "--model-path", str(folder)]
        options = [text for name, value in _OPTIONS.items() for text in (f"--{name}", value)]
        environ = {"SGLANG_USE_CPU_ENGINE": "1"}
        super().__init__([*command, *options, "--skip-server-warmup"], environ, log)

    def ask(self, prompt: list[int]) -> Answer:
        return prompt, self.ask_fully(prompt)["output_ids"]

    def ask_fully(self, prompt: list[int]) -> dict[str, Any]:
        """Return an answer with what the server says of it."""
        sampling = {"temperature": 0, "max_new_tokens": self.tokens, "ignore_eos": True}
        asked = {"input_ids": prompt, "sampling_params": sampling}
        answer: dict[str, Any] = json.loads(self.call("/generate", asked))
        return answer
