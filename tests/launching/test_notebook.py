"""The notebook runs from top to bottom, and what it starts is one run, wherever its parts were trained."""

import json
import signal
import subprocess
import sys
import time

import nbclient
import nbformat
import pytest
from support.launching import ROOT, kill_tree, run, scores, steps, weights

from app import UserError, launch

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
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 4
    printed = "".join(output.text for output in outputs if output.output_type == "stream")
    assert "micro-batch 3: [" in printed and "resuming" in printed and "FSDP2" in printed
    assert "after step 10: {'sums': 120, 'words': 40}" in printed and "{'sums': 160, 'words': 160}" in printed
    assert "Warning" not in printed and "Traceback" not in printed


@pytest.mark.launches
def test_a_run_in_the_kernel_shows_a_bar_and_a_curve(executed):
    """One output a run, which is replaced as the run goes on."""
    notebook, _ = executed
    shown = [
        output.data["text/html"]
        for cell in notebook.cells
        for output in cell.get("outputs", [])
        if "<progress" in output.get("data", {}).get("text/html", "")
    ]
    assert ['value="23" max="90"' in page for page in shown] == [True, False]
    assert 'value="90" max="90"' in shown[1] and all("<polyline" in page and "step " in page for page in shown)


@pytest.mark.launches
def test_a_command_of_a_cell_prints_lines_and_no_bar(executed):
    notebook, _ = executed
    (cell,) = [cell for cell in notebook.cells if "launch cpu recipes/img.py" in cell.source]
    printed = "".join(output.text for output in cell.outputs)
    assert "stopped after step 30" in printed and "\r" not in printed.replace("\r\n", "\n")
    assert len(printed.splitlines()) < 20 and "%|" not in printed


@pytest.mark.launches
def test_scores_move(executed):
    _, folder = executed
    found = [line["eval/accuracy"] for line in scores(folder / "digits")]
    assert len(found) == 6 and found[-1] > 0.8 > found[0] + 0.2


@pytest.mark.launches
def test_kernel_ddp_and_fsdp_are_one_run(executed):
    """And it is the run that began in a terminal and went on in the kernel, to the last bit."""
    _, folder = executed
    info = json.loads((folder / "digits" / "run.json").read_text())
    assert [launch["step"] for launch in info["launches"]] == [0, 23, 50]
    assert ["DDP" in info["launches"][1]["layout"], "FSDP2" in info["launches"][2]["layout"]] == [True, True]
    assert steps(folder / "digits") == steps(folder / "third")
    assert scores(folder / "digits") == scores(folder / "third")
    assert weights(folder / "digits") == weights(folder / "third")


@pytest.mark.launches
def test_a_loss_of_a_cell_travels_to_the_processes(executed):
    _, folder = executed
    plain, focal = steps(folder / "digits"), steps(folder / "focal")
    assert plain[0]["ids"] == focal[0]["ids"] and plain[0]["loss"] != focal[0]["loss"]
    assert json.loads((folder / "focal" / "run.json").read_text())["recipe"] == "notebook"


INTERRUPTED = """
import sys, time
sys.path[:0] = ["tests", "."]
from app import launch
from support import tiny

def main(folder):
    return tiny.train(folder, lambda run, model: time.sleep(0.2), log_every=1, save_every=100, epochs=20.0)

try:
    launch(main, sys.argv[1], "cpu")
except KeyboardInterrupt:
    print("INTERRUPTED")
"""


def test_an_interrupt_stops_after_a_step_with_a_checkpoint(tmp_path):
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


IN_A_CELL = """
import builtins, os, signal, sys
sys.path[:0] = ["tests", "."]
builtins.__IPYTHON__ = True  # as in a kernel
import torch
from support import tiny

before = signal.getsignal(signal.SIGINT)

def interrupts(run, model):
    if run.steps_done != 3:
        return
    if how == "in an evaluation":
        for turn in run.evaluation(model, tiny.DATA, torch.stack):
            signal.raise_signal(signal.SIGINT)
        assert False, "it has not ended"
    for _ in range({"once": 1, "twice": 2}[how]):
        signal.raise_signal(signal.SIGINT)

for how in sys.argv[2:]:
    folder = f"{sys.argv[1]}/{how}"
    try:
        tiny.train(folder, interrupts, save_every=100)
    except KeyboardInterrupt:
        print("INTERRUPTED")
    assert signal.getsignal(signal.SIGINT) is before
    tiny.train(folder, save_every=100)
    print("CELL ENDS")
"""


def test_an_interrupt_of_a_cell_keeps_the_step(tmp_path):
    """The run leaves after the step, with a checkpoint, and then the cell ends; a second interrupt comes at once."""
    ways = {"once": [0, 3], "in an evaluation": [0, 3], "twice": [0]}
    result = run([sys.executable, "-c", IN_A_CELL, tmp_path, *ways])
    *cells, rest = result.output.split("CELL ENDS\n")
    assert result.status == 0 and len(cells) == len(ways) and not rest.strip(), result.output
    for (how, saved_at), printed in zip(ways.items(), cells, strict=True):
        assert printed.count("INTERRUPTED") == 1 and "another interrupt stops it at once" in printed, printed
        info = json.loads((tmp_path / how / "run.json").read_text())
        assert [launch["step"] for launch in info["launches"]] == saved_at and info["status"] == "finished"


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
