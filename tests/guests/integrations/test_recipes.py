"""``casnap run`` before the tools that people fine-tune with, as the guide shows it.

Each recipe is killed when its second checkpoint is there, and started again. Its last snapshot is
then that of a run that nobody killed, bit by bit. ``make test-recipes`` has an environment for each
tool, as each needs other versions; elsewhere a tool that is not installed is skipped.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from casnap import Store
from tests.support.bitwise import assert_same
from tests.support.cli_calls import COMMAND
from tests.support.tiny_llamas import llama, small_files

pytestmark = [pytest.mark.integrations, pytest.mark.filterwarnings("default")]

GUIDE = Path(__file__).parents[3] / "docs/guides/fine-tuning-tools.md"
TOOLS = {"TRL": "trl", "LLaMA-Factory": "llamafactory", "ms-swift": "swift", "Unsloth": "unsloth"}
SWIFT = "--use_cpu true --torch_dtype float32 --report_to none --dataloader_num_workers 0"
ON_CPU = {
    "sft.py": ("save_steps=2,", "save_steps=2, use_cpu=True, bf16=False, report_to=[],"),
    "llamafactory.yaml": ("save_steps: 2", "save_steps: 2\nuse_cpu: true\nreport_to: none"),
    "unsloth_sft.py": ("save_steps=2,", "save_steps=2, use_cpu=True, bf16=False, report_to=[],"),
    "swift.sh": ("--save_steps 2", f"--save_steps 2 {SWIFT}"),
}
"""What a tiny run on a CPU needs besides what the guide has."""
EVALUATION = """
import json, lm_eval

task = {
    "task": "tiny",
    "dataset_path": "json",
    "dataset_kwargs": {"data_files": {"test": "DPO.jsonl"}},
    "test_split": "test",
    "output_type": "loglikelihood",
    "doc_to_text": "{{prompt}}",
    "doc_to_target": " {{chosen}}",
    "metric_list": [{"metric": "perplexity"}, {"metric": "acc"}],
}
found = [
    lm_eval.simple_evaluate("hf", {"pretrained": folder}, [task], device="cpu", bootstrap_iters=0)
    for folder in ("out/checkpoint-4", "saved", "model")
]
samples = [[sample["resps"] for sample in each["samples"]["tiny"]] for each in found]
print(json.dumps([len(samples[0]), samples[0] == samples[1], samples[0] == samples[2]]))
"""
"""What lm-eval says of a checkpoint's folder, of the same weights in a plain one, and of others."""
KINDS = ("DPO", "GRPO", "Reward")
SCRIPT = """
from datasets import load_dataset
from transformers.trainer_utils import get_last_checkpoint
import trl

def reward(completions, **_):
    return [float(len(set(text.split()))) for text in completions]

arguments = {more}
trainer = trl.{kind}Trainer(
    "./model",
    args=trl.{kind}Config("out", max_steps=12, save_steps=2, save_total_limit=2, use_cpu=True,
        bf16=False, report_to=[], per_device_train_batch_size=2, **arguments.pop("config", {{}})),
    train_dataset=load_dataset("json", data_files="{kind}.jsonl", split="train"),
    **arguments,
)
trainer.train(resume_from_checkpoint=get_last_checkpoint("out"))
"""


