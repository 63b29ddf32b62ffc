"""Train models with parameters that few have, one kind after the other in one launch, and write what becomes of each.

odd.py FOLDER: writes FOLDER/rank-R.json, which maps a kind and a mode to words of a refusal; None if it was trained.
"""

import json
import os
import sys
import traceback
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import embedding, embedding_bag, linear

from app import OptimConfig, Run, RunConfig, UserError

WIDTH = 16
DATA = [
    (row, torch.arange(4) + index % 5)
    for index, row in enumerate(torch.randn(20, WIDTH, generator=torch.Generator().manual_seed(0)))
]


@dataclass
class Config:
    optim: OptimConfig = field(default_factory=lambda: OptimConfig(lr=1e-2))
    run: RunConfig = field(default_factory=RunConfig)


class Layer(nn.Linear):
    """A layer that may have one more parameter, which is odd."""

    def __init__(self, odd=None, trained=True):
        super().__init__(WIDTH, WIDTH)
        self.odd = None if odd is None else nn.Parameter(odd.clone(), requires_grad=trained)

    def forward(self, x):
        x = super().forward(x).tanh()
        return x if self.odd is None else x * (1 + self.odd.sum()) + self.odd.sum().exp()


class Plain(nn.Module):
    """A model with two layers that FSDP2 shards one by one, of which one may be odd."""

    def __init__(self, *odd, **known):
        super().__init__()
        self.layers = nn.ModuleList([Layer(), Layer(*odd, **known)])
        self.out = nn.Linear(WIDTH, 1)

    def forward(self, x, ids):
        for layer in self.layers:
            x = layer(x)
        return self.out(self.use(x, ids))

    def use(self, x, ids):
        return x


class Logits(Plain):
    """A temperature: a parameter without dimensions, next to the layers."""

    def __init__(self, trained=True):
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(0.5), requires_grad=trained)

    def use(self, x, ids):
        return x * self.temperature.exp()


class Strided(Plain):
    """A weight in another layout."""

    def __init__(self, weight):
        super().__init__()
        self.weight = nn.Parameter(weight)

    def use(self, x, ids):
        weight = self.weight.real.reshape(-1)[: WIDTH * WIDTH].reshape(WIDTH, WIDTH)
        return linear(x, weight.float())


class Looked(Plain):
    """A table of vectors."""

    def __init__(self, table, **known):
        super().__init__()
        self.table = table(8, WIDTH, **known)

    def use(self, x, ids):
        found = self.table(ids)
        return x + (found.mean(1) if found.ndim > 2 else found)


class ByHand(Plain):
    """A table of vectors whose gradient is sparse, though no module says so."""

    def __init__(self, bag=False):
        super().__init__()
        self.table, self.bag = nn.Parameter(torch.ones(8, WIDTH)), bag

    def use(self, x, ids):
        if self.bag:
            return x + embedding_bag(ids, self.table, sparse=True)
        return x + embedding(ids, self.table, sparse=True).mean(1)


class Lazy(Plain):
    """A layer that waits for its first input to learn its size."""

    def __init__(self):
        super().__init__()
        self.lazy = nn.LazyLinear(WIDTH)

    def use(self, x, ids):
        return self.lazy(x)


class Buffered(Plain):
    """A buffer of another layout, kept with checkpoints or not."""

    def __init__(self, buffer, kept):
        super().__init__()
        self.register_buffer("numbers", buffer, persistent=kept)

    def use(self, x, ids):
        return x @ self.numbers


class Common(Plain):
    """Two layers that have one layer in common."""

    def __init__(self):
        super().__init__()
        self.layers[0].common = self.layers[1].common = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, ids):
        for layer in self.layers:
            x = layer.common(layer(x))
        return self.out(x)


def of_type(dtype, layer=False):
    """Return a model with one weight, or with all of a layer, of another type."""
    if layer:
        model = Plain()
        model.layers[1].to(dtype)
        model.layers[1].register_forward_pre_hook(lambda module, inputs: (inputs[0].to(dtype),))
        model.layers[1].register_forward_hook(lambda module, inputs, outputs: outputs.float())
        return model
    return Strided(torch.eye(WIDTH, dtype=dtype))


