"""app.training.optimizer: parameter groups, and learning rates at points that are easy to work out by hand."""

import math
from dataclasses import replace

import pytest
import torch
from torch.optim import lr_scheduler

from app.config import OptimConfig
from app.errors import UserError
from app.training.optimizer import UNSUITABLE, build_optimizer, check, learning_rate

USABLE = sorted(
    name
    for name, value in vars(torch.optim).items()
    if isinstance(value, type) and issubclass(value, torch.optim.Optimizer)
    if name not in {"Optimizer", *UNSUITABLE}
)


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.out = torch.nn.Linear(4, 10)
        self.embed = torch.nn.Embedding(10, 4)
        self.out.weight = self.embed.weight
        self.norm = torch.nn.LayerNorm(4)
        self.body = torch.nn.Linear(4, 4)
        self.scale = torch.nn.Parameter(torch.tensor(1.0))

    def forward(self, ids):
        return self.out(self.scale * self.norm(self.body(self.embed(ids))))


def rates(total_steps: int, batch: int = 1, **fields) -> list[float]:
    config = OptimConfig(**{"lr": 1.0, **fields})
    check(config)
    return [learning_rate(config, step, total_steps, batch) for step in range(total_steps)]


def groups(optimizer: torch.optim.Optimizer) -> dict[str, dict]:
    return {group["name"]: group for group in optimizer.param_groups}


def test_groups_hold_each_parameter_once_in_the_order_of_names():
    model = Model()
    found = groups(build_optimizer(model, OptimConfig(weight_decay=0.3)))
    assert list(found) == ["decay", "no_decay"]
    assert (found["decay"]["weight_decay"], found["no_decay"]["weight_decay"]) == (0.3, 0.0)
    # The tied matrix goes by its first name, out.weight.
    expected = {
        "decay": [model.body.weight, model.out.weight],
        "no_decay": [model.body.bias, model.norm.bias, model.norm.weight, model.out.bias, model.scale],
    }
    for name, parameters in expected.items():
        assert list(map(id, found[name]["params"])) == list(map(id, parameters))


def test_frozen_parameters_and_empty_groups_are_left_out():
    model = torch.nn.Linear(2, 2)
    model.weight.requires_grad_(False)
    (group,) = build_optimizer(model, OptimConfig()).param_groups
    assert group["name"] == "no_decay" and group["params"] == [model.bias]
    model.bias.requires_grad_(False)
    with pytest.raises(UserError, match="requires_grad_"):
        build_optimizer(model, OptimConfig())
    (group,) = build_optimizer(torch.nn.Linear(2, 2, bias=False), OptimConfig()).param_groups
    assert group["name"] == "decay"


@pytest.mark.parametrize("name", USABLE)
def test_every_usable_optimizer_learns(name):
    torch.manual_seed(0)
    model, ids = Model(), torch.arange(10)
    optimizer = build_optimizer(model, OptimConfig(name=name, lr=0.01))
    losses = []
    for _ in range(5):
        loss = torch.nn.functional.cross_entropy(model(ids), ids)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert type(optimizer).__name__ == name and losses[-1] < losses[0]


@pytest.mark.parametrize(
    ("name", "taken", "left"),
    [
        ("AdamW", {"lr": 0.1, "weight_decay": 0.2, "betas": (0.5, 0.6), "eps": 1e-3}, {"momentum"}),
        ("SGD", {"lr": 0.1, "weight_decay": 0.2, "momentum": 0.7}, {"betas", "eps"}),
        ("RMSprop", {"lr": 0.1, "weight_decay": 0.2, "momentum": 0.7, "eps": 1e-3}, {"betas"}),
        ("Adafactor", {"lr": 0.1, "weight_decay": 0.2, "eps": (None, 1e-3)}, {"betas", "momentum"}),
        ("Rprop", {"lr": 0.1}, {"betas", "eps", "momentum", "weight_decay"}),
    ],
)
def test_fields_reach_the_classes_that_take_them(name, taken, left):
    config = OptimConfig(name=name, lr=0.1, weight_decay=0.2, betas=(0.5, 0.6), eps=1e-3, momentum=0.7)
    for group in build_optimizer(torch.nn.Linear(2, 2, bias=False), config).param_groups:
        assert {field: group[field] for field in taken} == taken
        assert not left & set(group)


def test_fused_where_it_works():
    def fused(model: torch.nn.Module, name: str = "AdamW") -> bool | None:
        return build_optimizer(model, OptimConfig(name=name)).defaults.get("fused")

    assert fused(Model()) is fused(Model(), "Adam") is fused(Model().bfloat16()) is True
    complex_model = torch.nn.ParameterList([torch.zeros(2, dtype=torch.complex64)])
    assert fused(Model().to("meta")) is fused(complex_model) is None
    assert fused(Model(), "NAdam") is None


