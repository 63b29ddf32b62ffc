"""Train models whose norms keep running statistics, and write what they end with: norms.py FOLDER [LEFT].

LEFT: the folder of a run in exact mode that another layout has begun, to go on with.
"""

import json
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from unittest.mock import patch

import torch
from counting import counting
from torch import nn
from torch.utils.checkpoint import checkpoint

from app import OptimConfig, Run, RunConfig
from app.distributed import collectives, running_statistics
from app.sampling.hashing import hash_of

ROWS = list(torch.randn(43, 2, 6, 6, generator=torch.Generator().manual_seed(0)) * 3 + 1)
STEPS, STOP, EARLY = 24, 12, 3


@dataclass
class Config:
    """Seven micro-batches of a step, which no number of ranks here divides; epochs end inside steps."""

    run: RunConfig = field(
        default_factory=lambda: RunConfig(
            global_batch=20, micro_batch=3, steps=STEPS, log_every=5, eval_every=9, save_every=100, trackers=()
        )
    )


class Model(nn.Module):
    """Batch norm of three kinds, instance norm, a norm that is frozen, and one whose pass is computed again.

    No weight has a gradient that is zero but for rounding, such as a bias that a norm takes away again: Adam would make
    a whole step of it, another one on every layout.
    """

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Conv2d(2, 8, 3, bias=False), nn.BatchNorm2d(8)
        self.instance = nn.InstanceNorm2d(8, track_running_stats=True, momentum=0.3)
        self.mean = nn.BatchNorm2d(8, momentum=None)
        self.frozen = nn.BatchNorm2d(8)
        self.again = nn.Sequential(nn.Conv2d(8, 8, 1, bias=False), nn.BatchNorm2d(8, momentum=0.05), nn.ReLU())
        self.out = nn.Sequential(
            nn.Flatten(), nn.Linear(8 * 16, 8, bias=False), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1)
        )

        self.frozen.eval()

    def train(self, mode: bool = True):
        super().train(mode)
        self.frozen.eval()
        return self

    def forward(self, x):
        x = self.instance(self.norm(self.first(x)).relu()).relu()
        x = self.frozen(self.mean(x).relu())
        x = checkpoint(self.again, x, use_reentrant=False) if self.training else self.again(x)
        return self.out(x).squeeze(1)


def train(folder: Path, twice: bool = False, **settings) -> dict[str, str]:
    """Train or resume; return a hash of each tensor of the finished model."""
    config = Config()
    config.run.dir = str(folder)
    for name, value in settings.items():
        setattr(config.run, name, value)
    with Run(config) as run:
        plain = Model()
        model, optimizer = run.prepare(plain, OptimConfig(name="SGD", lr=0.05))
        for batch in run.batches(ROWS, torch.stack):
            plain.norm.momentum = 0.5 if run.steps_done < 7 else 0.05
            for micro in batch.micros(model):
                loss = (model(micro.inputs) - 1).square().mean()
                if twice:  # and once more in evaluation mode, which reads the statistics
                    model.eval()
                    with torch.no_grad():
                        guess = model(micro.inputs)
                    model.train()
                    loss = loss + 0.1 * (model(micro.inputs.flip(-1)) - guess).square().mean()
                run.backward(loss, micro)
            run.step(optimizer)
            if run.due(config.run.eval_every):
                scores = run.scores_of()
                for micro in run.evaluation(model, ROWS[:11], torch.stack):
                    scores.update(micro.weight, loss=(model(micro.inputs) - 1).square().mean())
                run.log(scores.compute())
        run.finish(model)
        plain = run.accelerator.unwrap_model(model)
        return {name: hash_of(buffer) for name, buffer in plain.named_buffers()}


def main(folder: Path, left: str = "") -> None:
    """Run all cases; each rank writes what its buffers are."""
    rank, told = os.environ.get("RANK", "0"), {}
    for exact in (True, False):
        name = "exact" if exact else "usual"
        told[name] = train(folder / name, exact=exact)
        train(folder / f"{name}-stopped", exact=exact, stop_at=STOP)
        told[f"{name}-stopped"] = train(folder / f"{name}-stopped", exact=exact)
        if exact or collectives.alone():
            train(folder / f"{name}-left", exact=exact, stop_at=STOP)
        train(folder / f"{name}-early", exact=exact, steps=EARLY, eval_every=1)
    told["twice"] = train(folder / "twice", exact=True, twice=True, steps=9)
    train(folder / "twice-stopped", exact=True, twice=True, steps=9, stop_at=4)
    told["twice-stopped"] = train(folder / "twice-stopped", exact=True, twice=True, steps=9, log_every=1)
    if left:
        train(Path(left), exact=True)
    with counting(folder / "counts.json"):
        told["counted"] = train(folder / "counted", steps=8, log_every=6, eval_every=8, check_every=8)
    # Whatever waits is too much.
    with patch.object(running_statistics, "MOST_BYTES", 0), counting(folder / "often.json"):
        told["often"] = train(folder / "often", steps=8, log_every=6, eval_every=8, check_every=8)
    (folder / f"rank-{rank}.json").write_text(json.dumps(told))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
