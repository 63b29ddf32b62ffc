"""state_dict and accelerator: what a run remembers comes back bit by bit, by name, or is refused by name.

One process here; the layouts are tested in tests/laws.
"""

import copy
import json
import math
import os
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import nn

from app.checkpoints.record import Record
from app.checkpoints.store import CheckpointStore
from app.config import OptimConfig
from app.distributed import naming
from app.distributed.accelerator import Accelerator
from app.distributed.state import sharded, state_dict
from app.distributed.state.attempt import SaveOutcome
from app.distributed.state.manifest import MANIFEST
from app.errors import UserError
from app.training.optim.building import build_optimizer
from app.training.optim.classes import UNSUITABLE

USABLE = sorted(
    name
    for name, kind in vars(torch.optim).items()
    if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)
    if name not in {"Optimizer", *UNSUITABLE}
)


class Net(nn.Module):
    """Tied weights, a frozen layer, buffers that move, a scalar, and a parameter that gets no gradient."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.norm = nn.BatchNorm1d(4)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.body = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.unused = nn.Linear(3, 2)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("table", torch.arange(3), persistent=False)

    def forward(self, ids):
        return self.head(self.body(self.frozen(self.norm(self.embed(ids)))) * self.scale)


class Launch:
    """One process's life with a run: a model, optimizers, steps."""

    def __init__(self, make_model=Net, make_optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=0.1)):
        torch.manual_seed(0)
        self.accelerator = Accelerator(1)
        model = make_model()
        self.model, self.optimizer = self.accelerator.prepare(model, make_optimizer(model))

    def train(self, steps: range) -> "Launch":
        for step in steps:
            torch.manual_seed(step)
            ids = torch.randint(7, (16,))
            nn.functional.cross_entropy(self.model(ids), ids).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        return self

    def save(self, folder: Path) -> "Launch":
        sharded.save(self.accelerator, str(folder))
        return self

    def load(self, folder: Path) -> "Launch":
        sharded.load(self.accelerator, str(folder))
        return self


def same(left, right) -> bool:
    """Compare nested values; tensors by type, shape and every bit."""
    if isinstance(left, torch.Tensor):
        alike = isinstance(right, torch.Tensor) and (left.dtype, left.shape) == (right.dtype, right.shape)
        return alike and torch.equal(*(t.detach().reshape(-1).contiguous().view(torch.uint8) for t in (left, right)))
    if isinstance(left, dict):
        alike = isinstance(right, dict) and {*map(repr, left)} == {*map(repr, right)}
        return alike and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple):
        return type(left) is type(right) and len(left) == len(right) and all(map(same, left, right))
    return type(left) is type(right) and repr(left) == repr(right)


def assert_same_run(left: Launch, right: Launch) -> None:
    assert same(dict(left.model.state_dict()), dict(right.model.state_dict()))
    assert same(left.optimizer.optimizer.state_dict(), right.optimizer.optimizer.state_dict())


@pytest.mark.parametrize("name", USABLE)
def test_an_interrupted_run_goes_on_as_if_it_had_not_been(tmp_path, name):
    def optimizer(model):
        return build_optimizer(model, OptimConfig(name=name, lr=0.05))

    whole = Launch(make_optimizer=optimizer).train(range(3)).save(tmp_path / "state").train(range(3, 6))
    resumed = Launch(make_optimizer=optimizer).load(tmp_path / "state").train(range(3, 6))
    assert_same_run(whole, resumed)
    control = Launch(make_optimizer=optimizer).train(range(3, 6))
    assert not same(dict(whole.model.state_dict()), dict(control.model.state_dict()))


MOMENTS = {
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "without state": lambda p: torch.optim.SGD(p, lr=0.1),
    "amsgrad": lambda p: torch.optim.AdamW(p, lr=0.1, amsgrad=True, fused=True),
    "foreach": lambda p: torch.optim.Adam(p, lr=0.1, foreach=True, maximize=True),
    "centered": lambda p: torch.optim.RMSprop(p, lr=0.1, momentum=0.5, centered=True),
}


