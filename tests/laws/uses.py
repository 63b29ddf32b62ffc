"""Train models whose layers a micro-batch uses several times, not at all, or through a gradient: one case each.

uses.py --case twice --run.dir runs/twice
"""

from dataclasses import dataclass, field

import torch
from torch import nn
from torch.autograd import grad
from torch.distributed.tensor import DTensor
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


class Dropping(Stack):
    """Leave out layers: at random, in each micro-batch others (stochastic depth), or the last one in all of them."""

    def __init__(self, alike=False):
        super().__init__()
        self.alike = alike

    def call(self, layer, x):
        left = layer is self.layers[2] if self.alike else torch.rand(()) < 0.5
        return x if self.training and left else layer(x)


class Conditional(Stack):
    """A norm for each kind of row, of one size, which FSDP2 gathers and reduces with the rest."""

    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleDict({name: nn.LayerNorm(WIDTH) for name in ("a", "b")})

    def forward(self, x):
        x = self.norms["a" if x[0, 0] > 0 else "b"](self.embed(x))
        return self.out(self.layers[0](x))


class Experts(Stack):
    """One of the layers for each row."""

    def forward(self, x):
        chosen = (x[:, 0] > 0).long() + (x[:, 1] > 0)
        x = self.embed(x)
        found = torch.zeros_like(x)
        for number, layer in enumerate(self.layers):
            rows = (chosen == number).nonzero()[:, 0]
            if len(rows):
                found = found.index_add(0, rows, layer(x[rows]))
        return self.out(found)


class Seldom(Stack):
    """Leave out a layer for one micro-batch of many."""

    def forward(self, x):
        x = self.embed(x)
        for layer in list(self.layers)[: 2 if self.training and x[0, 0] > 1.3 else 3]:
            x = layer(x)
        return self.out(x)


class Parts(Stack):
    """A layer that is sharded with the rest, and passed through in two parts with a backward pass of its own each."""

    def __init__(self):
        super().__init__([Block()])

    def forward(self, x):
        inner, x = self.layers[0], self.embed(x)
        halves = [checkpoint(inner, part, use_reentrant=True) for part in x.split(WIDTH // 2)] if len(x) else []
        return self.out(checkpoint(inner, torch.cat(halves), use_reentrant=True))


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


def penalised(model, x):
    """Add a penalty of the gradients of the inputs, as WGAN-GP does."""
    x = x.mean(1).requires_grad_()
    found = model(x)
    (gradient,) = torch.autograd.grad(found.sum(), x, create_graph=True)
    return (gradient.norm(dim=1) - 1).square().mean() + found.mean()


def only_penalty(model, x):
    """Train on nothing but the gradients of the inputs, as a force field does."""
    x = x.mean(1).requires_grad_()
    (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return (gradient[:, :3] - x[:, :3]).square().mean()


def often_penalised(model, x):
    return penalised(model, x) + penalised(model, 2 * x) + single(model, x)


def adversarial(model, x):
    """Train on what the loss is worst for, nearby."""
    near = x[:, 0].clone().requires_grad_()
    (gradient,) = torch.autograd.grad((model(near) - 1).square().mean(), near)
    return (model(near.detach() + 0.1 * gradient.sign()) - 1).square().mean() + single(model, x)


def of_weights(model, x):
    """Add a penalty of the gradients of the weights."""
    loss = single(model, x)
    gradients = torch.autograd.grad(loss, [p for p in model.parameters() if p.requires_grad], create_graph=True)
    return loss + 0.1 * sum(gradient.square().sum() for gradient in gradients)


def decayed(model, x):
    """Add a penalty of the weights."""
    return single(model, x) + 0.01 * sum(parameter.square().sum() for parameter in model.parameters())


def of_weights_unasked(model, x):
    """The same, by the name that many import; what the loss does not depend on is left out."""
    loss = single(model, x)
    weights = [p for p in model.parameters() if p.requires_grad]
    gradients = grad(loss, weights, create_graph=True, allow_unused=True)
    return loss + 0.1 * sum(gradient.square().sum() for gradient in gradients if gradient is not None)


def decayed_whole(model, x):
    """Add a penalty of the weights, gathered by hand."""
    weights = [p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters()]
    return single(model, x) + 0.01 * sum(weight.square().sum() for weight in weights)


def decayed_part(model, x):
    """Add a penalty of this rank's part of the weights."""
    weights = [p.to_local() if isinstance(p, DTensor) else p for p in model.parameters()]
    return single(model, x) + 0.01 * sum(weight.square().sum() for weight in weights)


def unused(model, x):
    """Make a forward pass that no loss uses."""
    model(x[:, 1])
    return single(model, x)


CASES = {
    # Used several times, as many as three of which the order of sums matters for.
    "thrice": (Stack, thrice),
    "crops": (Stack, crops),
    "cached": (Stack, cached),
    "tied": (tied, single),
    "tied-twice": (tied, twice),
    "checkpointed": (Checkpointed, thrice),
    "reentrant": (Reentrant, thrice),
    "reentrant-tied": (lambda: tied(Reentrant), single),
    "within": (Within, thrice),
    "within-reentrant": (lambda: Within(True), twice),
    "nested": (lambda: Stack([Stage(), Stage()]), thrice),
    "one-piece": (lambda: nn.Sequential(nn.Linear(6, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 3)), thrice),
    "parts": (Parts, single),
    # Through a gradient.
    "penalised": (Stack, penalised),
    "often-penalised": (lambda: Stack([Stage(), Stage()]), often_penalised),
    "penalised-checkpointed": (lambda: tied(Checkpointed), penalised),
    "only-penalty": (Stack, only_penalty),
    "adversarial": (Stack, adversarial),
    "of-weights": (Stack, of_weights),
    "of-weights-unasked": (Stack, of_weights_unasked),
    "decayed": (Stack, decayed),
    "decayed-whole": (Stack, decayed_whole),
    "decayed-part": (Stack, decayed_part),
    # Not at all.
    "unused": (Stack, unused),
    "dropped": (Dropping, single),
    "dropped-alike": (lambda: Dropping(alike=True), single),
    "conditional": (Conditional, single),
    "experts": (Experts, single),
    "seldom": (Seldom, single),
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
