"""Every shipped profile trains: as it stands, but on CPUs, on as few processes as it can have, with a mesh for them.

In exact mode its losses and weights are those of one process in the same precision.
"""

import functools
import json
import math
import sys
from contextlib import ExitStack
from importlib.util import find_spec

import pytest
import yaml
from support.launching import PROFILES, ROOT, furthest_loss, launch_all, profile_of, python_path, run, steps, weights
from support.machines import two_machines

LM, CLS = (ROOT / "recipes" / f"{name}.py" for name in ("lm", "cls"))
MANY, ZERO = (ROOT / "tests" / "laws" / name for name in ("many.py", "zero_on_cpu.py"))
COMMON = ["--scratch.width", 32, "--scratch.heads", 4, "--scratch.vocab", 300, "--data.block", 32, "--run.steps", 3]
COMMON += ["--run.global-batch", 6, "--run.micro-batch", 1, "--run.trackers", "--run.log-every", 1]
SMALL = [*COMMON, "--scratch.layers", 2, "--scratch.dropout", 0.1, "--sample-length", 0]
EXACT = ["--run.exact", "true"]
OF_CLS = ["--scratch.layers", 2, "--scratch.width", 32, "--scratch.heads", 4, "--scratch.vocab", 300]
OF_CLS += ["--data.max-length", 64, "--run.steps", 3, "--run.global-batch", 6, "--run.micro-batch", 2]
OF_CLS += ["--run.trackers", "--run.log-every", 1]
KINDS = {
    "ordinary": (LM, SMALL),
    "exact": (LM, [*SMALL, *EXACT]),
    "sliced": (LM, [*SMALL, *EXACT, "--run.slices", 2]),
    # The last layer has a bias, whose gradient is not rounded, and computes losses in chunks.
    "masked": (LM, [*COMMON, *EXACT, "--scratch.layers", 1, "--mask.rate", 0.2, "--logits", "chunked"]),
    # A BERT, with more slices than processes.
    "ordinary classes": (CLS, OF_CLS),
    "sliced classes": (CLS, [*OF_CLS, *EXACT, "--run.slices", 4]),
}
NAMES = sorted(path.stem for path in PROFILES.glob("*.yaml"))

# Those of one process are what the others are compared with.
ALONE = {"no": "cpu", "bf16": "gpu"}
# Layouts and precisions that others of them or other tests have, or that are large: `make laws` has these.
IN_LAWS = ["ddp_cpu", "fsdp_cpu", "tp_cpu", "fsdp_tp_cpu", "fsdp_tp", "ddp_2nodes", "fsdp", "fsdp_offload"]
# `test_lean.py` has DDP in bf16, and `test_staging.py` trains in groups that shard.
IN_LAWS += ["ddp", "hsdp"]
# Profiles that ask for the same as another one, but for machines, devices, precision and sizes.
ALIKE = {"fsdp": "fsdp_2nodes", "ddp_2nodes": "ddp", "ddp_cpu": "ddp", "fsdp_cpu": "fsdp_2nodes", "tp_cpu": "tp"}
ALIKE |= {"gpu": "cpu", "fsdp_tp_cpu": "fsdp_tp"}
WHERE = {"gpu_ids", "use_cpu", "num_processes", "num_machines", "machine_rank", "main_process_ip", "main_process_port"}
WHERE |= {"rdzv_backend", "same_network", "mixed_precision", "mpirun_config"}
# Accelerate's own example of all three dimensions: two copies of what fsdp_tp is.
COPIES = "fsdp_tp twice"


def settings_of(name: str) -> dict:
    """Read a profile."""
    if name == COPIES:
        known = settings_of("fsdp_tp")
        return known | {"parallelism_config": known["parallelism_config"] | {"parallelism_config_dp_replicate_size": 2}}
    return yaml.safe_load((PROFILES / f"{name}.yaml").read_text())


def smaller(name: str) -> dict:
    """Return what is changed of a profile: the device, the number of processes, and the sizes of its mesh."""
    known = settings_of(name)
    mesh = {key: min(size, 2) for key, size in known.get("parallelism_config", {}).items()}
    changed: dict = {
        "use_cpu": True,
        "num_processes": math.prod(mesh.values()) if mesh else min(known["num_processes"], 2),
    }
    return changed | ({"parallelism_config": mesh} if mesh else {})


def precision_of(name: str) -> str:
    """Return the precision of a profile."""
    return settings_of(name)["mixed_precision"]


def kinds_of(name: str) -> list[str]:
    """List the runs of a profile: in ordinary and in exact mode, in slices if it splits layers; and other models."""
    split = settings_of(name).get("parallelism_config", {}).get("parallelism_config_tp_size", 1) > 1
    others = {"fsdp": ["masked"], "fsdp_2nodes": ["masked"], "tp": ["ordinary classes", "sliced classes"]}
    return ["ordinary", "sliced" if split else "exact", *others.get(name, [])]


