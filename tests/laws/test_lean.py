"""Laws 3 and 4 for optimizers that need less memory: state in eight bits, weights in bf16, Adafactor."""

import functools
import shutil

import pytest
import yaml
from support.launching import PROFILES, ROOT, launch, profile_of, saved_state, steps, weights

from laws.lean import CASES, STEPS

SCRIPT = ROOT / "tests" / "laws" / "lean.py"
PROCESSES = {"cpu": 1, "ddp_cpu": 2, "fsdp_cpu": 2}
BEFORE = {"cpu": "ddp_cpu", "ddp_cpu": "fsdp_cpu", "fsdp_cpu": "cpu"}  # whose stopped runs each resumes
# Under DDP, `make test` has these as well as FSDP2 does, and `make laws` has the others.
UNDER_DDP = ("kahan", "both", "adafactor")


def is_late(layout, name):
    return layout == "ddp_cpu" and name not in UNDER_DDP


def in_laws(*layouts, resumed=False):
    """Return a test's cases and layouts, marked where `make laws` runs them: one process resumes in a launch more."""
    return [
        pytest.param(
            name,
            layout,
            marks=[pytest.mark.exhaustive] if is_late(layout, name) or (resumed and layout == "cpu") else [],
        )
        for name in CASES
        for layout in layouts
    ]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Return functions from a layout and a case to the folders of its run, and of the run that it has resumed."""
    root = tmp_path_factory.mktemp("lean")
    profiles = {name: profile_of(root / "profiles", name, mixed_precision="bf16") for name in PROCESSES}

    @functools.cache
    def launched(layout, late):
        """Train cases, and go on with another layout's; one process trains before the others have."""
        names = [name for name in CASES if is_late(layout, name) == late]
        start(layout, root / layout, "" if layout == "cpu" else copied(layout, names), names)

    @functools.cache
    def resumed_by_one():
        stopped = copied("cpu", CASES)
        start("cpu", stopped, stopped, CASES)

    def copied(layout, names):
        """Copy what another layout has left."""
        there = root / f"{layout}-from"
        for name in names:
            shutil.copytree(trained(BEFORE[layout], name).with_name(f"{name}-stopped"), there / f"{name}-stopped")
        return there

    def start(layout, folder, stopped, names):
        folder.mkdir(exist_ok=True)
        result = launch(profiles[layout], PROCESSES[layout], SCRIPT, folder, stopped, *names)
        assert result.status == 0, result.output[-6000:]

    def trained(layout, name):
        launched(layout, is_late(layout, name))
        return root / layout / name

    def resumed(layout, name):
        trained(layout, name)
        if layout == "cpu":
            resumed_by_one()
        return root / f"{layout}-from" / f"{name}-stopped"

    return trained, resumed


@pytest.mark.parametrize(("name", "layout"), in_laws("ddp_cpu", "fsdp_cpu"))
def test_every_layout_has_the_same_bits(trained, name, layout):
    """In exact mode, of losses, weights, state, and the finished model."""
    reference, other = trained[0]("cpu", name), trained[0](layout, name)
    assert steps(other) == steps(reference) and len(steps(other)) == STEPS
    assert weights(other) == weights(reference)
    assert saved_state(other, STEPS) == saved_state(reference, STEPS)


def test_offload_changes_no_bit(trained, tmp_path):
    """On a CPU, where it goes the same way and saves nothing: shards are on the host anyway."""
    known = yaml.safe_load((PROFILES / "fsdp_cpu.yaml").read_text())["fsdp_config"]
    how = {"mixed_precision": "bf16", "fsdp_config": known | {"fsdp_offload_params": True}}
    result = launch(profile_of(tmp_path, "fsdp_cpu", **how), 2, SCRIPT, tmp_path, "", "both")
    assert result.status == 0, result.output[-6000:]
    assert saved_state(tmp_path / "both", STEPS) == saved_state(trained[0]("fsdp_cpu", "both"), STEPS)


@pytest.mark.parametrize(("name", "layout"), in_laws(*PROCESSES, resumed=True))
def test_another_layout_goes_on_with_the_same_bits(trained, name, layout):
    whole, stopped = (run(layout, name) for run in trained)
    assert steps(stopped) == steps(whole) and weights(stopped) == weights(whole)
    assert saved_state(stopped, STEPS) == saved_state(whole, STEPS)


def test_what_is_kept(trained):
    """Codes of 8 bits and their scales for matrices; weights of 16 bits and what rounding cuts off."""
    eight, kahan = (saved_state(trained[0]("fsdp_cpu", name), STEPS) for name in ("eight", "kahan"))
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
