"""Law 4 under a real Slurm, two nodes on this machine: whatever stops a job, its run ends with the same bits.

In exact mode, as the run that nobody touched; with the job files that `submit` writes.
"""

import sys
import time
from pathlib import Path

import pytest
from support.launching import ROOT, python_path, run, steps, weights
from support.slurm import slurm

pytestmark = pytest.mark.exhaustive
TOY = ROOT / "tests" / "laws" / "toy.py"
EXACT = ["--run.exact", "true", "--run.save-every", "5"]
WORDS = ["submit", "slurm", TOY, "--profile", "ddp_cpu:1", "--nodes", "2", *EXACT]


@pytest.fixture(scope="module")
def cluster():
    with slurm() as cluster:
        yield cluster


@pytest.fixture(scope="module")
def untouched(tmp_path_factory):
    """Train alone, on one process."""
    folder = tmp_path_factory.mktemp("untouched") / "run"
    result = run([sys.executable, TOY, *EXACT, "--run.dir", folder], env={"PYTHONPATH": python_path(ROOT)})
    assert result.status == 0, result.output
    return folder


class Submitted:
    """A job of the toy recipe, whose steps last some seconds more."""

    def __init__(self, cluster, folder: Path, *words, pause: float = 0.2):
        self.cluster, self.folder, self.words, self.pause = cluster, folder, words, pause
        self.run = folder / "a run $(false)"
        self.job = self.submit().split("submitted as job ")[1].split()[0]

    def submit(self) -> str:
        variables = {"PYTHONPATH": python_path(ROOT), "PAUSE": str(self.pause), **self.cluster.variables}
        words = [sys.executable, "-m", "app", *WORDS, "--run.dir", self.run, *self.words]
        result = run(words, cwd=self.folder, env=variables)
        assert result.status == 0, result.output
        return result.output

    def log(self) -> str:
        return "".join(file.read_text() for file in self.folder.glob("jobs/*.log"))

    def reach(self, step: int) -> None:
        file = self.run / "metrics.jsonl"
        self.cluster.wait_for(lambda: file.exists() and f'"step": {step},' in file.read_text(), 90)

    def finish(self, untouched: Path, seconds: float = 150) -> None:
        """Wait until the job has ended, and compare the run with the untouched one."""
        ends = ("COMPLETED", "FAILED", "TIMEOUT", "NODE_FAIL", "CANCELLED")
        self.cluster.wait_for(lambda: self.cluster.state(self.job) in ends, seconds)
        assert self.cluster.state(self.job) == "COMPLETED", self.log()
        assert steps(self.run) == steps(untouched) and len(steps(self.run)) == 40
        assert weights(self.run) == weights(untouched)


def test_a_job_that_is_stopped_for_its_time(cluster, untouched, tmp_path):
    """Slurm's signal comes, the run saves, and the job puts itself back into the queue; a second one is not submitted.

    Slurm counts a time limit in minutes, and looks at it now and then: so scancel sends what --signal would.
    """
    job = Submitted(cluster, tmp_path, pause=1)
    job.reach(3)
    assert f"job {job.job} is there already" in job.submit()
    cluster.type("scancel", "--signal=USR1", job.job)
    job.finish(untouched)
    log = job.log()
    assert log.count(f"(status 75): job {job.job} goes back into the queue") == 1 and "resuming" in log


def test_a_job_whose_time_is_up(cluster, untouched, tmp_path):
    """By --time and --signal: of two minutes, one is left when the signal comes, or less; steps take 80 s."""
    job = Submitted(cluster, tmp_path, "--options", "time=2", "signal=USR1@60", pause=2)
    job.finish(untouched, 400)
    assert "(status 75)" in job.log()


def test_a_job_that_is_requeued(cluster, untouched, tmp_path):
    job = Submitted(cluster, tmp_path)
    job.reach(7)
    cluster.type("scontrol", "requeue", job.job)
    job.finish(untouched)


def test_a_job_that_loses_a_node(cluster, untouched, tmp_path):
    job = Submitted(cluster, tmp_path)
    job.reach(12)
    cluster.lose("n2")
    time.sleep(1)
    cluster.wait_for(lambda: cluster.state(job.job) != "RUNNING", 60)
    cluster.back("n2")
    job.finish(untouched)


def test_options_reach_slurm(cluster, tmp_path):
    """Quoted as they are; and those of the command line win."""
    words = [sys.executable, "-m", "app", *WORDS, "--run.dir", tmp_path / "run"]
    more = ["--options", 'comment=a "b" \\ $(c) #d', "ntasks-per-node=1", "begin=now+1hour", "cpus-per-task=3"]
    variables = {"PYTHONPATH": python_path(ROOT), **cluster.variables}
    result = run([*words, *more], cwd=tmp_path, env=variables)
    assert result.status == 0, result.output
    number = result.output.split("submitted as job ")[1].split()[0]
    shown = cluster.type("scontrol", "show", "job", number)
    cluster.type("scancel", number)
    assert 'Comment=a "b" \\ $(c) #d' in shown and "CPUs/Task=3" in shown and "Requeue=1" in shown
