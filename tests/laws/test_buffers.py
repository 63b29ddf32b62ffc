"""Laws 2 to 6 for buffers that training changes: ranks agree, a stop changes none, and layouts have the same bits.

A codebook, spectral norm, running statistics, a queue with an integer pointer and a flag, in one model (changing.py);
and norms with running statistics, which every process updates with its own micro-batches alone (norms.py).
"""

import contextlib
import functools
import io
import json
import shutil

import pytest
import torch
from support.launching import ROOT, filled, furthest, saved_state, scores, steps, train_all

from laws import buffers, changing
from laws import norms as script
from laws.norms import EARLY, STEPS, STOP
from laws.small import SMALL

SCRIPT = ROOT / "tests" / "laws" / "buffers.py"
OTHERS = [("ddp_cpu", 3), ("fsdp_cpu", 2)]  # `make laws` has others
LAYOUTS = [("cpu", 1), *OTHERS]
TWO = pytest.param(("ddp_cpu", 2), marks=pytest.mark.exhaustive)


@pytest.fixture(scope="module")
def launched(tmp_path_factory):
    """Return a function from a layout to the folder of its runs, and the output.

    Under FSDP2 it has also gone on with what DDP left.
    """
    root, printed = tmp_path_factory.mktemp("buffers"), io.StringIO()

    def here(folder):
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            buffers.main(folder)

    runs = filled(root, SCRIPT, here)

    def launched(profile, processes):
        left = [root / "from-ddp"] if profile == "fsdp_cpu" else []
        if left and not left[0].exists():
            shutil.copytree(launched("ddp_cpu", 3)[0] / "norms" / "exact-left", left[0])
        folder, output = runs(profile, processes, *left)
        return folder, output or printed.getvalue()

    return launched


def told_in(folder, processes):
    """Read what each rank has written."""
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(processes)]


@pytest.fixture(scope="module")
def changed(launched):
    """Return a function from a layout to the folder of changing.py's runs, each rank's results, and the output."""

    def changed(profile, processes):
        folder, output = launched(profile, processes)
        return folder / "changing", told_in(folder / "changing", processes), output

    return changed


@pytest.fixture(scope="module")
def norms(launched):
    """Return a function from a layout to the folder of norms.py's runs, and each rank's results."""

    def norms(profile, processes):
        folder = launched(profile, processes)[0] / "norms"
        return folder, told_in(folder, processes)

    return norms


@pytest.mark.parametrize("layout", [*LAYOUTS, TWO])
def test_stopped_and_resumed_is_bitwise_equal(changed, layout):
    folder, told, _ = changed(*layout)
    assert steps(folder / "stopped") == steps(folder / "whole")
    assert scores(folder / "stopped") == scores(folder / "whole")
    whole = saved_state(folder / "whole", changing.STEPS)
    assert saved_state(folder / "stopped", changing.STEPS) == whole
    assert {"models.0.queue.pointer", "models.0.queue.full", "models.0.book.codes"} < set(whole)
    for rank in told:
        assert rank["stopped"] == rank["whole"]


@pytest.mark.parametrize("layout", [*OTHERS, TWO])
def test_ranks_agree(changed, layout):
    """Also on a buffer changed late, on the last rank alone: it gets the main process's value, unchanged."""
    _, told, _ = changed(*layout)
    assert all(rank["whole"] == told[0]["whole"] and rank["late"] == told[0]["late"] for rank in told)
    assert told[0]["late"] == told[0]["whole"]


@pytest.mark.parametrize("layout", [*LAYOUTS, TWO])
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


@pytest.mark.parametrize("layout", [*OTHERS, TWO])
def test_a_buffer_that_is_another_one_on_one_rank_is_found(changed, layout):
    """DDP copies the main process's buffers at the start, FSDP does not; neither mends a later difference."""
    _, told, _ = changed(*layout)
    for rank in told:
        assert f"rank {layout[1] - 1} has drifted from rank 0: after step 1, 1 of" in rank["apart"]
        assert "buffers differ, first constant" in rank["apart"]


@pytest.mark.parametrize("layout", OTHERS)
def test_exact_mode_gives_every_layout_the_same_bits(norms, layout):
    """Of statistics, scores, weights and the optimizer, with seven micro-batches a step and 24 steps."""
    reference, other = norms("cpu", 1)[0], norms(*layout)[0]
    assert steps(other / "exact") == steps(reference / "exact")
    assert scores(other / "exact") == scores(reference / "exact") and len(scores(other / "exact")) == 3
    assert saved_state(other / "exact", STEPS) == saved_state(reference / "exact", STEPS)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("mode", ["exact", "usual"])
def test_a_stop_changes_nothing(norms, layout, mode):
    """It folds the statistics at another time; bits, on each rank, are those of the run that never stopped."""
    folder, told = norms(*layout)
    # The step of the stop is logged, because it is saved.
    lines = [line for line in steps(folder / f"{mode}-stopped") if line["step"] != STOP]
    assert lines == steps(folder / mode) and len(lines) > 4
    assert scores(folder / f"{mode}-stopped") == scores(folder / mode)
    assert saved_state(folder / f"{mode}-stopped", STEPS) == saved_state(folder / mode, STEPS)
    assert all(rank[mode] == rank[f"{mode}-stopped"] == told[0][mode] for rank in told)


@pytest.mark.parametrize("layout", OTHERS)
def test_without_exact_mode_layouts_differ_by_rounding(norms, layout):
    """In the first steps; these models, which normalise two or three samples at a time, make it grow fast."""
    reference, other = (norms(*where)[0] / "usual-early" for where in (("cpu", 1), layout))
    assert furthest(scores(reference), scores(other), "eval/loss") < 1e-5 and len(scores(other)) == EARLY
    one, two = saved_state(reference, EARLY), saved_state(other, EARLY)
    for name in (name for name in one if name.endswith("num_batches_tracked")):
        assert one[name] == two[name]


