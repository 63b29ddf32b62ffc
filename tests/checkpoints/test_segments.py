"""Settings of the optimizer that are changed in the middle of a run: from that step on, and told by run.json."""

import json
from dataclasses import dataclass, field

import pytest
import torch
from support.launching import ROOT, saved_state, steps, train_many, weights
from torch import nn

from app import OptimConfig, Run, RunConfig, UserError
from app.sampling.batch_plan import BatchPlan
from app.sampling.seeding import seed_all
from laws.small import SMALL

DATA = list(torch.randn(40, 4, generator=torch.Generator().manual_seed(0)))
BATCH, STEPS = 10, 12


@dataclass
class Config:
    optim: OptimConfig = field(default_factory=OptimConfig)
    run: RunConfig = field(default_factory=RunConfig)


def train(folder, optim, stop_at=0, changed="refuse", save_every=3, fails_after=0):
    settings = {"global_batch": BATCH, "micro_batch": 5, "trackers": (), "steps": STEPS, "keep": 9}
    settings |= {"dir": str(folder), "stop_at": stop_at, "changed": changed, "save_every": save_every, "log_every": 1}
    with Run(Config(OptimConfig(**optim), RunConfig(**settings))) as run:
        model, optimizer = run.prepare(nn.Linear(4, 4), OptimConfig(**optim))
        for batch in run.batches(DATA, torch.stack):
            for micro in batch.micros(model):
                run.backward((model(micro.inputs) - 1).square().mean(), micro)
            run.step(optimizer)
            if run.steps_done == fails_after:
                raise RuntimeError("as if it were killed")
        run.finish(model)


def segments(folder):
    return json.loads((folder / "run.json").read_text())["segments"]


A = {"lr": 0.1, "schedule": "constant", "weight_decay": 0.0, "clip": 0.5}
B = {**A, "lr": 0.02, "weight_decay": 0.5, "clip": 5.0, "betas": (0.5, 0.6), "eps": 1e-3}
NAMES = {"optim.lr", "optim.weight_decay", "optim.clip", "optim.betas", "optim.eps"}


def by_hand(ids, phases):
    """Train as torch alone does, over the samples of each step, with other settings in each phase."""
    seed_all(0)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW([{"params": [model.weight]}, {"params": [model.bias]}], fused=True)
    for step, rows in enumerate(ids):
        asked = next(settings for end, settings in phases if step < end)
        for group, decay in zip(optimizer.param_groups, (asked["weight_decay"], 0.0), strict=True):
            group |= {"lr": asked["lr"], "weight_decay": decay, "betas": asked.get("betas", (0.9, 0.999))}
            group["eps"] = asked.get("eps", 1e-8)
        (model(torch.stack([DATA[i] for i in rows])) - 1).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), asked["clip"])
        optimizer.step()
        optimizer.zero_grad()
    return model


def test_a_change_holds_from_its_step_on(tmp_path):
    """The weights are those of a loop by hand that changes its settings there."""
    from safetensors.torch import load_file

    train(tmp_path / "run", A, stop_at=6)
    with pytest.raises(UserError, match=r"optim.lr: 0.1 before, 0.02 now[\s\S]*--run.changed accept"):
        train(tmp_path / "run", B)
    train(tmp_path / "run", B, changed="accept")
    (segment,) = segments(tmp_path / "run")
    assert segment["step"] == 6 and segment["changed"].keys() == NAMES
    assert segment["changed"]["optim.lr"] == [0.1, 0.02]
    assert [line["lr"] for line in steps(tmp_path / "run")] == [0.1] * 6 + [0.02] * 6
    plan = BatchPlan(len(DATA), STEPS * BATCH, BATCH, 5)
    ids = [[i for turn in plan.step(step, 0, 1).turns for i in turn.ids] for step in range(STEPS)]
    expected, found = by_hand(ids, [(6, A), (STEPS, B)]), load_file(tmp_path / "run" / "model" / "model.safetensors")
    for name, tensor in expected.state_dict().items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=1e-6)
    alone = by_hand(ids, [(STEPS, A)])
    assert not torch.allclose(alone.weight, expected.weight, atol=1e-3)


def test_what_was_accepted_is_repeated_without_being_accepted_again(tmp_path):
    """Also where the launch that accepted it has saved nothing; the record then begins at the same checkpoint."""
    train(tmp_path, A, stop_at=3)
    with pytest.raises(RuntimeError):
        train(tmp_path, B, changed="accept", save_every=50, fails_after=5)
    assert [segment["step"] for segment in segments(tmp_path)] == [3]
    train(tmp_path, B, stop_at=6)
    assert [segment["step"] for segment in segments(tmp_path)] == [3]
    train(tmp_path, A, stop_at=9, changed="accept")
    assert [segment["step"] for segment in segments(tmp_path)] == [3, 6]
    train(tmp_path, A)
    assert [segment["step"] for segment in segments(tmp_path)] == [3, 6]
    assert [line["lr"] for line in steps(tmp_path)] == [0.1] * 3 + [0.02] * 3 + [0.1] * 6


