"""State that processes share is staged and written by one of them, and any layout reads it; which part is whose."""

import json

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from support.launching import ROOT, hsdp_on_cpu, launch

from app.distributed.state.deduplicate import divide
from app.distributed.state.safe_reader import StateReader
from laws.staging import Model

SHAPES = {name: tensor.shape for name, tensor in Model().state_dict().items()}
PARAMETERS = sum(p.nbytes for p in Model().parameters())
STATE = 3 * PARAMETERS  # weights and AdamW's two moments; its step counts are one number each
COUNTS = 4 * len(list(Model().parameters()))
STATISTICS = sum(b.nbytes for b in Model().buffers())
LARGEST = 35 * 13 * 4


@pytest.fixture(scope="module", params=[pytest.param("ddp2", marks=pytest.mark.exhaustive), "ddp3", "hsdp4"])
def staged(request, tmp_path_factory):
    """Launch one layout; return its folder, its ranks' reports, and how many ranks hold each byte."""
    folder = tmp_path_factory.mktemp(request.param)
    profile, processes, copies, more = "ddp_cpu", int(request.param[-1]), int(request.param[-1]), []
    if request.param == "hsdp4":
        profile, processes, copies, more = hsdp_on_cpu(folder), 1, 2, ["parts"]  # it sets the number of processes
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


@given(st.lists(st.integers(0, 1 << 40), max_size=50), st.integers(1, 9), st.integers(0, 1 << 40))
def test_a_division_is_even(sizes, parts, taken):
    owners, totals = divide(sizes, parts, taken)
    assert len(owners) == len(sizes) and all(0 <= owner < parts for owner in owners)
    assert sum(totals) == sum(sizes) + taken
    assert max(totals) <= max(taken, sum(totals) / parts + max(sizes, default=0))
