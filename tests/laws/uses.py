"""Train models whose layers a micro-batch uses several times, not at all, or through a gradient: one case each.

uses.py --case twice --run.dir runs/twice
"""

from dataclasses import dataclass, field

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from app import OptimConfig, Run, RunConfig, parse

DATA = list(torch.randn(61, 3, 6, generator=torch.Generator().manual_seed(0)))
WIDTH = 16


@dataclass
class Config:
    """Eight micro-batches of two or three rows a step, so that three ranks have one idle turn."""

    case: str = "twice"
    """A key of CASES."""
    optim: OptimConfig = field(default_factory=lambda: OptimConfig(lr=1e-2, weight_decay=0.1))
    run: RunConfig = field(
        default_factory=lambda: RunConfig(
            global_batch=23, micro_batch=3, steps=8, log_every=1, eval_every=4, save_every=100, trackers=()
        )
    )


class Block(nn.Module):
    """A layer of the stack."""

    def __init__(self):
        super().__init__()
        self.inner, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x):
        return x + self.norm(self.inner(x).tanh())


class Stack(nn.Module):
    """Layers that FSDP2 shards one by one, between two that it shards with the root."""

    def __init__(self, layers=None):
        super().__init__()
        self.embed, self.out = nn.Linear(6, WIDTH), nn.Linear(WIDTH, 3)
        self.layers = nn.ModuleList(layers or [Block() for _ in range(3)])

    def forward(self, x):
        x = self.embed(x)
        for layer in self.layers:
            x = self.call(layer, x)
        return self.out(x)

    def call(self, layer, x):
        return layer(x)


class Checkpointed(Stack):
    """Each layer computes once more in the backward pass."""

    def call(self, layer, x):
        return checkpoint(layer, x, use_reentrant=False)


class Reentrant(Stack):
    """The same, each with a backward pass of its own."""

    def call(self, layer, x):
        return checkpoint(layer, x, use_reentrant=True)


class Within(Stack):
    """The checkpoint lies within the layer that is sharded."""

    def __init__(self, reentrant=False, **known):
        super().__init__([Hidden(reentrant) for _ in range(3)])


class Hidden(Block):
    def __init__(self, reentrant):
        super().__init__()
        self.reentrant = reentrant

    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=self.reentrant)


class Stage(nn.Module):
    """A layer that is sharded, of layers that are sharded."""

    def __init__(self):
        super().__init__()
        self.blocks, self.scale = nn.ModuleList(Block() for _ in range(2)), nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        for block in self.blocks:
            x = block(x * self.scale)
        return x


def tied(kind=Stack):
    """Return a stack of one layer, three times."""
    return kind([Block()] * 3)


def single(model, x):
    return (model(x[:, 0]) - 1).square().mean()


def twice(model, x):
    return (model(x[:, 0]) - model(x[:, 1])).square().mean() - model(x[:, 0]).std()


def thrice(model, x):
    anchor, near, far = (model(x[:, place]) for place in range(3))
    return ((anchor - near).square() - (anchor - far).square() + 1).relu().mean()


def crops(model, x):
    """Compare crops of two sizes, one pass each."""
    found = [model(x[:, place].detach()) for place in range(3)] + [model(x.mean(1))]
    return (
        sum((one - other).square().mean() for one in found for other in found[:2] if one is not other)
        + found[0].exp().mean()
    )


def cached(model, x):
    """Take the gradient of a loss over all representations first, then pass it through the model part by part."""
    with torch.no_grad():
        found = torch.stack([model(x[:, place]) for place in range(3)])
    found.requires_grad_()
    loss = (found[0] - found[1]).square().mean() - found.std()
    (gradient,) = torch.autograd.grad(loss, found)
    kept = sum((model(x[:, place]) * gradient[place]).sum() for place in range(3))
    return kept + (loss - kept).detach()


def unused(model, x):
    """Make a forward pass that no loss uses."""
    model(x[:, 1])
    return single(model, x)


CASES = {
    "twice": (Stack, twice),
    "thrice": (Stack, thrice),
    "crops": (Stack, crops),
    "cached": (Stack, cached),
    "unused": (Stack, unused),
    "tied": (tied, single),
    "tied-twice": (tied, twice),
    "checkpointed": (Checkpointed, single),
    "checkpointed-thrice": (Checkpointed, thrice),
    "checkpointed-tied": (lambda: tied(Checkpointed), twice),
    "reentrant": (Reentrant, single),
    "reentrant-thrice": (Reentrant, thrice),
    "reentrant-tied": (lambda: tied(Reentrant), single),
    "within": (Within, thrice),
    "within-reentrant": (lambda: Within(True), single),
    "within-reentrant-thrice": (lambda: Within(True), thrice),
    "nested": (lambda: Stack([Stage(), Stage()]), thrice),
    "nested-tied": (lambda: Stack([Stage()] * 2), twice),
    "one-piece": (lambda: nn.Sequential(nn.Linear(6, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 3)), thrice),
}


def main(config: Config) -> dict[str, float]:
    build, loss_of = CASES[config.case]
    with Run(config) as run:
        model, optimizer = run.prepare(build(), config.optim)
        for batch in run.batches(DATA, torch.stack):
            for micro in batch.micros(model):
                run.backward(loss_of(model, micro.inputs), micro)
            run.step(optimizer)
            if run.due(config.run.eval_every):
                scores = run.scores_of()
                for micro in run.evaluation(model, DATA[:11], torch.stack):
                    scores.update(micro.weight, loss=single(model, micro.inputs))
                run.log(scores.compute())
        return run.finish(model)


if __name__ == "__main__":
    main(parse(Config))
