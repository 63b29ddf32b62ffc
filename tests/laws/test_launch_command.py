"""`python -m app launch`: what it prints, with which status it ends, and what signals to it do."""

import json
import signal
import subprocess
import sys
import time
from contextlib import contextmanager

import psutil
import pytest
from support.launching import ROOT, Training, environment, kill_tree, metrics, run, steps

from app import UserError
from app.commands.launch.command import main_of_words
from app.launching import accelerate_launch
from laws.small import SMALL

RECIPE = ROOT / "recipes" / "cls.py"
SCRIPT = ROOT / "tests" / "laws" / "stopped.py"
LAUNCH = [sys.executable, "-m", "app", "launch"]
QUICK = ["--run.steps", 3, "--run.global-batch", 8, "--run.micro-batch", 4, "--run.trackers"]


@contextmanager
def launched(folder, *words, python=sys.executable):
    """Launch stopped.py; at the end, no process of it is left."""
    started = Training(folder, [python, *LAUNCH[1:], *words])
    try:
        yield started
    finally:
        started.end()


def ranks(folder):
    return [psutil.Process(int(file.read_text())) for file in sorted(folder.glob("pid-*"))]


def test_two_launches_at_once_on_one_machine(tmp_path):
    """Each has a port of its own, and prints what a run prints, and nothing else.

    Three steps may teach a model nothing, which is said. One ends where it was to stop, with status 0 too.
    """
    started = []
    for name, more in (("a", []), ("b", ["--run.stop-at", 2])):
        words = [
            sys.executable,
            *LAUNCH[1:],
            "ddp_cpu:2",
            ROOT / "tests" / "laws" / "toy.py",
            *QUICK,
            "--run.dir",
            tmp_path / name,
            *more,
        ]
        words = [str(word) for word in words]
        started.append(
            subprocess.Popen(
                words, cwd=ROOT, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
        )
    try:
        for name, process in zip(("a", "b"), started, strict=True):
            output, errors = process.communicate(timeout=120)
            others = [line for line in errors.splitlines() if not line.startswith("warning: eval")]
            assert (process.returncode, others) == (0, []), errors
            record = json.loads((tmp_path / name / "run.json").read_text())
            assert record["layout"]["processes"] == 2 and metrics(tmp_path / name)
            assert record["status"] == ("finished" if name == "a" else "preempted")
            assert ("finished: 3 steps" if name == "a" else "stopped after step 2 of 3") in output
    finally:
        for process in started:
            kill_tree(process.pid)


def test_a_mistake_is_one_line(tmp_path, rows):
    words = [*SMALL["cls"].flags(rows), *QUICK, "--run.dir", tmp_path / "run", "--data.label", "colour"]
    result = run([*LAUNCH, "fsdp_cpu", RECIPE, *words])
    assert result.status == 2
    (line,) = result.output.splitlines()
    assert line.startswith("error: --data.label colour")


def test_ctrl_c_to_the_launcher(tmp_path):
    """Once: the run saves, and the script goes on; twice: all ranks leave at once, and are not started again."""
    words = ["ddp_cpu", "--max_restarts", "2", SCRIPT, tmp_path, "once@0.1", "twice@5"]
    with launched(tmp_path, *words, python=sys.executable) as now:
        now.reach("once", 3)
        now.process.send_signal(signal.SIGINT)
        now.wait_for(lambda: now.status("once") == "preempted")
        made = len(steps(tmp_path / "once"))
        assert 3 <= made < 40 and (tmp_path / "once" / "checkpoints" / f"step-{made:08d}").is_dir()
        now.wait_for(lambda: now.status("twice") == "running")
        time.sleep(1)
        for _ in range(2):
            now.process.send_signal(signal.SIGINT)
            time.sleep(0.5)
        assert now.process.wait(10) == 130, now.output()
        assert not any(psutil.pid_exists(int(file.read_text())) for file in tmp_path.glob("pid-*"))
        assert "Traceback" not in now.output() and "error" not in now.output(), now.output()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_before_any_rank_listens(tmp_path, number):
    """Ranks end at once, without a traceback of what they were importing."""
    script = tmp_path / "importing.py"
    note = "open(sys.argv[1] + '/pid-' + os.environ['RANK'], 'w').write(str(os.getpid()))"
    script.write_text(f"import os, sys, time\n{note}\ntime.sleep(60)")
    with launched(tmp_path, "ddp_cpu", "--max_restarts", "2", script, tmp_path) as now:
        now.wait_for(lambda: len(ranks(tmp_path)) == 2)
        now.process.send_signal(number)
        assert now.process.wait(20) == 128 + number, now.output()
        assert now.output() == ""


def test_as_the_first_process_of_a_container(tmp_path):
    """Where the launcher, and what it becomes, is process 1, as under `docker run`, or its child."""
    head = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount-proc"]
    if run([*head, "true"]).status:
        pytest.skip("unshare is not allowed here")
    for name, profile in {"one": "cpu", "two": "ddp_cpu"}.items():
        result = run([*head, *LAUNCH, profile, SCRIPT, tmp_path, name])
        assert result.status == 0, result.output
        assert json.loads((tmp_path / name / "run.json").read_text())["status"] == "finished"
    result = run([*head, "bash", "-c", f"{sys.executable} -m app launch cpu {SCRIPT} {tmp_path} shell; true"])
    assert json.loads((tmp_path / "shell" / "run.json").read_text())["status"] == "finished", result.output


def test_a_rank_that_is_killed(tmp_path):
    """The others end with it, and the launcher says which one it was, and by what."""
    with launched(tmp_path, "ddp_cpu", SCRIPT, tmp_path, "run@0.2", python=sys.executable) as now:
        now.reach("run", 2)
        both = ranks(tmp_path)
        both[1].kill()
        assert now.process.wait(30) == 137, now.output()
        assert not any(rank.is_running() and rank.status() != psutil.STATUS_ZOMBIE for rank in both)
        told = [line for line in now.output().splitlines() if "error" in line]
        assert told == ["error: rank 1 was ended by SIGKILL: the machine may have run out of memory"]
        assert "Traceback" not in now.output(), now.output()


def test_one_process_is_the_run_itself(tmp_path):
    with launched(tmp_path, "cpu", SCRIPT, tmp_path, "run@0.1") as now:
        now.reach("run", 3)
        (rank,) = ranks(tmp_path)
        assert rank.pid == now.process.pid and "launch" not in rank.cmdline()
        now.process.terminate()
        assert now.process.wait(20) == 75 and now.status("run") == "preempted"


@pytest.mark.parametrize("on", ["the launcher", pytest.param("a rank", marks=pytest.mark.exhaustive)])
def test_a_preempted_run_of_several_processes_ends_with_75(tmp_path, on):
    """Wherever the signal has come."""
    with launched(tmp_path, "ddp_cpu", SCRIPT, tmp_path, "run@0.1", python=sys.executable) as now:
        now.reach("run", 3)
        (now.process if on == "the launcher" else ranks(tmp_path)[1]).send_signal(signal.SIGTERM)
        assert now.process.wait(30) == 75 and now.status("run") == "preempted", now.output()


@pytest.mark.parametrize(
    "words, told",
    [
        (["ddp_cpu"], "there is no recipe"),
        (["ddp_cpu:2", "recipes/gone.py"], "recipes/gone.py: there is no such file"),
        (["dpp_cpu", "recipes/cls.py"], r"the profile dpp_cpu: No such file or directory; .*did you mean ddp_cpu\?"),
        (["ddp_cpu", "--run.steps", "5", "recipes/cls.py"], "--run.steps: flags of the recipe come after it"),
        (["ddp_cpu:0", "recipes/cls.py"], "the profile ddp_cpu:0: 0 processes"),
        (["cpu:3", "recipes/cls.py"], "starts one process, not 3: take ddp_cpu:3"),
        (["ddp:2", "recipes/cls.py"], "GPU"),
        (["cpu", "--num_processes", "2", "recipes/cls.py"], "--num_processes: name the profile and its processes"),
        (["--config_file", "x.yaml", "recipes/cls.py"], "--config_file: name the profile"),
        (["ddp_cpu", "--num_machines", "two", "recipes/cls.py"], "--num_machines two: give the number"),
        (["ddp_cpu:3", "--num_machines=2", "recipes/cls.py"], "3 processes on 2 machines"),
    ],
)
def test_words_that_start_nothing(monkeypatch, words, told):
    monkeypatch.chdir(ROOT)
    with pytest.raises(UserError, match=told):
        main_of_words(words)


def test_without_words_it_says_how(capsys):
    assert main_of_words([]) == main_of_words(["--help"]) == 0
    assert "[PROFILE[:N]]" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words", [[RECIPE, "--help"], ["cpu", RECIPE, "-h"], ["cpu", RECIPE, "--optim.lr", "1", "--help"]]
)
def test_help_after_the_recipe_is_the_recipes(monkeypatch, words):
    asked = []
    monkeypatch.setattr(accelerate_launch, "launch", lambda profile, words: asked.append(words) or 0)
    assert main_of_words([str(word) for word in words]) == 0
    assert asked[0][0] == str(RECIPE) and asked[0][-1] in ("-h", "--help")


