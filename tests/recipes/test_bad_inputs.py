"""What bad input gets: one message that names the field, the value and the fix; status 2; nothing left behind."""

import json
import socket
import sys
import time

import pytest
from support.damage import contents
from support.launching import PROFILES, ROOT, launch, metrics, python, run, train_many

from app import UserError, parse
from app.distributed.environment import SILENCE
from laws.many import load

RECIPE = ROOT / "recipes" / "cls.py"
TOY = ROOT / "tests" / "laws" / "toy.py"
QUICK = ["--run.trackers", "--scratch.width", 32, "--scratch.vocab", 300, "--data.max-length", 64]


def train(flags, *more):
    """Run the recipe in this process."""
    recipe = load(RECIPE)
    return recipe.main(parse(recipe.Config, [str(word) for word in (*flags, *more)]))


@pytest.fixture(scope="module")
def refused(tmp_path_factory, rows, data_cache):
    """Give a function that starts the recipe with bad flags, and returns what it says once it has refused properly."""

    def refused(*flags, data=None):
        folder = tmp_path_factory.mktemp("refused") / "run"
        with pytest.raises(UserError) as refusal:
            train(QUICK, "--data.path", data or rows(101), "--run.dir", folder, *flags)
        assert not folder.exists()
        return str(refusal.value)

    return refused


@pytest.mark.parametrize(
    "flags, words",
    [
        (["--run.globl-batch", 3], ["--run.globl-batch", "--run.global-batch"]),
        pytest.param(["--run.steps", "many"], ["--run.steps", "many"], marks=pytest.mark.exhaustive),
        (["--data.label", "colour"], ["error: --data.label colour", "text, label"]),
    ],
)
def test_the_program_says_it_once_and_ends_with_status_2(tmp_path, rows, flags, words):
    result = python(RECIPE, *QUICK, "--data.path", rows(101), "--run.dir", tmp_path / "run", *flags)
    assert result.status == 2 and "Traceback" not in result.output
    assert not (tmp_path / "run").exists()
    for word in words:
        assert result.output.count(word) == 1 or not word.startswith("error")
        assert word in result.output


@pytest.mark.parametrize(
    "flags, words",
    [
        (["--run.global-batch", 0], ["--run.global-batch 0", "at least 1"]),
        (["--run.micro-batch", -1], ["--run.micro-batch -1", "at least 1"]),
        (["--run.epochs", 0], ["--run.epochs 0", "--run.steps"]),
        (["--optim.lr", 0], ["--optim.lr 0"]),
        (["--optim.name", "AdamV"], ["AdamV", "Adam"]),
        (["--run.stop-at", 999], ["--run.stop-at 999", "steps"]),
        (["--data.label", "colour"], ["--data.label colour", "text, label"]),
        (["--data.path", "builtin:nothing"], ["builtin:nothing", "builtin:stdlib"]),
        (["--data.path", "no/such/file.csv"], ["no/such/file.csv"]),
        (["--run.resume", "must"], ["--run.resume must", "no checkpoint"]),
        (["--config", "no-such-file.yaml"], ["no-such-file.yaml"]),
        (["--scratch.heads", 3], ["--scratch.heads 3", "--scratch.width 32"]),
        (["--scratch.heads", 0], ["--scratch.heads 0", "at least 1"]),
        (["--scratch.width", 0], ["--scratch.width 0", "at least 1"]),
        (["--scratch.layers", -1], ["--scratch.layers -1", "at least 1"]),
        (["--scratch.vocab", 100], ["--scratch.vocab 100", "261"]),
        (["--scratch.dropout", 2], ["--scratch.dropout 2.0", "below 1"]),
        (["--scratch.dropout", "nan"], ["--scratch.dropout nan", "must be a finite number"]),
    ],
)
def test_bad_flags(refused, flags, words):
    output = refused(*flags)
    for word in words:
        assert word in output


def test_empty_and_one_sided_data(refused, tmp_path):
    empty = tmp_path / "empty.jsonl"
    empty.touch()
    assert str(empty) in refused(data=empty)
    one_class = tmp_path / "one.jsonl"
    one_class.write_text("".join(json.dumps({"text": f"row {i}", "label": "red"}) + "\n" for i in range(20)))
    assert "red" in refused(data=one_class)


def test_folder_that_cannot_be_written(tmp_path, rows):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"--run\.dir"):
        train(QUICK, "--data.path", rows(101), "--run.dir", tmp_path / "file" / "run")


def errors(output):
    return [line for line in output.splitlines() if line.startswith("error:")]


def test_the_first_process_of_each_machine_speaks_before_the_ranks_meet(rows, tmp_path):
    """A machine that has a trouble of its own would end without a word."""
    for local_rank, times in ((0, 1), (1, 0)):
        env = {"RANK": str(8 + local_rank), "LOCAL_RANK": str(local_rank), "WORLD_SIZE": "16"}
        began = time.monotonic()
        result = run([sys.executable, RECIPE, "--run.epochs", 0, "--run.dir", tmp_path / "run"], env=env)
        assert result.status == 2 and result.output.count("error: --run.epochs") == times
        # A launcher ends all at the first end: the silent one waits until the other one has spoken.
        assert times or time.monotonic() - began > SILENCE