@pytest.mark.parametrize("make", MOMENTS.values(), ids=MOMENTS)
def test_optimizers_of_ones_own_come_back(tmp_path, make):
    def launch() -> Launch:
        return Launch(make_optimizer=lambda model: make(list(model.parameters())))

    whole = launch().train(range(3)).save(tmp_path / "state").train(range(3, 6))
    assert_same_run(whole, launch().load(tmp_path / "state").train(range(3, 6)))


UNUSUAL = {
    "tensor lr": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.1)),
    "LBFGS": lambda p: torch.optim.LBFGS(p, lr=0.1),
}


@pytest.mark.parametrize("make", UNUSUAL.values(), ids=UNUSUAL)
def test_tensors_in_unusual_places_come_back_or_are_refused(tmp_path, make):
    """Never a fault that every save then has, so that a run goes on without checkpoints."""

    def train(found: Launch, steps: range) -> Launch:
        for step in steps:
            ids = torch.arange(7) * step % 7

            def loss(ids=ids):
                found.optimizer.zero_grad()
                value = nn.functional.cross_entropy(found.model(ids), ids)
                value.backward()
                return value

            found.optimizer.step(loss)
        return found

    def launch() -> Launch:
        return Launch(make_optimizer=lambda model: make([p for p in model.parameters() if p.requires_grad]))

    first = train(launch(), range(1, 4))
    try:
        first.save(tmp_path / "state")
    except UserError as error:
        assert "optimizers.0" in str(error)
        return
    assert_same_run(train(first, range(4, 6)), train(launch().load(tmp_path / "state"), range(4, 6)))


def test_loading_goes_back_in_time_too(tmp_path):
    """The launch that loads has gone on: nothing of what it did later is left."""
    first = Launch().save(tmp_path / "state")
    before = copy.deepcopy(dict(first.model.state_dict()))
    first.train(range(3)).load(tmp_path / "state")
    assert same(dict(first.model.state_dict()), before)
    assert not first.optimizer.optimizer.state


def test_saving_changes_nothing(tmp_path):
    plain, saved = Launch().train(range(4)), Launch()
    for step in range(4):
        saved.save(tmp_path / str(step)).train(range(step, step + 1))
        assert not any(p.grad is not None for p in saved.model.parameters())
    assert_same_run(plain, saved)


def test_only_parameters_that_had_a_gradient_have_state(tmp_path):
    first = Launch().train(range(2)).save(tmp_path / "state")
    second = Launch().load(tmp_path / "state")
    for launch in (first, second):
        names = {p: name for name, p in launch.model.named_parameters()}
        held = {names[p] for p in launch.optimizer.optimizer.state}
        assert held == {"embed.weight", "norm.weight", "norm.bias", "body.weight", "body.bias", "scale"}


def test_tied_weights_stay_tied(tmp_path):
    Launch().train(range(2)).save(tmp_path / "state")
    second = Launch().load(tmp_path / "state")
    assert second.model.head.weight is second.model.embed.weight
    second.train(range(2, 3))
    assert torch.equal(second.model.head.weight, second.model.embed.weight)


def test_a_tied_transformer_comes_back(tmp_path):
    from transformers import GPT2Config, GPT2LMHeadModel

    shape = {"vocab_size": 7, "n_embd": 8, "n_layer": 2, "n_head": 2, "n_positions": 16}

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.gpt = GPT2LMHeadModel(GPT2Config(**shape, bos_token_id=0, eos_token_id=0))

        def forward(self, ids):
            return self.gpt(ids[None]).logits[0]

    whole = Launch(Model).train(range(2)).save(tmp_path / "state").train(range(2, 4))
    resumed = Launch(Model).load(tmp_path / "state").train(range(2, 4))
    assert resumed.model.gpt.lm_head.weight is resumed.model.gpt.transformer.wte.weight
    assert_same_run(whole, resumed)


