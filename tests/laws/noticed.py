"""Train a small model in one run after another: noticed.py FOLDER RUN@PLACE[@SECONDS][:FLAG:VALUE ...] ...

Each is slow where it comes to its place for the first time, on each rank: it writes the file NAME-PLACE-RANK into the
folder, and sleeps. Places are `data`, `first` (the rows of step 1), `step` (in the fifth), `steps` (in each),
`evaluation` (in a micro-batch of it), `checkpoint` (before it is committed), `model` (once its weights are written),
and `none`.
"""

import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn

from app import OptimConfig, Run, RunConfig, parse
from app.checkpoints.store import CheckpointStore

ROWS = list(torch.randn(200, 4, generator=torch.Generator().manual_seed(0)))


@dataclass
class Config:
    """Twelve steps of four micro-batches, three evaluations and three checkpoints."""

    run: RunConfig = field(
        default_factory=lambda: RunConfig(
            global_batch=20, micro_batch=5, steps=12, log_every=1, eval_every=4, save_every=4, trackers=()
        )
    )


class Slowly:
    """Sleep at one place of a run, and only once."""

    def __init__(self, folder: Path, word: str):
        self.name, self.place, seconds = [*word.split("@"), "2"][:3]
        self.seconds, self._folder = float(seconds), folder

    def at(self, place: str) -> None:
        """Be at a place."""
        mark = self._folder / f"{self.name}-{self.place}-{os.environ.get('RANK', '0')}"
        if place == self.place and (place == "steps" or not mark.exists()):
            mark.touch()
            time.sleep(self.seconds)


class Part:
    """A part of a model that is written slowly."""

    def __init__(self, slowly: Slowly):
        self.slowly = slowly

    def save_pretrained(self, folder: Path) -> None:
        """Write a file, after a while."""
        self.slowly.at("model")
        (Path(folder) / "part.json").write_text("{}")


def train(config: Config, slowly: Slowly) -> None:
    """Train one run to its end, or until it is stopped."""

    def collate(rows: list) -> torch.Tensor:
        slowly.at("first")
        return torch.stack(rows)

    with Run(config) as run:
        slowly.at("data")
        torch.manual_seed(0)
        model, optimizer = run.prepare(nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.1), nn.Linear(8, 1)), OptimConfig())
        for batch in run.batches(ROWS, collate):
            slowly.at("steps")
            if run.steps_done == 5:
                slowly.at("step")
            for micro in batch.micros(model):
                run.backward(model(micro.inputs).square().mean(), micro)
            run.step(optimizer)
            if run.due(config.run.eval_every):
                scores = run.scores_of()
                for number, micro in enumerate(run.evaluation(model, ROWS[:50], torch.stack)):
                    if number == 1:
                        slowly.at("evaluation")
                    scores.update(micro.weight, loss=model(micro.inputs).square().mean())
                run.log(scores.compute())
        run.finish(model, Part(slowly))


def before_commit(slowly: Slowly, commit: Callable) -> Callable:
    """Have checkpoints wait before they are committed."""

    def wait(*args):
        slowly.at("checkpoint")
        return commit(*args)

    return wait


COMMIT = CheckpointStore._commit

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    (folder / f"pid-{os.environ.get('RANK', '0')}").write_text(str(os.getpid()))
    for word in sys.argv[2:]:
        head, *flags = word.split(":")
        slowly = Slowly(folder, head)
        CheckpointStore._commit = before_commit(slowly, COMMIT)
        train(parse(Config, ["--run.dir", str(folder / slowly.name), *flags]), slowly)
