"""Law 4 for buffers that training changes: ranks agree, and a stop does not change them.

A codebook, spectral norm, running statistics, a queue with an integer pointer and a flag, in one model.
"""

import json

import pytest
from support.launching import ROOT, filled, saved_state, scores, steps

from laws.changing import STEPS

SCRIPT = ROOT / "tests" / "laws" / "changing.py"
LAYOUTS = [("cpu", 1), ("ddp_cpu", 2), ("ddp_cpu", 3), ("fsdp_cpu", 2)]
TWO = ("ddp_cpu", 2)  # `make laws` has it


def in_laws(layouts):
    """Mark the layout that `make laws` has."""
    return [pytest.param(layout, marks=[pytest.mark.exhaustive] if layout == TWO else []) for layout in layouts]


EVERY, SEVERAL = in_laws(LAYOUTS), in_laws(LAYOUTS[1:])


@pytest.fixture(scope="module")
def changed(tmp_path_factory):
    """Return a function from a layout to the folder of its runs, each rank's results, and the output."""
    runs = filled(tmp_path_factory.mktemp("changing"), SCRIPT)

    def changed(profile, processes):
        folder, output = runs(profile, processes)
        told = [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(processes)]
        return folder, told, output

    return changed


@pytest.mark.parametrize("layout", EVERY)
def test_stopped_and_resumed_is_bitwise_equal(changed, layout):
    folder, told, _ = changed(*layout)
    assert steps(folder / "stopped") == steps(folder / "whole")
    assert scores(folder / "stopped") == scores(folder / "whole")
    whole = saved_state(folder / "whole", STEPS)
    assert saved_state(folder / "stopped", STEPS) == whole
    assert {"models.0.queue.pointer", "models.0.queue.full", "models.0.book.codes"} < set(whole)
    for rank in told:
        assert rank["stopped"] == rank["whole"]


@pytest.mark.parametrize("layout", SEVERAL)
def test_ranks_agree(changed, layout):
    """Also on a buffer changed late, on the last rank alone: it gets the main process's value, unchanged."""
    _, told, _ = changed(*layout)
    assert all(rank["whole"] == told[0]["whole"] and rank["late"] == told[0]["late"] for rank in told)
    assert told[0]["late"] == told[0]["whole"]


@pytest.mark.parametrize("layout", EVERY)
def test_they_are_named_once_a_start(changed, layout):
    """The message names three and counts the others, without norms' statistics; later ones when they are found."""
    _, _, output = changed(*layout)
    share = {1: "all 6", 2: "3 of 6", 3: "2 of 6"}[layout[1]]
    line = "warning: training changes buffers (book.codes, book.counts, queue.rows and "
    starts = 5 if layout[1] > 1 else 4
    assert output.count(line) == starts
    assert f"queue.rows and 4 more): after a step all processes have the main process's, which sees {share}" in output
    assert output.count("warning: training changes buffers (late") == 1
    assert "constant" not in output.partition("has drifted")[0]


@pytest.mark.parametrize("layout", SEVERAL)
def test_a_buffer_that_is_another_one_on_one_rank_is_found(changed, layout):
    """DDP copies the main process's buffers at the start, FSDP does not; neither mends a later difference."""
    _, told, _ = changed(*layout)
    for rank in told:
        assert f"rank {layout[1] - 1} has drifted from rank 0: after step 1, 1 of" in rank["apart"]
        assert "buffers differ, first constant" in rank["apart"]
