"""The plan says what the run then does: what processes hold, what is written, and what a run folder would restore."""

import json
import shutil
import sys

import pytest
import torch
from support.launching import PROFILES, ROOT, launch_many, run

from app import OptimConfig, UserError
from app.__main__ import main
from app.commands.plan import memory
from app.launching import profiles
from app.training.optim import bf16
from app.training.optim.building import build_optimizer
from laws.holding import Model

RECIPE = ROOT / "tests" / "laws" / "holding.py"
# optimizer, micro-batch, exact mode, whether a part of the model is frozen
CASES = {
    "one-turn": ("AdamW", 4, False, False),
    "two-turns": ("AdamW", 2, False, False),
    "exact": ("AdamW", 2, True, False),
    "frozen": ("SGD", 2, False, True),
    "factors": ("Adafactor", 4, False, False),
    "eight": ("AdamW8bit", 2, True, False),
}


@pytest.fixture(scope="module")
def held(tmp_path_factory):
    """Give a function that runs every case under a profile, and returns its folder, and what its processes held."""
    done = {}

    def held(profile: str):
        if profile not in done:
            folder = done[profile] = tmp_path_factory.mktemp(profile)
            names = ("--optim.name", "--run.micro-batch", "--run.exact", "--frozen")
            commands = [
                ["--run.dir", folder / name, *(word for pair in zip(names, case, strict=True) for word in pair)]
                for name, case in CASES.items()
            ]
            launch_many(profile, 2, RECIPE, commands, folder)
        folder = done[profile]
        files = sorted(folder.glob("*-rank*.json"))
        ranks = {}
        for file in files:
            ranks.setdefault(file.name.partition("-rank")[0], []).append(json.loads(file.read_text()))
        return folder, {name: {key: max(rank[key] for rank in all_) for key in all_[0]} for name, all_ in ranks.items()}

    return held


def expected(case: str, profile: str):
    optimizer, micro, exact, frozen = CASES[case]
    model = Model(frozen)
    weights, buffers = memory.weigh([model], [build_optimizer(model, OptimConfig(name=optimizer))])
    layout = profiles.read(str(PROFILES / f"{profile}.yaml"))
    turns = 8 // micro // layout.processes
    size = memory.checkpoint(model.state_dict().values(), weights)
    return memory.per_process(weights, buffers, layout, turns, exact, beside=True), size


@pytest.mark.parametrize("profile", ["ddp_cpu", "fsdp_cpu"])
def test_memory_is_what_processes_hold(held, profile):
    folder, found = held(profile)
    assert len(found) == len(CASES)
    for case, bytes_ in found.items():
        planned, size = expected(case, profile)
        assert {name: getattr(planned, name) for name in bytes_} == bytes_, case
        if profile == "ddp_cpu":
            files = (folder / case / "checkpoints" / "step-00000002").rglob("*")
            assert size == pytest.approx(sum(f.stat().st_size for f in files if f.is_file()), rel=0.02), case


@pytest.mark.parametrize(
    "settings",
    [
        {"name": "AdamW"},
        {"name": "SGD"},
        {"name": "SGD", "momentum": 0.0},
        {"name": "Adafactor"},
        {"name": "RMSprop"},
        {"name": "RMSprop", "momentum": 0.0},
        {"name": "Adagrad"},
        {"name": "ASGD"},
        {"name": "AdamW8bit"},
        {"updates": "kahan"},
    ],
)
def test_optimizer_state_is_that_of_a_real_step(settings):
    """Before the step nothing of it exists; and planning leaves nothing behind."""
    model = torch.nn.Sequential(torch.nn.Embedding(700, 8), torch.nn.Conv1d(4, 3, 2), torch.nn.LayerNorm(5))
    bf16.keep_weights(model, OptimConfig(**settings), "bf16")
    optimizer = build_optimizer(model, OptimConfig(**settings))
    before = {p: dict(state) for p, state in optimizer.state.items()}
    planned = memory.remembered(optimizer)
    assert {p: dict(state) for p, state in optimizer.state.items()} == before
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    for parameter in model.parameters():
        tensors = [v for v in optimizer.state.get(parameter, {}).values() if isinstance(v, torch.Tensor)]
        found = tuple(shape._replace(whole=False) for shape in planned[parameter])
        assert found == tuple(memory.Shape.of(tensor) for tensor in tensors)


def test_state_that_cannot_be_found_out_is_said():
    class Stubborn(torch.optim.SGD):
        def step(self):
            raise RuntimeError("no")

    parameter = torch.nn.Parameter(torch.ones(2))
    assert memory.remembered(Stubborn([parameter], lr=1.0)) == {parameter: None}


