"""A Trainer of Transformers with a small model, and the weights beside its checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from casnap import Snapshot

FROZEN = 4096 * 32 * 4


class Numbers(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __init__(self, length: int = 24) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        ids = (torch.arange(8) * 31 + i) % 4096
        return {"input_ids": ids, "labels": ids}


def trainer_of(
    folder: Path,
    *,
    plain: bool = False,
    kind: Any = None,
    dropout: float = 0.1,
    adapter: str | None = None,
    **arguments: Any,
) -> Any:
    import transformers

    from casnap.integrations.transformers import CasnapTrainerMixin

    class Ours(CasnapTrainerMixin, transformers.Trainer):  # type: ignore[misc]
        pass

    kind = transformers.Trainer if plain else kind or Ours
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=4096, n_positions=8, n_embd=32, n_layer=1, n_head=2,
        resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout,
    )  # fmt: skip
    model = transformers.GPT2LMHeadModel(config)
    model.transformer.wte.requires_grad_(requires_grad=False)  # tied to the head, and frozen
    if adapter is not None:
        model = adapted(model, adapter)
    often = {"max_steps": 8, "save_steps": 2, "save_total_limit": 2, "logging_steps": 1}
    arguments = often | arguments
    return kind(
        model=model,
        args=transformers.TrainingArguments(
            output_dir=str(folder),
            use_cpu=True,
            per_device_train_batch_size=4,
            report_to=[],
            disable_tqdm=True,
            **arguments,
        ),
        train_dataset=Numbers(),
        eval_dataset=Numbers(),
    )


def adapted(model: Any, how: str) -> Any:
    """Return a model with an adapter: wrapped by PEFT, added by Transformers, or two of them."""
    import peft

    torch.manual_seed(1)
    config = peft.LoraConfig(r=4, target_modules=["c_attn", "c_proj"], lora_dropout=0.1)
    if how == "added":
        model.add_adapter(config)
        return model
    model = peft.get_peft_model(model, config)
    if how == "two":
        model.add_adapter("other", peft.LoraConfig(r=2, target_modules=["c_attn"]))
    return model


def loaded(folder: Path) -> dict[str, torch.Tensor]:
    """Return the weights as Transformers and vLLM find them: by the index, or in one file."""
    from safetensors.torch import load_file

    index = folder / "model.safetensors.index.json"
    names = {"model.safetensors"}
    if index.exists():
        names = set(json.loads(index.read_text())["weight_map"].values())
    found = {k: v for name in names for k, v in load_file(folder / name).items()}
    return dict(sorted(found.items()))


def stored(snapshot: Snapshot) -> dict[str, torch.Tensor]:
    """Return the weights of a snapshot; of what is tied, the embedding alone."""
    values = snapshot.get_state_dict_for_key("model")
    return {k: v for k, v in sorted(values.items()) if k != "lm_head.weight"}


def with_weights(run: Path) -> list[str]:
    return sorted(path.parent.name for path in run.glob("checkpoint-*/model.safetensors"))
