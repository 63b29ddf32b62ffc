"""app.exact, in one process: what it refuses, what it says, and what it leaves alone."""

from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from app import OptimConfig, Run, RunConfig, UserError
from app.exact import GRID, _Grid

DATA = list(torch.randn(40, 4, generator=torch.Generator().manual_seed(0)))


@dataclass
class Config:
    run: RunConfig = field(default_factory=RunConfig)


def train(folder, model, loss=lambda output: output.square().mean(), optim=None, **more):
    """Train a model for two epochs of four steps."""
    settings = {"global_batch": 10, "micro_batch": 5, "epochs": 2.0, "trackers": (), "log_every": 1, "exact": True}
    with Run(Config(RunConfig(dir=str(folder), **{**settings, **more}))) as run:
        model, optimizer = run.prepare(model, optim or OptimConfig())
        for batch in run.batches(DATA, torch.stack):
            for micro in batch.micros(model):
                run.backward(loss(model(micro.inputs)), micro)
            run.step(optimizer)
        return model, optimizer


def test_batchnorm_is_refused(tmp_path):
    """It computes over what a process holds, which is another thing on every layout."""
    with pytest.raises(UserError, match=r"--run\.exact: 1 is a BatchNorm1d.*LayerNorm"):
        train(tmp_path / "run", nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))


@pytest.mark.parametrize(("width", "fused"), [(16, True), (15, False)])
def test_fused_kernels_of_cpu_work_on_full_vectors_alone(tmp_path, width, fused):
    """They round the last elements of a tensor, and so of a shard, in another way."""
    model = nn.Sequential(nn.Linear(4, 16), nn.Linear(16, width), nn.Linear(width, 16))
    model[0].weight.requires_grad_(False)
    _, optimizer = train(tmp_path / "run", model)
    assert [group["fused"] for group in optimizer.param_groups] == [fused, False]


@pytest.mark.parametrize("threads", [1, 2])
def test_fused_adamw_gives_shards_the_bits_of_the_whole(threads):
    """Where rows fill vectors; the version of torch that this was seen to hold for is the one in requirements.lock."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for rows, cuts in ((37, [5, 6, 30]), (4001, [1000, 2001, 3002])):
            generator = torch.Generator().manual_seed(rows)
            start = torch.randn(rows, 48, generator=generator)
            whole = [nn.Parameter(start.clone())]
            shards = [nn.Parameter(piece.clone()) for piece in start.tensor_split(cuts)]
            optimizers = [torch.optim.AdamW(parameters, fused=True) for parameters in (whole, shards)]
            for _ in range(5):
                gradient = torch.randn(rows, 48, generator=generator) * 1e-3
                whole[0].grad = gradient
                for shard, piece in zip(shards, gradient.tensor_split(cuts), strict=True):
                    shard.grad = piece.clone()
                for optimizer in optimizers:
                    optimizer.step()
            assert torch.equal(torch.cat([shard.data for shard in shards]), whole[0].data)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("factor", "words"), [(1e4, "sums are exact below 4096"), (2.0 ** -(GRID + 4), "lie under the grid")]
)
def test_gradients_that_do_not_fit_the_grid_are_said_once(tmp_path, capsys, factor, words):
    train(tmp_path / "run", nn.Linear(4, 1), lambda output: output.sum() * factor, OptimConfig(lr=1e-9))
    assert capsys.readouterr().err.count(words) == 1


def test_gradients_that_fit_are_not_mentioned(tmp_path, capsys):
    train(tmp_path / "run", nn.Linear(4, 1))
    assert "--run.exact" not in capsys.readouterr().err


def test_a_gradient_of_zero_has_no_sign():
    """Whether -0 survives a sum depends on how many parts it has, and so on the layout."""
    grid = _Grid(SimpleNamespace(scaler=None, device="cpu"))
    assert not grid.nearest(torch.tensor([-0.0, -(2.0 ** -(GRID + 2))])).signbit().any()


def test_what_changes_bits_is_said(tmp_path, capsys):
    """The number of threads may change between sittings, but then the promise is not kept."""
    train(tmp_path / "run", nn.Linear(4, 1), stop_at=2)
    train(tmp_path / "run", nn.Linear(4, 1), stop_at=4)
    assert "warning" not in capsys.readouterr().err
    train(tmp_path / "run", nn.Linear(4, 1), threads=2)
    assert "--run.exact: threads was 1, is 2: bits from here on may differ" in capsys.readouterr().err


class Unused(nn.Module):
    """A model that never uses one of its parameters, and never trains another."""

    def __init__(self):
        super().__init__()
        self.used, self.idle, self.frozen = nn.Linear(4, 1), nn.Linear(4, 1), nn.Linear(4, 1)
        self.frozen.requires_grad_(False)

    def forward(self, x):
        return self.used(x) + self.frozen(x)


def test_a_parameter_without_gradient_is_left_alone(tmp_path):
    """Weight decay or momentum would change it if it were given zeros."""
    torch.manual_seed(0)
    model = Unused()
    before = model.idle.weight.detach().clone()
    train(tmp_path / "run", model, optim=OptimConfig(weight_decay=0.5))
    assert torch.equal(model.idle.weight, before) and model.idle.weight.grad is None


def test_what_is_near_the_ordinary_mode(tmp_path):
    """Rounding to the grid changes the sixth digit at most."""
    runs = {}
    for exact in (True, False):
        torch.manual_seed(0)
        model = nn.Linear(4, 1)
        model, _ = train(tmp_path / str(exact), model, exact=exact)
        runs[exact] = model.weight.detach().clone()
    assert torch.allclose(runs[True], runs[False], rtol=1e-5)
    assert not torch.equal(runs[True], torch.zeros_like(runs[True]))