def commands(folder, kinds, rows):
    """Return the commands of some kinds of runs."""
    data = ["--data.path", rows(31), "--data.eval-path", rows(7)]
    return [(KINDS[kind][0], [*KINDS[kind][1], *data, "--run.dir", folder / kind], None) for kind in kinds]


@pytest.fixture(scope="module")
def alone(tmp_path_factory, rows):
    """Return a function from a precision to the folder of one process's runs, which the first call makes."""
    root = tmp_path_factory.mktemp("alone")

    @functools.cache
    def alone(precision):
        file = profile_of(root, ALONE[precision], use_cpu=True)
        launch_all(file, 1, commands(root / precision, KINDS, rows), root)
        return root / precision

    return alone


@pytest.fixture(scope="module")
def trained(tmp_path_factory, rows):
    """Return a function from a profile's name to the folder of its runs, which the first call makes."""
    root = tmp_path_factory.mktemp("profiles")

    @functools.cache
    def trained(name):
        changed, folder = smaller(name), root / name.replace(" ", "-")
        file = profile_of(folder, name.partition(" ")[0], **changed)
        listed = commands(folder, kinds_of(name), rows)
        if settings_of(name)["num_machines"] > 1:
            words = folder / "commands.json"
            words.write_text(json.dumps([(str(a), [str(word) for word in b], c) for a, b, c in listed]))
            with ExitStack() as stack:
                both = stack.enter_context(two_machines(folder, file, MANY))
                for machine in both:
                    machine.start(words)
                ends = [machine.now.process.wait(300) for machine in both]
                assert ends == [0, 0], both[0].now.output() + both[1].now.output()
        else:
            launch_all(file, changed["num_processes"], listed, folder)
        return folder

    return trained


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.exhaustive] if name in (COPIES, *IN_LAWS) else [])
        for name in [COPIES, *NAMES]
        if settings_of(name)["distributed_type"] != "DEEPSPEED" and name not in ALONE.values()
    ],
)
def test_it_trains_as_one_process_does(trained, alone, name):
    precision = precision_of(name)
    one, many = alone(precision), trained(name)
    for kind in kinds_of(name):
        assert [line["ids"] for line in steps(many / kind)] == [line["ids"] for line in steps(one / kind)]
        assert len(steps(many / kind)) == 3
        if kind.startswith("ordinary"):
            # Slices are exact mode's; without them layers have other sums, in bf16 of eight bits.
            assert furthest_loss(steps(one / kind), steps(many / kind)) < (1e-5 if precision == "no" else 2e-3)
        else:
            assert steps(many / kind) == steps(one / kind)
            assert weights(many / kind) == weights(one / kind)


@pytest.mark.parametrize("name", ALIKE)
def test_profiles_differ_by_where_they_run_alone(name):
    """So what one of two trains, the other one would: the rest of their settings is the same."""
    one, other = ({**settings_of(each), **smaller(each)} for each in (name, ALIKE[name]))
    for each in (one, other):  # what is not said is false
        each["fsdp_config"] = {key: value for key, value in each.get("fsdp_config", {}).items() if value is not False}
    assert {key: one[key] for key in one.keys() - WHERE} == {key: other[key] for key in other.keys() - WHERE}


@pytest.mark.apart
@pytest.mark.skipif(find_spec("deepspeed") is None, reason="deepspeed is not installed")
@pytest.mark.parametrize("name", [name for name in NAMES if settings_of(name)["distributed_type"] == "DEEPSPEED"])
def test_it_trains_under_deepspeed(alone, rows, tmp_path, name):
    """But for what zero_on_cpu.py replaces; under the first profile, exact mode is asked for then, and refused."""
    flags = [*SMALL, "--data.path", rows(31), "--data.eval-path", rows(7), "--run.dir"]
    refuses = name == "zero2"
    more = ["next", *flags, tmp_path / "refused", *EXACT] if refuses else []
    words = ["accelerate.commands.launch", "--config_file", profile_of(tmp_path, name, num_processes=2)]
    words += ["--main_process_port", 0, ZERO, LM, *flags, tmp_path / "run", *more]
    result = run([sys.executable, "-m", *words], env={"PYTHONPATH": python_path(ROOT / "tests")})
    assert bool(result.status) == refuses, result.output
    assert "DeepSpeed ZeRO" in result.output and ", bf16, cpu" in result.output, result.output
    one = alone("bf16") / "ordinary"
    assert [line["ids"] for line in steps(tmp_path / "run")] == [line["ids"] for line in steps(one)]
    assert furthest_loss(steps(one), steps(tmp_path / "run")) < 1e-2
    assert ("--run.exact: DeepSpeed sums gradients in its own order" in result.output) == refuses
    assert not (tmp_path / "refused" / "metrics.jsonl").exists()
