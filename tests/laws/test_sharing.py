"""Exact mode on several processes that share one GPU: the bits of one process, on every layout and across a stop.

The kernels are the GPU's; collectives go through host memory (`staged.py`).
"""

import functools

import pytest
from support.launching import ROOT, saved_state, scores, steps

from laws.gpus import GPUS, apart, launch, profile, recipes, wants_gpu
from laws.small import SMALL

pytestmark = wants_gpu
ONE = ("gpu" if GPUS else "cpu", 1)
DDP, FSDP = ("ddp", "fsdp") if GPUS else ("ddp_cpu", "fsdp_cpu")
LAYOUTS = {"ddp-x2": (DDP, 2), "fsdp-x2": (FSDP, 2), "ddp-x4": (DDP, 4), "fsdp-x4": (FSDP, 4)}
STEPS, STOP, BATCH = 4, 2, 16
COMMON = ["--run.global-batch", BATCH, "--run.steps", STEPS, "--run.log-every", 1, "--run.trackers"]
COMMON += ["--run.eval-every", STOP, "--run.save-every", STOP, "--run.workers", 0]
MICRO = ["--run.micro-batch", 4]  # four micro-batches a step, one for each of four ranks
EXACT = [*MICRO, "--run.exact", "true"]
SYNC = ["--scratch.norm", "batch", "--run.sync-bn", "true"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory, rows, request):
    """Return a function from a layout to the folder of its runs of all tested recipes."""
    root = tmp_path_factory.mktemp("sharing")
    wanted = dict.fromkeys(
        item.callspec.params["recipe"] for item in request.session.items if item.path == request.path
    )
    wanted = [name for name in wanted if not any(name == p.values[0] and _skipped(p) for p in recipes())]

    @functools.cache
    def runs(layout):
        kind, processes = ONE if layout == "one" else LAYOUTS[layout]
        commands = []
        for recipe in wanted:
            named = {"exact": EXACT, "again": EXACT, "ordinary": MICRO}
            if GPUS and recipe == "img":  # one micro-batch with all of a step's samples
                named["sync-bn"] = [*SYNC, "--run.micro-batch", BATCH // processes]
            # The same run, begun under DDP and finished under FSDP.
            chain, file = root / f"chain-x{processes}" / recipe, ROOT / f"recipes/{recipe}.py"
            flags = [*SMALL[recipe].flags(rows), *COMMON]
            commands += [(file, [*flags, *m, "--run.dir", root / layout / recipe / n], None) for n, m in named.items()]
            if layout.startswith("ddp"):
                commands.append((file, [*flags, *EXACT, "--run.stop-at", STOP, "--run.dir", chain], None))
            if layout.startswith("fsdp"):
                runs(layout.replace("fsdp", "ddp"))
                commands.append((file, [*flags, *EXACT, "--run.dir", chain], None))
        # Exact mode first: CUDA's libraries choose their kernels once in a process.
        commands.sort(key=lambda command: "--run.exact" not in command[1])
        launch(profile(root, kind), processes, commands, root, script="sharing.py", timeout=300)
        return root / layout

    return runs


def _skipped(parameter) -> bool:
    return any(mark.args[0] for mark in parameter.marks)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("recipe", recipes())
def test_exact_mode_gives_every_layout_the_bits_of_one_process(runs, layout, recipe):
    """Losses, norms, scores, weights and the optimizers' state; also when the same layout runs twice."""
    reference = runs("one") / recipe / "exact"
    for name in ("exact", "again"):
        other = runs(layout) / recipe / name
        assert steps(other) == steps(reference)
        assert scores(other) == scores(reference)
        assert saved_state(other, STEPS) == saved_state(reference, STEPS)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("recipe", recipes("cls"))
def test_what_ranks_exchange_comes_from_the_device(runs, layout, recipe):
    """A control: the ranks have exchanged gradients, and only through the tests' own process group."""
    kind, processes = LAYOUTS[layout]
    (file,) = runs(layout).parent.glob(f"{kind}-no-{processes}-*.exchanged")
    device = "cuda" if GPUS else "cpu"
    sums = {line.rpartition(" ")[0] for line in file.read_text().splitlines() if line.endswith(f" {device}")}
    assert "allreduce" in sums
    assert bool(sums & {"_reduce_scatter_base", "reduce_scatter_single"}) == layout.startswith("fsdp")


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name.startswith("fsdp")])
@pytest.mark.parametrize("recipe", recipes())
def test_exact_mode_goes_on_under_fsdp_with_what_ddp_left(runs, layout, recipe):
    reference = runs("one") / recipe / "exact"
    other = runs(layout).parent / f"chain-x{LAYOUTS[layout][1]}" / recipe
    assert steps(other) == steps(reference)
    assert saved_state(other, STEPS) == saved_state(reference, STEPS)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("recipe", recipes())
def test_ordinary_mode_agrees_to_rounding(runs, layout, recipe):
    reference, other = steps(runs("one") / recipe / "ordinary"), steps(runs(layout) / recipe / "ordinary")
    assert [line["ids"] for line in other] == [line["ids"] for line in reference]
    assert apart(reference, other, recipe=recipe, layout=layout) <= 1e-5


@pytest.mark.skipif(not GPUS, reason="needs a GPU: SyncBatchNorm does")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("recipe", recipes("img"))
def test_synchronised_batch_norm_sees_all_samples_of_a_step(runs, layout, recipe):
    reference, other = steps(runs("one") / recipe / "sync-bn"), steps(runs(layout) / recipe / "sync-bn")
    assert apart(reference, other, recipe=f"{recipe}, SyncBN", layout=layout) <= 1e-4
