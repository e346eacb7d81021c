"""Language models that are made in a moment, and what they answer: for engines."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from casnap import StateDict, Store

_WORDS, _EOS = 128, 127
# Engines add in another order, so of two tokens with equal logits they may choose the other one.
_TIE = 1e-3


def llama(seed: int, *, tied: bool = False) -> Any:
    """Return a Llama, whose answers are those of no other seed."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=_WORDS, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=512,
        bos_token_id=0, eos_token_id=_EOS, tie_word_embeddings=tied, initializer_range=0.3,
        dtype="float32", architectures=["LlamaForCausalLM"],
    )  # fmt: skip
    torch.manual_seed(seed)
    return LlamaForCausalLM(config).eval()


def small_files(model: Any, folder: Path) -> dict[str, str]:
    """Return the configuration of a model and a tokenizer, as a pull puts them beside weights."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {f"w{i}": i for i in range(_WORDS)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w1"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="w0", eos_token=f"w{_EOS}", unk_token="w1"
    ).save_pretrained(folder)
    model.config.save_pretrained(folder)
    return {file.name: file.read_text() for file in folder.glob("*.json")}


def take(store: Store, model: Any, name: str, scratch: Path) -> None:
    files = StateDict(small_files(model, scratch))
    store.take({"model": model, "files": files}, name)


def prompts(count: int, length: int) -> list[list[int]]:
    """Return prompts that are long enough to be kept as prefixes."""
    generator = torch.Generator().manual_seed(1)
    return torch.randint(2, 120, (count, length), generator=generator).tolist()


class Judge:
    """Says which models an answer may be of.

    Args:
        models: The versions, from the first to the last.
    """

    def __init__(self, models: Sequence[Any]) -> None:
        self._models = models

    @torch.no_grad()
    def _chosen(self, model: Any, prompt: list[int], answer: list[int]) -> list[bool]:
        """Return of each token whether the model would have chosen it after those before."""
        logits = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
        of_answer = logits.gather(1, torch.tensor(answer)[:, None])[:, 0]
        chosen: list[bool] = (of_answer >= logits.max(dim=1).values - _TIE).tolist()
        return chosen

    def versions(self, prompt: list[int], answer: list[int]) -> list[int]:
        """Return the versions of which an answer may be as a whole."""
        return [
            number
            for number, model in enumerate(self._models)
            if all(self._chosen(model, prompt, answer))
        ]

    def goes_over(self, prompt: list[int], answer: list[int]) -> bool:
        """Whether an answer is of one version up to some token, and then of a later one."""
        chosen = [self._chosen(model, prompt, answer) for model in self._models]
        return any(
            all(before[:at]) and all(after[at:])
            for before, after in itertools.combinations(chosen, 2)
            for at in range(len(answer) + 1)
        )
