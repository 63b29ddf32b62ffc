"""The commands that people type, and what they have afterwards."""

import functools
import json
import os
import shutil
import sys

import numpy as np
import pytest
import yaml
from support.launching import (
    PROFILES,
    ROOT,
    environment,
    launch,
    launch_many,
    metrics,
    profile_of,
    python,
    run,
    scores,
    steps,
    train_many,
)

from app import UserError, parse
from laws.many import load
from laws.small import SMALL

RECIPE = ROOT / "recipes" / "cls.py"
STEPS = ["--run.log-every", 1, "--run.trackers", "--run.steps", 4, "--run.eval-every", 2]
SHORT = ["--scratch.width", 32, "--scratch.vocab", 300, "--data.max-length", 64, *STEPS]


def flags_of(rows, folder, *more):
    return [*SHORT, "--data.path", rows(101), "--data.eval-path", rows(7), "--run.dir", folder, *more]


# tests/laws/test_layouts.py compares what several processes write with this; `make laws` has them here.
SEVERAL = [pytest.param(profile, 2, marks=pytest.mark.exhaustive) for profile in ("ddp_cpu", "fsdp_cpu")]


@pytest.mark.parametrize(("profile", "processes"), [("cpu", 1), *SEVERAL])
def test_finished_model_is_loaded_by_others(rows, tmp_path, data_cache, profile, processes):
    """from_pretrained and pipeline() give the evaluation's own score; a run can start from it as a pretrained model."""
    from transformers import AutoModelForSequenceClassification, pipeline

    folder = tmp_path / "run"
    same = shutil.copy(rows(101), tmp_path / "same.jsonl")  # what is trained on itself would be refused
    longer = ["--run.steps", 30, "--run.eval-every", 30, "--data.eval-path", same, "--optim.lr", 0.01]
    again = flags_of(rows, tmp_path / "again", "--model", folder / "model")
    train_many(profile, processes, RECIPE, [flags_of(rows, folder, *longer), again], tmp_path)
    model = AutoModelForSequenceClassification.from_pretrained(folder / "model")
    assert type(model).__name__ == "BertForSequenceClassification"
    assert model.config.architectures == ["BertForSequenceClassification"]
    classify = pipeline("text-classification", str(folder / "model"), truncation=True)
    lines = [json.loads(line) for line in rows(101).read_text().splitlines()]
    hits = [classify(line["text"])[0]["label"] == line["label"] for line in lines]
    assert scores(folder)[-1]["eval/accuracy"] == pytest.approx(np.mean(hits), abs=1e-7)
    assert 0.4 < np.mean(hits) < 1
    assert steps(tmp_path / "again")[0]["loss"] < steps(folder)[0]["loss"]
    assert json.loads((folder / "run.json").read_text())["status"] == "finished"


def test_trackers_know_one_run_over_three_launches(rows, tmp_path):
    """wandb, offline: one id, whatever the layout; tensorboard has the values of metrics.jsonl."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = tmp_path / "run"
    common = [*flags_of(rows, folder), "--run.trackers", "wandb", "tensorboard"]
    result = launch("ddp_cpu", 2, RECIPE, *common, "--run.stop-at", 1)
    assert result.status == 0, result.output[-3000:]
    assert json.loads((folder / "run.json").read_text())["status"] == "preempted"
    recipe = load(RECIPE)
    for more in (["--run.stop-at", 3], []):
        recipe.main(parse(recipe.Config, [str(word) for word in (*common, *more)]))
    offline = sorted((folder / "wandb").glob("offline-run-*"))
    known = json.loads((folder / "run.json").read_text())["trackers"]["wandb"]
    assert len(offline) == 3 and all(path.name.endswith(known) for path in offline)
    events = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    for name in ("loss", "lr", "grad_norm", "eval/accuracy"):
        expected = [(line["step"], float(np.float32(line[name]))) for line in metrics(folder) if name in line]
        assert [(event.step, event.value) for event in events.Scalars(name)] == expected
    assert [line["step"] for line in steps(folder)] == [1, 2, 3, 4]


def test_every_way_to_start(rows, tmp_path):
    """No profile; a saved default of accelerate's; python with the file; python -m: each gives the same run."""
    home, graph = tmp_path / "home", ROOT / "recipes" / "graph.py"  # the recipe that starts soonest
    env = {"HF_HOME": str(home)}
    accelerate = [sys.executable, "-m", "accelerate.commands.launch"]
    ways = {"none": [*accelerate, graph], "file": [graph], "module": ["-m", "recipes.graph"]}
    ways["saved"] = ways["none"]
    small = [*SMALL["graph"].flags(rows), *STEPS]
    for name, words in ways.items():
        if name == "saved":
            (home / "accelerate").mkdir(parents=True)
            (home / "accelerate" / "default_config.yaml").write_text((PROFILES / "ddp_cpu.yaml").read_text())
        words = [*words, *small, "--run.dir", tmp_path / name]
        result = python(*words) if name in ("file", "module") else run(words, env=env)
        assert result.status == 0, result.output[-3000:]
        assert ("2 data ranks" in result.output) == (name == "saved")
    reference = steps(tmp_path / "none")
    assert steps(tmp_path / "file") == steps(tmp_path / "module") == reference
    assert [line["ids"] for line in steps(tmp_path / "saved")] == [line["ids"] for line in reference]


