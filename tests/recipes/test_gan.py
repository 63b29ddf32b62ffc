"""Two models in one loop: what gradients flow through and what they reach; how far made images are from real ones."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from support.launching import ROOT, launch_many, scores, steps, train_many
from support.tables import python, refused
from support.tiny import DATA, Config
from torch import nn

from app import OptimConfig, Run, RunConfig
from app.training.scores.frechet import PixelFrechet, distance, moments_of

RECIPE = ROOT / "recipes" / "gan.py"


def test_gradients_flow_through_a_frozen_model_and_reach_none_of_it(tmp_path):
    with Run(Config(RunConfig(dir=str(tmp_path), trackers=(), steps=2, global_batch=8, micro_batch=4))) as run:
        first, optimizer = run.prepare(nn.Linear(4, 4), OptimConfig(lr=0.1))
        second, other = run.prepare(nn.Linear(4, 1), OptimConfig(lr=0.1))
        for batch in run.batches(DATA, torch.stack):
            for micro in batch.micros(first, frozen=[second]):
                run.backward(second(first(micro.inputs)).square().mean(), micro, "loss/first")
            assert all(p.grad is not None for p in first.parameters())
            assert all(p.grad is None and p.requires_grad for p in second.parameters())
            run.step(optimizer)
            for micro in batch.micros(second):
                run.backward(second(micro.inputs).square().mean(), micro, "loss/second")
            run.step(other)


def test_the_distance_is_that_of_two_normal_distributions():
    """Of shifted ones, the shift; of scaled ones, the difference of their deviations; summed in any order, the same."""
    eye, zero = torch.eye(3, dtype=torch.float64), torch.zeros(3, dtype=torch.float64)
    assert distance(zero, eye, zero + 2, eye).item() == pytest.approx(12)
    assert distance(zero, 4 * eye, zero, 9 * eye).item() == pytest.approx(3)
    real = torch.randint(0, 256, (90, 1, 16, 16), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    metric, parts = PixelFrechet(moments_of([real])), PixelFrechet(moments_of(real.split(40)))
    metric.update(real)
    for piece in reversed(real.flip(3).split(7)):
        parts.update(piece)
    whole = PixelFrechet(moments_of([real]))
    whole.update(real.flip(3))
    assert abs(metric.alone()["frechet"]) < 1e-9 and whole.alone() == parts.alone()
    assert whole.alone()["frechet"] > 0.01
    small = real.reshape(90, 8, 2, 8, 2).float().mean((2, 4)).flatten(1).numpy() / 255
    assert np.allclose(metric.real_moments[0], small.mean(0), atol=1e-3)
    assert np.allclose(metric.real_moments[1], np.cov(small.T, bias=True), atol=1e-4)


def test_both_models_go_on_on_another_layout_and_the_generator_loads_elsewhere(tmp_path, data_cache):
    """Begun on FSDP x2, ended on it and on one process; the exported generator needs no Samestep."""
    small = ["--width", 8, "--samples", 70, "--run.trackers", "--run.log-every", 1, "--run.global-batch", 24]
    small += ["--run.micro-batch", 8, "--run.steps", 4, "--run.eval-every", 2, "--run.save-every", 1]
    whole, moved = (["--run.dir", tmp_path / name] for name in ("whole", "moved"))
    launch_many("fsdp_cpu", 2, RECIPE, [[*small, *whole], [*small, *moved, "--run.stop-at", 2]], tmp_path)
    train_many("cpu", 1, RECIPE, [[*small, *moved]], tmp_path)
    for one, other in zip(steps(tmp_path / "whole"), steps(tmp_path / "moved"), strict=True):
        assert {"loss/generator", "loss/discriminator", "grad_norm", "grad_norm/1"} <= one.keys()
        assert other["loss/generator"] == pytest.approx(one["loss/generator"], rel=1e-5)
        assert other["loss/discriminator"] == pytest.approx(one["loss/discriminator"], rel=1e-5)
    pairs = zip(scores(tmp_path / "whole"), scores(tmp_path / "moved"), strict=True)
    assert all(other["eval/frechet"] == pytest.approx(one["eval/frechet"], rel=1e-3) for one, other in pairs)
    assert len(list((tmp_path / "whole" / "images" / "eval" / "samples").glob("*.png"))) == 2
    folder = tmp_path / "whole" / "model"
    code = (
        "import sys; sys.modules['app'] = None; import torch; from transformers import AutoModel; "
        f"model = AutoModel.from_pretrained({str(folder)!r}, trust_remote_code=True); "
        "print(tuple(model(torch.ones(3, model.config.latent)).shape), sum(p.sum().item() for p in model.parameters()))"
    )
    shape, _, total = python(code, HF_MODULES_CACHE=str(tmp_path / "modules")).strip().rpartition(" ")
    weights = load_file(folder / "model.safetensors")
    assert shape == "(3, 1, 16, 16)"
    assert float(total) == pytest.approx(sum(w.sum().item() for w in weights.values()), rel=1e-4)
    assert json.loads((folder / "config.json").read_text())["auto_map"]


def test_shapes_that_no_dcgan_has():
    from laws.many import load

    recipe = load(str(RECIPE))
    with refused("--width 12: must be a multiple of 8"):
        recipe.build_models(recipe.Config(width=12))
    config = recipe.Config()
    config.data.size = 12
    with refused("--data.size 12: must be a power of two"):
        recipe.load_data(config)
