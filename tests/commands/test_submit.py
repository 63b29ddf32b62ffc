"""python -m app submit: what stands in job files, what is refused, and how the engines' own programs are called."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from support.launching import ROOT

from app import UserError
from app.__main__ import main
from app.commands.submit import job_file

TOY = str(ROOT / "tests" / "laws" / "toy.py")
# Names that mean something to a shell, to YAML or to Kubernetes, and letters that do not print.
NASTY = "a b'c\"d $(touch harm) `touch harm` $HOME $$ $(MACHINE) \\ {{name}} # : - \n\t*é\x01\u2028😀 {x} %j"
IMAGE = ["--image", "lab/train:1", "--volume", "runs:/runs"]
ENGINES = ("slurm", "kubernetes", "skypilot")


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """Type commands in an empty folder, on a machine that has none of the engines' programs but those of `fake`."""
    monkeypatch.chdir(tmp_path)
    programs = tmp_path / "programs"
    programs.mkdir()
    monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")
    monkeypatch.setattr("app.commands.submit.engine.shutil.which", lambda name: (programs / name).exists() or None)
    return tmp_path


def fake(name: str, script: str = "") -> None:
    """Put a program of an engine in the place of the real one: it notes its words, a list in JSON a line."""
    file = Path("programs", name)
    note = f"import json, sys; open({str(Path('typed').resolve())!r}, 'a').write(json.dumps(sys.argv[1:]) + chr(10))"
    quoted = note.replace("'", "'\\''")
    file.write_text(f"#!/bin/bash\n{sys.executable} -c '{quoted}' {name} \"$@\"\n{script}\n")
    file.chmod(0o755)


def typed() -> list[list[str]]:
    """List what has been typed to the fakes."""
    file = Path("typed")
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def submit(*words: str) -> int:
    return main(["submit", *words])


def of_engine(engine: str) -> list[str]:
    """Return the options that an engine needs, and a folder that outlives its machines."""
    if engine == "kubernetes":
        return [*IMAGE, "--run.dir", f"/runs/{NASTY}"]
    return ["--run.dir", f"s3://bucket/{NASTY}" if engine == "skypilot" else NASTY]


def written(engine: str) -> Path:
    """Write a job file of two nodes with a folder's nasty name in it."""
    assert submit(engine, TOY, "--profile", "ddp_cpu:2", "--nodes", "2", "--dry-run", *of_engine(engine), *AWKWARD) == 0
    (file,) = Path("jobs").iterdir()
    return file


AWKWARD = ["--run.steps", "7"]


def run_in_bash(script: str, **variables: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        ["bash", "-c", script], env={**os.environ, **variables}, capture_output=True, text=True, timeout=30
    )


def started(words: list[str]) -> list[str]:
    """Return what the launcher is told, from the number of machines on."""
    return words[words.index("--num_machines") :]


def test_words_reach_the_launcher_as_they_are_under_slurm(here, monkeypatch):
    """The job file runs with an srun that starts the second node's task alone."""
    fake("python", "[ $1 != -c ] || echo 10.0.0.1")
    with monkeypatch.context() as patch:
        patch.setattr(sys, "executable", str(here / "programs" / "python"))
        file = written("slurm")
    fake("srun", 'while [ "$1" != bash ]; do shift; done; SLURM_NODEID=1 exec "$@"')
    fake("scontrol", "[ $2 = hostnames ] && printf 'n1\\nn2\\n' || echo NodeName=$4 NodeAddr=10.0.0.2 NodeHostName=$4")
    done = run_in_bash(f"source {file}", SLURM_JOB_ID="20123", SLURM_JOB_NODELIST="n[1-2]")
    assert done.returncode == 0, done.stderr
    asked, words = (words for words in typed() if words[0] == "python")
    assert words[1:4] == ["-m", "app", "launch"] and words[4] == f"{ROOT / 'accelerate_configs' / 'ddp_cpu.yaml'}:4"
    meeting = ["--machine_rank", "1", "--main_process_ip", "10.0.0.1", "--main_process_port", "10123"]
    assert started(words) == ["--num_machines", "2", *meeting, TOY, "--run.dir", NASTY, *AWKWARD]
    assert not Path("harm").exists()
    _, flag, code, second = asked
    assert (flag, second) == ("-c", "10.0.0.2")
    assert subprocess.check_output([sys.executable, "-c", code, "127.0.0.1"], text=True) == "127.0.0.1\n"


def in_kubernetes(word: str, variables: dict[str, str]) -> str:
    """Replace $(NAME) as Kubernetes does in a container's command."""
    made, position = "", 0
    while position < len(word):
        if word[position] == "$" and position + 1 < len(word):
            follows = word[position + 1]
            end = word.find(")", position)
            if follows == "$":
                made, position = made + "$", position + 2
                continue
            if follows == "(" and end > 0:
                name = word[position + 2 : end]
                made, position = made + variables.get(name, f"$({name})"), end + 1
                continue
        made, position = made + word[position], position + 1
    return made