def test_config_file_and_defaults_are_flags(rows, tmp_path):
    """The config.yaml of a run, given back with --config, repeats it; flags behind it win."""
    recipe = load(RECIPE)
    recipe.main(parse(recipe.Config, [str(word) for word in flags_of(rows, tmp_path / "a")]))
    words = ["--config", str(tmp_path / "a" / "config.yaml"), "--run.dir", str(tmp_path / "b")]
    recipe.main(parse(recipe.Config, words))
    assert steps(tmp_path / "b") == steps(tmp_path / "a")
    assert yaml.safe_load((tmp_path / "b" / "config.yaml").read_text())["run"]["dir"] == str(tmp_path / "b")


@pytest.fixture(scope="module")
def bf16(rows, tmp_path_factory):
    """Give a function from a profile to the folder of its runs in bf16: an ordinary one and an exact one."""
    root = tmp_path_factory.mktemp("bf16")

    @functools.cache
    def bf16(profile, processes):
        folder = root / f"{profile}-{processes}"
        commands = [flags_of(rows, folder / "run"), flags_of(rows, folder / "exact", "--run.exact", "true")]
        launch_many(profile_of(root, profile, mixed_precision="bf16"), processes, RECIPE, commands, root)
        return folder

    return bf16


# `make laws` has the others: tests/laws/test_shipped_profiles.py has both in bf16, with another recipe.
OTHERS = [pytest.param(*layout, marks=pytest.mark.exhaustive) for layout in (("ddp_cpu", 3), ("fsdp_cpu", 2))]


@pytest.mark.parametrize(("profile", "processes"), [("cpu", 1), *OTHERS])
def test_bf16_by_the_profile(rows, tmp_path, bf16, profile, processes):
    """bf16 arithmetic, fp32 weights, and nearly the losses of fp32; in exact mode the same bits on every layout."""
    from safetensors.torch import load_file

    folder = bf16(profile, processes)
    assert json.loads((folder / "run" / "run.json").read_text())["layout"]["precision"] == "bf16"
    recipe = load(RECIPE)
    recipe.main(parse(recipe.Config, [str(word) for word in flags_of(rows, tmp_path / "fp32")]))
    pairs = list(zip(steps(folder / "run"), steps(tmp_path / "fp32"), strict=True))
    assert all(a["loss"] == pytest.approx(b["loss"], rel=2e-2) and a["loss"] != b["loss"] for a, b in pairs)
    reference = bf16("cpu", 1) / "exact"
    assert steps(folder / "exact") == steps(reference) and scores(folder / "exact") == scores(reference)
    weights, expected = (load_file(path / "model" / "model.safetensors") for path in (folder / "exact", reference))
    assert all(tensor.equal(expected[name]) for name, tensor in weights.items())
    assert {str(tensor.dtype) for tensor in weights.values()} == {"torch.float32"}


