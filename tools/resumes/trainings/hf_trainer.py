"""A Trainer of Transformers with dropout and shuffled data; with LoRA if the third word says so."""

import sys

import torch
import transformers

from casnap.integrations.transformers import CasnapTrainerMixin

transformers.set_seed(0)
torch.set_num_threads(1)


class Trainer(CasnapTrainerMixin, transformers.Trainer):
    """Saves snapshots."""


config = transformers.GPT2Config(vocab_size=64, n_positions=8, n_embd=16, n_layer=1, n_head=2)
model = transformers.GPT2LMHeadModel(config)
if "lora" in sys.argv[3:]:
    import peft

    adapter = peft.LoraConfig(r=4, target_modules=["c_attn", "c_proj"], lora_dropout=0.1)
    model = peft.get_peft_model(model, adapter)
trainer = Trainer(
    model=model,
    args=transformers.TrainingArguments(
        output_dir=sys.argv[1],
        max_steps=int(sys.argv[2]),
        save_steps=1,
        per_device_train_batch_size=4,
        warmup_steps=5,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
    ),
    train_dataset=[
        {"input_ids": ids, "labels": ids} for ids in torch.arange(256).view(32, 8) * 7 % 64
    ],
)
last = transformers.trainer_utils.get_last_checkpoint(sys.argv[1])
trainer.train(resume_from_checkpoint=last is not None)
