"""State that processes share is staged and written by one of them, and any layout reads it; which part is whose.

The launch of four processes also trains, in two groups that shard, for laws 1 to 4.
"""

import json

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from support.launching import ROOT, hsdp_on_cpu, launch, steps, train_many, weights

from app.distributed.state.deduplicate import divide
from app.distributed.state.safe_reader import StateReader
from laws.staging import Model

SHAPES = {name: tensor.shape for name, tensor in Model().state_dict().items()}
PARAMETERS = sum(p.nbytes for p in Model().parameters())
STATE = 3 * PARAMETERS  # weights and AdamW's two moments; its step counts are one number each
COUNTS = 4 * len(list(Model().parameters()))
STATISTICS = sum(b.nbytes for b in Model().buffers())
LARGEST = 35 * 13 * 4
RECIPE = ROOT / "recipes" / "cls.py"
SHORT = ["--scratch.width", 32, "--scratch.vocab", 300, "--data.max-length", 64, "--run.log-every", 1]
SHORT += ["--run.trackers", "--run.steps", 4, "--run.eval-every", 2]
EXACT = ["--run.exact", "true"]


@pytest.fixture(scope="module")
def flags(rows):
    """Return a function from a run's folder, and more, to flags of cls."""
    data = ["--data.path", rows(101), "--data.eval-path", rows(7)]
    return lambda folder, *more: [str(word) for word in (*SHORT, *data, "--run.dir", folder, *more)]


@pytest.fixture(scope="module", params=[pytest.param("ddp2", marks=pytest.mark.exhaustive), "ddp3", "hsdp4"])
def staged(request, tmp_path_factory, flags):
    """Launch one layout; return its folder, its ranks' reports, and how many ranks hold each byte."""
    folder = tmp_path_factory.mktemp(request.param)
    profile, processes, copies, more = "ddp_cpu", int(request.param[-1]), int(request.param[-1]), []
    if request.param == "hsdp4":
        runs = flags(folder / "run", "--run.stop-at", 2), flags(folder / "exact", *EXACT)
        (folder / "commands.json").write_text(json.dumps([(str(RECIPE), words, None) for words in runs]))
        # The profile sets the number of processes.
        profile, processes, copies, more = hsdp_on_cpu(folder), 1, 2, [folder / "commands.json"]
    result = launch(profile, processes, ROOT / "tests/laws/staging.py", folder, *more)
    assert result.status == 0, result.output
    reports = [json.loads(path.read_text()) for path in sorted(folder.glob("rank*.json"))]
    assert len(reports) == int(request.param[-1])
    return folder, reports, copies


def test_every_process_stages_its_share(staged):
    """Together they stage each byte once; none stages more than its share plus one tensor."""
    _, reports, copies = staged
    amounts = [report["alike"]["bytes"] for report in reports]
    whole = STATE + COUNTS + STATISTICS + 5 * 8
    assert sum(amounts) == whole
    assert max(amounts) <= STATE / len(reports) + LARGEST + COUNTS + STATISTICS + 40
    assert max(amounts) < 0.75 * whole / (len(reports) / copies)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_what_was_staged_comes_back(staged):
    """To the bit on the same layout; by name and shape on one process; registered objects are the main process's."""
    folder, reports, _ = staged
    assert all(report[name]["same"] for report in reports for name in ("alike", "apart"))
    assert all(report[name]["table"] == list(range(5)) for report in reports for name in ("alike", "apart"))
    for name in ("alike", "apart"):
        saved = StateReader(folder / name).read_metadata().state_dict_metadata
        assert {n.removeprefix("models.0."): e.size for n, e in saved.items() if n.startswith("models.")} == SHAPES
        tensors = {
            n: torch.full(entry.size, torch.nan) for n, entry in saved.items() if n.startswith("models.0.layers")
        }
        dcp.load(tensors, storage_reader=StateReader(folder / name), no_dist=True)
        assert all(tensor.isfinite().all() for tensor in tensors.values()) and len(tensors) == 16


def test_state_that_one_rank_has_alone_is_not_lost(staged):
    """In that case ranks do not divide the work: each stages all that it has."""
    folder, reports, _ = staged
    saved = StateReader(folder / "apart").read_metadata().state_dict_metadata
    assert sum(name.endswith(".more") for name in saved) == 1
    assert all(set(SHAPES) - {n.removeprefix("models.0.") for n in report["apart"]["names"]} <= {
        name for name in SHAPES if name.startswith("norm.")
    } for report in reports)  # fmt: skip


@pytest.mark.parametrize("staged", ["hsdp4"], indirect=True)
def test_each_number_is_counted_once(staged):
    """Whole, cut into rows or columns, over one and two dimensions of a mesh, and in rows that are cut twice."""
    counted = json.loads((staged[0] / "counted.json").read_text())
    refused = [counted.pop(name) for name in ("copies", "coordinates", "cut_along")]
    assert len(counted) == 3 + 9 + 1 and sum("_" in name or "_S" in name for name in counted) >= 1
    for name, (times, *more, alike) in counted.items():
        cut = 4 // more[-1]
        assert (times, len(more), alike) == (1.0, 1, True) and cut in (1, 2, 4), name
    assert all("neither cut nor copied" in words for words in refused)


@pytest.mark.parametrize("staged", ["hsdp4"], indirect=True)
def test_groups_that_shard_train_as_one_process_does(staged, flags, data_cache):
    """Which also goes on where they stopped."""
    folder = staged[0]
    where = json.loads((folder / "exact" / "run.json").read_text())["layout"]
    assert (where["wrapping"], where["data_ranks"]) == ("HSDP", 4)
    alone = flags(folder / "run"), flags(folder / "one"), flags(folder / "exact-one", *EXACT)
    train_many("cpu", 1, RECIPE, list(alone), folder)
    pairs = list(zip(steps(folder / "run"), steps(folder / "one"), strict=True))
    assert all(a["ids"] == b["ids"] and a["loss"] == pytest.approx(b["loss"], rel=1e-5) for a, b in pairs)
    # Summed over a group's shards, and not over the copies that the groups are.
    assert all(a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-5) for a, b in pairs)
    assert steps(folder / "exact") == steps(folder / "exact-one")
    assert weights(folder / "exact") == weights(folder / "exact-one")


@given(st.lists(st.integers(0, 1 << 40), max_size=50), st.integers(1, 9), st.integers(0, 1 << 40))
def test_a_division_is_even(sizes, parts, taken):
    owners, totals = divide(sizes, parts, taken)
    assert len(owners) == len(sizes) and all(0 <= owner < parts for owner in owners)
    assert sum(totals) == sum(sizes) + taken
    assert max(totals) <= max(taken, sum(totals) / parts + max(sizes, default=0))
