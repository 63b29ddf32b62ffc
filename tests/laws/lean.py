"""Train with optimizers that need less memory, whole and stopped: lean.py FOLDER [STOPPED [CASE...]]."""

import sys
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from looping import made_steps
from torch import nn

from app import OptimConfig, Run, RunConfig
from app.distributed.environment import report_user_errors

ROWS = list(torch.randn(43, 6, generator=torch.Generator().manual_seed(0)))
STEPS, STOP = 9, 4
EIGHT = OptimConfig(name="AdamW8bit", lr=0.02, clip=0.5, weight_decay=0.1)
CASES = {
    "eight": EIGHT,
    "stochastic": replace(EIGHT, name="AdamW", updates="stochastic"),
    "kahan": replace(EIGHT, name="AdamW", updates="kahan"),
    "both": replace(EIGHT, updates="stochastic"),
    "adafactor": replace(EIGHT, name="Adafactor"),
}


@dataclass
class Config:
    """Seven micro-batches of a step, which no number of ranks here divides."""

    optim: OptimConfig = field(default_factory=OptimConfig)
    run: RunConfig = field(
        default_factory=lambda: RunConfig(
            global_batch=20, micro_batch=3, steps=STEPS, log_every=1, save_every=100, trackers=(), exact=True
        )
    )


class Model(nn.Module):
    """Layers that FSDP shards one by one; blocks of 32 and of 256 numbers, and a last one that is short."""

    def __init__(self):
        super().__init__()
        self.embed, self.norm = nn.Linear(6, 256), nn.LayerNorm(256)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(256, 31), nn.Tanh(), nn.Linear(31, 256)) for _ in range(2))
        self.wide = nn.Linear(256, 300)
        self.head = nn.Linear(300, 17)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x):
        x = self.embed(x)
        for layer in self.layers:
            x = x + self.dropout(layer(x))
        return self.head(self.wide(self.norm(x)).tanh()).mean(-1)


def train(folder: Path, optim: OptimConfig, **settings) -> None:
    """Train or resume."""
    config = Config(optim=optim)
    config.run.dir = str(folder)
    for name, value in settings.items():
        setattr(config.run, name, value)
    with Run(config) as run:
        model, optimizer = run.prepare(Model(), config.optim)
        for _ in made_steps(run, model, optimizer, ROWS):
            pass
        run.finish(model)


def main(folder: Path, stopped: str = "", *names: str) -> None:
    """Run cases whole, and to a stop; go on with those that stopped in a folder, and only that if it is the same."""
    for name in names or CASES:
        if stopped != str(folder):
            train(folder / name, CASES[name])
            train(folder / f"{name}-stopped", CASES[name], stop_at=STOP)
        if stopped:
            train(Path(stopped) / f"{name}-stopped", CASES[name])


if __name__ == "__main__":
    report_user_errors()
    main(Path(sys.argv[1]), *sys.argv[2:])