def test_groups_keep_their_hyperparameters_and_the_machine_its_kernels(tmp_path):
    def groups(lr, fused):
        def make(model):
            parameters = [
                {"params": [model.embed.weight, model.scale], "lr": lr, "betas": (0.5, 0.6), "name": "first"},
                {"params": list(model.body.parameters()), "weight_decay": lr, "mine": [1, None, "x"]},
            ]
            return torch.optim.AdamW(parameters, lr=2 * lr, fused=fused)

        return make

    first = Launch(make_optimizer=groups(0.1, True)).train(range(2)).save(tmp_path / "state")
    second = Launch(make_optimizer=groups(0.7, False)).load(tmp_path / "state")
    for before, after in zip(first.optimizer.param_groups, second.optimizer.param_groups, strict=True):
        kept = {k: v for k, v in before.items() if k not in ("params", "fused", "foreach")}
        assert same(kept, {k: v for k, v in after.items() if k in kept})
        assert (before["fused"], after["fused"]) == (True, False)
    assert [group["lr"] for group in second.optimizer.param_groups] == [0.1, 0.2]


class Counting(torch.optim.SGD):
    """An optimizer whose state is numbers, text, nothing, and tensors of a shape and type of their own."""

    def step(self, closure=None):
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                own = self.state[p]
                own["count"] = own.get("count", 0) + 1
                own["norm"] = float(p.grad.norm())
                own["word"], own["nothing"], own["flag"] = "x", None, True
                own["row"] = own.get("row", torch.zeros(5)) + p.grad.sum()
        return super().step(closure)


def test_state_that_is_no_tensor_comes_back(tmp_path):
    def make(model):
        return Counting(model.parameters(), lr=0.1, momentum=0.9)

    whole = Launch(make_optimizer=make).train(range(2)).save(tmp_path / "state").train(range(2, 4))
    resumed = Launch(make_optimizer=make).load(tmp_path / "state")
    (own, *_) = resumed.optimizer.optimizer.state.values()
    assert own["count"] == 2 and own["flag"] is True and own["nothing"] is None
    assert_same_run(whole, resumed.train(range(2, 4)))


def two(model_lr=0.1) -> tuple[Accelerator, list]:
    torch.manual_seed(0)
    accelerator = Accelerator(1)
    pairs = []
    for _ in range(2):
        model = nn.Linear(3, 3)
        pairs.append(accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=model_lr)))
    return accelerator, pairs


