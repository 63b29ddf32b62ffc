"""Optimizers of other packages, by import path: found, tried on shards, and refused where they cannot be right."""

import pytest
import torch

from app.config import OptimConfig
from app.errors import UserError
from app.training.optim.building import Place, build_optimizer, check

PACKAGE = '''
import torch
from torch.optim import Optimizer


class Plain(Optimizer):
    """Treats each number alone."""

    def __init__(self, params, lr=0.1, betas=(0.9, 0.99, 0.999), weight_decay=0.0, positive=True):
        if lr > 1:
            raise ValueError("lr is far too large")
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                self.update(p, group["lr"])

    def update(self, p, lr):
        self.state[p]["sum"] = self.state[p].get("sum", 0) + p.grad
        p.sub_(self.state[p]["sum"], alpha=lr)


class Whole(Plain):
    """Divides by the norm of the gradient of a whole weight."""

    def update(self, p, lr):
        p.sub_(p.grad / p.grad.norm(), alpha=lr)


class Tails(Plain):
    """Rounds the last numbers, which fill no vector, in another way."""

    def update(self, p, lr):
        whole, part = p.view(-1), p.numel() // 16 * 16
        twice = whole - p.grad.view(-1) * lr
        p.sub_(p.grad, alpha=lr)
        whole[part:] = twice[part:]


class Blocks(Plain):
    """Keeps a number for each block of eight."""

    def update(self, p, lr):
        self.state[p]["absmax"] = torch.zeros(-(-p.numel() // 8))
        p.sub_(p.grad, alpha=lr)


class Own(torch.Tensor):
    pass


class Odd(Plain):
    """Keeps state in a kind of tensor of its own."""

    def update(self, p, lr):
        self.state[p]["sum"] = torch.zeros_like(p).as_subclass(Own)


class Broken(Plain):
    def update(self, p, lr):
        raise NotImplementedError("on the CPU")


class Closing(Plain):
    def step(self, closure):
        pass


def function():
    pass
'''
CPU = torch.device("cpu")


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package with optimizers, and one that lacks another."""
    (tmp_path / "someones").mkdir()
    (tmp_path / "someones" / "__init__.py").write_text(PACKAGE)
    (tmp_path / "someones" / "lacking.py").write_text("import package_that_is_nowhere")
    (tmp_path / "someones" / "failing.py").write_text("1 / 0")
    monkeypatch.syspath_prepend(tmp_path)


def build(name: str, place: Place | None = None, **settings) -> torch.optim.Optimizer:
    return build_optimizer(torch.nn.Linear(3, 2), OptimConfig(name=f"someones.{name}", **settings), place)


def test_settings_reach_the_class_that_has_them(package):
    """Not two betas to a class that takes three."""
    optimizer = build("Plain", lr=0.5, weight_decay=0.25)
    assert type(optimizer).__name__ == "Plain" and optimizer.defaults["lr"] == 0.5
    assert optimizer.defaults["betas"] == (0.9, 0.99, 0.999)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.25, 0.0]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("no_such_package.Lion", "no-such-package is not installed: pip install no-such-package"),
        ("someones.there.Lion", "someones has no module someones.there"),
        ("someones.lacking.Lion", "someones.lacking needs a package: package_that_is_nowhere is not installed"),
        ("someones.failing.Lion", "does not import: ZeroDivisionError"),
        ("someones.Plane", "someones has no Plane; did you mean Plain?"),
        ("someones.Xyzzy", "someones has no Xyzzy; it has Plain, Whole, "),
        ("someones.function", "is no torch.optim.Optimizer"),
        ("someones.Closing", "its step evaluates the loss itself"),
        ("torch.optim.LBFGS", "it evaluates the loss several times a step"),
        (".Lion", "is no import path"),
    ],
)
def test_what_is_not_there_is_said(package, name, said):
    with pytest.raises(UserError) as error:
        check(OptimConfig(name=name))
    assert said in str(error.value) and str(error.value).startswith(f"--optim.name {name}")


def test_what_a_class_refuses_is_said(package):
    with pytest.raises(UserError, match=r"someones\.Plain refuses lr 2, .*ValueError: lr is far too large"):
        build("Plain", lr=2)


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize(
    ("name", "where", "said"),
    [
        ("Plain", set(), ""),
        ("Whole", {(True, False), (True, True)}, "does not update shards as it updates whole weights: take a profile"),
        ("Tails", {(True, True)}, "whole weights to the last bit, which --run.exact needs"),
        ("Blocks", {(True, False), (True, True)}, "FSDP2 shards only state of the weight's own shape"),
        ("Odd", {(s, e) for s in (False, True) for e in (False, True)}, "sum is a Own: checkpoints keep plain tensors"),
        ("Broken", {(s, e) for s in (False, True) for e in (False, True)}, "NotImplementedError: on the CPU"),
    ],
)
def test_what_cannot_be_right_is_refused(package, name, where, said, sharded, exact):
    """Where weights are sharded, or anywhere; and trying it draws no random numbers."""
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    if (sharded, exact) in where:
        with pytest.raises(UserError, match=said):
            build(name, Place(CPU, sharded, exact))
    else:
        model = torch.nn.Linear(3, 2, dtype=torch.float64)
        torch.manual_seed(0)
        build_optimizer(model, OptimConfig(name=f"someones.{name}"), Place(CPU, sharded, exact))
        assert torch.equal(torch.rand(1), expected)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("foreach", {"foreach": True, "fused": False}),
        ("fused", {"foreach": False, "fused": True}),
        ("for-loop", {"foreach": False, "fused": False}),
    ],
)
@pytest.mark.parametrize("name", ["AdamW", "SGD", "Adagrad"])
def test_kernels_that_are_asked_for(name, kind, options):
    found = build_optimizer(torch.nn.Linear(3, 2), OptimConfig(name=name, implementation=kind))
    assert {key: found.defaults[key] for key in options} == options


def test_kernels_that_cannot_be_had(package):
    def refused(name: str, kind: str, model: torch.nn.Module, *place: bool) -> str:
        with pytest.raises(UserError) as error:
            build_optimizer(model, OptimConfig(name=name, implementation=kind), Place(CPU, *place) if place else None)
        return str(error.value)

    narrow, wide = torch.nn.Linear(3, 2), torch.nn.Linear(16, 2, bias=False)
    assert "NAdam has no such kernels" in refused("NAdam", "fused", narrow)
    assert "someones.Plain has no such kernels" in refused("someones.Plain", "foreach", narrow)
    assert "do not take the shards of FSDP2" in refused("SGD", "fused", narrow, True, False)
    assert "layouts would differ with --run.exact" in refused("AdamW", "fused", narrow, False, True)
    fused = OptimConfig(implementation="fused")
    assert build_optimizer(wide, fused, Place(CPU, True, True)).defaults["fused"]
    with pytest.raises(
        UserError, match=r"--optim\.implementation quick does not work: it must be one of auto, foreach"
    ):
        check(OptimConfig(implementation="quick"))


@pytest.mark.parametrize("kind", ["foreach", "for-loop"])
@pytest.mark.parametrize("name", ["AdamW", "Adam", "SGD", "Adagrad", "NAdam", "RMSprop"])
def test_unfused_kernels_give_shards_the_bits_of_the_whole(name, kind):
    """On a CPU, of any size and cut; and both of torch's kinds give the same bits there, but for NAdam."""
    draw = torch.Generator().manual_seed(0)
    start = torch.randn(97, 7, generator=draw)
    gradients = [torch.randn(97, 7, generator=draw) for _ in range(3)]
    found = []
    for pieces, how in ((1, kind), (2, kind), (5, kind), (1, kind if name == "NAdam" else "for-loop")):
        model = torch.nn.ParameterList([part.clone() for part in start.chunk(pieces)])
        optimizer = build_optimizer(model, OptimConfig(name=name, implementation=how))
        for gradient in gradients:
            for part, own in zip(model, gradient.chunk(pieces), strict=True):
                part.grad = own.clone()
            optimizer.step()
        found.append(torch.cat([part.detach() for part in model]))
    assert all(torch.equal(other, found[0]) for other in found)