def test_words_reach_the_launcher_as_they_are_under_kubernetes():
    _, job = yaml.safe_load_all(written("kubernetes").read_text())
    (container,) = job["spec"]["template"]["spec"]["containers"]
    words = [in_kubernetes(word, {"MACHINE": "1"}) for word in container["command"]]
    name = job["metadata"]["name"]
    meeting = ["--machine_rank", "1", "--main_process_ip", f"{name}-0.{name}", "--main_process_port", "29500"]
    assert words[:5] == ["python", "-m", "app", "launch", "ddp_cpu:4"]
    assert started(words) == ["--num_machines", "2", *meeting, TOY, "--run.dir", f"/runs/{NASTY}", *AWKWARD]
    assert job["metadata"]["annotations"]["samestep/run"] == f"/runs/{NASTY}"
    assert container["volumeMounts"][1] == {"name": "runs", "mountPath": "/runs"}


def test_words_reach_the_launcher_as_they_are_under_skypilot(here, monkeypatch):
    toy, place = str(Path(TOY).relative_to(ROOT)), "s3://bucket/runs/x"
    flags = ["--run.dir", place, "--run.best", NASTY.replace("\n", " "), *AWKWARD]
    with monkeypatch.context() as patch:
        patch.chdir(ROOT)
        patch.setattr(job_file, "FOLDER", here / "jobs")
        assert submit("skypilot", toy, "--profile", "ddp_cpu:2", "--nodes", "2", "--dry-run", *flags) == 0
    (file,) = Path("jobs").iterdir()
    task = yaml.safe_load(file.read_text())
    fake("python")
    addresses = {"SKYPILOT_NODE_RANK": "1", "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2"}
    done = run_in_bash(task["run"], **addresses)
    assert done.returncode == 0, done.stderr
    ((_, *words),) = typed()
    meeting = ["--machine_rank", "1", "--main_process_ip", "10.0.0.1", "--main_process_port", "29500"]
    assert words[:4] == ["-m", "app", "launch", "ddp_cpu:4"]
    assert started(words) == ["--num_machines", "2", *meeting, toy, *flags]
    assert task["resources"]["job_recovery"]["recover_on_exit_codes"] == [75] and not Path("harm").exists()


@pytest.mark.parametrize(("status", "requeued"), [(75, True), (138, True), (0, False), (1, False), (143, False)])
def test_a_slurm_job_goes_back_into_the_queue_when_its_run_has_left_early(here, status, requeued):
    file = written("slurm")
    fake("srun", f"exit {status}")
    fake("scontrol")
    done = run_in_bash(
        f"source {file}", PATH=f"{here}/programs:/usr/bin:/bin", SLURM_JOB_ID="12", SLURM_JOB_NODELIST="n1"
    )
    assert (["scontrol", "requeue", "12"] in typed()) == requeued
    assert done.returncode == (0 if requeued else status)


@pytest.mark.parametrize(
    ("options", "per_node", "line"),
    [
        (["ddp_cpu:2", "--nodes", "2"], 2, "ddp_cpu.yaml:4 --num_machines 2"),
        (["ddp", "--nodes", "2", "--run.micro-batch", "1"], 8, "#SBATCH --gpus-per-node=8"),
        (["ddp_2nodes", "--nodes", "2", "--run.micro-batch", "1"], 8, "ddp_2nodes.yaml:16 --num_machines 2"),
        (["ddp_2nodes:4", "--nodes", "1"], 2, "ddp_2nodes.yaml:2 --num_machines 1"),
    ],
)
def test_a_profile_says_what_each_machine_has(options, per_node, line):
    assert submit("slurm", TOY, "--run.global-batch", "16", "--dry-run", "--profile", *options) == 0
    text = Path("jobs/toy.sbatch").read_text()
    assert f"#SBATCH --cpus-per-task={per_node}\n" in text and line in text


def test_options_of_sbatch(capsys):
    more = ["partition=gpu,debug", "exclusive", 'comment=a "b" \\ $(c)', "signal=USR1@300"]
    assert submit("slurm", TOY, "--profile", "ddp_cpu", "--dry-run", "--options", *more) == 0
    lines = Path("jobs/toy.sbatch").read_text().splitlines()
    expected = ["--partition=gpu,debug", "--exclusive", '--comment="a \\"b\\" \\\\ $(c)"', "--signal=USR1@300"]
    assert [line for line in lines if line.startswith("#SBATCH")][-4:] == [f"#SBATCH {each}" for each in expected]
    printed = capsys.readouterr().out
    assert "jobs/toy.sbatch: DDP x2, fp32, for the run in runs/toy" in printed
    assert f"what it will be: python -m app plan {TOY} --profile ddp_cpu:2\n" in printed


