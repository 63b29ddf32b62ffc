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

RECIPE = ROOT / "recipes" / "lm.py"
MANY, ZERO = (ROOT / "tests" / "laws" / name for name in ("many.py", "zero_on_cpu.py"))
SMALL = ["--scratch.layers", 2, "--scratch.width", 32, "--scratch.heads", 4, "--scratch.vocab", 300]
SMALL += ["--scratch.dropout", 0.1, "--data.block", 32, "--run.steps", 3, "--run.global-batch", 6, "--run.micro-batch"]
SMALL += [1, "--run.trackers", "--run.log-every", 1, "--sample-length", 0]
NAMES = sorted(path.stem for path in PROFILES.glob("*.yaml"))
SLICES = 2


# Layouts and precisions that others of them or other tests have, or that are large: `make laws` has these.
IN_LAWS = ["cpu", "ddp_cpu", "fsdp_cpu", "tp_cpu", "fsdp_tp_cpu", "fsdp_tp", "ddp_2nodes", "fsdp_offload"]
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


def kind_of(name: str) -> tuple[str, bool]:
    """Return the precision of a profile, and whether it splits layers."""
    known = settings_of(name)
    return known["mixed_precision"], known.get("parallelism_config", {}).get("parallelism_config_tp_size", 1) > 1


@pytest.fixture(scope="module")
def trained(tmp_path_factory, rows):
    """Return a function from a profile's name to the folder of its runs, which the first call makes."""
    root = tmp_path_factory.mktemp("profiles")
    data = ["--data.path", rows(31), "--data.eval-path", rows(7)]

    def flags(name, kind, split):
        exact = ["--run.exact", "true", *(["--run.slices", SLICES] if split else [])]
        return [*SMALL, *data, "--run.dir", root / name.replace(" ", "-") / kind, *(exact if kind == "exact" else [])]

    @functools.cache
    def one(precision, split):
        """Train on one process, with slices if layers are split."""
        name = f"one-{precision}-{split}"
        file = profile_of(root / name, "cpu", mixed_precision=precision)
        launch_all(file, 1, [(RECIPE, flags(name, kind, split), None) for kind in ("ordinary", "exact")], root / name)
        return root / name

    @functools.cache
    def trained(name):
        changed, folder = smaller(name), root / name.replace(" ", "-")
        file = profile_of(folder, name.partition(" ")[0], **changed)
        commands = [(RECIPE, flags(name, kind, kind_of(name)[1]), None) for kind in ("ordinary", "exact")]
        if settings_of(name)["num_machines"] > 1:
            listed = folder / "commands.json"
            listed.write_text(json.dumps([(str(a), [str(word) for word in b], c) for a, b, c in commands]))
            with ExitStack() as stack:
                both = stack.enter_context(two_machines(folder, file, MANY))
                for machine in both:
                    machine.start(listed)
                ends = [machine.now.process.wait(300) for machine in both]
                assert ends == [0, 0], both[0].now.output() + both[1].now.output()
        else:
            launch_all(file, changed["num_processes"], commands, folder)
        return folder

    trained.one = one
    return trained


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.exhaustive] if name in (COPIES, *IN_LAWS) else [])
        for name in [COPIES, *NAMES]
        if settings_of(name)["distributed_type"] != "DEEPSPEED"
    ],
)
def test_it_trains_as_one_process_does(trained, name):
    precision, split = kind_of(name)
    found, alone = trained(name), trained.one(precision, split)
    for kind in ("ordinary", "exact"):
        assert [line["ids"] for line in steps(found / kind)] == [line["ids"] for line in steps(alone / kind)]
        assert len(steps(found / kind)) == 3
    # Slices are exact mode's; without them layers have other sums, in bf16 of eight bits.
    assert furthest_loss(steps(alone / "ordinary"), steps(found / "ordinary")) < (1e-5 if precision == "no" else 2e-3)
    assert steps(found / "exact") == steps(alone / "exact")
    assert weights(found / "exact") == weights(alone / "exact")


@pytest.mark.apart
@pytest.mark.skipif(find_spec("deepspeed") is None, reason="deepspeed is not installed")
@pytest.mark.parametrize("name", [name for name in NAMES if settings_of(name)["distributed_type"] == "DEEPSPEED"])
def test_it_trains_under_deepspeed(trained, rows, tmp_path, name):
    """But for what zero_on_cpu.py replaces. Exact mode is refused by name."""
    file = profile_of(tmp_path, name, num_processes=2)
    words = ["accelerate.commands.launch", "--config_file", file, "--main_process_port", 0, ZERO, RECIPE, *SMALL]
    words += ["--data.path", rows(31), "--data.eval-path", rows(7), "--run.dir"]
    env = {"PYTHONPATH": python_path(ROOT / "tests")}
    result = run([sys.executable, "-m", *words, tmp_path / "run"], env=env)
    assert result.status == 0 and "DeepSpeed ZeRO" in result.output and ", bf16, cpu" in result.output, result.output
    alone = trained.one("bf16", False) / "ordinary"
    assert [line["ids"] for line in steps(tmp_path / "run")] == [line["ids"] for line in steps(alone)]
    assert furthest_loss(steps(alone), steps(tmp_path / "run")) < 1e-2
    if name == "zero3":
        refused = run([sys.executable, "-m", *words, tmp_path / "exact", "--run.exact", "true"], env=env)
        assert "--run.exact: DeepSpeed sums gradients in its own order" in refused.output