def piped(words, reader, folder):
    """Run a command with its output in a pipe to another; return the command's status and what both print."""
    command = " ".join(f"'{word}'" for word in words)
    result = run(["bash", "-c", f"{{ {command} 2>&1; echo status $? >{folder}/status; }} | {reader}"])
    return (folder / "status").read_text().split()[1], result.output


def test_a_reader_that_leaves_changes_nothing(tmp_path, rows):
    """A run whose output goes to `head` is finished all the same; and a help text that is cut off ends quietly."""
    recipe = [sys.executable, RECIPE, *SMALL["cls"].flags(rows), *QUICK, "--run.log-every", 1]
    status, output = piped([*recipe, "--run.dir", tmp_path / "run"], "head -n 1", tmp_path)
    assert (status, len(output.splitlines())) == ("0", 1)
    assert json.loads((tmp_path / "run" / "run.json").read_text())["status"] == "finished"
    status, output = piped([sys.executable, "-m", "app", "nosuch"], "true", tmp_path)
    assert (status, output) == ("2", "")
    for words in ([RECIPE, "--help"], ["-m", "app", "runs", tmp_path], ["-m", "app"]):
        status, output = piped([sys.executable, *words], "true", tmp_path)
        assert (status, output) == ("0", ""), words


def test_nothing_waits_where_output_is_unbuffered(tmp_path):
    """As in containers: what was printed before a process is killed is there."""
    code = "import os, sys; from app.launching.dropped_output import outlive_readers; outlive_readers()\n"
    code += "print('out'); print('err', file=sys.stderr); os._exit(3)"
    result = run([sys.executable, "-u", "-c", code])
    assert (result.status, sorted(result.output.split())) == (3, ["err", "out"])
