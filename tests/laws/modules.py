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
WIDTH = 16


@dataclass
class Config:
    """Eight micro-batches of two or three rows a step, so that three ranks have one idle turn."""

    case: Literal["attention", "loops", "norm", "unused", "frozen"] = "attention"
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


MODELS = {"attention": Attention, "loops": Attention, "norm": Norm, "unused": Unused, "frozen": Attention}


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
        if config.case == "unused" and run.accelerator.ddp_handler:
            run.accelerator.ddp_handler.find_unused_parameters = True
        model, optimizer = run.prepare(MODELS[config.case](), config.optim)
        others = [run.prepare(nn.Linear(3, 1), config.optim)] if config.case == "frozen" else []
        for batch in run.batches(DATA, torch.stack):
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
