"""Which tests show what of each framework, and the table of that in docs/compatibility.md.

``python -m tests.support.frameworks`` prints the table.
"""

from __future__ import annotations

COLUMNS = (
    "save",
    "async",
    "resume",
    "other world size",
    "frozen base stored once",
    "export",
    "killed",
)

# Those of `trainer_contract.py` that a class of the file inherits.
_RESUMES = "RunContract.test_resumes_bit_exact_after_sigkill"
_CHANGED = "RunContract.test_each_save_writes_what_changed_and_the_last_are_kept"

TESTS: dict[str, dict[str, str]] = {
    "torch.distributed.checkpoint": {
        "save": "test_dcp.py::test_all_values_come_back",
        "async": "test_dcp.py::test_async_saves_with_a_kept_stager",
        "resume": "test_dcp.py::test_a_model_and_its_optimizer_go_both_ways",
        "other world size": (
            "test_dcp_ranks.py::test_what_was_saved_on_some_ranks_is_loaded_on_others"
        ),
        "frozen base stored once": "test_dcp_ranks.py::test_a_second_save_writes_only_what_changed",
        "export": "test_dcp.py::test_a_model_and_its_optimizer_go_both_ways",
        "killed": "test_dcp_ranks.py::test_a_save_that_fails_leaves_the_one_before",
    },
    "Lightning": {
        "save": f"test_lightning.py::{_CHANGED}",
        "async": f"test_lightning.py::{_RESUMES}",
        "resume": f"test_lightning.py::{_RESUMES}",
        "other world size": (
            "test_lightning.py::test_a_sharded_strategy_resumes_through_the_redirect"
        ),
        "frozen base stored once": f"test_lightning.py::{_CHANGED}",
        "export": f"test_lightning.py::{_CHANGED}",
        "killed": f"test_lightning.py::{_RESUMES}",
    },
    "Transformers": {
        "save": f"test_transformers.py::{_CHANGED}",
        "resume": f"test_transformers.py::{_RESUMES}",
        "other world size": f"test_transformers.py::{_CHANGED}",
        "frozen base stored once": f"test_transformers.py::{_CHANGED}",
        "export": f"test_transformers.py::{_CHANGED}",
        "killed": f"test_transformers.py::{_RESUMES}",
    },
    "Transformers with DeepSpeed": dict.fromkeys(
        [c for c in COLUMNS if c != "async"],
        f"test_trainers_deepspeed.py::{_CHANGED}",
    ),
    "Accelerate": {
        "save": f"test_accelerate.py::{_CHANGED}",
        "resume": f"test_accelerate.py::{_RESUMES}",
        "other world size": f"test_trainers_fsdp.py::{_CHANGED}",
        "frozen base stored once": f"test_accelerate.py::{_CHANGED}",
        "export": f"test_accelerate.py::{_CHANGED}",
        "killed": f"test_accelerate.py::{_RESUMES}",
    },
    "Accelerate with DeepSpeed": dict.fromkeys(
        [c for c in COLUMNS if c != "async"],
        f"test_trainers_deepspeed.py::{_CHANGED}",
    ),
    "Trainer and Accelerate with FSDP": dict.fromkeys(
        [c for c in COLUMNS if c not in ("async", "export")],
        f"test_trainers_fsdp.py::{_CHANGED}",
    ),
    "torchtitan": {
        "save": f"test_torchtitan.py::{_CHANGED}",
        "async": f"test_torchtitan.py::{_RESUMES}",
        "resume": f"test_torchtitan.py::{_RESUMES}",
        "other world size": "test_torchtitan.py::test_another_number_of_ranks_goes_on",
        "frozen base stored once": f"test_torchtitan.py::{_CHANGED}",
        "export": f"test_torchtitan.py::{_CHANGED}",
        "killed": f"test_torchtitan.py::{_RESUMES}",
    },
    "torch_checkpointing": {
        "save": "test_torch_checkpointing.py::test_tensors_are_filled_in_place",
        "async": f"test_torch_checkpointing.py::{_RESUMES}",
        "resume": f"test_torch_checkpointing.py::{_RESUMES}",
        "other world size": ("test_torch_checkpointing.py::test_ranks_load_in_another_sharding"),
        "frozen base stored once": f"test_torch_checkpointing.py::{_CHANGED}",
        "export": f"test_torch_checkpointing.py::{_CHANGED}",
        "killed": f"test_torch_checkpointing.py::{_RESUMES}",
    },
    "DeepSpeed": {
        "save": "test_deepspeed.py::test_any_stage_and_number_of_ranks_goes_on",
        "async": f"test_deepspeed.py::{_RESUMES}",
        "resume": f"test_deepspeed.py::{_RESUMES}",
        "other world size": "test_deepspeed.py::test_any_stage_and_number_of_ranks_goes_on",
        "frozen base stored once": f"test_deepspeed.py::{_CHANGED}",
        "export": f"test_deepspeed.py::{_CHANGED}",
        "killed": f"test_deepspeed.py::{_RESUMES}",
    },
    "Megatron Core": {
        "save": "test_megatron.py::test_tensor_pipeline_and_data_parallel_sizes_change",
        "async": "test_megatron.py::test_a_save_in_the_background_has_the_values_of_its_call",
        "resume": f"test_megatron.py::{_RESUMES}",
        "other world size": (
            "test_megatron.py::test_tensor_pipeline_and_data_parallel_sizes_change"
        ),
        "frozen base stored once": (
            "test_megatron.py::test_tensor_pipeline_and_data_parallel_sizes_change"
        ),
        "export": "test_megatron.py::test_each_kind_comes_back_as_it_was",
        "killed": f"test_megatron.py::{_RESUMES}",
    },
}
"""Framework → column → the test that shows it, in ``tests/guests/integrations``."""


def table() -> str:
    """Return the table, in Markdown."""
    lines = [f"| framework | {' | '.join(COLUMNS)} | tests |", "|---" * (len(COLUMNS) + 2) + "|"]
    for framework, shown_by in TESTS.items():
        cells = ["yes" if column in shown_by else "—" for column in COLUMNS]
        files = dict.fromkeys(test.partition("::")[0] for test in shown_by.values())
        names = ", ".join(f"`{file}`" for file in files)
        lines.append(f"| {framework} | {' | '.join(cells)} | {names} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
