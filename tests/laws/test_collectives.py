"""Law 6: one gradient synchronisation a step, and nothing else on a step that does not log, evaluate or save."""

import json

import pytest
from support.launching import ROOT, filled

from laws import counting

SCRIPT = ROOT / "tests" / "laws" / "counting.py"
CASES = {"cpu": ["plain"], "ddp_cpu": ["plain", "changing"], "fsdp_cpu": ["plain", "unclipped"]}
PROCESSES = [2, pytest.param(4, marks=pytest.mark.exhaustive)]
LAYERS = 3  # units of FSDP: two layers in the stack, and the rest


@pytest.fixture(scope="module")
def counts(tmp_path_factory):
    """Return a function from a layout to the counts of a silent and of a logged step."""
    runs = filled(tmp_path_factory.mktemp("counts"), SCRIPT, counting.main)

    def counts(profile, processes, case="plain"):
        return json.loads((runs(profile, processes, *CASES[profile])[0] / f"{case}.json").read_text())

    return counts


def without(count, *names):
    return {name: n for name, n in count.items() if name not in names}


def test_one_process_has_no_collectives(counts):
    seen = counts("cpu", 1)
    assert without(seen["silent"], "reads") == without(seen["logged"], "reads") == {}


@pytest.mark.parametrize("processes", PROCESSES)
def test_ddp_reduces_once_a_step(counts, processes):
    """With two turns (2 processes) and with one (4): one all-reduce, and one more to log."""
    seen = counts("ddp_cpu", processes)
    assert without(seen["silent"], "reads") == {"c10d::allreduce_": 1}
    assert without(seen["logged"], "reads") == {"c10d::allreduce_": 2}


def test_buffers_that_training_changes_cost_one_broadcast(counts):
    assert without(counts("ddp_cpu", 2, "changing")["silent"], "reads") == {
        "c10d::allreduce_": 1,
        "c10d::broadcast_": 1,
    }


@pytest.mark.parametrize("processes", PROCESSES)
def test_fsdp_reduce_scatters_each_layer_once_a_step(counts, processes):
    """FSDP gathers in every turn and reduces in one; the norm for clipping is one small all-reduce."""
    turns = 4 // processes
    silent = counts("fsdp_cpu", processes)["silent"]
    assert silent["c10d::_reduce_scatter_base_"] == LAYERS
    assert silent["c10d::_allgather_base_"] <= turns * LAYERS * 2
    assert silent["_c10d_functional::all_reduce"] == 1
    logged = counts("fsdp_cpu", processes)["logged"]
    assert logged["c10d::allreduce_"] == silent["c10d::allreduce_"] + 1


def test_without_clipping_fsdp_reduces_nothing_else(counts):
    silent = counts("fsdp_cpu", 2, "unclipped")["silent"]
    assert silent["c10d::_reduce_scatter_base_"] == LAYERS
    assert "_c10d_functional::all_reduce" not in silent


@pytest.mark.parametrize("profile", ["cpu", "ddp_cpu", "fsdp_cpu"])
def test_a_silent_step_reads_no_number_from_the_device(counts, profile):
    """But for the check of the gradient's norm, which happens on a CPU only, where reading does not wait."""
    seen = counts(profile, 1 if profile == "cpu" else 2)
    assert seen["silent"]["reads"] == {"app/training/loop/step_metrics.py:add_norm": 1}
    assert sum(seen["logged"]["reads"].values()) > 1