def test_every_rank_fails_with_one_message(tmp_path):
    """Too many processes for the micro-batches are told once."""
    words = [TOY, "--run.dir", tmp_path / "run", "--run.global-batch", 16, "--run.micro-batch", 16]
    result = launch("ddp_cpu", 2, *words)
    assert result.status != 0 and 'File "' + str(TOY) not in result.output
    assert errors(result.output) == [
        "error: 2 processes for 1 micro-batch (global batch 16 = 1 x 16): at most 1 can work; "
        "use --run.micro-batch 8 or a larger --run.global-batch"
    ]
    assert not (tmp_path / "run").exists()


@pytest.mark.exhaustive  # tests/laws/test_launch_command.py has it under FSDP2 and our own launcher
def test_an_error_of_the_main_process_alone_is_told_once(rows, tmp_path):
    words = [RECIPE, "--run.dir", tmp_path / "run", *QUICK, "--data.path", rows(101), "--data.label", "colour"]
    result = launch("ddp_cpu", 2, *words, timeout=60)
    assert len(errors(result.output)) == 1 and "--data.label colour" in errors(result.output)[0]
    assert 'File "' + str(RECIPE) not in result.output
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("profile", "processes"), [pytest.param("gpu", 1, marks=pytest.mark.exhaustive), ("ddp", 2)])
def test_more_gpus_than_there_are(tmp_path, profile, processes):
    import torch

    if torch.accelerator.is_available():
        pytest.skip("this machine has a GPU")
    result = launch(profile, processes, TOY, "--run.dir", tmp_path / "run")
    assert result.status != 0
    assert len(errors(result.output)) == 1 and "this machine has no GPU" in errors(result.output)[0]


@pytest.fixture(scope="module")
def finished(tmp_path_factory, rows, data_cache):
    """Give the folder and flags of a short finished run."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    flags = [*QUICK, "--data.path", rows(101), "--run.steps", 4, "--run.save-every", 2, "--run.dir", folder]
    train_many("cpu", 1, RECIPE, [flags], folder.parent)
    return folder, flags


@pytest.mark.parametrize(
    "flags, words",
    [
        (["--optim.lr", 0.5, "--run.seed", 3], ["optim.lr: 0.001 before, 0.5 now", "run.seed: 0 before, 3 now"]),
        (["--run.resume", "never"], ["--run.resume never"]),
    ],
)
def test_another_run_in_the_same_folder(finished, flags, words):
    folder, before = finished[0], contents(finished[0])
    with pytest.raises(UserError) as refusal:
        train(finished[1], *flags)
    for word in words:
        assert word in str(refusal.value)
    assert contents(folder) == before


def test_damaged_checkpoint_is_named_and_left_out(finished, tmp_path, capsys):
    """A flipped bit: the run goes on from the one before. Both damaged: status 2, nothing overwritten."""
    import shutil

    folder = tmp_path / "run"
    shutil.copytree(finished[0], folder)
    flags = [*finished[1][:-1], folder]

    def flip(step):
        file = folder / "checkpoints" / f"step-{step:08d}" / "state" / "__0_0.distcp"
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        file.write_bytes(data)

    flip(4)
    train(flags)
    output = "".join(capsys.readouterr())
    assert "step-00000004 is damaged" in output and "__0_0.distcp" in output
    assert "after step 2 of 4" in output
    assert [line["step"] for line in metrics(folder) if "ids" in line][-1] == 4
    flip(2), flip(4)
    before = contents(folder)
    with pytest.raises(UserError, match="no checkpoint"):
        train(flags)
    assert {p: d for p, d in contents(folder).items() if "checkpoints" in str(p)} == {
        p: d for p, d in before.items() if "checkpoints" in str(p)
    }


def test_loss_that_is_not_finite(rows, tmp_path, data_cache):
    """A learning rate that explodes in the middle of a run: no sample is blamed, and the advice helps."""
    flags = [*QUICK, "--data.path", rows(101), "--optim.name", "SGD", "--optim.clip", 0, "--run.dir", tmp_path / "run"]
    flags += ["--run.save-every", 3, "--run.global-batch", 16, "--run.micro-batch", 4, "--run.steps", 6]
    lower = ["--optim.lr", 1e-3, "--run.changed", "accept"]
    train(flags, *lower, "--run.stop-at", 3)
    with pytest.raises(UserError) as failure:
        train(flags, "--optim.lr", 1e30, "--run.changed", "accept")
    said = str(failure.value)
    assert "in all 4 micro-batches: training has diverged" in said and "samples [" not in said
    assert "a lower --optim.lr" in said and "--run.changed accept" in said
    assert json.loads((tmp_path / "run" / "run.json").read_text())["status"] == "failed"
    train(flags, *lower)
    assert json.loads((tmp_path / "run" / "run.json").read_text())["status"] == "finished"


def test_port_in_use(tmp_path):
    """The launcher moves to a free port, and says so."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        head = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", PROFILES / "ddp_cpu.yaml"]
        flags = ["--run.steps", 1, "--run.dir", tmp_path / "run"]
        result = run([*head, "--main_process_port", taken.getsockname()[1], TOY, *flags])
    assert result.status == 0, result.output[-3000:]
    assert "already in use" in result.output