def test_sbatch_is_asked_first_and_typed_once(here, capsys):
    """A dry run submits nothing; a job that waits or runs is not submitted again."""
    fake("sbatch", 'case "$1" in --test-only) echo "would start" >&2;; *) echo 12;; esac')
    fake("squeue")
    words = ["slurm", TOY, "--profile", "ddp_cpu:2"]
    assert submit(*words, "--dry-run") == 0
    assert typed() == [["sbatch", "--test-only", "jobs/toy.sbatch"]] and "would start" in capsys.readouterr().out
    assert submit(*words) == 0
    printed = capsys.readouterr().out
    assert "submitted as job 12" in printed and "scancel 12" in printed and "tail -f jobs/toy-12.log" in printed
    fake("squeue", f"echo '7 /elsewhere'; echo '12 {here}'")
    assert submit(*words) == 0 and "job 12 is there already" in capsys.readouterr().out
    assert [words for words in typed() if words[0] == "sbatch" and "--parsable" in words] == [
        ["sbatch", "--parsable", "jobs/toy.sbatch"]
    ]


def test_what_an_engine_refuses_is_said(here):
    fake("squeue")
    fake("sbatch", "echo noise >&2; echo 'sbatch: error: invalid partition' >&2; exit 1")
    with pytest.raises(UserError, match=r"^sbatch --parsable refuses: sbatch: error: invalid partition"):
        submit("slurm", TOY, "--profile", "ddp_cpu:2")


def kubectl_that_has(status: dict, run: str = "/runs/x") -> None:
    job = {"metadata": {"annotations": {"samestep/run": run}}, "status": status}
    fake("kubectl", f"[ $1 != get ] || echo '{json.dumps(job)}'")


@pytest.mark.parametrize(
    ("status", "verbs"),
    [
        ({"active": 2}, ["get"]),
        ({"conditions": [{"type": "Complete", "status": "True"}]}, ["get", "delete", "apply"]),
        ({"conditions": [{"type": "Failed", "status": "True"}]}, ["get", "delete", "apply"]),
        (None, ["get", "apply"]),
    ],
)
def test_a_job_that_has_ended_makes_room_for_the_next(status, verbs, capsys):
    fake("kubectl") if status is None else kubectl_that_has(status)
    assert submit("kubernetes", TOY, "--profile", "ddp_cpu", *IMAGE, "--run.dir", "/runs/x") == 0
    assert [words[1] for words in typed()] == verbs and "kubectl delete job x" in capsys.readouterr().out


def test_a_job_of_another_run_is_left_alone():
    kubectl_that_has({"active": 1}, run="/runs/other/x")
    with pytest.raises(UserError, match="has a job x that is not this run's: give another --name"):
        submit("kubernetes", TOY, "--profile", "ddp_cpu", *IMAGE, "--run.dir", "/runs/x")


def test_without_an_engine_it_says_what_to_type(capsys):
    assert submit("kubernetes", TOY, "--profile", "ddp_cpu", *IMAGE, "--run.dir", "/runs/x") == 0
    assert "there is no kubectl here: where it is, type kubectl apply -f jobs/x.kubernetes" in capsys.readouterr().out


def test_skypilot_is_called(here, capsys, monkeypatch):
    fake("sky")
    (here / "mine.py").write_text(Path(TOY).read_text())
    place = ["--run.dir", "s3://bucket/runs/My_run"]
    assert (
        submit("skypilot", "mine.py", "--profile", "ddp:8", "--accelerators", "H100", "--run.micro-batch", "1", *place)
        == 0
    )
    file = "jobs/my-run.skypilot.yaml"
    assert typed() == [["sky", "jobs", "launch", "--yes", "--detach-run", "--name", "my-run", file]]
    assert yaml.safe_load(Path(file).read_text())["resources"]["accelerators"] == "H100:8"
    assert "sky jobs cancel --name my-run" in capsys.readouterr().out


def test_a_template_of_ones_own():
    Path("mine").write_text("#!/bin/bash\n#SBATCH --gres=gpu:a100\n{{options}}\nsrun {{launch}} -- {{training}}\n")
    assert submit("slurm", TOY, "--profile", "ddp_cpu", "--dry-run", "--template", "mine", "--run.steps", "3") == 0
    text = Path("jobs/toy.sbatch").read_text()
    assert text.splitlines()[2] == "#SBATCH --gres=gpu:a100" and text.endswith(f" -- {TOY} --run.steps 3\n")
    Path("mine").write_text("{{nmae}}")
    with pytest.raises(UserError, match=r"--template mine: \{\{nmae\}\} is not known; .*did you mean name\?"):
        submit("slurm", TOY, "--profile", "ddp_cpu", "--dry-run", "--template", "mine")


