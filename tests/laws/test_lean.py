"""Laws 3 and 4 for optimizers that need less memory: state in eight bits, weights in bf16, Adafactor."""

import functools
import shutil

import pytest
import yaml
from support.launching import PROFILES, ROOT, launch, profile_of, saved_state, steps, weights

from laws.lean import CASES, STEPS

SCRIPT = ROOT / "tests" / "laws" / "lean.py"
PROCESSES = {"cpu": 1, "ddp_cpu": 2, "fsdp_cpu": 2}
BEFORE = {"cpu": "fsdp_cpu", "ddp_cpu": "cpu", "fsdp_cpu": "ddp_cpu"}  # whose stopped runs each resumes


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Return functions from a layout to the folder of its runs, and to that of the runs that it has resumed."""
    root = tmp_path_factory.mktemp("lean")
    profiles = {name: profile_of(root / "profiles", name, mixed_precision="bf16") for name in PROCESSES}

    @functools.cache
    def trained(name):
        # One process trains before the others have, and goes on with their runs in a second launch.
        return launched(name, root / name) if name == "cpu" else launched(name, root / name, copied(name))

    @functools.cache
    def resumed(name):
        stopped = copied(name)
        trained(name)
        return launched(name, stopped, stopped) if name == "cpu" else stopped

    @functools.cache
    def copied(name):
        return shutil.copytree(trained(BEFORE[name]), root / f"{name}-from")

    def launched(name, folder, *words):
        folder.mkdir(exist_ok=True)
        result = launch(profiles[name], PROCESSES[name], SCRIPT, folder, *words)
        assert result.status == 0, result.output[-6000:]
        return folder

    return trained, resumed


@pytest.mark.parametrize("layout", ["ddp_cpu", "fsdp_cpu"])
@pytest.mark.parametrize("name", CASES)
def test_every_layout_has_the_same_bits(trained, name, layout):
    """In exact mode, of losses, weights, state, and the finished model."""
    reference, other = trained[0]("cpu") / name, trained[0](layout) / name
    assert steps(other) == steps(reference) and len(steps(other)) == STEPS
    assert weights(other) == weights(reference)
    assert saved_state(other, STEPS) == saved_state(reference, STEPS)


def test_offload_changes_no_bit(trained, tmp_path):
    """On a CPU, where it goes the same way and saves nothing: shards are on the host anyway."""
    known = yaml.safe_load((PROFILES / "fsdp_cpu.yaml").read_text())["fsdp_config"]
    how = {"mixed_precision": "bf16", "fsdp_config": known | {"fsdp_offload_params": True}}
    result = launch(profile_of(tmp_path, "fsdp_cpu", **how), 2, SCRIPT, tmp_path, "", "both")
    assert result.status == 0, result.output[-6000:]
    assert saved_state(tmp_path / "both", STEPS) == saved_state(trained[0]("fsdp_cpu") / "both", STEPS)


@pytest.mark.parametrize("layout", PROCESSES)
@pytest.mark.parametrize("name", CASES)
def test_another_layout_goes_on_with_the_same_bits(trained, name, layout):
    whole, stopped = trained[0](layout) / name, trained[1](layout) / f"{name}-stopped"
    assert steps(stopped) == steps(whole) and weights(stopped) == weights(whole)
    assert saved_state(stopped, STEPS) == saved_state(whole, STEPS)


def test_what_is_kept(trained):
    """Codes of 8 bits and their scales for matrices; weights of 16 bits and what rounding cuts off."""
    eight, kahan = (saved_state(trained[0]("fsdp_cpu") / name, STEPS) for name in ("eight", "kahan"))
    count = 256 * 31
    for kept in ("exp_avg", "exp_avg_root"):
        assert len(eight[f"optimizers.0.models.0.layers.0.0.weight.{kept}"]) == count
        assert len(eight[f"optimizers.0.models.0.layers.0.0.weight.{kept}_scale"]) == 4 * count // 32
        assert len(eight[f"optimizers.0.models.0.wide.weight.{kept}_scale"]) == 4 * 300 * 8
        assert len(eight[f"optimizers.0.models.0.head.weight.{kept}_scale"]) == 4 * 17 * 2  # the second block is short
    assert len(eight["optimizers.0.models.0.embed.weight.exp_avg"]) == 4 * 256 * 6  # too small for codes
    assert len(kahan["models.0.wide.weight"]) == 2 * 256 * 300
    assert len(kahan["optimizers.0.models.0.wide.weight.compensation"]) == 2 * 256 * 300
    assert len(kahan["optimizers.0.models.0.wide.weight.exp_avg"]) == 4 * 256 * 300