def step_one(model, optimizer) -> None:
    model(torch.ones(2, 3)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_two_models_of_which_one_has_never_been_trained(tmp_path):
    """Saving makes no state for it, and loading gives back that there is none."""
    accelerator, ((model, optimizer), (other, idle)) = two()
    step_one(model, optimizer)
    sharded.save(accelerator, str(tmp_path / "state"))
    assert len(optimizer.optimizer.state) == 2 and not idle.optimizer.state

    again, ((model2, optimizer2), (other2, idle2)) = two()
    step_one(other2, idle2)
    sharded.load(again, str(tmp_path / "state"))
    assert same(model.state_dict(), model2.state_dict()) and same(other.state_dict(), other2.state_dict())
    assert same(optimizer.optimizer.state_dict(), optimizer2.optimizer.state_dict())
    assert not idle2.optimizer.state
    for pair in ((model, optimizer), (other, idle), (model2, optimizer2), (other2, idle2)):
        step_one(*pair)
    assert same(model.state_dict(), model2.state_dict()) and same(other.state_dict(), other2.state_dict())


def test_two_optimizers_over_one_model(tmp_path):
    def launch():
        torch.manual_seed(0)
        accelerator, model = Accelerator(1), nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        own = [
            torch.optim.SGD(part.parameters(), lr=0.1, momentum=rate)
            for part, rate in zip(model, (0.5, 0.9), strict=True)
        ]
        model, *own = accelerator.prepare(model, *own)
        return accelerator, model, own

    def train(model, own):
        model(torch.ones(2, 3)).square().sum().backward()
        for optimizer in own:
            optimizer.step()
            optimizer.zero_grad()

    accelerator, model, own = launch()
    train(model, own)
    sharded.save(accelerator, str(tmp_path / "state"))
    train(model, own)
    again, model2, own2 = launch()
    sharded.load(again, str(tmp_path / "state"))
    train(model2, own2)
    assert same(model.state_dict(), model2.state_dict())
    assert [o.param_groups[0]["momentum"] for o in own2] == [0.5, 0.9]


def test_half_precision_weights_with_full_precision_state(tmp_path):
    """State keeps its own type, as an optimizer with master weights needs; so do counters."""

    class Master(torch.optim.SGD):
        def step(self, closure=None):
            for p in self.param_groups[0]["params"]:
                own = self.state[p]
                own.setdefault("master", p.detach().float() + 1e-6)
                own["count"] = own.get("count", torch.zeros((), dtype=torch.int64)) + 1
                own["code"] = torch.arange(p.numel(), dtype=torch.uint8)

    def launch() -> Launch:
        return Launch(lambda: nn.Linear(2, 2).bfloat16(), lambda model: Master(model.parameters(), lr=0.1))

    first, second = launch(), launch()
    first.model(torch.ones(2, dtype=torch.bfloat16)).sum().backward()
    first.optimizer.step()
    first.save(tmp_path / "state")
    second.load(tmp_path / "state")
    assert_same_run(first, second)


def test_names_are_those_of_the_plain_model():
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    names = naming.parameter_names([model])
    assert names[model[0].weight] == "models.0.0.weight"
    assert set(state_dict.model_tensors([model])[0]) == {f"models.0.{name}" for name in model.state_dict()}
    wrapped = torch.compile(model)
    assert naming.parameter_names([wrapped])[model[0].weight] == "models.0.0.weight"
    assert set(state_dict.model_tensors([wrapped])[0]) == set(state_dict.model_tensors([model])[0])


class Object:
    """Something of the user's with a state."""

    def __init__(self, content):
        self.content = content

    def state_dict(self):
        return self.content

    def load_state_dict(self, content):
        self.content = content


def there_and_back(folder: Path, content):
    """Save and load an object beside a model."""
    found = []
    for value in (content, None):
        accelerator, item = Accelerator(1), Object(value)
        accelerator.prepare(nn.Linear(1, 1))
        accelerator.register_for_checkpointing(item)
        if not found:
            sharded.save(accelerator, str(folder))
        else:
            sharded.load(accelerator, str(folder))
        found.append(item.content)
    return found[1]


def test_registered_objects_come_back_in_their_order(tmp_path):
    contents = [{"best": 0.5}, {"ema": {"w": torch.rand(3), "n": 4}, "history": [(1, torch.ones(2, 2)), "x", None]}]
    for act in ("save", "load"):
        accelerator = Accelerator(1)
        accelerator.prepare(nn.Linear(1, 1))
        items = [Object(content if act == "save" else None) for content in contents]
        accelerator.register_for_checkpointing(*items)
        getattr(accelerator, f"{act}_state")(str(tmp_path / "state"))
    assert same([item.content for item in items], contents)


@pytest.mark.parametrize(
    "content",
    [
        {"empty": {}, "none": [], "nothing": (), "null": None},
        {"tensor": "x", "items": [["a", 1]], "list": {"tuple": 3}},
        {1: "int", False: "bool", None: "null", 2.5: "float"},
        {"nan": math.nan, "inf": -math.inf, "big": 2**80, "zero": -0.0, "text": "\ud800 \u2028 é"},
        {"bf16": torch.ones(2, dtype=torch.bfloat16), "bool": torch.tensor([True]), "complex": torch.ones(1) * 1j},
        {"scalar": torch.tensor(3), "none": torch.zeros(0), "none2": torch.zeros(2, 0), "u8": torch.ones(1).byte()},
        {"turned": torch.arange(6).reshape(2, 3).t(), "slice": torch.arange(9)[::3]},
        {"expanded": torch.ones(1).expand(4), "nan": torch.tensor([math.nan, math.inf])},
        torch.ones(3),
        [1, (2, [torch.ones(1)])],
        7,
        {"a.b": torch.ones(1), "a": {"b": torch.zeros(1)}},
        {1: torch.ones(1), "1": torch.zeros(1)},
    ],
    ids=lambda content: str(content).replace("\n", "")[:40].encode("ascii", "replace").decode(),
)
def test_contents_of_an_object(tmp_path, content):
    assert same(there_and_back(tmp_path / "state", content), content)


keys = st.sampled_from(["1", 1, "a", "b", "a.b"])
tensors_ = st.integers(0, 99).map(torch.tensor)
numbers = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=3))
insides = st.recursive(
    st.one_of(tensors_, tensors_, numbers),
    lambda inner: st.one_of(st.dictionaries(keys, inner), st.lists(inner), st.lists(inner).map(tuple)),
    max_leaves=4,
)
trees = st.dictionaries(keys, insides, min_size=1)


