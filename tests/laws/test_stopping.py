"""Law 4 with signals and killed processes: ranks stop together after a step, or at once, and the run resumes."""

import json
import os
import pickle
import re
import shlex
import signal
import subprocess
import sys
import time
from contextlib import contextmanager

import psutil
import pytest
from support.launching import PROFILES, ROOT, Training, kill_tree, launch, scores, steps

SCRIPT = ROOT / "tests" / "laws" / "stopped.py"
SLOW = "@0.1"
EVALUATES = [f"{name}:--run.eval-every:10:--run.keep:9" for name in ("slow", "slow", "evaluated")]


@contextmanager
def training(folder, *runs, processes=1, more=(), profile="", shell="", python=sys.executable):
    """Launch runs of stopped.py after the shell command `shell`, if given; at the end, no process of theirs is left."""
    profile = PROFILES / f"{profile or ('ddp_cpu' if processes > 1 else 'cpu')}.yaml"
    head = [python, "-m", "accelerate.commands.launch", "--config_file", profile, "--main_process_port", "0"]
    words = [*head, *more, SCRIPT, folder, *runs]
    started = Training(folder, ["bash", "-c", f"{shell} {shlex.join(map(str, words))}"] if shell else words)
    try:
        yield started
    finally:
        started.end()
        for file in folder.glob("pid-*"):
            kill_tree(int(file.read_text()))


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """Send each signal to a run of two ranks, all in one launch; the last run hangs."""
    folder = tmp_path_factory.mktemp("stopped")
    runs = [f"{name}{SLOW}" for name in ("SIGTERM", "SIGUSR1", "SIGINT")]
    runs += ["SIGTERM", "whole", *EVALUATES, "hang:--run.timeout:2"]
    with training(folder, *runs, processes=2, python=sys.executable) as now:
        for name, ranks in {"SIGTERM": [1], "SIGUSR1": [0], "SIGINT": [0, 1]}.items():
            now.reach(name, 6)
            for rank in ranks:
                now.rank(rank).send_signal(getattr(signal, name))
            now.wait_for(lambda name=name: now.status(name) == "preempted")
        leave_evaluation(now, 1)
        assert now.process.wait(60)
        yield now


@pytest.fixture(scope="module")
def sharded(tmp_path_factory):
    """Send SIGUSR1 to the whole job of two ranks under FSDP2, with the shell command of the docs; then an evaluation's.

    As Slurm sends it: the launcher ignores it.
    """
    folder = tmp_path_factory.mktemp("sharded")
    (shell,) = set(re.findall(r'bash -c "(trap .*; exec) accelerate launch', (ROOT / "docs/running.md").read_text()))
    with training(folder, f"run{SLOW}", *EVALUATES, processes=2, profile="fsdp_cpu", shell=shell) as now:
        now.reach("run", 3)
        job = [psutil.Process(now.process.pid), now.rank(0), now.rank(1)]
        assert len({process.pid for process in job}) == 3
        for process in job:
            process.send_signal(signal.SIGUSR1)
        now.wait_for(lambda: now.status("run") == "preempted")
        leave_evaluation(now, 0)
        assert now.process.wait(60) == 0, now.output()
        yield now


def leave_evaluation(now, rank: int) -> None:
    """Ask a rank to stop during an evaluation with four micro-batches of three seconds left."""
    now.wait_for((now.folder / "slow-evaluates").exists)
    began = time.monotonic()
    now.rank(rank).send_signal(signal.SIGTERM)
    now.wait_for(lambda: now.status("slow") == "preempted")
    assert time.monotonic() - began < 9, now.output()


def went_on_in_its_evaluation(folder) -> None:
    """Check that a run stopped during its evaluation and resumed equals one that never stopped, in scores and lines."""
    assert scores(folder / "slow") == scores(folder / "evaluated") and len(scores(folder / "evaluated")) == 4
    assert steps(folder / "slow") == steps(folder / "evaluated") and len(steps(folder / "evaluated")) == 40
    files = [(folder / run / "model" / "model.safetensors").read_bytes() for run in ("slow", "evaluated")]
    assert files[0] == files[1]
    record = json.loads((folder / "slow" / "run.json").read_text())
    assert record["status"] == "finished" and [launch["step"] for launch in record["launches"]] == [0, 10]


@pytest.mark.parametrize("name", ["SIGUSR1", "SIGINT"])
def test_a_signal_on_any_rank_stops_all_after_the_same_step(stopped, name):
    """They save there, print so, and end with status 0: the script goes on with the next run."""
    run = stopped.folder / name
    made = len(steps(run))
    assert 6 <= made < 40
    assert [path.name for path in (run / "checkpoints").iterdir()] == [f"step-{made:08d}"]
    assert json.loads((run / "run.json").read_text())["step"] == made
    assert f"stopped after step {made} of 40; the same command goes on after step {made}" in stopped.output()


def test_what_was_stopped_by_a_signal_goes_on_bitwise(stopped):
    assert "resuming" in stopped.output()
    assert (
        steps(stopped.folder / "SIGTERM") == steps(stopped.folder / "whole")
        and len(steps(stopped.folder / "whole")) == 40
    )
    files = [(stopped.folder / run / "model" / "model.safetensors").read_bytes() for run in ("SIGTERM", "whole")]
    assert files[0] == files[1]


