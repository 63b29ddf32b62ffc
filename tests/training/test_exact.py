"""app.training.exact.gradients, in one process: what it refuses, what it says, and what it leaves alone."""

import itertools
import os
from dataclasses import dataclass, field
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from accelerate.utils import DistributedType, TorchDynamoPlugin
from torch import nn

from app import OptimConfig, Run, RunConfig, UserError
from app.training.exact.gradients import ExactGradients
from app.training.exact.grid import GRID, Grid, ShardedRounding

DATA = list(torch.randn(40, 4, generator=torch.Generator().manual_seed(0)))


@dataclass
class Config:
    run: RunConfig = field(default_factory=RunConfig)


def train(folder, model, loss=lambda output: output.square().mean(), optim=None, rows=DATA, **more):
    """Train a model for two epochs of four steps."""
    settings = {"global_batch": 10, "micro_batch": 5, "epochs": 2.0, "trackers": (), "log_every": 1, "exact": True}
    with Run(Config(RunConfig(dir=str(folder), **{**settings, **more}))) as run:
        model, optimizer = run.prepare(model, optim or OptimConfig())
        for batch in run.batches(rows, torch.stack):
            for micro in batch.micros(model):
                run.backward(loss(model(micro.inputs)), micro)
            run.step(optimizer)
        return model, optimizer


@pytest.mark.parametrize(
    ("kind", "compiler", "words"),
    [
        (DistributedType.DEEPSPEED, {}, "DeepSpeed sums gradients in its own order"),
        (DistributedType.NO, {"backend": "INDUCTOR"}, "add dynamo_use_regional_compilation: true"),
    ],
)
def test_profiles_that_cannot_be_exact_are_refused(kind, compiler, words):
    state = SimpleNamespace(dynamo_plugin=TorchDynamoPlugin(**compiler))
    accelerator = SimpleNamespace(distributed_type=kind, state=state, compiles=bool(compiler), split=None)
    with pytest.raises(UserError, match=words):
        ExactGradients(accelerator, 0)


def test_synchronised_batchnorm_is_refused(tmp_path):
    """It computes over what processes hold at a time, which is another thing on every layout."""
    with pytest.raises(UserError, match=r"--run\.exact: 1 is a SyncBatchNorm.*LayerNorm"):
        train(tmp_path / "run", nn.Sequential(nn.Linear(4, 4), nn.SyncBatchNorm(4)))


def test_a_layer_that_overwrites_its_input_is_refused(tmp_path):
    """FSDP2 cannot train it, and exact mode does before each layer what FSDP2 does."""

    class Layer(nn.Linear):
        def forward(self, x):
            return super().forward(x.relu_())

    model = nn.Sequential(nn.Linear(4, 4), Layer(4, 4))
    model._no_split_modules = ["Layer"]
    with pytest.raises(UserError, match=r"--run\.exact: a layer of the model changes its own input in place.*relu for"):
        train(tmp_path / "run", model)


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
    ("factor", "words"), [(1e4, "sums are exact below 4096"), (2.0 ** -(GRID + 4), "below half the grid's unit")]
)
def test_gradients_that_do_not_fit_the_grid_are_said_once(tmp_path, capsys, factor, words):
    train(tmp_path / "run", nn.Linear(4, 1), lambda output: output.sum() * factor, OptimConfig(lr=1e-9))
    assert capsys.readouterr().err.count(words) == 1


@pytest.mark.parametrize(("size", "said"), [(5000.0, 1), (3000.0, 0)])
def test_micro_batches_that_cancel_are_said(tmp_path, capsys, size, said):
    """The gradient of the step is 0, and what one of two ranks would hand on is far beyond the grid."""
    rows, signs = [torch.ones(4)] * 20, itertools.cycle([size / 2, -size / 2])
    train(tmp_path / "run", nn.Linear(4, 1), lambda output: output.mean() * 2 * next(signs), OptimConfig(lr=1e-9), rows)
    assert '"grad_norm": 0.0' in (tmp_path / "run" / "metrics.jsonl").read_text()
    text = f"may reach {size:.4g} in the gradient of"
    assert capsys.readouterr().err.count(text) == said


def test_gradients_that_fit_are_not_mentioned(tmp_path, capsys):
    train(tmp_path / "run", nn.Linear(4, 1))
    assert "--run.exact" not in capsys.readouterr().err


def test_a_gradient_of_zero_has_no_sign():
    """Whether -0 survives a sum depends on how many parts it has, and so on the layout."""
    grid = Grid(SimpleNamespace(scaler=None, device="cpu"))
    assert not grid.nearest(0, torch.tensor([-0.0, -(2.0 ** -(GRID + 2))])).signbit().any()


class Sharded(nn.Linear):
    """What FSDP2 makes of a module, as far as ShardedRounding looks at it."""

    def set_gradient_divide_factor(self, factor):
        pass

    def _get_fsdp_state(self):
        return SimpleNamespace(_lazy_init=lambda: None)

    def unshard(self):
        pass

    def reshard(self):
        pass

    def beside(self, x):
        return x @ self.weight.T


def test_a_gradient_that_was_not_rounded_is_refused_by_name():
    """FSDP2 gathers weights for forward passes, and for methods that it was told of, where no hook is called."""
    model = Sharded(4, 1, bias=False)
    shards = ShardedRounding(model, Grid(SimpleNamespace(scaler=None, device="cpu")))
    shards.check()  # nothing has a gradient yet
    model.beside(DATA[0]).sum().backward()
    with pytest.raises(UserError, match="the gradient of weight is not rounded"):
        shards.check()
    model(DATA[0]).sum().backward()
    shards.check()


def test_what_changes_bits_is_said(tmp_path, capsys):
    """The number of threads may change between launches, but then the promise is not kept."""
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


def settings_of_torch():
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.utils.deterministic.fill_uninitialized_memory,
        torch.backends.mha.get_fastpath_enabled(),
        os.environ.get("CUBLAS_WORKSPACE_CONFIG"),
    )


@pytest.fixture(params=["usual", "asked"])
def found(request, monkeypatch):
    """Give torch's settings as a process may have them before a run, and put them back."""
    usual = settings_of_torch()
    if request.param == "asked":
        monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = not usual[2]
    yield settings_of_torch()
    torch.use_deterministic_algorithms(usual[0], warn_only=usual[1])
    torch.utils.deterministic.fill_uninitialized_memory = usual[2]
    torch.backends.mha.set_fastpath_enabled(usual[3])


def test_a_run_gives_back_the_settings_that_it_found(tmp_path, found):
    """Also the shortcut of torch's encoder layers, which FSDP2's hooks rule out, and which has other bits."""
    during = []
    train(
        tmp_path / "run", nn.Linear(4, 1), lambda output: during.append(settings_of_torch()) or output.square().mean()
    )
    assert during[0] != found and not during[0][3] and during[0][4]
    assert settings_of_torch() == found


def test_a_run_that_does_not_begin_gives_back_what_it_took(tmp_path, found, monkeypatch):
    """Torch's settings, which would change what this process does next, and the folder, with all that was made."""
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="not today"):
        patch.setattr("app.run.seed_all", Mock(side_effect=RuntimeError("not today")))
        patch.setattr(
            "app.training.exact.gradients._check", lambda accelerator: torch.use_deterministic_algorithms(True)
        )
        train(tmp_path / "run", nn.Linear(4, 1))
    assert settings_of_torch() == found and not (tmp_path / "run").exists()
    train(tmp_path / "run", nn.Linear(4, 1))