KINDS = {
    "plain": Plain,
    "0-d": Logits,
    "0-d in a layer": lambda: Plain(torch.tensor(0.5)),
    "0-d frozen": lambda: Logits(trained=False),
    "no rows": lambda: Plain(torch.zeros(0, 5)),
    "no rows frozen": lambda: Plain(torch.zeros(0, 5), trained=False),
    "no columns": lambda: Plain(torch.zeros(5, 0)),
    "one row": lambda: Plain(torch.zeros(1, 5)),
    "one number": lambda: Plain(torch.zeros(1)),
    "transposed": lambda: Strided(torch.eye(WIDTH).t()),
    "every second column": lambda: Strided(torch.zeros(WIDTH, 2 * WIDTH)[:, ::2]),
    "channels last": lambda: Strided(torch.zeros(WIDTH, 4, 2, 2).to(memory_format=torch.channels_last)),
    "bf16 weight": lambda: of_type(torch.bfloat16),
    "float64 weight": lambda: of_type(torch.float64),
    "bf16 layer": lambda: of_type(torch.bfloat16, layer=True),
    "float64 layer": lambda: of_type(torch.float64, layer=True),
    "complex": lambda: Strided(torch.eye(WIDTH, dtype=torch.complex64)),
    "integers": lambda: Plain(torch.zeros(3, dtype=torch.int64), trained=False),
    "booleans": lambda: Plain(torch.zeros(3, dtype=torch.bool), trained=False),
    "embedding": lambda: Looked(nn.Embedding),
    "sparse embedding": lambda: Looked(nn.Embedding, sparse=True),
    "sparse bag": lambda: Looked(nn.EmbeddingBag, sparse=True),
    "sparse by hand": ByHand,
    "sparse bag by hand": lambda: ByHand(bag=True),
    "lazy": Lazy,
    "expanded buffer": lambda: Buffered(torch.ones(1).expand(WIDTH, WIDTH), kept=True),
    "expanded buffer apart": lambda: Buffered(torch.ones(1).expand(WIDTH, WIDTH), kept=False),
    "sparse buffer": lambda: Buffered(torch.eye(WIDTH).to_sparse(), kept=True),
    "sparse buffer apart": lambda: Buffered(torch.eye(WIDTH).to_sparse_csr(), kept=False),
    "a layer in common": Common,
    "one for many": lambda: Strided(torch.zeros(1).expand(WIDTH, WIDTH)),
}
# Every one of torch's, by its name.
OPTIMIZERS = sorted(
    name
    for name, kind in vars(torch.optim).items()
    if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer
)


def train(folder, kind, exact):
    """Make three steps; return nothing."""
    torch.manual_seed(0)
    run = RunConfig(
        dir=str(folder), global_batch=8, micro_batch=2, steps=3, log_every=1, eval_every=3, save_every=2, trackers=()
    )
    run.exact = exact
    config = Config(OptimConfig(lr=1e-2, name=kind if kind in OPTIMIZERS else "AdamW"), run)
    with Run(config) as run:
        model, optimizer = run.prepare(KINDS.get(kind, Plain)(), config.optim)
        for batch in run.batches(DATA, lambda rows: [torch.stack(column) for column in zip(*rows, strict=True)]):
            for micro in batch.micros(model):
                run.backward((model(*micro.inputs) - 1).square().mean(), micro)
            run.step(optimizer)
        run.finish(model)


def verdict(folder, kind, exact):
    """Return a refusal's words, None if all went well, and a traceback of anything else."""
    try:
        train(folder, kind, exact)
    except UserError as error:
        return str(error)
    except BaseException:  # what a kind must not end in
        return traceback.format_exc()


def main(folder, *kinds):
    """Train each kind, or some, in both modes."""
    found = {
        f"{kind}, {mode}": verdict(folder / f"{kind}, {mode}".replace(" ", "-"), kind, mode == "exact")
        for kind in kinds or (*KINDS, *OPTIMIZERS)
        for mode in ("ordinary", "exact")
    }
    (folder / f"rank-{os.environ.get('RANK', '0')}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
