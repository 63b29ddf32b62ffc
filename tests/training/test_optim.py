"""app.training.optim.building: parameter groups, and learning rates at points that are easy to work out by hand."""

import math
from dataclasses import replace

import pytest
import torch
from torch.optim import lr_scheduler

from app.config import OptimConfig, points
from app.errors import UserError
from app.training.optim.building import build_optimizer, check
from app.training.optim.classes import UNSUITABLE
from app.training.optim.groups import Frozen
from app.training.optim.muon import orthogonal
from app.training.optim.schedule import check_points, learning_rate

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
    check_points(config, total_steps)
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


def test_muon_takes_matrices_of_hidden_layers():
    """Not embeddings, not the last layer, and nothing with one dimension."""
    found = by_name(Layers(), name="Muon")
    assert {name for name, group in found.items() if group.get("muon")} == {f"layers.{i}.weight" for i in range(3)}
    tied = by_name(Model(), name="Muon")
    assert {name for name, group in tied.items() if group.get("muon")} == {"body.weight"}


@pytest.mark.parametrize("shape", [(8, 8), (5, 16), (16, 5)])
def test_muons_updates_are_nearly_orthogonal(shape):
    found = orthogonal(torch.randn(shape, generator=torch.Generator().manual_seed(0)))
    values = torch.linalg.svdvals(found)
    assert found.shape == shape and values.min() > 0.6 and values.max() < 1.3


def test_muons_other_half_is_adamw():
    torch.manual_seed(0)
    ours, theirs = Model(), Model()
    theirs.load_state_dict(ours.state_dict())
    for model in (ours, theirs):
        model.unused = torch.nn.Linear(4, 4)  # for which Muon is
    settings = OptimConfig(lr=0.01, weight_decay=0.1, freeze=("body.weight",))
    pairs = [(m, build_optimizer(m, replace(settings, name=name))) for m, name in ((ours, "Muon"), (theirs, "AdamW"))]
    for _ in range(5):
        for model, optimizer in pairs:
            model(torch.arange(10)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    for (name, a), b in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        if "unused" not in name:
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("kind", ["GPT2", "Bert", "ViT"])
def test_what_muon_takes_of_models_of_transformers(kind):
    """All matrices of all layers, and nothing else."""
    import transformers

    shape = {"GPT2": {"n_embd": 8, "n_layer": 2, "n_head": 2, "vocab_size": 11}}.get(
        kind, {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
    )
    ends = {"GPT2": "LMHeadModel", "Bert": "ForSequenceClassification", "ViT": "ForImageClassification"}
    model = getattr(transformers, kind + ends[kind])(getattr(transformers, f"{kind}Config")(**shape))
    taken = {name for name, group in by_name(model, name="Muon").items() if group.get("muon")}
    layers = (".layer.", ".layers.", ".h.")
    hidden = {n for n, p in model.named_parameters() if p.ndim == 2 and any(part in n for part in layers)}
    assert len(hidden) >= 8 and hidden <= taken and taken - hidden <= {"bert.pooler.dense.weight"}


def test_muon_without_matrices_is_refused():
    with pytest.raises(UserError, match="no matrix of a hidden layer"):
        build_optimizer(torch.nn.LayerNorm(3), OptimConfig(name="Muon"))


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


def test_inverse_square_root_points():
    assert rates(9, schedule="inverse_sqrt", warmup=4)[:5] == pytest.approx([0.25, 0.5, 0.75, 1, math.sqrt(4 / 5)])
    assert rates(16, schedule="inverse_sqrt")[15] == 0.25
    assert rates(16, schedule="inverse_sqrt", min_lr=0.5)[15] == 0.5


def test_restarts_are_those_of_transformers():
    from transformers import get_cosine_with_hard_restarts_schedule_with_warmup as restarts

    for cycles in (1, 2, 3):
        expected = torch_rates(61, (lambda opt, n=cycles: restarts(opt, 0, 61, n), 0))
        assert rates(61, lr=0.3, schedule="cosine", cycles=cycles) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("total", [10, 61])
def test_one_cycle_is_torchs(total):
    warmup = round(0.3 * total)

    def cycle(optimizer):
        return lr_scheduler.OneCycleLR(optimizer, 0.3, total, pct_start=warmup / total, cycle_momentum=False)

    ours = rates(total, lr=0.3, schedule="one_cycle", warmup=warmup, min_lr=1 / 25 / 1e4)
    assert ours == pytest.approx(torch_rates(total, (cycle, 0)), rel=1e-9)


def test_swa_falls_and_then_is_constant():
    found = rates(10, schedule="swa", decay=4, min_lr=0.2)
    assert found[0] == 1 and found[6:] == pytest.approx([0.2] * 4) and found[3] == pytest.approx(0.6)


def test_points(tmp_path):
    assert rates(5, schedule="points", points=("0:0", "2:1", "4:0.5")) == pytest.approx([0, 0.5, 1, 0.75, 0.5])
    assert rates(5, schedule="points", points=("50%:1", "100%:0")) == pytest.approx([1, 1, 1, 0.5, 0])
    file = tmp_path / "rates.csv"
    file.write_text("step,factor\n0,0\n\n# the top\n2 , 1\n4,0.5\n")
    assert points.read((str(file),)) == ("0:0", "2:1", "4:0.5")
    for wrong, words in {"0:1 x": "no point", "missing.csv": "No such file"}.items():
        with pytest.raises(UserError, match=words):
            check(OptimConfig(schedule="points", points=points.read(tuple(wrong.split()))))
    with pytest.raises(UserError, match="end with 2:1, and the run has 5 steps: add a point at the end"):
        rates(5, schedule="points", points=("0:0", "2:1"))
    for wrong in (("5:1", "5:0"), ("50%:1", "10:0.5", "100%:0")):
        with pytest.raises(UserError, match=f"{wrong[0]} {wrong[1]}: each must be later"):
            rates(100, schedule="points", points=wrong)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"schedule": "one_cycle"}, "--optim.warmup, for example 0.3"),
        ({"cycles": 2}, "only --optim.schedule cosine restarts, not linear"),
        ({"schedule": "points"}, "needs --optim.points"),
        ({"points": ("0:1", "9:1")}, "need --optim.schedule points, not linear"),
        ({"schedule": "points", "points": ("0.5:1", "5:0")}, "'0.5:1' is no point"),
        ({"schedule": "points", "points": ("0:0", "5:0")}, "nothing would be trained"),
        ({"layer_decay": 0.0}, "--optim.layer-decay 0.0 does not work"),
    ],
)
def test_schedules_that_lack_something(fields, words):
    with pytest.raises(UserError, match=words):
        check(OptimConfig(**fields))