@pytest.mark.parametrize(
    "rows_of, more, names",
    [
        (lambda i: {"text": f"word {i} {i % 3}", "label": i / 10}, [], {"eval/mse", "eval/pearson"}),
        (lambda i: {"text": f"word {i}", "label": [["a"], ["b", "c"], []][i % 3]}, [], {"eval/accuracy", "eval/f1"}),
        (
            lambda i: {"text": f"word {i}", "second": f"other {i}", "x": i % 2, "y": (i // 2) % 2},
            ["--data.label", "x", "y", "--data.text", "text", "second"],
            {"eval/accuracy", "eval/f1"},
        ),
    ],
    ids=["regression", "lists", "columns"],
)
def test_other_kinds_of_labels(tmp_path, capsys, rows_of, more, names):
    """Each has its scores, and one that decides which checkpoint is the best."""
    file = tmp_path / "data.jsonl"
    file.write_text("".join(json.dumps(rows_of(i)) + "\n" for i in range(60)))
    recipe = load(RECIPE)
    words = [*SHORT, "--data.path", file, "--run.dir", tmp_path / "run", *more]
    found = recipe.main(parse(recipe.Config, [str(word) for word in words]))
    assert names <= set(found) and all(np.isfinite(value) for value in found.values())
    best = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["run"]["best"]
    assert best == ("-eval/mse" if "eval/mse" in names else "eval/accuracy")
    assert "--run.best" not in capsys.readouterr().err


def run_on(tmp_path, data: list[dict], *more, **files) -> dict:
    """Run the recipe in this process on rows, and on the rows of further files where more says so."""
    for name, lines in {"data": data, **files}.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    recipe = load(RECIPE)
    words = [*SHORT, "--data.path", tmp_path / "data.jsonl", "--run.dir", tmp_path / "run", *more]
    return recipe.main(parse(recipe.Config, [str(word) for word in words]))


def test_several_labels_are_scored_by_their_probability(tmp_path):
    """Also where no logit leaves [0, 1], and could be taken for a probability."""
    import torch
    from transformers import BertConfig, BertForSequenceClassification

    from app.data.text.tokenizer import train_tokenizer

    tokenizer = train_tokenizer(["some words"], 270, 64)
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
    model = BertForSequenceClassification(BertConfig(vocab_size=len(tokenizer), num_labels=2, **sizes))
    with torch.no_grad():
        model.classifier.weight.zero_()
        model.classifier.bias.fill_(0.3)  # a probability of 0.57
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    data = [{"text": f"words {i}", "label": ["a", "b"]} for i in range(40)]
    found = run_on(tmp_path, data, "--model", tmp_path / "model", "--optim.lr", 1e-9)
    assert found["eval/accuracy"] == found["eval/f1"] == 1


def test_one_row_to_evaluate_a_regression_on(tmp_path, recwarn):
    """A correlation needs two."""
    data = [{"text": f"words {i}", "label": i / 7} for i in range(40)]
    found = run_on(tmp_path, data, "--data.eval-path", tmp_path / "other.jsonl", other=data[:1])
    assert "eval/mse" in found and "eval/pearson" not in found
    assert not [warning for warning in recwarn if "earson" in str(warning.message)]


def test_the_run_says_what_it_makes_of_the_data(tmp_path, capsys):
    rows = [{"text": "word " * (i % 40), "label": float(i % 2)} for i in range(100)]
    rows[20]["label"] = 2.0  # held out, were it not the only one
    run_on(tmp_path, rows, "--data.max-length", 10)
    lines = capsys.readouterr().out.splitlines()
    numbers = (
        "91 training rows, 9 held out; 1 drawn to be held out kept for training, as no other row has the class; "
        "67 training and 6 evaluation texts are longer than 10 tokens (--data.max-length) and cut"
    )
    classes = "3 classes, whole numbers (--data.problem regression predicts amounts): 0, 1, 2"
    assert lines[lines.index(numbers) + 1] == classes


def test_a_second_run_in_the_same_folder_is_refused(tmp_path):
    import subprocess
    import time

    folder, toy = tmp_path / "run", ROOT / "tests" / "laws" / "toy.py"
    words = ["--run.dir", str(folder), "--run.steps", "4000"]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    first = subprocess.Popen([sys.executable, toy, *words], env=environment({"PAUSE": "0.05"}), **quiet)
    try:
        limit = time.monotonic() + 60
        while not (folder / "metrics.jsonl").exists() and time.monotonic() < limit:
            time.sleep(0.2)
        recipe = load(toy)
        with pytest.raises(UserError, match=f"process {first.pid} on {os.uname().nodename}"):
            recipe.train(parse(recipe.Config, words))
    finally:
        first.kill()
        first.wait()


def test_importing_app_is_light():
    """Neither torch nor transformers nor wandb, until they are needed."""
    code = "import app, sys; print(sorted({'torch', 'transformers', 'wandb', 'accelerate'} & set(sys.modules)))"
    assert run([sys.executable, "-c", code]).output.strip() == "[]"