@settings(
    derandomize=True,
    deadline=None,
    database=None,
    max_examples=150,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)
@given(trees)
def test_any_tree_is_split_and_joined(tree):
    """Each tensor has a name of its own, and the rest goes through JSON."""
    tensors: dict = {}
    content = json.loads(json.dumps(state_dict.split_tensors(tree, "objects.0", tensors)))
    assert all(isinstance(value, torch.Tensor) for value in tensors.values())
    assert same(state_dict.join_tensors(content, {name: value.clone() for name, value in tensors.items()}), tree)


@pytest.mark.parametrize("content", [{(1, 2): "a pair"}, {"a": {(0, "w"): torch.ones(2)}}, {frozenset({1}): 2}])
def test_keys_that_are_not_plain_come_back_or_are_refused(tmp_path, content):
    """When saving: a checkpoint that is there can be loaded."""
    try:
        assert same(there_and_back(tmp_path / "state", content), content)
    except UserError as error:
        assert ".state_dict()" in str(error) and not (tmp_path / "state" / "objects.json").exists()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"seen": {1, 2}}, r"\.state_dict\(\)\.seen is of type set"),
        ({"a": [{"b": object()}]}, r"\.state_dict\(\)\.a\.0\.b is of type object"),
        ({"rng": b"bytes"}, r"\.state_dict\(\)\.rng is of type bytes"),
        ({"kind": torch.float32}, r"\.state_dict\(\)\.kind is of type dtype"),
    ],
)
def test_an_object_with_something_else_is_refused_by_name(tmp_path, content, words):
    with pytest.raises(UserError, match=words):
        there_and_back(tmp_path / "state", content)


def refused(folder: Path, make_model) -> str:
    launch = Launch(make_model)
    before = copy.deepcopy(dict(launch.model.state_dict()))
    with pytest.raises(UserError) as error:
        launch.load(folder)
    assert same(dict(launch.model.state_dict()), before)
    return str(error.value)


class Wider(Net):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(4, 4, bias=False)
        self.unused = nn.Linear(3, 5)
        self.new = nn.Linear(1, 1, bias=False)


def test_a_checkpoint_of_another_model_is_refused_with_names_and_shapes(tmp_path):
    Launch().save(tmp_path / "state")
    words = refused(tmp_path / "state", Wider)
    assert str(tmp_path / "state") in words
    for line in (
        "models.0.unused.weight: (2, 3) there, (5, 3) here",
        "models.0.body.bias: (4,) there, absent here",
        "models.0.new.weight: absent there, (1, 1) here",
    ):
        assert line in words


def test_of_many_differences_the_first_are_named(tmp_path):
    Launch(lambda: nn.Sequential(*(nn.Linear(1, 1) for _ in range(4)))).save(tmp_path / "state")
    words = refused(tmp_path / "state", lambda: nn.Sequential(*(nn.Linear(2, 2) for _ in range(4))))
    assert words.count("there") == 5 and "3 more" in words


