"""The parts of `prove` that need no training: what it refuses, how a launch ends, and what makes a verdict."""

import itertools
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from support.launching import PROFILES, ROOT
from support.run_records import record

from app import UserError
from app.commands.own_folder import PROVE
from app.commands.prove import command
from app.commands.prove import trial as trials
from app.commands.prove.report import Report
from app.commands.prove.trace import Trace
from app.commands.prove.trial import Chain, Trial, draw, reason
from app.distributed.layout_record import Layout
from app.launching import profiles
from app.launching.launcher import Stalled, run

CPU, DDP = str(PROFILES / "cpu.yaml"), str(PROFILES / "ddp_cpu.yaml")
RECIPE = ROOT / "recipes" / "cls.py"
# A child that leaves the process group, as torchrun's ranks do, and writes down its number.
PARENT = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
open(sys.argv[1], "w").write(str(child.pid))
time.sleep(60)
"""


@pytest.mark.parametrize(
    "changes, flags, words",
    [
        ({"recipe": Path("recipes/none.py")}, [], "recipes/none.py: there is no such file"),
        ({"profiles": (CPU,)}, [], "give at least two"),
        ({"across": (CPU,)}, [], "--across needs two profiles"),
        ({"across": (CPU, DDP), "steps": 1}, [], "--steps 2 or more"),
        ({"profiles": (CPU, "none.yaml")}, [], "none.yaml: No such file"),
        ({"profiles": (CPU, f"{DDP}:0")}, [], "at least 1 must train"),
        ({"profiles": (CPU, str(PROFILES / "fsdp_2nodes.yaml"))}, [], "is for 2 machines; prove starts"),
        ({"profiles": (CPU, str(RECIPE))}, [], "is not YAML"),
        ({"profiles": (CPU, str(ROOT / "requirements.lock"))}, [], "has no distributed_type"),
        ({"profiles": (CPU, "mpi.yaml")}, [], "distributed_type MULTI_CPU: starts one process: write MULTI_GPU"),
        ({"steps": 0}, [], "--steps 0"),
        ({}, ["--run.dir", "x"], "--run.dir: prove sets it; use --report"),
        ({}, ["--run.stop_at=3"], "--run.stop-at: prove sets it; use --steps"),
    ],
)
def test_what_cannot_be_asked(monkeypatch, tmp_path, changes, flags, words):
    monkeypatch.chdir(tmp_path)
    Path("mpi.yaml").write_text("distributed_type: MULTI_CPU\nuse_cpu: true\nnum_processes: 2\n")
    monkeypatch.setattr(command, "_train", None)  # what gets there is not refused
    with pytest.raises(UserError, match=words):
        command.main(command.Options(**{"recipe": RECIPE, "profiles": (CPU, DDP), **changes}), flags)


def test_an_earlier_report_gives_way_and_nothing_else(tmp_path):
    folder = PROVE.make_room(tmp_path / "report")
    (folder / "01-cpu").mkdir()
    assert [path.name for path in PROVE.make_room(folder).iterdir()] == ["report.json"]
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    with pytest.raises(UserError, match="it holds something other than a report"):
        PROVE.make_room(tmp_path / "runs")
    assert (tmp_path / "runs" / "mine").exists()


def gone(pid):
    """Wait until a process is no more."""
    for _ in range(100):
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.05)
    return False


@pytest.mark.launches
@pytest.mark.parametrize("end", ["stalled", "interrupted"])
def test_all_that_a_launch_began_ends_with_it(tmp_path, end):
    """Where nothing moves, and where Ctrl-C or an error ends this program; also what left the process group."""
    note = tmp_path / "pid"

    def moved():
        if end == "interrupted" and note.exists() and note.read_text():
            raise KeyboardInterrupt
        return note.exists()

    with pytest.raises(Stalled if end == "stalled" else KeyboardInterrupt):
        run([sys.executable, "-c", PARENT, str(note)], tmp_path / "output", moved, patience=1)
    assert gone(int(note.read_text()))


@pytest.mark.launches
def test_what_a_short_launch_did_is_seen(tmp_path):
    """It ends before the first look at how far it is."""
    file, seen = tmp_path / "file", []
    assert (
        run(
            [sys.executable, "-S", "-c", f"open({str(file)!r}, 'w')"],
            tmp_path / "output",
            lambda: seen.append(file.exists()),
            30,
        )
        == 0
    )
    assert seen[-1:] == [True]


def test_a_signal_ends_a_launch_too(tmp_path):
    note = tmp_path / "pid"
    words = [sys.executable, "-c", PARENT, str(note)]
    program = "import pathlib, app.launching.launcher\n"
    program += f"app.launching.launcher.run({words!r}, pathlib.Path({str(tmp_path / 'output')!r}), int, 60)"
    process = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT)
    while not (note.exists() and note.read_text()):
        time.sleep(0.05)
    process.terminate()
    assert process.wait(10) == 143 and gone(int(note.read_text()))


@pytest.mark.launches
def test_a_launcher_that_dies_leaves_nothing_behind(tmp_path):
    note = tmp_path / "pid"
    dying = PARENT.replace("time.sleep(60)\n", "time.sleep(1.5)\nsys.exit(3)\n")
    assert run([sys.executable, "-c", dying, str(note)], tmp_path / "output", lambda: None, 30) == 3
    assert gone(int(note.read_text()))


@pytest.mark.launches
def test_a_launch_that_ends_gives_its_status_and_output(tmp_path):
    words = [sys.executable, "-c", "print('said'); raise SystemExit(3)"]
    assert run(words, tmp_path / "output", lambda: None, 30) == 3
    assert (tmp_path / "output").read_text() == "said\n"


@pytest.mark.parametrize(
    "output, found",
    [
        (
            "some\nerror: --run.x 3: no\n  more of it\nTraceback (most recent call last):\n",
            "error: --run.x 3: no\n  more of it",
        ),
        (
            "[rank1]: Traceback (most recent call last):\n[rank1]: ValueError: one\nRuntimeError: two\n",
            "ValueError: one",
        ),
        (
            "| Unrecognized options: --x |\nTraceback (most recent call last):\nsubprocess.CalledProcessError: long\n",
            "| Unrecognized options: --x |",
        ),
        ("", ""),
    ],
)
def test_why_a_launch_failed_is_found_in_what_it_printed(output, found):
    assert reason(output) == found


def test_a_recipe_that_makes_fewer_steps_is_not_the_same(tmp_path, monkeypatch):
    """Nor one that makes none, and ends well."""
    monkeypatch.setattr(trials, "run", lambda words, output, *rest: output.write_text("done") * 0)
    found = trials.train(RECIPE, [], Chain([(profiles.read(CPU), 3)]), True, tmp_path / "run", 60)
    assert found.ended == "ended after 0 of 3 steps" and not found.begun
    assert Report("recipe.py", [], 3, True).add(found).verdict == "failed"


@pytest.mark.parametrize("steps", [2, 3, 7, 40])
@pytest.mark.parametrize("names", [(CPU, DDP), (CPU, f"{DDP}:2", f"{DDP}:3")])
def test_stops_across_profiles_are_drawn_by_seed(names, steps):
    found = [profiles.read(name) for name in names]
    for seed in range(20):
        launches = draw(found, steps, seed).launches
        stops = [until for _, until in launches]
        assert launches == draw(found, steps, seed).launches
        assert stops == sorted(set(stops)) and stops[0] > 0 and stops[-1] == steps
        assert len(stops) == min(steps, 2 * len(names))
        turns = [profile for profile, _ in launches]
        assert all(one is not next_ for one, next_ in itertools.pairwise(turns))
    assert len({str(draw(found, steps, seed).launches) for seed in range(20)}) > 1


VERSIONS = {"torch": "2", "transformers": "5"}
LINE = {"ids": "a", "inputs": {}, "losses": {}, "weights": {}, "gradients": {}}
BEGUN = Trace(set(), {0: {"weights": {}}, 1: LINE})


def trial(profile=DDP, ended="", refused=False, trace=BEGUN, **where):
    file = profiles.read(profile)
    fields = {"processes": file.processes, "data_ranks": file.processes, "wrapping": "DDP", "kernels": "AVX2", **where}
    begun = record(layout=Layout(**fields), versions=VERSIONS) if trace.steps else None
    return Trial(Chain([(file, 3)]), Path("folder"), trace, 1.0, ended, refused, begun)


ONE = trial(CPU, wrapping="")


@pytest.mark.parametrize(
    "other, verdict, status",
    [
        (trial(), "same", 0),
        (trial(trace=Trace(set(), {0: {"weights": {}}, 1: {**LINE, "ids": "b"}})), "different", 1),
        (trial(ended="rank 1 has drifted from rank 0: after step 2", refused=True), "different", 1),
        (trial(ended="--run.exact: norm is a SyncBatchNorm", refused=True, trace=Trace(set(), {})), "refused", 1),
        (trial(ended="ValueError: shape"), "failed", 1),
        (trial(ended="ValueError: shape", trace=Trace(set(), {})), "failed", 1),
        (trial(ended="the loss of step 2 is nan", refused=True), "failed", 1),
        (trial(ended="9 processes for 3 micro-batches", refused=True, trace=Trace(set(), {})), "not run", 2),
    ],
)
def test_verdicts(other, verdict, status):
    report = Report("recipe.py", [], 1, True)
    for each in (ONE, other):
        report.add(each)
    assert [row.verdict for row in report.rows] == ["reference", verdict] and report.status == status
    assert other.ended in report.text() and report.as_dict()["status"] == status
    report.add(trial())
    assert report.status == status and report.summary().startswith("same" if not status else "ddp_cpu: ")


def test_what_the_user_should_know_of_a_comparison():
    def notes(reference, other, exact=True):
        report = Report("recipe.py", [], 1, exact)
        report.add(reference)
        return " ".join(report.add(other).notes)

    other = Trace(set(), {0: {"weights": {}}, 1: {**LINE, "ids": "b"}})
    assert notes(ONE, trial()) == ""
    assert "1 of the 2 processes" in notes(ONE, trial(processes=1))
    assert "the layout of the reference" in notes(trial(), trial())
    assert "precision was fp32, is bf16" in notes(ONE, trial(trace=other, precision="bf16"))
    assert "threads was 1, is 2" in notes(ONE, trial(trace=other, threads=2))
    assert "threads" not in notes(ONE, trial(trace=other, threads=2), exact=False)


def grown(factor):
    """Make the trace of four steps whose loss is apart from 1 by more in each."""
    lines = {n: {**LINE, "losses": {"loss": {}}, "loss": 1 + factor * 1e-7 * 30**n} for n in range(1, 5)}
    return Trace(set(), {0: {"weights": {}}, **lines})


@pytest.mark.parametrize(
    "exactly, verdict, status, words",
    [
        (trial(trace=grown(0)), "rounding that grows", 0, "the bits of the reference in all 4 steps"),
        (trial(trace=grown(1)), "different", 1, "in exact mode too it is different (step 1: loss weights"),
        (trial(ended="--run.exact: norm is a SyncBatchNorm", refused=True), "different", 1, "exact mode cannot tell"),
    ],
)
def test_rounding_is_told_from_a_mistake_by_exact_mode(monkeypatch, tmp_path, exactly, verdict, status, words):
    """What is outside the ordinary mode's tolerance is trained once more, and the reference with it."""
    asked = []

    def train(recipe, flags, chain, exact, folder, patience):
        asked.append((chain.profile.processes, exact))
        if exact:
            return exactly if chain.profile.processes > 1 else trial(CPU, wrapping="", trace=grown(0))
        several = chain.profile.processes > 1
        return trial(DDP if several else CPU, trace=grown(several))

    monkeypatch.setattr(trials, "train", train)
    options = command.Options(RECIPE, (CPU, DDP), steps=4, exact=False)
    report = command._train(options, [], [Chain([(profiles.read(name), 4)]) for name in (CPU, DDP)], tmp_path)
    assert asked == [(1, False), (2, False), (1, True), (2, True)]
    assert report.rows[1].verdict == verdict and report.status == status
    assert words in report.text()
    assert "apart from the reference: loss 3.0e-06 in step 1, 7.5e-02 in step 4, 29-fold a step" in report.text()
    assert report.as_dict()["profiles"][1]["growth"]["loss"]["rate"] == pytest.approx(30, rel=0.05)
    assert ("what run.batches gets as `weights`" in report.text()) == (verdict == "different")