@pytest.mark.parametrize(("first", "second"), [(("ddp_cpu", 3), ("fsdp_cpu", 2)), (("fsdp_cpu", 2), ("cpu", 1))])
def test_resumed_on_another_layout(norms, tmp_path, first, second):
    resumed = norms(*second)[0].parents[1] / "from-ddp"
    if second == ("cpu", 1):
        resumed = shutil.copytree(norms(*first)[0] / "exact-left", tmp_path / "run")
        script.train(resumed, exact=True)
    reference = norms("cpu", 1)[0] / "exact"
    lines = [line for line in steps(resumed) if line["step"] != STOP]
    assert lines == steps(reference) and scores(resumed) == scores(reference)
    assert saved_state(resumed, STEPS) == saved_state(reference, STEPS)


def test_the_statistics_are_those_of_all_micro_batches_in_order(norms):
    """Those of torch, but for rounding, which folds as it goes; counts are equal, also of the frozen norm."""
    folder = norms("cpu", 1)[0]
    exact, usual = (saved_state(folder / name, EARLY) for name in ("exact-early", "usual-early"))
    for name in (name for name in exact if "running_" in name):
        a, b = (torch.frombuffer(bytearray(state[name]), dtype=torch.float32) for state in (exact, usual))
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
    exact, usual = (saved_state(folder / name, STOP) for name in ("exact-left", "usual-left"))
    counted = {n: int.from_bytes(b, "little") for n, b in exact.items() if n.endswith("num_batches_tracked")}
    by_module = {name.split(".")[2]: count for name, count in counted.items()}
    assert by_module == {
        "norm": 7 * STOP,
        "instance": 0,
        "mean": 7 * STOP,
        "frozen": 0,
        "again": 14 * STOP,
        "out": 7 * STOP,
    }
    assert {n: b for n, b in usual.items() if n in counted} == {n: b for n, b in exact.items() if n in counted}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_passes_in_one_turn(norms, layout):
    """One of them reads the statistics: those of the steps before, whatever is logged and wherever the run stops."""
    reference = norms("cpu", 1)[1][0]["twice"]
    assert all(rank["twice"] == rank["twice-stopped"] == reference for rank in norms(*layout)[1])


def test_a_silent_step_has_no_further_collective(norms):
    """And a logged one has two more: of its numbers, and of what the norms have seen since the last one."""
    counts = json.loads((norms("ddp_cpu", 3)[0] / "counts.json").read_text())
    assert {n: c for n, c in counts["silent"].items() if n != "reads"} == {"c10d::allreduce_": 1}
    assert {n: c for n, c in counts["logged"].items() if n != "reads"} == {"c10d::allreduce_": 3}
    assert counts["silent"]["reads"].keys() <= {
        "app/training/loop/gradients.py:finite",
        "app/training/loop/step_metrics.py:add_norm",
    }


def test_what_waits_takes_little_memory(norms):
    """Beyond a limit, here 0 bytes, it is folded after a silent step too: a second collective, and the same numbers."""
    folder, told = norms("ddp_cpu", 3)
    counts = json.loads((folder / "often.json").read_text())
    assert counts["silent"]["c10d::allreduce_"] == 2
    assert all(rank["often"] == rank["counted"] == told[0]["counted"] for rank in told)


COMMON = ["--run.global-batch", 10, "--run.micro-batch", 2, "--run.steps", 6, "--run.eval-every", 3]
COMMON += ["--run.log-every", 1, "--run.exact", "true", "--run.trackers"]
CASES = {
    "img": ["--scratch.norm", "batch"],
    "resnet": ["--model", "RESNET", "--optim.lr", 0.01],
    "seg": ["--scratch.norm", "batch"],
}


@pytest.fixture(scope="module")
def recipes(tmp_path_factory, rows, data_cache):
    """Return a function from a layout to the folder of runs of recipes whose models have batch norm."""
    from transformers import ResNetConfig, ResNetForImageClassification, ViTImageProcessorPil

    root = tmp_path_factory.mktemp("recipes")
    torch.manual_seed(0)
    shape = ResNetConfig(num_channels=3, embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], num_labels=10)
    ResNetForImageClassification(shape).save_pretrained(root / "resnet")
    ViTImageProcessorPil(size={"height": 32, "width": 32}).save_pretrained(root / "resnet")

    @functools.cache
    def recipes(profile, processes):
        commands = []
        for name, more in CASES.items():
            recipe = "img" if name == "resnet" else name
            own = [root / "resnet" if word == "RESNET" else word for word in more]
            flags = [*SMALL[recipe].flags(rows), *COMMON, *own, "--run.dir", root / f"{profile}-{processes}" / name]
            commands.append((ROOT / "recipes" / f"{recipe}.py", flags, None))
        train_all(profile, processes, commands, root)
        return root / f"{profile}-{processes}"

    return recipes


@pytest.mark.exhaustive
@pytest.mark.parametrize("layout", OTHERS)
@pytest.mark.parametrize("name", CASES)
def test_recipes_with_batch_norm_have_the_same_bits_on_every_layout(recipes, name, layout):
    """Of img and seg, `test_recipes.py` has one of them in `make test`."""
    reference, other = recipes("cpu", 1) / name, recipes(*layout) / name
    state = saved_state(reference, 6)
    assert any("running_mean" in tensor for tensor in state) and len(scores(reference)) == 2
    assert steps(other) == steps(reference) and scores(other) == scores(reference)
    assert saved_state(other, 6) == state
