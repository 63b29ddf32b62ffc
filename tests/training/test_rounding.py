"""grid_rounding: launches that do not grow with the number of parameters, and kernels with the bits of torch's own."""

import importlib.util
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from support.launching import ROOT, python_path
from support.tiny import Config, RunConfig
from torch import nn

from app import OptimConfig, Run
from app.training.exact import rounding as grid_rounding
from app.training.exact.grid import GRID, Grid, Sums
from benchmarks.launches import Launches

DATA = list(torch.randn(40, 16, generator=torch.Generator().manual_seed(0)))
POINTS = 2.0**GRID


def launches_of_a_step(folder, layers: int, exact: bool) -> tuple[int, int]:
    """Count what a silent step of two micro-batches launches; return it with the number of parameters."""
    settings = {"global_batch": 10, "micro_batch": 5, "steps": 3, "log_every": 3, "save_every": 9, "trackers": ()}
    counted = Launches()
    # On a CPU exact mode's optimizer has a kernel for all of them where rows fill vectors, as a GPU's always has.
    model = nn.Sequential(*[nn.Linear(16, 16, bias=False) for _ in range(layers)])
    with Run(Config(RunConfig(dir=str(folder), exact=exact, **settings))) as run:
        model, optimizer = run.prepare(model, OptimConfig())
        for number, batch in enumerate(run.batches(DATA, torch.stack)):
            with counted if number == 1 else Launches():
                for micro in batch.micros(model):
                    run.backward(model(micro.inputs).square().mean(), micro)
                run.step(optimizer)
    return counted.total, len(list(model.parameters()))


def test_what_exact_mode_launches_does_not_grow_with_the_number_of_parameters(tmp_path):
    """Rounding, adding, dividing, the norm and clipping: as many for 4 parameters as for 40, give or take a few."""
    extra = []
    for layers in (4, 40):
        exact, _ = launches_of_a_step(tmp_path / f"exact-{layers}", layers, True)
        ordinary, parameters = launches_of_a_step(tmp_path / f"ordinary-{layers}", layers, False)
        assert ordinary > 2 * parameters  # the control: these do grow
        extra.append(exact - ordinary)
    assert extra[1] <= extra[0] + 4, extra


def values(count=70_000, seed=0):
    """Give gradients of all sizes, and what is not a number."""
    generator = torch.Generator().manual_seed(seed)
    found = torch.randn(count, generator=generator) * torch.randint(-60, 20, (count,), generator=generator).exp2()
    found[:5] = torch.tensor([0.0, -0.0, float("nan"), float("inf"), -float("inf")])
    found[5:105] = (torch.arange(100) - 50) / 2 / POINTS  # halves of a unit
    return found


def one_by_one(gradients):
    """Round and add as one would write it down."""
    total = torch.zeros_like(gradients[0], dtype=torch.float64)
    for gradient in gradients:
        total = total + torch.round(gradient * POINTS) + 0.0
    return torch.div(total, POINTS).float()


@pytest.mark.parametrize("piece", [2**4, 2**16, 2**24])
@pytest.mark.parametrize("scale", [None, 2.0**10])
def test_the_size_of_pieces_changes_no_bit(monkeypatch, piece, scale):
    """Under fp16 the unit follows the scale of the loss; memory that is not contiguous and missing gradients too."""
    monkeypatch.setitem(grid_rounding.PIECES, "cpu", piece)
    scaler = scale and SimpleNamespace(_scale=torch.full((), scale))
    model = nn.ParameterList(
        [torch.zeros(30, 7), torch.zeros(3), torch.zeros(()), torch.zeros(2, 5, 4, 4), torch.zeros(8), torch.zeros(40)]
    )
    model[3].data = model[3].data.to(memory_format=torch.channels_last)
    sums = Sums(model, Grid(SimpleNamespace(scaler=scaler, device="cpu")), alone=True)
    given = [[values(p.numel() + 200, seed)[-p.numel() :].view(p.shape) for p in model] for seed in range(3)]
    for turn, gradients in enumerate(given):
        for index, (parameter, gradient) in enumerate(zip(model, gradients, strict=True)):
            if index != 4 and (index != 1 or turn == 1):  # one that has none at all, one that has one once
                parameter.grad = gradient.clone() * (scale or 1.0)
        sums.add()
    sums.finish()
    for index, parameter in enumerate(model):
        if index == 4:
            assert parameter.grad is None
        else:
            expected = one_by_one([given[1][index]] if index == 1 else [gradients[index] for gradients in given])
            assert grid_rounding.same(parameter.grad, expected * (scale or 1.0))
            assert parameter.grad.stride() == parameter.stride()


def test_rounding_goes_to_the_nearest_and_halves_to_even():
    found = values()
    sums = torch.empty(len(found), dtype=torch.float64)
    grid_rounding.add(found.clone(), sums, POINTS, fresh=True)
    exact = torch.tensor([float("nan") if x != x else x for x in found.tolist()], dtype=torch.float64) * POINTS
    assert grid_rounding.same(sums, exact.round() + 0.0)
    assert grid_rounding.same(grid_rounding.nearest(found, POINTS), (exact.round() / POINTS + 0.0).float())


INTERPRETED = """
import torch
from app.training.exact import rounding
from app.training.exact import triton_kernels as kernels
assert rounding.agrees(kernels, torch.device("cpu")), "the kernels have other bits than torch"
right = kernels.add
def wrong(values, sums, points, fresh):
    right(values + 2.0**-42, sums, points, fresh)
kernels.add = wrong
assert not rounding.agrees(kernels, torch.device("cpu")), "the comparison sees nothing"
"""


@pytest.mark.apart
@pytest.mark.skipif(not importlib.util.find_spec("triton"), reason="Triton is not installed")
def test_kernels_have_the_bits_of_torch_where_triton_interprets_them():
    """On a CPU. tests/laws/test_cuda.py does it on a GPU, where they are compiled."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": python_path(ROOT)}
    subprocess.run([sys.executable, "-c", INTERPRETED], check=True, env=environment)


COMPILED = """
import re
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from app.training.exact import triton_kernels as kernels
shape = {"points": "*fp32", "count": "i32", "block": "constexpr"}
add = {"values": "*fp32", "sums": "*fp64", **shape, "fresh": "constexpr"}
nearest = {"values": "*fp32", "rounded": "*fp32", **shape}
for function, signature, fixed in ((kernels._add, add, {"fresh": False}), (kernels._nearest, nearest, {})):
    source = ASTSource(function, signature, constexprs={"block": kernels.BLOCK, **fixed})
    for generation in (80, 90, 100):
        compiled = triton.compile(source, GPUTarget("cuda", generation, 32), {"enable_fp_fusion": False})
        floats = set(re.findall(r"(?:fma|mul|add|sub|div)\\S*\\.f(?:32|64)\\S*", compiled.asm["ptx"]))
        assert floats and all(".rn" in name and not name.startswith("fma") for name in floats), floats
"""


@pytest.mark.apart
@pytest.mark.skipif(not importlib.util.find_spec("triton"), reason="Triton is not installed")
def test_kernels_compile_to_products_and_sums_that_are_rounded_each(tmp_path):
    """For three generations of GPUs, none of which is needed for it."""
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": python_path(ROOT)}
    subprocess.run([sys.executable, "-c", COMPILED], check=True, env=environment)