class Layers(torch.nn.Module):
    """Embeddings, three blocks, a norm and a head."""

    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(5, 4)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(3))
        self.norm, self.head = torch.nn.LayerNorm(4), torch.nn.Linear(4, 2)


def by_name(model: torch.nn.Module, **fields) -> dict[str, dict]:
    optimizer = build_optimizer(model, OptimConfig(**fields))
    owner = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    return {name: owner.get(id(p), {}) for name, p in model.named_parameters()}


def test_layers_have_lower_rates_the_deeper_they_are():
    found = {n: g.get("factor", 1.0) for n, g in by_name(Layers(), layer_decay=0.5).items() if n.endswith("weight")}
    assert found == {
        "embed.weight": 0.5**4,
        **{f"layers.{i}.weight": 0.5 ** (3 - i) for i in range(3)},
        "norm.weight": 1.0,
        "head.weight": 1.0,
    }
    with pytest.raises(UserError, match="Linear has no list of blocks"):
        build_optimizer(torch.nn.Linear(2, 2), OptimConfig(layer_decay=0.5))


def test_rates_and_decays_by_name():
    """The last pattern that fits counts; rates multiply with those of layers."""
    found = by_name(Layers(), layer_decay=0.5, rates=("*=2", "head.*=10"), decays=("*=0.3", "*.bias=0", "embed.*=0.1"))
    assert found["head.weight"]["factor"] == 10 and found["embed.weight"]["factor"] == 2 * 0.5**4
    decays = [found[name]["weight_decay"] for name in ("head.weight", "head.bias", "norm.weight", "embed.weight")]
    assert decays == [0.3, 0, 0.3, 0.1]
    assert "weight_decay" not in by_name(Layers(), name="Rprop", decays=("*=0.3",))["head.weight"]


def test_freezing_by_name():
    model = Layers()
    found = by_name(model, freeze=("embed.*", "layers.*@:0.5", "head.bias@30:"))
    assert found["embed.weight"] == {} and not model.embed.weight.requires_grad
    assert found["layers.0.bias"]["frozen"] == (0.0, 0.5) and found["head.bias"]["frozen"] == (30.0, None)
    assert "frozen" not in found["head.weight"]
    frozen = [[step for step in range(40) if Frozen(*span).holds(step, 40)] for span in ((0.0, 0.5), (30.0, None))]
    assert frozen == [list(range(20)), list(range(30, 40))]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"rates": ("heads*=2",)}, r"--optim.rates 'heads\*' fits none of the model's 11 weights: names are .*head"),
        ({"rates": ("head",)}, "'head': give PATTERN=NUMBER"),
        ({"rates": ("head*=-1",)}, "give PATTERN=NUMBER"),
        ({"decays": ("head*=x",)}, "give PATTERN=NUMBER"),
        ({"freeze": ("nothing",)}, "--optim.freeze 'nothing' fits none"),
        ({"rates": ("head=2",)}, r"try 'head\.\*'"),
        ({"freeze": ("head*@5",)}, "PATTERN@:STEP"),
        ({"freeze": ("head*@:nan",)}, "PATTERN@:STEP"),
        ({"freeze": ("head*@-5:",)}, "PATTERN@:STEP"),
        ({"freeze": ("head*@0.5:0.2",)}, "PATTERN@:STEP"),
        ({"freeze": ("*",)}, "freeze fewer"),
    ],
)
def test_patterns_that_do_not_work(fields, words):
    with pytest.raises(UserError, match=words):
        build_optimizer(Layers(), OptimConfig(**fields))


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