@pytest.mark.parametrize(("name", "fused"), [("AdamW", True), ("Adam", True), ("SGD", None), ("Adagrad", None)])
def test_optimizers_run_on_the_dtensors_of_fsdp(name, fused, tmp_path):
    """Pinned for torch 2.13, where the fused kernels of SGD and Adagrad do not."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
        model = torch.nn.Linear(2, 2)
        torch.distributed.fsdp.fully_shard(model, mesh=mesh)
        optimizer = build_optimizer(model, OptimConfig(name=name))
        assert optimizer.defaults["fused"] is fused
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("name, kind", [("adamw", "AdamW"), ("sgd", "SGD"), ("NAdam", "NAdam")])
def test_names_are_understood_in_any_case(name, kind):
    assert type(build_optimizer(torch.nn.Linear(2, 2), OptimConfig(name=name))).__name__ == kind


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("AdamWW", ["AdamWW", "AdamW"]),
        ("sgdm", ["SGD"]),
        ("zzz", ["AdamW", "SGD"]),
        ("Optimizer", ["no optimizer"]),
        ("lr_scheduler", ["no optimizer"]),
        ("LBFGS", ["LBFGS", "AdamW"]),
        ("SparseAdam", ["sparse"]),
        ("Muon", ["matrices"]),
    ],
)
def test_names_that_do_not_work_are_refused(name, words):
    with pytest.raises(UserError) as error:
        build_optimizer(Model(), OptimConfig(name=name))
    assert all(word in str(error.value) for word in ["--optim.name", *words])


def test_warmup_rises_from_one_share_to_the_peak():
    assert rates(10, schedule="constant", warmup=4) == [0.25, 0.5, 0.75, 1, 1, 1, 1, 1, 1, 1]
    assert rates(10, schedule="constant", warmup=0.4) == rates(10, schedule="constant", warmup=4)
    assert rates(100, schedule="constant", warmup=0.29)[28] == 1 > rates(100, schedule="constant", warmup=0.29)[27]
    assert rates(3, schedule="constant", warmup=1) == [1, 1, 1]


@pytest.mark.parametrize("schedule", ["linear", "cosine", "constant", "wsd"])
def test_warmup_longer_than_the_run(schedule):
    assert rates(4, schedule=schedule, warmup=8) == [1 / 8, 2 / 8, 3 / 8, 4 / 8]


@pytest.mark.parametrize("warmup", [0, 0.1, 0.9, 1])
@pytest.mark.parametrize("schedule", ["linear", "cosine", "constant", "multistep", "wsd"])
def test_one_step_is_at_the_peak(schedule, warmup):
    assert rates(1, schedule=schedule, warmup=warmup, milestones=(0.9, 1)) == [1]


def test_linear_points():
    assert rates(4) == [1, 0.75, 0.5, 0.25]
    assert rates(4, min_lr=0.2) == pytest.approx([1, 0.8, 0.6, 0.4])
    assert rates(5, warmup=2) == [0.5, 1, 0.75, 0.5, 0.25]
    assert rates(4, lr=3e-4, min_lr=1.0) == [3e-4] * 4


def test_cosine_points():
    assert rates(4, schedule="cosine") == pytest.approx([1, (1 + math.sqrt(0.5)) / 2, 0.5, (1 - math.sqrt(0.5)) / 2])
    assert rates(2, schedule="cosine", min_lr=0.5) == pytest.approx([1, 0.75])


def test_multistep_points():
    expected = [1, 1, 0.5, 0.5, 0.5, 0.25]
    assert rates(6, schedule="multistep", milestones=(2, 5), gamma=0.5) == expected
    assert rates(6, schedule="multistep", milestones=(1 / 3, 5 / 6), gamma=0.5) == expected


def test_wsd_points():
    expected = [0.5, 1, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25]
    assert rates(10, schedule="wsd", warmup=2, decay=4) == expected
    assert rates(10, schedule="wsd", warmup=2, decay=0.4) == expected
    assert rates(10, schedule="wsd", decay=4, min_lr=0.2)[6:] == pytest.approx([1, 0.8, 0.6, 0.4])
    assert rates(10, schedule="wsd", decay=0) == [1] * 10
    # A decay that reaches into warm-up starts at its end.
    assert rates(5, schedule="wsd", warmup=2, decay=100) == rates(5, schedule="linear", warmup=2)


@pytest.mark.parametrize("min_lr", [0.0, 0.1])
@pytest.mark.parametrize("warmup", [0, 1, 7, 0.1, 300])
@pytest.mark.parametrize("schedule", ["linear", "cosine", "wsd"])
def test_continuous_single_peaked_and_above_the_end(schedule, warmup, min_lr):
    values = rates(1000, schedule=schedule, warmup=warmup, min_lr=min_lr)
    top = values.index(max(values))
    assert max(values) == 1 and values[:top] == sorted(values[:top])
    assert values[top:] == sorted(values[top:], reverse=True)
    assert min_lr < values[-1] < min_lr + 0.01
    assert max(abs(a - b) for a, b in zip(values[top:], values[top + 1 :], strict=False)) < 0.01


@pytest.mark.parametrize("schedule", ["linear", "cosine", "wsd"])
def test_past_the_last_step_it_stays_at_the_end(schedule):
    config = OptimConfig(lr=1.0, schedule=schedule, min_lr=0.1)
    assert [learning_rate(config, step, 10, 1) for step in (10, 11, 500)] == pytest.approx([0.1] * 3)


def test_batch_scaling():
    known = {"lr": 0.1, "schedule": "constant", "base_batch": 64}
    assert rates(1, 256, **known) == [0.1]
    assert rates(1, 256, **known, batch_scaling="sqrt") == pytest.approx([0.2])
    assert rates(1, 256, **known, batch_scaling="linear") == pytest.approx([0.4])
    assert rates(1, 16, **known, batch_scaling="linear") == pytest.approx([0.025])
    assert rates(2, 256, **{**known, "warmup": 2, "batch_scaling": "linear"}) == pytest.approx([0.2, 0.4])


def torch_rates(total_steps: int, *build) -> list[float]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.3)
    schedulers = [make(optimizer) for make, _ in build]
    scheduler = lr_scheduler.SequentialLR(optimizer, schedulers, [start for _, start in build[1:]])
    values = []
    for _ in range(total_steps):
        values.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return values


@pytest.mark.parametrize("warmup", [0, 2, 11])
def test_equals_the_schedulers_of_torch(warmup):
    total, start = 60, max(0, warmup - 1)
    falls = {
        "linear": lambda opt: lr_scheduler.LinearLR(opt, 1.0, 0.1, total_iters=total - start),
        "cosine": lambda opt: lr_scheduler.CosineAnnealingLR(opt, total - start, eta_min=0.03),
        "multistep": lambda opt: lr_scheduler.MultiStepLR(opt, [20 - start, 45 - start], gamma=0.2),
    }
    for schedule, fall in falls.items():
        build = [(fall, start)]
        if warmup:
            build.insert(0, (lambda opt: lr_scheduler.LinearLR(opt, 1 / warmup, 1.0, total_iters=start), 0))
        ours = rates(total, lr=0.3, schedule=schedule, warmup=warmup, min_lr=0.1, milestones=(20, 45), gamma=0.2)
        assert ours == pytest.approx(torch_rates(total, *build), rel=1e-9), schedule


def test_defaults_are_good():
    check(OptimConfig())


@pytest.mark.parametrize(
    ("field", "values"),
    {
        "lr": [0.0, -1.0, math.nan, math.inf],
        "weight_decay": [-0.1, math.nan],
        "betas": [(0.9, 1.0), (-0.1, 0.9)],
        "eps": [-1e-8],
        "momentum": [-0.9],
        "clip": [-1.0, math.nan],
        "warmup": [-0.1, math.nan],
        "min_lr": [-0.1, 1.1, math.nan],
        "decay": [-0.2],
        "gamma": [0.0, -0.1, 1.5],
        "milestones": [(0.5, 0.5), (10.0, 5.0), (0.0, 0.5), (math.nan,)],
        "base_batch": [-1],
        "schedule": ["cosin"],
        "batch_scaling": ["square"],
    }.items(),
)
def test_bad_values_are_refused_by_field_and_value(field, values):
    for value in values:
        with pytest.raises(UserError) as error:
            check(replace(OptimConfig(base_batch=1), **{field: value}))
        shown = " ".join(map(str, value)) if isinstance(value, tuple) else value
        assert f"--optim.{field.replace('_', '-')} {shown} " in str(error.value)
        assert "must be" in str(error.value)


def test_fields_that_need_another():
    with pytest.raises(UserError, match=r"--optim.batch-scaling sqrt .* --optim.base-batch 256"):
        check(OptimConfig(batch_scaling="sqrt"))
    check(OptimConfig(batch_scaling="sqrt", base_batch=64))
    with pytest.raises(UserError, match=r"--optim.schedule multistep .* --optim.milestones"):
        check(OptimConfig(schedule="multistep"))
    check(OptimConfig(schedule="multistep", milestones=(0.5, 100)))