def test_an_evaluation_is_left_at_once_and_made_after_the_resume(stopped):
    """Its step is saved without scores; under DDP, ranks do not wait for each other in an evaluation."""
    went_on_in_its_evaluation(stopped.folder)


def test_an_evaluation_is_left_where_every_pass_is_a_collective(sharded):
    went_on_in_its_evaluation(sharded.folder)


def test_a_rank_that_hangs_is_shown(stopped):
    """Every rank's stacks with its step, the status of the launcher and of the folder."""
    assert stopped.process.returncode != 0
    for rank in (0, 1):
        assert f"stacks of rank {rank}, step 5:" in stopped.output()
    assert stopped.output().count("tests/laws/stopped.py") >= 2
    run = json.loads((stopped.folder / "hang" / "run.json").read_text())
    assert run["status"] == "failed" and "no progress for 2 s (--run.timeout)" in run["error"]


def test_a_rank_that_hangs_leaves_its_last_collectives(stopped):
    """Canary, torch 2.11 to 2.13: what the flight recorder has for gloo; for NCCL, torch's own tool compares ranks."""
    folder = stopped.folder / "hang" / "collectives"
    assert f"the last collectives of each rank are in {folder}\n" in stopped.output()
    for rank in (0, 1):
        told = pickle.loads((folder / f"rank_{rank}").read_bytes())
        assert told["entries"] and told["entries"][-1]["profiling_name"].startswith("gloo:")


def test_sigusr1_to_the_whole_job(sharded):
    """The run saves."""
    made = len(steps(sharded.folder / "run"))
    assert sharded.status("run") == "preempted" and made < 40
    assert (sharded.folder / "run" / "checkpoints" / f"step-{made:08d}").is_dir()


def test_a_launcher_of_one_process_that_gets_sigterm(tmp_path):
    """accelerate's launcher does not stop its child, which still stops after a step and saves."""
    with training(tmp_path, f"run{SLOW}") as now:
        now.reach("run", 3)
        child = now.rank(0)
        now.process.terminate()
        child.wait(10)
        assert now.process.wait(10) in (0, 128 + signal.SIGTERM, -signal.SIGTERM), now.output()
        made = len(steps(tmp_path / "run"))
        assert now.status("run") == "preempted" and made < 40
        assert (tmp_path / "run" / "checkpoints" / f"step-{made:08d}").is_dir()


def test_killed_ranks_and_launchers(stopped, tmp_path):
    """With --max_restarts, a killed rank is restarted and the run resumes; all ranks end with a killed launcher."""
    with training(tmp_path, f"run{SLOW}:--run.save-every:2", processes=2, more=["--max_restarts", "1"]) as now:
        now.reach("run", 5)
        began, before = time.monotonic(), now.rank(1)
        before.kill()
        now.wait_for(lambda: "resuming" in now.output())
        assert time.monotonic() - began < 25  # seconds; torchrun would kill the other rank after 30
        now.reach("run", 9)
        ranks = [now.rank(0), now.rank(1)]
        for rank in ranks:
            rank.suspend()  # so that they cannot notice it themselves
        now.process.kill()
        psutil.wait_procs(ranks, timeout=5)
        assert not any(rank.is_running() and rank.status() != psutil.STATUS_ZOMBIE for rank in ranks)
    result = launch("ddp_cpu", 2, SCRIPT, tmp_path, "run")
    assert result.status == 0, result.output
    assert steps(tmp_path / "run") == steps(stopped.folder / "whole") and len(steps(tmp_path / "run")) == 40


@contextmanager
def program(folder, run):
    """Run stopped.py without a launcher, in a separate process group, until it is in a step."""
    words = [sys.executable, SCRIPT, folder, run]
    process = subprocess.Popen(
        words,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        end = time.monotonic() + 60
        while not (folder / "run" / "run.json").exists() and time.monotonic() < end:
            time.sleep(0.02)
        time.sleep(1)
        yield process
    finally:
        kill_tree(process.pid)


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", pytest.param("SIGUSR1", marks=pytest.mark.exhaustive)])
def test_processes_that_load_data_leave_signals_to_the_run(tmp_path, name):
    """A terminal's Ctrl-C, torchrun's SIGTERM and SLURM's signals reach all processes of a run."""
    with program(tmp_path, "run@0.3:--run.workers:2") as process:
        assert len(psutil.Process(process.pid).children()) == 2
        os.killpg(process.pid, getattr(signal, name))
        status, said = process.wait(20), process.stderr.read()
    assert status == 75 and "Traceback" not in said, said
    made = len(steps(tmp_path / "run"))
    assert json.loads((tmp_path / "run" / "run.json").read_text())["status"] == "preempted" and made < 40
    assert (tmp_path / "run" / "checkpoints" / f"step-{made:08d}").is_dir()


def test_ctrl_c_twice_leaves_at_once(tmp_path):
    """After the first Ctrl-C a plain program finishes its step; after the second it ends at once."""
    with program(tmp_path, "run@5") as process:
        process.send_signal(signal.SIGINT)
        time.sleep(0.5)
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        assert process.wait(2) == 130
        assert "Ctrl-C again leaves at once" in process.stderr.read()
        assert json.loads((tmp_path / "run" / "run.json").read_text())["status"] == "preempted"
