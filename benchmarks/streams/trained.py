"""Training on streamed data against the same training on mapped data, in one process, a few steps each in turn.

Both feed one model through the loader of a run, with their own plans. What is streamed is read cold: in the first epoch
chunks are fetched and decoded. Threads that fetch are waited for in the turn that they work for.
"""

import concurrent.futures
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from app.commands.output import table
from app.launching.flags import parse
from app.sampling.batch_plan import BatchPlan, Step
from app.sampling.seeding import seed_all
from app.training.feeding.loader import load
from benchmarks.streams import shards
from benchmarks.streams.measuring import Cost, Timer, rate, ratio, take_turns

CPU = torch.device("cpu")
SIZES = {
    "default size": "",
    "tiny": "--scratch.layers 1 --scratch.width 32 --scratch.heads 2",
}
QUIET = "--run.steps 100000"
SORTED = "streamed, --data.sort-over 4"
CLASSIFIERS = {
    "streamed": "--data.stream true",
    SORTED: "--data.stream true --data.sort-over 4",
    "mapped": "--data.stream false",
    "mapped, not sorted": "--data.stream false",
}
PAIRS = (("streamed", "mapped"), ("streamed", "mapped, not sorted"), (SORTED, "mapped"))


@dataclass
class Training:
    """One contestant: where its steps come from, and the model, which all have in common."""

    steps: Iterator[Step]
    train: Any
    loss: Any
    model: torch.nn.Module
    optimizer: torch.optim.Optimizer | None
    """None: nothing is computed, and reading alone is measured."""
    tokens: bool
    """Whether supervised tokens are counted, instead of samples."""
    padded: float = 0.0
    """Tokens with padding, so far."""
    real: float = 0.0

    def turn(self, steps: int) -> Cost:
        """Make some steps."""
        items = 0.0
        with Timer() as timer:
            for _ in range(steps):
                step = next(self.steps)
                for turn in step.turns:
                    items += turn.weight if self.tokens else len(turn.ids)
                    self._count(turn.inputs)
                    if self.optimizer is not None:
                        (self.loss(self.model, turn.inputs) * (turn.weight / step.weight)).backward()
                if self.optimizer is not None:
                    self.optimizer.step()
                    self.optimizer.zero_grad()
            self._settle()
        return timer.cost(items)

    def _count(self, inputs: dict[str, torch.Tensor]) -> None:
        if (mask := inputs.get("attention_mask")) is not None:
            self.padded += mask.numel()
            self.real += int(mask.sum())

    def _settle(self) -> None:
        """Wait for what is fetched ahead, so that it does not work in the turn of another one."""
        rows = getattr(self.train, "rows", self.train)
        if (cache := getattr(rows, "_cache", None)) is not None:
            concurrent.futures.wait(list(cache._coming.values()))


def classifier(folder: Path, shape: str, trains: bool) -> dict[str, Training]:
    """Return the contestants of cls."""
    from app.data.text.labeled_text import PadCollate
    from recipes import cls

    classes = " ".join(sorted(set(shards.stdlib()["label"])))
    made: dict[str, Training] = {}
    model = optimizer = None
    for name, more in CLASSIFIERS.items():
        flags = f"--data.path {folder} {more} --data.classes {classes} {shape} {QUIET}"
        config = parse(cls.Config, flags.split())
        train, _, labels, tokenizer, _ = cls.load_data(config)
        seed_all(0)
        if model is None:
            model = cls.build_model(config, labels, tokenizer).train()
            optimizer = torch.optim.AdamW(model.parameters(), 1e-4, fused=True) if trains else None
        lengths = None if name == "mapped, not sorted" else train.lengths
        steps = _steps(config, train, PadCollate.of(tokenizer), lengths, None)
        made[name] = Training(steps, train, lambda model, inputs: model(**inputs).loss, model, optimizer, False)
    return made


def language(folder: Path, shape: str, trains: bool) -> dict[str, Training]:
    """Return the contestants of lm."""
    from app.data.corpus.blocks import token_loss
    from app.data.rows import stack
    from recipes import lm

    made: dict[str, Training] = {}
    model = optimizer = None
    for name, stream in (("streamed", "true"), ("mapped", "false")):
        flags = f"--data.path {folder} --data.stream {stream} --data.packing concat {shape} {QUIET}"
        config = parse(lm.Config, flags.split())
        train, _, tokenizer, _ = lm.load_data(config)
        seed_all(0)
        if model is None:
            model = lm.build_model(config, tokenizer).train()
            optimizer = torch.optim.AdamW(model.parameters(), 1e-4, fused=True) if trains else None
        steps = _steps(config, train, stack, None, train.weights)
        made[name] = Training(
            steps, train, lambda model, inputs: token_loss(*lm.predict(model, inputs)), model, optimizer, True
        )
    return made


def _steps(config: Any, train: Any, collate: Any, lengths: Any, weights: Any) -> Iterator[Step]:
    plan = BatchPlan.of_run(config.run, len(train), None if callable(lengths) else lengths, weights)
    plan = plan.ordered(train.order(plan)) if hasattr(train, "order") else plan
    length = lengths if callable(lengths) and plan.order.sort_over > 1 else None
    return load(plan, range(plan.steps), train, collate, 0, 1, CPU, length=length)


def run(folder: Path, rows: int, rounds: int) -> None:
    """Print a line for each recipe and size of model, and for reading alone."""
    from benchmarks.streams.tokens import write_tokens

    texts = shards.write_parquet(folder / "texts", shards.texts(rows), 4)
    tokens = write_tokens(folder / "tokens", rows)
    lines = []
    for recipe, make, data in (("cls", classifier, texts), ("lm", language, tokens)):
        for size, shape in {**SIZES, "reading alone": ""}.items():
            contestants = make(data, shape, trains=size != "reading alone")
            steps = {"default size": 2, "tiny": 8, "reading alone": 16}[size]
            for each in contestants.values():
                each.turn(1)
            costs = take_turns({name: partial(each.turn, steps) for name, each in contestants.items()}, rounds)
            for ours, mapped in PAIRS:
                if ours in contestants and mapped in contestants:
                    speeds = f"{rate(costs[ours]):,.0f} / {rate(costs[mapped]):,.0f}"
                    both = [ratio(costs[ours], costs[mapped], clock) for clock in ("wall", "cpu")]
                    padding = _padding(contestants[ours], contestants[mapped])
                    lines.append([recipe, size, ours, mapped, speeds, *both, padding])
    head = ["recipe", "model", "ours", "against", "samples or tokens/s", "ratio", "by CPU time", "padding"]
    print(table(head, lines, right=(4,)))


def _padding(*contestants: Training) -> str:
    """Write the share of padding among the tokens of each."""
    return " / ".join(f"{1 - each.real / each.padded:.1%}" for each in contestants if each.padded)
