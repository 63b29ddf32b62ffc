"""What contestants train: a recipe's data, model and loss, without its loop."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from app.config import OptimConfig, RunConfig, chosen
from app.launching.flags import parse
from app.sampling import permutation
from app.sampling.batch_plan import BatchPlan
from app.sampling.seeding import seed_all
from app.training.optim.building import build_optimizer
from app.training.optim.schedule import learning_rate


class Ordered:
    """Rows in the order of our run, for contestants that read rows one after the other."""

    def __init__(self, rows: Sequence, ids: np.ndarray, augment: Callable | None, seed: int):
        self.rows, self.ids, self.augment, self.random = rows, ids.tolist(), augment, np.random.default_rng(seed)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, place: int) -> Any:
        row = self.rows[self.ids[place]]
        return self.augment(row, self.random) if self.augment else row


@dataclass
class Job:
    """A model and its training rows, as plain torch objects."""

    model: nn.Module
    rows: Ordered
    collate: Callable[[list], Any]
    loss: Callable[[nn.Module, Any], Tensor]
    """Mean over a micro-batch."""
    items: Callable[[Any], int]
    """Returns the samples, or supervised tokens, of a micro-batch's inputs."""
    eval_rows: Sequence
    optim: OptimConfig
    run: RunConfig
    steps: int
    bf16: bool

    @property
    def device(self) -> torch.device:
        """Return the device to train on: a GPU if one is visible."""
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")

    @property
    def loading(self) -> dict[str, Any]:
        """Return the arguments with which a DataLoader loads ahead as our run does on this device."""
        return {"num_workers": 4, "pin_memory": True} if self.device.type == "cuda" else {}

    def placed(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """Copy a micro-batch to the device."""
        if self.device.type == "cpu":
            return inputs
        return {name: tensor.to(self.device, non_blocking=True) for name, tensor in inputs.items()}

    @property
    def turns(self) -> int:
        """Return the number of micro-batches of a step."""
        return self.run.global_batch // self.run.micro_batch

    def optimizer(self) -> torch.optim.Optimizer:
        """Make the same optimizer as our run."""
        return build_optimizer(self.model, self.optim)

    def rate(self, step: int) -> float:
        """Return the learning rate of a step."""
        return learning_rate(self.optim, step, self.steps, self.run.global_batch)

    def autocast(self) -> torch.autocast:
        """Return the autocast context: bf16 if chosen."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.bf16)

    @torch.inference_mode()
    def score(self) -> float:
        """Return the mean loss over all items of the evaluation rows."""
        self.model.eval()
        total = count = 0
        size = self.run.micro_batch
        for low in range(0, len(self.eval_rows), size):
            inputs = self.collate([self.eval_rows[i] for i in range(low, min(low + size, len(self.eval_rows)))])
            with self.autocast():
                loss = self.loss(self.model, self.placed(inputs))
            total, count = total + loss.item() * self.items(inputs), count + self.items(inputs)
        return total / count


def job_of(recipe: str, flags: list[str], bf16: bool, variant: str = "") -> Job:
    """Load a recipe's data and build its model, with its own functions, from its flags.

    Args:
        variant: "padded": each document is a row, padded to the longest of its micro-batch (language models only).
    """
    make = {"cls": _classifier, "img": _images, "seg": _segmenter, "lm": _language}[recipe]
    if recipe == "lm":
        return make(flags, bf16, variant)
    return make(flags, bf16)


def _job(config, rows, augment, bf16: bool, **parts) -> Job:
    config, _ = chosen(config)
    plan = BatchPlan.of_run(config.run, len(rows))
    ids, _ = permutation.stream(np.arange(plan.total), len(rows), config.run.seed)
    ordered = Ordered(rows, ids, augment, config.run.seed)
    return Job(rows=ordered, optim=config.optim, run=config.run, steps=plan.steps, bf16=bf16, **parts)


def _classifier(flags: list[str], bf16: bool) -> Job:
    from app.data.text.labeled_text import PadCollate
    from recipes import cls

    config = parse(cls.Config, flags)
    train, sets, labels, tokenizer, _ = cls.load_data(config)
    seed_all(config.run.seed)
    return _job(
        config, train, None, bf16,
        model=cls.build_model(config, labels, tokenizer).train(),
        collate=PadCollate.of(tokenizer),
        loss=lambda model, inputs: model(**inputs).loss,
        items=lambda inputs: len(inputs["labels"]),
        eval_rows=sets[""],
    )  # fmt: skip


def _images(flags: list[str], bf16: bool) -> Job:
    from torch.nn.functional import cross_entropy

    from app.data.images.augment import Draw, ImageCollate
    from recipes import img

    config = parse(img.Config, flags)
    train, sets, labels, processor, _ = img.load_data(config)
    collate = ImageCollate.of(processor)
    seed_all(config.run.seed)

    def loss(model, inputs):
        smoothing = config.loss.smoothing if model.training else 0.0
        logits = model(pixel_values=inputs["pixel_values"]).logits
        return cross_entropy(logits, inputs["labels"], label_smoothing=smoothing)

    return _job(
        config, train.rows, Draw(config.augment), bf16,
        model=img.build_model(config, labels, train, collate).train(),
        collate=collate,
        loss=loss,
        items=lambda inputs: len(inputs["labels"]),
        eval_rows=sets[""],
    )  # fmt: skip


def _segmenter(flags: list[str], bf16: bool) -> Job:
    from app.data.rows import stack
    from app.tasks.segmentation.losses import channels_of, dice_loss
    from app.tasks.segmentation.networks import logits_of
    from recipes import seg

    config = parse(seg.Config, flags)
    patches, _, _ = seg.load_data(config)
    names = patches.cases.names
    loss_of = dice_loss(config.loss, channels_of(config.loss, len(names)))
    seed_all(config.run.seed)
    network, _ = seg.build_model(config, patches, names)
    held = [patches.cut(patches[i], np.random.default_rng(i)) for i in range(16)]
    return _job(
        config, patches, patches.cut, bf16,
        model=network.train(),
        collate=stack,
        loss=lambda model, inputs: loss_of(logits_of(model, inputs["image"]), inputs["mask"]),
        items=lambda inputs: len(inputs["mask"]),
        eval_rows=held,
    )  # fmt: skip


def _language(flags: list[str], bf16: bool, variant: str) -> Job:
    from app.data.corpus.blocks import token_loss
    from app.data.rows import stack
    from recipes import lm

    config = parse(lm.Config, flags)
    train, sets, tokenizer, _ = lm.load_data(config)
    held = sets[""]
    if variant == "padded":
        train, held = _Pieces(train), _Pieces(held)
    seed_all(config.run.seed)
    return _job(
        config, train, None, bf16,
        model=lm.build_model(config, tokenizer).train(),
        collate=_pad if variant == "padded" else stack,
        loss=partial(lm.loss_of, criterion=token_loss),
        items=lambda inputs: int((inputs["targets"] >= 0).sum()),
        eval_rows=held,
    )  # fmt: skip


class _Pieces:
    """Documents one by one; one that is longer than a block is cut into several rows."""

    def __init__(self, blocks):
        self.documents, self.start = blocks.documents, blocks.start
        begins = np.flatnonzero(self.documents.begins(0, len(self.documents)))
        ends = [*begins[1:].tolist(), len(self.documents)]
        self.spans = [
            (low, min(low + blocks.size, end))
            for begin, end in zip(begins.tolist(), ends, strict=True)
            for low in range(begin, end, blocks.size)
        ]

    def __len__(self) -> int:
        return len(self.spans)

    def __getitem__(self, index: int) -> np.ndarray:
        return self.documents.tokens(*self.spans[index]).astype(np.int64), self.start


def _pad(rows: list[tuple[np.ndarray, int]]) -> dict[str, Tensor]:
    """Pad documents to the longest, on the right: causal attention does not see that padding."""
    longest = max(len(tokens) for tokens, _ in rows)
    inputs, targets = np.zeros((len(rows), longest), np.int64), np.full((len(rows), longest), -100)
    for i, (tokens, start) in enumerate(rows):
        inputs[i, 0], inputs[i, 1 : len(tokens)], targets[i, : len(tokens)] = start, tokens[:-1], tokens
    return {"input_ids": torch.from_numpy(inputs), "targets": torch.from_numpy(targets)}
