"""Train with averages of the weights, and stop early, on this layout: averaged.py FOLDER [LEFT].

LEFT: the folder of a run of the case `every` that another layout has begun, to go on with.
"""

import sys
from dataclasses import dataclass, field
from pathlib import Path

import torch
from looping import evaluate, made_steps
from torch import nn

from app import EMAConfig, OptimConfig, Run, RunConfig
from app.distributed import collectives
from app.distributed.environment import report_user_errors

ROWS = list(torch.randn(43, 2, 6, 6, generator=torch.Generator().manual_seed(0)) * 3 + 1)
STEPS, STOP, EARLY = 24, 10, 16
CASES = {
    "every": EMAConfig(decay=0.9, every=3),
    "swa": EMAConfig(uniform=True, start=0.3, every=2),
    "also": EMAConfig(decay=0.95, warmup=False, use="also"),
}
STOPPED = ("every", "swa")
# As if a high loss were good, which the first evaluation has.
BEST = {
    "every": {},
    "swa": {"best": "eval/loss", "model": "best"},
    "also": {"best": "ema/loss", "model": "best"},
}


@dataclass
class Config:
    """Seven micro-batches of a step, which no number of ranks here divides."""

    optim: OptimConfig = field(default_factory=OptimConfig)
    ema: EMAConfig = field(default_factory=EMAConfig)
    run: RunConfig = field(
        default_factory=lambda: RunConfig(
            global_batch=20, micro_batch=3, steps=STEPS, log_every=1, eval_every=4, save_every=100, trackers=()
        )
    )


class Model(nn.Module):
    """Layers that FSDP shards one by one, with running statistics, and a weight that is frozen."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Conv2d(2, 8, 3, bias=False), nn.BatchNorm2d(8)
        self.layers = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1) for _ in range(2))
        self.scale, self.out = nn.Parameter(torch.ones(8, 1, 1), requires_grad=False), nn.Linear(8 * 16, 1)

    def forward(self, x):
        x = self.norm(self.first(x)).relu()
        for layer in self.layers:
            x = layer(x * self.scale).relu()
        return self.out(x.flatten(1)).squeeze(1)


def train(folder: Path, averaging: EMAConfig, exact: bool = True, **settings) -> None:
    """Train or resume."""
    config = Config(ema=averaging)
    config.run.dir, config.run.exact, config.run.best = str(folder), exact, "-eval/loss"
    for name, value in settings.items():
        setattr(config.run, name, value)
    with Run(config) as run:
        model, optimizer = run.prepare(Model(), OptimConfig(lr=0.01))
        for _ in made_steps(run, model, optimizer, ROWS):
            if run.due(config.run.eval_every):
                run.evaluate(evaluate, model, {"easy": ROWS[:11], "hard": ROWS[20:29]})
        run.finish(model)


def main(folder: Path, left: str = "") -> None:
    """Run all cases: stopped and resumed, or ended early and resumed; whole on one process, and those never stopped."""
    for name, averaging in CASES.items():
        if collectives.alone() or name not in STOPPED:
            train(folder / name, averaging, eval_first=True, **BEST[name])
    for name in STOPPED:
        train(folder / f"{name}-stopped", CASES[name], eval_first=True, **BEST[name], stop_at=STOP)
        if name == "every":
            train(folder / "left", CASES[name], eval_first=True, stop_at=STOP)
        train(folder / f"{name}-stopped", CASES[name], eval_first=True, **BEST[name])
    told = {"best": "eval/loss", "patience": 2}
    train(folder / "early", CASES["every"], **told, stop_at=EARLY - 3)
    train(folder / "early", CASES["every"], **told)
    train(folder / "usual", CASES["every"], exact=False, steps=8)
    if left:
        train(Path(left), CASES["every"])
    if collectives.alone():
        train(folder / "gone-on", CASES["every"], **told)
        train(folder / "gone-on", CASES["every"], **told)  # which is over
        train(folder / "gone-on", CASES["every"], best="eval/loss", patience=0)
        train(folder / "best-of-weights", CASES["also"], best="eval/loss", model="best")
        train(folder / "plain", EMAConfig())
        kept = {"steps": 6, "save_every": 1, "keep": 9}
        train(folder / "kept", EMAConfig(decay=0.3), **kept)
        train(folder / "kept-cold", EMAConfig(decay=0.3, warmup=False), **kept)
        train(folder / "kept-swa", EMAConfig(uniform=True, start=2, every=2), **kept)


if __name__ == "__main__":
    report_user_errors()
    main(Path(sys.argv[1]), *sys.argv[2:])
