"""transformers' Trainer on a random BERT, twice a level: the second fit initializes the same model again."""

import json
import os
import sys
import tempfile

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainerCallback, TrainingArguments, set_seed
from transformers.utils import is_apex_available

assert is_apex_available()


class Digits(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, i):
        return {"input_ids": torch.full((6,), 1 + i % 4), "labels": i % 4}


class Losses(TrainerCallback):
    def __init__(self, level):
        self.level = level

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "loss" in logs:
            print(json.dumps({"level": self.level, "loss": logs["loss"]}), flush=True)


def train(level, folder):
    set_seed(0)
    config = BertConfig(vocab_size=8, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
                        max_position_embeddings=8, num_labels=4, hidden_dropout_prob=0, attention_probs_dropout_prob=0)
    model = BertForSequenceClassification(config)
    args = TrainingArguments(
        folder, half_precision_backend="apex", fp16_opt_level=level, optim="adamw_apex_fused", learning_rate=1e-2, adam_epsilon=1e-4,
        per_device_train_batch_size=8, gradient_accumulation_steps=2, num_train_epochs=4, logging_steps=1,
        save_strategy="no", evaluation_strategy="epoch", use_cpu=True, report_to=[], disable_tqdm=True)
    # The arguments refuse fp16 on a CPU when they are made. Nothing after that asks.
    args.fp16 = True
    trainer = Trainer(model, args, train_dataset=Digits(), eval_dataset=Digits(), callbacks=[Losses(level)])
    assert trainer.use_apex
    trainer.train()
    assert trainer.model.bert.encoder.layer[0].output.dense.weight.dtype == (torch.float16 if level in ("O2", "O3") else torch.float32)
    assert hasattr(trainer.optimizer, "_amp_stash")
    trainer.train()
    trainer.save_model(folder)
    saved = BertForSequenceClassification.from_pretrained(folder)
    assert saved.dtype == torch.float32


for level in sys.argv[1:]:
    with tempfile.TemporaryDirectory() as folder:
        train(level, folder)
