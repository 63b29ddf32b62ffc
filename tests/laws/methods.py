"""Train with each of the methods that a flag switches on."""

from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from looping import made_steps
from torch import nn

from app import OptimConfig, Run, RunConfig
from app.distributed import collectives

ROWS = list(torch.randn(43, 6, generator=torch.Generator().manual_seed(0)))
STEPS, STOP = 14, 6
PLAIN = OptimConfig(lr=0.02, clip=0.5)
FREEZE = ("embed.*", "layers.0.*@:8", "layers.2.*@5:", "head.bias@0.2:0.6")
CASES = {
    "frozen": replace(PLAIN, freeze=FREEZE),
    "muon": replace(PLAIN, name="Muon", weight_decay=0.1),
    "rates": replace(
        PLAIN,
        name="SGD",
        layer_decay=0.5,
        rates=("head.*=3",),
        decays=("*norm*=0.2", "*.weight=0.1"),
        schedule="points",
        points=("0:0.1", "30%:1", "100%:0.2"),
    ),
    "ramps": replace(PLAIN, batch_scaling="linear", base_batch=20),
}
SETTINGS = {"ramps": {"batch_ramp": ("4:3", "9:8")}}  # at first, a single micro-batch


@dataclass
class Config:
    """Seven micro-batches of a step, which no number of ranks here divides."""

    optim: OptimConfig = field(default_factory=OptimConfig)
    run: RunConfig = field(
        default_factory=lambda: RunConfig(
            global_batch=20, micro_batch=3, steps=STEPS, log_every=1, save_every=100, trackers=(), exact=True
        )
    )


class Collate:
    """Stack rows, and round them in the first steps, as an example of inputs that depend on the step."""

    def __call__(self, rows):
        return torch.stack(rows)

    def at(self, step: int):
        return (lambda rows: torch.stack(rows).round()) if step < STOP + 1 else self


class Model(nn.Module):
    """Layers that FSDP shards one by one, between embeddings and a head."""

    def __init__(self):
        super().__init__()
        self.embed, self.norm = nn.Linear(6, 16), nn.LayerNorm(16)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.head = nn.Linear(16, 1)

    def forward(self, x):
        x = self.embed(x)
        for layer in self.layers:
            x = x + layer(x).tanh()
        return self.head(self.norm(x)).squeeze(-1)


def train(folder: Path, optim: OptimConfig, **settings) -> None:
    """Train or resume."""
    config = Config(optim=optim)
    config.run.dir = str(folder)
    for name, value in settings.items():
        setattr(config.run, name, value)
    with Run(config) as run:
        model, optimizer = run.prepare(Model(), config.optim)
        for _ in made_steps(run, model, optimizer, ROWS, Collate()):
            pass
        run.finish(model)


def main(folder: Path) -> None:
    """Run all cases stopped and resumed, and on one process whole."""
    for name, optim in CASES.items():
        more = SETTINGS.get(name, {})
        if collectives.alone():
            train(folder / name, optim, **more)
        train(folder / f"{name}-stopped", optim, stop_at=STOP, **more)
        train(folder / f"{name}-stopped", optim, **more)
    train(folder / "kept", CASES["frozen"], save_every=1, keep=99)
