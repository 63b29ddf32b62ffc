"""The notebook runs from top to bottom, and what it starts is one run, wherever its parts were trained."""

import json
import signal
import subprocess
import sys
import time

import nbclient
import nbformat
import pytest

from app import UserError, launch
from launching import ROOT, furthest, kill_tree, run, steps

NOTEBOOK = ROOT / "notebooks" / "prototype.ipynb"


@pytest.fixture(scope="module")
def executed(tmp_path_factory):
    """Execute the notebook; return it, with its outputs, and the folder of its runs."""
    folder = tmp_path_factory.mktemp("notebook")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    client = nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(NOTEBOOK.parent)}})
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(folder))  # where the notebook makes its folder
        client.execute()
    (runs,) = folder.glob("prototype-*")
    return notebook, runs


def test_the_notebook_has_no_outputs_in_the_project():
    assert not any(cell.get("outputs") for cell in nbformat.read(NOTEBOOK, as_version=4).cells)


@pytest.mark.launches
def test_cells_show_texts_pictures_and_curves(executed):
    notebook, _ = executed
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 2
    printed = "".join(output.text for output in outputs if output.output_type == "stream")
    assert "micro-batch 3: [" in printed and "resuming" in printed and "FSDP2" in printed
    assert "Warning" not in printed and "Traceback" not in printed


@pytest.mark.launches
def test_kernel_ddp_and_fsdp_are_one_run(executed):
    """And it is the run that began in a terminal and went on in the kernel."""
    _, folder = executed
    info = json.loads((folder / "texts" / "run.json").read_text())
    assert [launch["step"] for launch in info["sittings"]] == [0, 20, 40]
    assert ["DDP" in info["sittings"][1]["layout"], "FSDP2" in info["sittings"][2]["layout"]] == [True, True]
    texts, third = steps(folder / "texts"), steps(folder / "third")
    assert [line["step"] for line in texts] == [line["step"] for line in third]
    assert [line["ids"] for line in texts] == [line["ids"] for line in third]
    assert furthest(texts, third) < 1e-5


@pytest.mark.launches
def test_a_loss_of_a_cell_travels_to_the_processes(executed):
    _, folder = executed
    plain, smooth = steps(folder / "texts"), steps(folder / "smooth")
    assert plain[0]["ids"] == smooth[0]["ids"] and plain[0]["loss"] != smooth[0]["loss"]
    assert json.loads((folder / "smooth" / "run.json").read_text())["recipe"] == "notebook"


INTERRUPTED = """
import sys, time
sys.path[:0] = ["tests", "."]
from app import launch
import tiny

def main(folder):
    return tiny.train(folder, lambda run, model: time.sleep(0.2), log_every=1, save_every=100, epochs=20.0)

try:
    launch(main, sys.argv[1], "cpu")
except KeyboardInterrupt:
    print("INTERRUPTED")
"""


def test_an_interrupt_stops_behind_a_step_with_a_checkpoint(tmp_path):
    words = [sys.executable, "-c", INTERRUPTED, str(tmp_path / "run")]
    process = subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        end = time.monotonic() + 90
        while (
            not (tmp_path / "run/metrics.jsonl").exists()
            or '"step": 3' not in (tmp_path / "run/metrics.jsonl").read_text()
        ):
            assert time.monotonic() < end
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=60)
    finally:
        kill_tree(process.pid)
    info = json.loads((tmp_path / "run/run.json").read_text())
    assert info["status"] == "preempted" and output.rstrip().endswith("INTERRUPTED"), output
    assert [path.name for path in (tmp_path / "run/checkpoints").iterdir()] == [f"step-{info['step']:08d}"]


FAILS = """
import sys
sys.path.insert(0, ".")
from app import UserError, launch

def fails(config):
    raise UserError("no such flavour")

try:
    launch(fails, None, "cpu")
except RuntimeError as error:
    print("RAISED", error)
"""


def test_what_fails_there_is_told_here():
    output = run([sys.executable, "-c", FAILS]).output
    assert "error: no such flavour" in output and "RAISED the launch ended with status 1" in output


def test_a_profile_that_is_none_is_refused():
    with pytest.raises(UserError, match="no_such_profile"):
        launch(print, None, "no_such_profile")