def skip_without(tool: str) -> None:
    """Skip a test if this is not the environment of its tool; the others bring an old TRL along."""
    here = [name for name, module in TOOLS.items() if find_spec(module) is not None]
    if here[-1:] != [tool]:
        pytest.skip(f"this is not the environment of {tool}")


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a tiny model, and the data of all recipes."""
    folder = tmp_path_factory.mktemp("inputs")
    model = llama(0)
    (folder / "data").mkdir()
    small_files(model, folder / "model")
    model.save_pretrained(folder / "model")

    def words(start: int, count: int) -> str:
        return " ".join(f"w{(start * 7 + i * 3) % 100 + 2}" for i in range(count))

    def write(name: str, rows: list[dict[str, Any]]) -> None:
        (folder / name).write_text("".join(f"{json.dumps(row)}\n" for row in rows))

    many = range(40)
    write("train.jsonl", [{"text": words(i, 8)} for i in many])
    write("GRPO.jsonl", [{"prompt": words(i, 4)} for i in many])
    pairs = [{"chosen": words(i, 4), "rejected": words(i + 1, 4)} for i in many]
    write("Reward.jsonl", pairs)
    write("DPO.jsonl", [{"prompt": words(i + 2, 4), **pair} for i, pair in enumerate(pairs)])
    turns = [("user", 4), ("assistant", 6)]
    chats = [[{"role": who, "content": words(i, n)} for who, n in turns] for i in many]
    write("chats.jsonl", [{"messages": chat} for chat in chats])
    rows = [{"instruction": words(i, 4), "input": "", "output": words(i + 1, 6)} for i in many]
    (folder / "data/tiny.json").write_text(json.dumps(rows))
    (folder / "data/dataset_info.json").write_text('{"tiny": {"file_name": "tiny.json"}}')
    return folder


def start(command: str, folder: Path, inputs: Path) -> subprocess.Popen[bytes]:
    """Start a command of the guide in a folder that has the inputs."""
    folder.mkdir(exist_ok=True)
    for path in inputs.iterdir():
        if not (folder / path.name).exists():
            (folder / path.name).symlink_to(path)
    words = shlex.split(command)
    words[:1] = COMMAND if words[0] == "casnap" else words[:1]
    environment = {
        **os.environ,
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(folder.parent / "home"),
        "DISABLE_VERSION_CHECK": "1",  # of LLaMA-Factory: of packages that are not needed here
    }
    with (folder / "log").open("ab") as log:
        return subprocess.Popen(
            words, cwd=folder, env=environment, stdout=log, stderr=log, start_new_session=True
        )


def is_there(checkpoint: Path) -> bool:
    """Whether a checkpoint is whole; ms-swift itself reads the adapter, which comes last."""
    is_adapter = (checkpoint / "adapter_config.json").exists()
    last = "adapter_model.safetensors" if is_adapter else "casnap-snapshot.json"
    return (checkpoint / last).exists()


def check_recipe(command: str, tmp_path: Path, inputs: Path) -> None:
    """Check that a run that is killed, and started again, ends as one that is not."""
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert start(command, whole, inputs).wait() == 0, (whole / "log").read_text()
    process = start(command, killed, inputs)
    while process.poll() is None and not is_there(killed / "out/checkpoint-4"):
        time.sleep(0.005)
    os.killpg(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL, (killed / "log").read_text()
    assert not (killed / "out/checkpoint-12").exists()
    assert start(command, killed, inputs).wait() == 0, (killed / "log").read_text()
    log = (killed / "log").read_text()
    assert len(re.findall(r"casnap run: the checkpoints of \S+ in \S+ are snapshots", log)) == 2
    assert re.findall(r"casnap run: \S+ resumes from \S*out/checkpoint-\d+, at step \d+", log)
    ends = [[*Store(folder / "out", create=False).snapshots()] for folder in (whole, killed)]
    for snapshots in ends:
        assert [s.name for s in snapshots] == ["checkpoint-10", "checkpoint-12"]
    keys = {"model", "optimizer", "scheduler", "rng"}
    for key in keys:
        one, other = (snapshots[-1].get_state_dict_for_key(key) for snapshots in ends)
        assert_same(one, other)


@pytest.mark.parametrize("tool", TOOLS)
def test_the_recipe_of_the_guide(tool: str, tmp_path: Path, inputs: Path) -> None:
    skip_without(tool)
    section = GUIDE.read_text().split(f"\n## {tool}\n")[1].split("\n## ")[0]
    ((text, name),) = re.findall(r"```\w+\n(# (\S+)\n.*?)```", section, re.DOTALL)
    (command,) = re.findall(r"```sh\n(casnap run .*)\n```", section)
    before, after = ON_CPU[name]
    assert before in text
    for folder in ("whole", "killed"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / name).write_text(text.replace(before, after))
    check_recipe(command, tmp_path, inputs)


@pytest.mark.parametrize("kind", KINDS)
def test_the_other_trainers_of_trl(kind: str, tmp_path: Path, inputs: Path) -> None:
    skip_without("TRL")
    more = {
        "DPO": "{}",
        "GRPO": "{'reward_funcs': reward, 'config': {'num_generations': 2, "
        "'max_completion_length': 8}}",
        "Reward": "{}",
    }[kind]
    for folder in ("whole", "killed"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "run.py").write_text(SCRIPT.format(kind=kind, more=more))
    check_recipe("casnap run python run.py", tmp_path, inputs)


def test_lm_eval_reads_the_folder_of_a_checkpoint(tmp_path: Path, inputs: Path) -> None:
    """Each likelihood is that of the same weights as `save_pretrained` writes them."""
    pytest.importorskip("lm_eval")
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "train.py").write_text(
        "from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments\n"
        "from transformers import default_data_collator\n"
        "data = [{'input_ids': [2 + i, 5, 9], 'labels': [2 + i, 5, 9]} for i in range(32)]\n"
        "model = AutoModelForCausalLM.from_pretrained('model')\n"
        "tokenizer = AutoTokenizer.from_pretrained('model')\n"
        "arguments = TrainingArguments('out', max_steps=4, save_steps=2, learning_rate=0.1,\n"
        "    use_cpu=True, report_to=[])\n"
        "Trainer(model, arguments, train_dataset=data, processing_class=tokenizer,\n"
        "    data_collator=default_data_collator).train()\n"
        "model.save_pretrained('saved')\n"
        "tokenizer.save_pretrained('saved')\n"
    )
    (folder / "evaluate_all.py").write_text(EVALUATION)
    for command in ("casnap run python train.py", "python evaluate_all.py"):
        assert start(command, folder, inputs).wait() == 0, (folder / "log").read_text()
    assert (folder / "out/checkpoint-4/casnap-snapshot.json").exists()
    last = (folder / "log").read_text().splitlines()[-1]
    assert json.loads(last) == [40, True, False], last