def test_a_job_file_of_another_run_is_not_replaced():
    assert submit("slurm", TOY, "--profile", "ddp_cpu", "--dry-run", "--run.dir", "a/x") == 0
    assert submit("slurm", TOY, "--profile", "ddp_cpu", "--dry-run", "--run.dir", "a/x", "--run.steps", "5") == 0
    assert "--run.steps 5" in Path("jobs/x.sbatch").read_text()
    for words in (["--run.dir", "b/x"], ["--run.dir", "a/x", "--name", "own"]):
        Path("jobs/own.sbatch").write_text("#!/bin/bash\n")  # a user's
        with pytest.raises(UserError, match=r"is not a job of the run .*: give another --name"):
            submit("slurm", TOY, "--profile", "ddp_cpu", "--dry-run", *words)
    assert Path("jobs/own.sbatch").read_text() == "#!/bin/bash\n"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["slrum"], r"slrum: give one of .*did you mean slurm\?"),
        (["slurm", "--profile", "ddq"], "--profile ddq: .*did you mean"),
        (["slurm"], "--profile is missing"),
        (["slurm", "--profile", "cpu", "--nodes", "2"], "starts one process, not 2"),
        (["slurm", "--profile", "ddp_cpu:3", "--nodes", "2"], "6 processes for 4 micro-batches"),
        (["slurm", "--profile", "zero2:1", "--nodes", "2"], "deepspeed_multinode_launcher pdsh: .*write standard"),
        (["slurm", "--profile", "ddp_cpu", "--nodes", "0"], "--nodes 0"),
        (["slurm", "--profile", "ddp_cpu", "--options", "Partition gpu"], "--options Partition gpu"),
        (["slurm", "--profile", "ddp_cpu", "--options", "comment=a\nb"], "--options comment"),
        (["slurm", "--profile", "ddp_cpu", "--image", "x"], "--image is for kubernetes"),
        (["slurm", "--profile", "ddp_cpu", "--name", "a b"], "--name a b: .*such as a-b"),
        (["slurm", "--profile", "ddp_cpu", "--run.log-every", "0"], "--run.log-every 0"),
        (["slurm", "--profile", "ddp_cpu", "--run.dir", "s3://me:word@b/x"], "a password or a signature"),
        (["slurm", "--profile", "ddp_cpu", "--run.dir", "https://b/x?a=1&sig=abc"], "a password or a signature"),
        (["kubernetes", "--profile", "ddp_cpu"], "--image is missing"),
        (["kubernetes", "--profile", "ddp_cpu", "--image", "x"], "--run.dir runs/toy: it would be lost with the pod"),
        (
            ["kubernetes", "--profile", "ddp_cpu", *IMAGE, "--run.dir", "/runs/../x"],
            "lost with the pod: give /runs/NAME",
        ),
        (["kubernetes", "--profile", "ddp_cpu", *IMAGE[:3], "runs"], "--volume runs: give CLAIM:/FOLDER"),
        (["kubernetes", "--profile", "ddp_cpu", *IMAGE, "--secret", "KEY=word"], "--secret KEY=word: give the name"),
        (["skypilot", "--profile", "ddp_cpu"], "--run.dir runs/toy: it would be lost with the machine"),
        (["skypilot", "--profile", "ddp:4", "--run.dir", "s3://b/x"], "--accelerators : name the kind"),
        (["skypilot", "--profile", "ddp_cpu", "--run.dir", "s3://b/x"], "only the current folder is copied"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_written(words, told):
    with pytest.raises(UserError, match=told):
        submit(words[0], TOY, *words[1:], "--dry-run")
    assert not Path("jobs").exists()


@pytest.mark.parametrize("words", [["--run.stepz", "3"], ["--run.steps", "three"]])
def test_a_flag_that_the_recipe_does_not_know(words, capsys):
    with pytest.raises((SystemExit, UserError)):
        submit("slurm", TOY, "--profile", "ddp_cpu", "--dry-run", *words)
    assert not Path("jobs").exists()


@pytest.mark.parametrize("word", ["", "plain", "it's", NASTY, "\x7f\x85", "$'\\x'", "-n", "~", "!x"])
def test_quoting(word):
    done = run_in_bash(f"printf '%s' {job_file.in_shell([word])}")
    assert done.stdout == word
    assert yaml.safe_load(job_file.in_yaml(word)) == word and "\n" not in job_file.in_shell([word]) + job_file.in_yaml(
        word
    )
