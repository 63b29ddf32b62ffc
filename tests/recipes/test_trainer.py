"""A step of a run next to a step of transformers' Trainer."""

import copy
import json

import numpy as np
import torch
from support.tag_files import write
from transformers import Trainer, TrainingArguments

from app import parse
from recipes import tag

STEPS = 6
FLAGS = (
    "--data.holdout 0.2 --scratch.width 16 --scratch.layers 1 --scratch.vocab 300 --scratch.dropout 0 "
    "--optim.lr 2e-3 --optim.warmup 0 --optim.schedule constant --optim.weight-decay 0.1 --run.steps 6 "
    "--run.global-batch 8 --run.micro-batch 8 --run.log-every 1 --run.trackers --run.quiet true"
)


def test_the_same_batches_train_as_with_trainer(tmp_path, monkeypatch, data_cache):
    """Same losses, norms before clipping, and weights at the end: of decayed weights, biases and norms."""
    build, models, batches = tag.build_model, [], []

    def kept(*arguments):
        model = build(*arguments)
        models.extend([model, copy.deepcopy(model)])
        model.register_forward_pre_hook(
            lambda model, _, inputs: batches.append(inputs) if model.training else None, with_kwargs=True
        )
        return model

    monkeypatch.setattr(tag, "build_model", kept)
    file = write(tmp_path, "json")
    tag.main(parse(tag.Config, [*FLAGS.split(), "--data.path", str(file), "--run.dir", str(tmp_path / "run")]))
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    ours, theirs = models

    class Given(Trainer):
        def get_train_dataloader(self):
            return torch.utils.data.DataLoader(self.train_dataset, batch_size=None)

    settings = TrainingArguments(
        output_dir=str(tmp_path / "theirs"), use_cpu=True, report_to="none", save_strategy="no", disable_tqdm=True,
        max_steps=STEPS, learning_rate=2e-3, lr_scheduler_type="constant", weight_decay=0.1, max_grad_norm=1.0,
        logging_steps=1, dataloader_pin_memory=False,
    )  # fmt: skip
    trainer = Given(model=theirs, args=settings, train_dataset=batches)
    trainer.train()
    found = [
        [(line["loss"], line["grad_norm"]) for line in log if "loss" in line]
        for log in (lines, trainer.state.log_history)
    ]
    assert len(found[0]) == len(batches) == STEPS and max(norm for _, norm in found[0]) > 1  # one is clipped
    np.testing.assert_allclose(*found, rtol=1e-4)
    for name, weight in ours.state_dict().items():
        torch.testing.assert_close(weight, theirs.state_dict()[name], rtol=0, atol=1e-4, msg=name)