PLAN = """
import sys
from types import SimpleNamespace
from app.__main__ import main
from app.distributed import supported
supported.importlib = SimpleNamespace(util=SimpleNamespace(find_spec=lambda name: name))  # DeepSpeed is there
recipe, folder, out = sys.argv[1:]
status = [
    main(["plan", recipe, "--run.dir", f"{folder}/new", "--json", f"{out}/new.json", "--mtbf", "5"]),
    main(["plan", recipe, "--run.dir", f"{folder}/two-turns", "--run.micro-batch", "2", "--run.steps", "3",
          "--run.log-every", "7", "--optim.lr", "1", "--json", f"{out}/old.json", "--price", "9", "--mtbf", "5",
          "--optim.name", "Adafactor", "--profile", "accelerate_configs/ddp_cpu.yaml:5",
          "accelerate_configs/zero3.yaml:2", "accelerate_configs/fsdp_cpu.yaml"]),
]
print("status", status)
"""


def test_each_process_copies_what_it_alone_has_and_a_share_of_the_rest():
    """For a checkpoint; weights under adapters are in none."""
    shape, vector = memory.Shape((8, 8), 4), memory.Shape((64,), 4)
    split = memory.Weight(shape, True, (shape, shape)).cut(0, 2)
    frozen = memory.Weight(shape, False, saved=False)

    def copied(name, *weights):
        profile = profiles.read(str(PROFILES / f"{name}.yaml"))
        return memory.per_process([*weights], 0, profile, 1, False, beside=True).copy

    assert copied("tp_cpu", split) == 3 * shape.bytes() // 2
    assert copied("fsdp_tp_cpu", split) == 3 * shape.bytes() // 4
    assert copied("tp_cpu", memory.Weight(vector, True, (vector,))) == vector.bytes()  # of two, each process has one
    assert copied("cpu", frozen) == copied("tp_cpu", frozen.cut(0, 2)) == 0


def everything(folder):
    return {path: (path.stat().st_mtime_ns, path.is_file() and path.read_bytes()) for path in folder.rglob("*")}


def test_a_plan_reads_and_writes_nothing(held, tmp_path):
    """Of a recipe in a folder of its own: nothing is made for a new run, nothing touched of an old one."""
    folder, _ = held("ddp_cpu")
    shutil.copy(RECIPE, tmp_path / "mine.py")
    before = everything(folder)
    result = run([sys.executable, "-c", PLAN, tmp_path / "mine.py", folder, tmp_path])
    assert "status [0, 1]" in result.output, result.output
    assert everything(folder) == before and not (folder / "new").exists()
    new, old = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("new", "old"))
    numbers = {"samples": 50, "steps": 2, "steps_per_epoch": 6.25, "micro_batches": 2, "parameters": 37830}
    assert {name: new[name] for name in numbers} == numbers and new["trained"] == 37830
    assert [layout["profile"] for layout in new["layouts"]] == ["cpu", "ddp_cpu", "fsdp_cpu"]
    assert [layout["accumulation"] for layout in new["layouts"]] == [2, 1, 1]
    assert new["layouts"][1]["memory"]["optimizer"] == expected("one-turn", "ddp_cpu")[0].optimizer
    assert new["folder"]["step"] is None and not new["folder"]["trouble"]
    assert "5 processes for 4 micro-batches" in old["layouts"][0]["trouble"] and not old["layouts"][2]["trouble"]
    assert "5 processes for 4 micro-batches" in result.output and "Adafactor" in old["layouts"][1]["trouble"]
    assert old["folder"]["step"] == 2 and old["folder"]["saved_on"] == "2 data ranks, DDP, fp32, cpu"
    changes = {change["name"]: change["effect"] for change in old["folder"]["changes"]}
    assert changes.pop("run.steps").startswith("the learning rate follows")
    assert changes == {"run.log_every": "taken as it is now", "optim.lr": "refused", "optim.name": "refused"}
    assert "other settings" in old["folder"]["trouble"]
    # The run made its two steps on two processes; a third one is to come.
    time, text = old["folder"]["time"], " ".join(result.output.split())
    assert time["measured"]["devices"] == 2 and time["cost"] == pytest.approx(9 * time["device_hours"]["total"])
    measured = time["measured"]
    assert time["left"]["seconds"] == pytest.approx(measured["step"] + measured["save"] / measured["every"])
    assert "fsdp_cpu: 2 devices, 18.00 an hour" in text and "estimated for 1 step to come" in text
    assert f"--run.save-every {time['save_every']} costs least" in text and time["save_every"] > 0
    assert new["folder"]["time"]["measured"] is None and "is measured when it trains: plan again" in text


def test_what_cannot_be_planned_is_refused(tmp_path):
    """In one message; and the commands are listed without loading torch."""
    (tmp_path / "empty.py").write_text("'''No loop.'''\n")
    with pytest.raises(UserError, match=r"never called run\.batches"):
        main(["plan", str(tmp_path / "empty.py")])
    result = run([sys.executable, "-X", "importtime", "-m", "app"])
    assert result.status == 0 and "  plan " in result.output and " torch\n" not in result.output
