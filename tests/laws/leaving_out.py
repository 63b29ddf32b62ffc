"""Leave steps out on this layout, with all that a step changes: leaving_out.py FOLDER all|some.

Each case trains over batches 0, 1, 2, ...; a run with a spoilt batch among them must end in the state of the run that
never had it. Batches are functions of their number alone, and the learning rate is constant.
"""

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import parametrizations

from app import EMAConfig, OptimConfig, Run, RunConfig
from app.distributed import collectives, naming
from app.distributed.accelerator import Accelerator
from app.distributed.environment import report_user_errors
from app.distributed.state import sharded

WIDTH, SPOILT = 6, -1
MICROS = 4
ROWS = list(torch.zeros(96, 1))


@dataclass
class Config:
    optim: OptimConfig = field(default_factory=OptimConfig)
    ema: EMAConfig = field(default_factory=EMAConfig)
    run: RunConfig = field(default_factory=RunConfig)


class Codebook(nn.Module):
    """Averages of what it sees, changed in place, through .data as many do."""

    def __init__(self):
        super().__init__()
        self.register_buffer("codes", torch.zeros(WIDTH))
        self.register_buffer("through_data", torch.zeros(WIDTH))

    def forward(self, x):
        with torch.no_grad():
            self.codes.lerp_(x.mean((0, 2)), 0.1)
            self.through_data.data.mul_(0.9).add_(x.mean((0, 2)), alpha=0.1)
        return x + 0.1 * self.codes[:, None]


class Replaced(nn.Module):
    """A buffer that each pass replaces, one that the first pass sets, and one that it makes."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("late", None, persistent=False)

    def forward(self, x):
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean((0, 2))
        self.late = x.detach().mean() + (0 if self.late is None else self.late)
        if not hasattr(self, "new"):
            self.register_buffer("new", x.detach().mean(), persistent=False)
        return x + 0.1 * self.mean[:, None]


class Counting(nn.Module):
    """Whole numbers: a buffer, an attribute, and extra state; and a queue with its pointer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("passes", torch.zeros((), dtype=torch.int64))
        self.register_buffer("queue", torch.zeros(8, WIDTH))
        self.register_buffer("pointer", torch.zeros((), dtype=torch.int64), persistent=False)
        self.calls, self.seen = 0, {"calls": 0}

    def get_extra_state(self):
        return dict(self.seen)

    def set_extra_state(self, state):
        self.seen = dict(state)

    def forward(self, x):
        self.passes += 1
        self.calls += 1
        self.seen["calls"] += 1
        self.queue[self.pointer] = x.detach().mean((0, 2))
        self.pointer.copy_((self.pointer + 1) % 8)
        return x


class Layers(nn.Module):
    """Layers that FSDP2 shards one by one."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x):
        for block in self.blocks:
            x = block(x.transpose(1, 2)).transpose(1, 2).tanh() + x
        return x


class Spectral(nn.Module):
    """Vectors of spectral norm, by torch's parametrization and by its older hook."""

    def __init__(self):
        super().__init__()
        self.new = parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))
        self.old = nn.utils.spectral_norm(nn.Linear(WIDTH, WIDTH))

    def forward(self, x):
        return x + self.old(self.new(x.transpose(1, 2))).transpose(1, 2)


