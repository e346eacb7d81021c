"""``from_pretrained`` loads the folder of a pull, at every version."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from casnap import StateDict, Store
from casnap.serving import PullOptions

pytestmark = [pytest.mark.integrations, pytest.mark.filterwarnings("default")]
SHARDS = PullOptions(max_shard_size=300_000)


def llama(*, tied: bool) -> Any:
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=1024, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=2, tie_word_embeddings=tied,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).bfloat16()


def take(store: Store, model: Any, step: int) -> None:
    files = StateDict({"config.json": model.config.to_json_string()})
    store.take({"model": model, "files": files}, f"run/step_{step}")


def loaded(folder: Path) -> dict[str, torch.Tensor]:
    import transformers

    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype="auto", output_loading_info=True
    )
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    weights: dict[str, torch.Tensor] = model.state_dict()
    return weights


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("options", [PullOptions(), SHARDS])
def test_versions_of_a_model(tmp_path: Path, tied: bool, options: PullOptions) -> None:
    store, live, model = Store(tmp_path / "ckpts"), tmp_path / "live", llama(tied=tied)
    take(store, model, 0)
    store.pull(live, options=options)
    before, old = copy.deepcopy(model.state_dict()), live.resolve()
    assert_same(loaded(live), before)
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight += 1
    take(store, model, 1)
    report = store.pull(live, options=options)
    assert report.changed == ["model.layers.1.mlp.up_proj.weight"]
    assert_same(loaded(live), dict(model.state_dict()))
    assert_same(loaded(old), before)


def test_one_name_of_tied_weights(tmp_path: Path) -> None:
    store, live, model = Store(tmp_path / "ckpts"), tmp_path / "live", llama(tied=True)
    take(store, model, 0)
    report = store.pull(live, options=PullOptions(tied=["lm_head.weight"]))
    assert "lm_head.weight" not in report.equal
    assert report.total_bytes < sum(p.nbytes for p in model.parameters()) + 40_000
    assert_same(loaded(live), dict(model.state_dict()))


def test_a_module_that_was_wrapped(tmp_path: Path) -> None:
    store, live, model = Store(tmp_path / "ckpts"), tmp_path / "live", llama(tied=False)
    weights = {f"module.{name}": tensor for name, tensor in model.state_dict().items()}
    files = StateDict({"config.json": model.config.to_json_string()})
    store.take({"model": StateDict(weights), "files": files}, "wrapped")
    store.pull(live, options=PullOptions(rename=[r"s/^module\.//"], dtype="float32"))
    expected = {name: tensor.float() for name, tensor in model.state_dict().items()}
    found = {name: tensor.float() for name, tensor in loaded(live).items()}
    assert_same(found, expected)