def test_a_change_that_is_taken_back_is_none(tmp_path):
    train(tmp_path, A, stop_at=3)
    with pytest.raises(RuntimeError):
        train(tmp_path, B, changed="accept", save_every=50, fails_after=5)
    train(tmp_path, A, changed="accept")
    assert segments(tmp_path) == []


def test_other_settings_stay_refused(tmp_path):
    train(tmp_path, A, stop_at=3)
    with pytest.raises(UserError, match=r"optim.name") as refusal:
        train(tmp_path, {**A, "name": "SGD"}, changed="accept")
    assert "--run.changed" not in str(refusal.value)


def test_options_that_a_recipe_has_set_itself_stay(tmp_path):
    """In groups of its own too, before and after a resume, and where another setting is changed."""

    def train(stop_at, **optim):
        settings = {"global_batch": BATCH, "micro_batch": 5, "trackers": (), "steps": STEPS, "changed": "accept"}
        config = Config(OptimConfig(**optim), RunConfig(dir=str(tmp_path), stop_at=stop_at, **settings))
        with Run(config) as run:
            model, optimizer = run.prepare(nn.Linear(4, 4), config.optim)
            optimizer.param_groups[0]["weight_decay"] = 0.3
            optimizer.param_groups[1].pop("name")
            for batch in run.batches(DATA, torch.stack):
                for micro in batch.micros(model):
                    run.backward((model(micro.inputs) - 1).square().mean(), micro)
                run.step(optimizer)
                assert [group["weight_decay"] for group in optimizer.param_groups] == [0.3, 0.0]
            return optimizer.param_groups[0]["betas"]

    assert train(3, betas=(0.9, 0.99)) == (0.9, 0.99)
    assert train(6, betas=(0.5, 0.6)) == (0.5, 0.6)


def test_momentum_that_begins_in_the_middle_is_refused_where_its_state_is_missing(tmp_path):
    settings = {**A, "name": "RMSprop", "momentum": 0.0}
    train(tmp_path, settings, stop_at=3)
    with pytest.raises(UserError, match=r"--optim\.momentum 0\.9: RMSprop"):
        train(tmp_path, {**settings, "momentum": 0.9}, changed="accept")


# `make laws` begins under DDP: what a change does is the same on ranks whose weights are whole and on one process.
@pytest.mark.parametrize("begun", [("cpu", 1), pytest.param(("ddp_cpu", 2), marks=pytest.mark.exhaustive)])
def test_exact_mode_has_the_same_bits_on_every_layout_through_a_change(tmp_path, rows, data_cache, begun):
    """The same three launches, on one process throughout, and on one layout, FSDP2 and one process in turn.

    Means of losses too, over steps of which some are in an earlier launch.
    """
    recipe = ROOT / "recipes" / "graph.py"
    common = [*SMALL["graph"].flags(rows), "--run.global-batch", 10, "--run.micro-batch", 4, "--run.exact", "true"]
    common += ["--run.steps", 9, "--run.log-every", 4, "--run.trackers", "--run.save-every", 3]
    phases = [["--run.stop-at", 3], ["--run.stop-at", 6, "--optim.lr", 3e-3, "--optim.clip", 0.1]]
    phases += [["--optim.lr", 3e-3, "--optim.clip", 0.1, "--optim.weight-decay", 0.3]]
    ways = {"one": [("cpu", 1)] * 3, "several": [begun, ("fsdp_cpu", 2), ("cpu", 1)]}
    for name, layouts in ways.items():
        for layout, phase in zip(layouts, phases, strict=True):
            words = [*common, *phase, "--run.changed", "accept", "--run.dir", tmp_path / name]
            train_many(*layout, recipe, [words], tmp_path)
    assert steps(tmp_path / "one") == steps(tmp_path / "several")
    assert [line["step"] for line in steps(tmp_path / "one") if "loss_mean" in line][-2:] == [8, 9]
    assert weights(tmp_path / "one") == weights(tmp_path / "several")
    assert saved_state(tmp_path / "one", 9) == saved_state(tmp_path / "several", 9)
    assert segments(tmp_path / "one") == segments(tmp_path / "several")
    assert [segment["step"] for segment in segments(tmp_path / "one")] == [3, 6]