class Short(nn.Module):
    """An embedding whose forward passes shorten the rows of its weight."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(9, WIDTH, max_norm=0.5)

    def forward(self, x):
        rows = torch.arange(len(x)) if x.isfinite().all() else torch.arange(9)[-len(x) :]
        return x + self.table(rows)[..., None]


class Teacher(nn.Module):
    """Frozen weights that follow others."""

    def __init__(self):
        super().__init__()
        self.student, self.teacher = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH).requires_grad_(False)

    def forward(self, x):
        x = x.transpose(1, 2)
        return (self.student(x) + self.teacher(x)).transpose(1, 2)

    @torch.no_grad()
    def follow(self):
        for mine, other in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
            mine.lerp_(other, 0.5)


PARTS = {
    "batch norm": lambda: nn.BatchNorm1d(WIDTH),
    "cumulative batch norm": lambda: nn.BatchNorm1d(WIDTH, momentum=None),
    "instance norm": lambda: nn.InstanceNorm1d(WIDTH, affine=True, track_running_stats=True),
    "codebook": Codebook,
    "replaced": Replaced,
    "counting": Counting,
    "spectral": Spectral,
    "teacher": Teacher,
    "short": Short,
}
AVERAGES = {
    "none": EMAConfig(),
    "uniform": EMAConfig(uniform=True, start=1),
    "warm": EMAConfig(decay=0.9, start=1, every=2),
}
ORDERS = {
    "first": [SPOILT, 0, 1, 2, 3],
    "middle": [0, 1, SPOILT, SPOILT, 2, SPOILT, 3],
    "last": [0, 1, 2, 3, SPOILT],
}
STOPPED = "stopped"  # in the middle of the order of that name
NEVER = [0, 1, 2, 3]
# Of the cases, and of the orders of each, those in which several processes leave out in some other way than one.
SOME = {
    "usual all": ["middle"],
    "exact all": [*ORDERS],
    "usual uniform": ["middle", STOPPED],
    "exact warm": ["middle", STOPPED],
    "two 0": ["middle"],
    "two 1": ["middle"],
    "momentum": ["middle"],
}


def network(parts):
    return nn.Sequential(Layers(), *(PARTS[name]() for name in parts))


def batch_of(number, micro):
    """Return the rows of a micro-batch; of a spoilt batch, one has numbers that are not finite."""
    x = torch.randn(3, WIDTH, 5, generator=torch.Generator().manual_seed(1000 + 10 * number + micro))
    return x * torch.nan if number == SPOILT and micro == 1 else x


def train(folder, parts, order, averaging=AVERAGES["none"], spoilt="", optim=None, then=lambda run: None, **settings):
    """Train one model, or two with `spoilt`, which names the one whose gradient is spoilt; return the state."""
    settings = {"global_batch": MICROS, "micro_batch": 1, "steps": len(order), "trackers": (), **settings}
    settings = {"save_every": 100, "log_every": 2, "check_every": 1, "nonfinite": "skip", "best": "", **settings}
    torch.manual_seed(0)
    optim = optim or OptimConfig(lr=0.05, schedule="constant")
    with Run(Config(optim, averaging, RunConfig(dir=str(folder), **settings))) as run:
        models = [network(parts) for _ in range(1 + bool(spoilt))]
        prepared = [run.prepare(model, optim) for model in models]
        for batch in run.batches(ROWS, torch.stack):
            number = order[run.steps_done - 1]
            for which, (model, optimizer) in enumerate(prepared):
                bad = SPOILT if spoilt in ("", str(which)) else 50
                for micro in batch.micros(model):
                    x = batch_of(bad if number == SPOILT else number, micro.index)
                    run.backward(model(x).square().mean(), micro, f"loss/{which}")
                for module in naming.plain([model])[0].modules():
                    if isinstance(module, Teacher):
                        module.follow()
                run.step(optimizer)
            then(run)
        found = state_of(run)
        run.finish(prepared[0][0])
    return found


def state_of(run):
    """Return all that training has changed, by name: what checkpoints hold, and what they do not."""
    run.services.buffers.find_changes()
    tensors, objects = sharded.collect(run.accelerator)
    found = {n: (t.full_tensor() if isinstance(t, DTensor) else t).detach().clone() for n, t in tensors.items()}
    for index, model in enumerate(naming.plain(run.accelerator.models)):
        for name, module in model.named_modules():
            found |= {f"buffers.{index}.{name}.{n}": b.clone() for n, b in module._buffers.items() if b is not None}
            found |= {f"attributes.{index}.{name}.{n}": v for n, v in vars(module).items() if n == "calls"}
    record = run._loop._measured({}, run._loop.means)
    return found | {"objects": json.dumps(objects), "counts": record.counts, "patience": record.patience}


def differing(one, other):
    """Name what differs between two states."""
    return [n for n in {**one, **other} if n not in one or n not in other or not _same(one[n], other[n])]


def _same(one, other):
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


def cases(sharded_weights):
    """Yield a name, and the arguments of `train` but for the order."""
    # A pass under FSDP2 shortens the rows of a whole weight, which is thrown away.
    parts = [name for name in PARTS if not (sharded_weights and name == "short")]
    for exact in (False, True):
        kind = "exact" if exact else "usual"
        yield f"{kind} all", {"parts": parts, "exact": exact}
        yield f"{kind} uniform", {"parts": parts[:4], "averaging": AVERAGES["uniform"], "exact": exact}
        yield f"{kind} warm", {"parts": parts[:4], "averaging": AVERAGES["warm"], "exact": exact}
    for which in "01":
        yield f"two {which}", {"parts": parts[:4], "averaging": AVERAGES["uniform"], "spoilt": which}
    yield "momentum", {"parts": [], "optim": OptimConfig(name="SGD", lr=0.05, schedule="constant"), "spoilt": "1"}


def planned(sharded_weights, which):
    """Yield each case of `all`, or of `some`: its name, the arguments of `train` but for the order, and its orders."""
    for name, how in cases(sharded_weights):
        averaged = how.get("averaging", AVERAGES["none"]) != AVERAGES["none"] and "spoilt" not in how
        orders = [*ORDERS, *([STOPPED] if averaged else [])] if which == "all" else SOME.get(name, [])
        if orders:
            yield name, how, orders


def main(folder: Path, which: str) -> None:
    """Run cases, and write what differs from the run that never had the spoilt batch, by case and order."""
    told, is_sharded = {}, Accelerator().is_fsdp2
    for name, how, orders in planned(is_sharded, which):
        place = folder / name.replace(" ", "-")
        never = train(place / "never", order=NEVER, **how)
        assert all(t.isfinite().all() for t in never.values() if isinstance(t, torch.Tensor))
        for order in orders:
            if order == STOPPED:
                train(place / order, order=ORDERS["middle"], stop_at=4, **how)
                left = train(place / order, order=ORDERS["middle"], **how)
                told[f"{name}, {order}"] = [n for n in differing(never, left) if not n.startswith(("buf", "attr"))]
            else:
                told[f"{name}, {order}"] = differing(never, train(place / order, order=ORDERS[order], **how))
    if collectives.rank() == 0:
        (folder / "told.json").write_text(json.dumps(told))


if __name__ == "__main__":
    report_user_errors()
    main(Path(sys.argv[1]), sys.argv[2])
