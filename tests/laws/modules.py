"""Train models with torch's own modules, and with what recipes do with them: one case each.

modules.py --case attention --run.dir runs/attention
"""

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import nn
from torch.nn.functional import linear

from app import OptimConfig, Run, RunConfig, parse

DATA = list(torch.randn(61, 5, 6, generator=torch.Generator().manual_seed(0)))
WIDTH, LARGE = 16, 20.0


@dataclass
class Config:
    """Eight micro-batches of two or three rows a step, so that three ranks have one idle turn."""

    case: Literal["attention", "loops", "norm", "unused", "branches", "frozen", "skipped", "scaled", "shared"] = (
        "attention"
    )
    find_unused: bool = False
    optim: OptimConfig = field(default_factory=lambda: OptimConfig(lr=1e-2, weight_decay=0.1))
    run: RunConfig = field(
        default_factory=lambda: RunConfig(
            global_batch=23, micro_batch=3, steps=40, log_every=1, eval_every=8, save_every=100, trackers=()
        )
    )


class Attention(nn.Module):
    """Parameters used without their module's forward: in torch's attention, in a list, by hand."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(6, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 24, dropout=0.1, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.scales = nn.ParameterList([torch.ones(WIDTH), torch.zeros(WIDTH)])
        self.out = nn.Linear(WIDTH, 3, bias=False)

    def forward(self, x):
        padding = (x[..., 0] > 0.5).cummax(1).values & (torch.arange(x.shape[1]) > 0)
        x = self.encoder(self.embed(x), src_key_padding_mask=padding).masked_fill(padding[..., None], 0)
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return linear(x.mean(1) * self.scales[0] + self.scales[1], self.out.weight)


class Norm(nn.Sequential):
    """A batch norm, which refuses a single row."""

    def __init__(self):
        super().__init__(nn.Flatten(), nn.Linear(30, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU(), nn.Linear(WIDTH, 3))


class Unused(nn.Module):
    """A part that no micro-batch uses, and one that some micro-batches use."""

    def __init__(self):
        super().__init__()
        self.used, self.seldom, self.idle = nn.Linear(6, 3), nn.Linear(6, 3), nn.Linear(6, 3)

    def forward(self, x):
        x = x.mean(1)
        return self.used(x) + self.seldom(x) if x[0, 0] > 0 else self.used(x)


class Branches(nn.Module):
    """Two parts of one shape, of which a micro-batch uses one, and one that all use."""

    def __init__(self):
        super().__init__()
        self.parts, self.out = nn.ModuleList(nn.Linear(6, WIDTH) for _ in range(2)), nn.Linear(WIDTH, 3)

    def forward(self, x):
        return self.out(self.parts[int(x[0, 0, 0] > 0)](x.mean(1)).tanh())


class Uses(nn.Module):
    """A layer that uses an input twice, as positions and an encoder's output are in each layer of a decoder."""

    def __init__(self):
        super().__init__()
        self.one, self.two, self.three = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x, shared):
        return (self.one(x) * self.two(shared)).tanh() + self.three(shared)


class Shared(nn.Module):
    """Layers with an input in common, whose gradients have to be added in one order."""

    def __init__(self):
        super().__init__()
        self.embed, self.layers = nn.Linear(6, WIDTH), nn.ModuleList(Uses() for _ in range(3))
        self.out = nn.Linear(WIDTH, 3)

    def forward(self, x):
        x = shared = self.embed(x.mean(1))
        for layer in self.layers:
            x = layer(x, shared=shared)
        return self.out(x)


class OverflowInOneRow(torch.autograd.Function):
    """Pass a weight on; where a sample is large, the gradient of one of its rows is infinite."""

    @staticmethod
    def forward(ctx, weight, x):
        ctx.overflows = bool((x >= LARGE).any())
        return weight.clone()

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone()
        if ctx.overflows:
            gradient[WIDTH - 3] = torch.inf
        return gradient, None


class Overflowing(nn.Module):
    """As under fp16, some gradients overflow, and the loss does not: those of one rank's shard under FSDP2."""

    def __init__(self):
        super().__init__()
        self.embed, self.out = nn.Linear(6, WIDTH), nn.Linear(WIDTH, 3)

    def forward(self, x):
        weight = OverflowInOneRow.apply(self.embed.weight, x)
        return self.out(linear(x.mean(1), weight, self.embed.bias).tanh())


MODELS = {"norm": Norm, "unused": Unused, "branches": Branches, "scaled": Overflowing, "shared": Shared}
SPOILT = {"skipped": torch.inf, "scaled": LARGE}


def rows(case):
    """Return the samples of a case, of which one may be too large."""
    return [
        torch.full_like(row, SPOILT[case]) if index == 7 and case in SPOILT else row for index, row in enumerate(DATA)
    ]


def scale_losses(run):
    """Give the run the loss scaler that mixed_precision: fp16 would on a GPU; it grows every second step."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    run.accelerator.scaler = run.gradients.grid.scaler = scaler
    # accelerate's own does nothing without mixed_precision: fp16.
    run.accelerator.unscale_gradients = lambda optimizer: scaler.unscale_(optimizer.optimizer)


def loss_of(model, inputs):
    """Compare with what a network might well have to find out."""
    return (model(inputs) - inputs.square().mean(1)[:, :3]).square().mean()


def train(run, model, batch, case):
    """Add the gradients of a step's micro-batches."""
    for micro in batch.micros(model):
        loss = loss_of(model, micro.inputs)
        if case == "norm":
            # A loss over the batch: NaN for a single row.
            run.backward({"loss/fit": loss, "loss/spread": model(micro.inputs).std(0).mean()}, micro)
        else:
            run.backward(loss, micro)
    for micro in batch.micros(model) if case == "loops" else ():
        run.backward(model(micro.inputs).square().mean(), micro, "loss/size")


def judged(run, model, judge, batch):
    """Add the gradients of a model through a second one, as a generator's through its critic."""
    for micro in batch.micros(model, frozen=[judge]):
        run.backward(judge(model(micro.inputs)).square().mean(), micro, "loss/through")
    for micro in batch.micros(judge):
        run.backward((judge(model(micro.inputs).detach()) - 1).square().mean(), micro, "loss/judge")


def main(config: Config) -> dict[str, float]:
    with Run(config) as run:
        if config.find_unused and run.accelerator.ddp_handler:
            run.accelerator.ddp_handler.find_unused_parameters = True
        if config.case == "scaled":
            scale_losses(run)
        model, optimizer = run.prepare(MODELS.get(config.case, Attention)(), config.optim)
        others = [run.prepare(nn.Linear(3, 1), config.optim)] if config.case == "frozen" else []
        for batch in run.batches(rows(config.case), torch.stack):
            judged(run, model, others[0][0], batch) if others else train(run, model, batch, config.case)
            for each in (optimizer, *(other for _, other in others)):
                run.step(each)
            if run.due(config.run.eval_every):
                scores = run.scores_of()
                for micro in run.evaluation(model, DATA[:11], torch.stack):
                    scores.update(micro.weight, loss=loss_of(model, micro.inputs))
                run.log(scores.compute())
        return run.finish(model)


if __name__ == "__main__":
    main(parse(Config))