def test_another_number_of_optimizers_is_refused(tmp_path):
    Launch().save(tmp_path / "state")
    accelerator = Accelerator(1)
    model = Net()
    own = [torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2)]
    accelerator.prepare(model, *own)
    with pytest.raises(UserError, match="has 1 optimizers, this program has 2: prepare and register the same"):
        sharded.load(accelerator, str(tmp_path / "state"))


def test_other_parameter_groups_are_refused(tmp_path):
    Launch().train(range(1)).save(tmp_path / "state")

    def make(model):
        return torch.optim.AdamW([{"params": [p]} for p in model.parameters()], lr=0.1)

    with pytest.raises(UserError, match="group"):
        Launch(make_optimizer=make).load(tmp_path / "state")


@pytest.mark.parametrize("counts", [(1, 0), (0, 1), (2, 1)])
def test_another_number_of_objects_is_refused(tmp_path, counts):
    def accelerator(count: int) -> Accelerator:
        found = Accelerator(1)
        found.prepare(nn.Linear(1, 1))
        found.register_for_checkpointing(*(Object({"x": torch.ones(1)}) for _ in range(count)))
        return found

    sharded.save(accelerator(counts[0]), str(tmp_path / "state"))
    with pytest.raises(UserError, match="object"):
        sharded.load(accelerator(counts[1]), str(tmp_path / "state"))


def test_an_optimizer_of_parameters_that_no_prepared_model_has_is_refused(tmp_path):
    """Such as a learned weight between two losses: it would not be saved."""
    extra = nn.Parameter(torch.ones(1))

    def make(model):
        return torch.optim.AdamW([*model.parameters(), extra], lr=0.1)

    launch = Launch(make_optimizer=make)
    extra.grad = torch.ones(1)
    launch.optimizer.step()
    with pytest.raises(UserError, match="prepare"):
        launch.save(tmp_path / "state")


def test_such_a_parameter_that_had_no_gradient_does_no_harm(tmp_path):
    """There is nothing to save of it."""

    def make(model):
        return torch.optim.AdamW([*model.parameters(), nn.Parameter(torch.ones(1))], lr=0.1)

    whole = Launch(make_optimizer=make).train(range(2)).save(tmp_path / "state").train(range(2, 4))
    assert_same_run(whole, Launch(make_optimizer=make).load(tmp_path / "state").train(range(2, 4)))


def test_state_that_a_module_keeps_beside_its_tensors_comes_back(tmp_path):
    """torch's get_extra_state, which modules with scales or counters use."""

    class Extra(nn.Linear):
        def __init__(self):
            super().__init__(1, 1)
            self.seen = 0

        def get_extra_state(self):
            return {"seen": self.seen}

        def set_extra_state(self, content):
            self.seen = content["seen"]

    first = Launch(Extra)
    first.model.seen = 5
    first.save(tmp_path / "state")
    assert Launch(Extra).load(tmp_path / "state").model.seen == 5


def test_a_checkpoint_is_on_disk_before_it_has_its_name(tmp_path, monkeypatch):
    """All files of a checkpoint, flushed by torch or by the commit."""
    flushed, flush = set(), os.fsync

    def record(descriptor):
        flushed.add(os.fstat(descriptor).st_ino)
        flush(descriptor)

    monkeypatch.setattr(os, "fsync", record)
    to = CheckpointStore(tmp_path, rank=0, world_size=1)
    launch = Launch().train(range(1))
    assert to.save(Record(1), lambda folder: sharded.save(launch.accelerator, folder)) == SaveOutcome()
    files = [path for path in to.path(1).rglob("*") if path.is_file()]
    assert len(files) >= 5 and (to.path(1) / MANIFEST) in files
    assert [path.name for path in files if path.stat().st_ino not in flushed] == []
