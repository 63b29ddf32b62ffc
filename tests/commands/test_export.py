"""A model taken out of a run is its checkpoint's, whatever the layout; others load it; the Hub gets what is there."""

import json
import shlex
import shutil
import sys

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file
from support.fake_hub import TOKEN, hub
from support.launching import ROOT, python, run, saved_state, train_all
from support.tiny import train

from app.__main__ import main
from app.commands.export import command, model_card, upload
from app.errors import UserError
from app.rundir import history
from laws.small import SMALL

COMMON = ["--run.global-batch", 8, "--run.micro-batch", 4, "--run.trackers", "--run.steps", 4, "--run.save-every", 2]
COMMON += ["--run.eval-every", 4]
STEP = 2
MORE = {"img": ["--ema.decay", 0.9, "--ema.use", "also"]}
# A tokenizer and texts, a processor and running statistics, and two models.
SHARDED = ["cls", "img", "gan"]
TASKS = {"cls": "text-classification", "img": "image-classification", "lm": "text-generation"}


@pytest.fixture(scope="module")
def runs(tmp_path_factory, rows, data_cache):
    """Train some recipes on FSDP2 x2, and the others, whose shards an export reads no differently, on one process."""
    root = tmp_path_factory.mktemp("export")
    for profile, processes, names in (
        ("fsdp_cpu", 2, SHARDED),
        ("cpu", 1, [name for name in SMALL if name not in SHARDED]),
    ):
        commands = [
            (
                ROOT / f"recipes/{name}.py",
                [*SMALL[name].flags(rows), *COMMON, *MORE.get(name, []), "--run.dir", root / name],
                None,
            )
            for name in names
        ]
        train_all(profile, processes, commands, root, timeout=300)
    return root


@pytest.fixture(scope="module")
def exported(runs):
    """Export the checkpoint in the middle of all recipes' runs; return their folders."""
    folders = {name: runs / "out" / name for name in [*SMALL, "ema", "mean"]}
    calls = [["export", str(runs / n), "--step", str(STEP), "--to", str(folders[n])] for n in SMALL]
    calls.append(["export", str(runs / "img"), "--weights", "ema", "--to", str(folders["ema"])])
    calls.append(["export", str(runs / "img"), "--average", "2", "--to", str(folders["mean"])])
    for words in calls:
        assert main(words) == 0
    return folders


@pytest.mark.parametrize("recipe", SMALL)
def test_weights_are_the_checkpoints(runs, exported, recipe):
    saved = {
        n.removeprefix("models.0."): b for n, b in saved_state(runs / recipe, STEP).items() if n.startswith("models.0.")
    }
    found = load_file(exported[recipe] / "model.safetensors")
    assert found and all(tensor.numpy().tobytes() == saved[name] for name, tensor in found.items())
    assert {tensor.dtype for tensor in found.values()} <= {torch.float32, torch.int64}
    assert saved_state(runs / recipe, 4) != saved_state(runs / recipe, STEP)


def test_averages_are_exported(runs, exported):
    """Those that the run has kept, and the mean of two checkpoints."""
    two, four = (saved_state(runs / "img", step) for step in (2, 4))
    ema, mean = (load_file(exported[name] / "model.safetensors") for name in ("ema", "mean"))
    for name in (name for name, tensor in ema.items() if tensor.is_floating_point()):
        average = four.get(f"averages.models.0.{name}")
        assert ema[name].numpy().tobytes() == (average or four[f"models.0.{name}"])
        a, b = (np.frombuffer(state[f"models.0.{name}"], np.float32).astype(np.float64) for state in (two, four))
        assert np.array_equal(mean[name].numpy().ravel(), ((a + b) / 2).astype(np.float32))
    assert any(name.startswith("averages.") for name in four)
    assert "The weights are the mean of 2 checkpoints, of steps 2, 4." in (exported["mean"] / "README.md").read_text()
    assert "The weights are their average over the steps (`--ema`)." in (exported["ema"] / "README.md").read_text()


@pytest.mark.parametrize("recipe", TASKS)
def test_a_pipeline_takes_it(exported, recipe):
    from PIL import Image
    from transformers import pipeline

    use = pipeline(TASKS[recipe], str(exported[recipe]))
    picture = Image.fromarray(np.zeros((32, 32), np.uint8))
    beside = {"cls": "tokenizer.json", "lm": "generation_config.json", "img": "preprocessor_config.json"}
    assert (exported[recipe] / beside[recipe]).exists()
    found = use(picture) if recipe == "img" else use("alpha beta", **({"max_new_tokens": 4} if recipe == "lm" else {}))
    assert found[0].keys() >= ({"generated_text"} if recipe == "lm" else {"label", "score"})


@pytest.mark.parametrize("recipe", ["seg", "gan"])
def test_what_no_pipeline_knows_says_how_to_load_it(exported, recipe, monkeypatch):
    """The command on the card works: one in a shell, the other's program in this process, which has MONAI already."""
    card = (exported[recipe] / "README.md").read_text()
    words = card.partition("```bash\n")[2].partition("\n```")[0]
    if recipe == "seg":
        monkeypatch.chdir(exported[recipe])
        python_, option, program = shlex.split(words)
        assert (python_, option) == ("python", "-c")
        exec(program, {"__name__": "__main__"})
        return
    result = run(["bash", "-c", words.replace("python ", f"{sys.executable} ", 1)], cwd=exported[recipe])
    assert result.status == 0, result.output


def test_the_card_says_how_the_model_came_about(runs, exported):
    card = (exported["cls"] / "README.md").read_text()
    front = yaml.safe_load(card.split("---\n")[1])
    assert front["pipeline_tag"] == "text-classification" and "metrics" not in front  # step 2 is not evaluated
    assert (
        "2 of 4 steps" in card and "2 data ranks, FSDP2, fp32, cpu" in card and "| `--run.global-batch` | 8 |" in card
    )
    settings = yaml.safe_load((exported["cls"] / "training_config.yaml").read_text())
    assert settings["run"]["steps"] == 4 and "dir" not in settings["run"]
    assert (exported["cls"] / "cls.py").read_bytes() == (ROOT / "recipes/cls.py").read_bytes()
    assert (exported["cls"] / "curves.png").stat().st_size > 1000


def test_the_run_is_only_read(runs, exported):
    assert json.loads((runs / "cls" / "run.json").read_text())["status"] == "finished"
    assert sorted(path.name for path in (runs / "cls").iterdir()) == [
        "checkpoints", "config.yaml", "lock", "metrics.jsonl", "model", "recipe.py", "run.json",
    ]  # fmt: skip


@pytest.fixture
def online(monkeypatch):
    """Give a function that lets this process ask a Hub, which a Python else is told of at its imports."""

    def online(url, token):
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", url)
        monkeypatch.setenv("HF_TOKEN", token)

    return online


def test_pushing(runs, exported, online, capsys):
    """To a stand-in; a dry run before it asks nothing of anybody, and a wrong token is said to be one."""
    with hub() as there:
        online(there.url, TOKEN)
        assert main(["export", str(runs / "cls"), "--push", "me/model", "--dry-run"]) == 0 and not there.files
        assert f"would upload it to {there.url}/me/model, made public" in capsys.readouterr().out
        env = {"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": there.url, "HF_HUB_DISABLE_XET": "1", "HF_TOKEN": TOKEN}
        words = ["export", runs / "cls", "--step", STEP, "--push", "me/model", "--private"]
        result = python("-m", "app", *words, **env)
        assert result.status == 0 and result.output.rstrip().endswith(f"{there.url}/me/model"), result.output
        files, local = there.files["me/model"], exported["cls"]
        assert {name: files.get(name) for name in ("model.safetensors", "config.json", "tokenizer.json", "cls.py")} == {
            name: (local / name).read_bytes()
            for name in ("model.safetensors", "config.json", "tokenizer.json", "cls.py")
        }
        assert there.private["me/model"] and not (runs / "cls" / "export").exists()
        online(there.url, "hf_wrong")
        with pytest.raises(UserError, match=r"401[\s\S]*hf auth whoami"):
            main(["export", str(runs / "cls"), "--push", "me/model"])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"average": "5"}, "has 2 such checkpoints, of steps 2, 4; at least 5 are needed"),
        ({"average": "3:9"}, "has 1 such checkpoints"),
        ({"average": "all"}, "give 2 or more, or a range of steps"),
        ({"average": "0"}, "give 2 or more"),
        ({"average": "2", "best": True}, "--average 2 and --best: give one of them"),
        ({"weights": "ema"}, "was trained without --ema.decay"),
    ],
)
def test_averages_that_cannot_be(runs, options, said):
    with pytest.raises(UserError, match=said):
        command.main(command.Options(run=runs / "cls", **options))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"step": 3}, "no checkpoint of step 3; there are 2, 4"),
        ({"to": "."}, r"\. exists already"),
        ({"push": "a b"}, "--push a b: "),
        ({"push": "me/x"}, "HF_HUB_OFFLINE is set"),
    ],
)
def test_what_cannot_be(runs, options, said):
    with pytest.raises(UserError, match=said):
        command.main(command.Options(run=runs / "cls", **options))


def test_a_damaged_checkpoint_is_not_exported(runs, tmp_path):
    shutil.copytree(runs / "cls", tmp_path / "run")
    file = next((tmp_path / "run/checkpoints/step-00000004/state").glob("*.distcp"))
    file.write_bytes(file.read_bytes()[:-8] + b"\1" * 8)
    with pytest.raises(UserError, match="step 4 is damaged"):
        command.main(command.Options(run=tmp_path / "run"))


def test_scores_are_results_to_the_hub(tmp_path):
    """Those of a task that the Hub knows; a score that is no number is left out of them."""
    from huggingface_hub import ModelCard

    train(tmp_path / "run")
    run = history.read(tmp_path / "run")
    (tmp_path / "run" / "recipe.py").write_text("")
    run.config["data"] = {"path": ["me/texts"]}
    counts = {f"eval/{name}": 8 for name in ("samples", "images", "boxes", "tokens")}
    scores = {"eval/accuracy": 0.75, "eval/loss": float("nan"), **counts}
    found = {}
    for kind in ("BertForSequenceClassification", "UNet"):
        (tmp_path / kind).mkdir()
        model_card.write(run, tmp_path / kind, 4, scores, kind, "")
        found[kind] = ModelCard.load(tmp_path / kind / "README.md").data
    (result,) = found["BertForSequenceClassification"].eval_results
    assert (result.metric_type, result.metric_value, result.dataset_name) == ("accuracy", 0.75, "me/texts")
    assert result.task_type == found["BertForSequenceClassification"].pipeline_tag == "text-classification"
    assert found["UNet"].eval_results is None and found["UNet"].metrics == ["accuracy", "loss"]
    assert found["UNet"].datasets == ["me/texts"]
    run.config["data"] = {"path": ["me/texts"], "mix": "two.yaml"}  # next to a mixture, the path is a default
    (tmp_path / "mixed").mkdir()
    model_card.write(run, tmp_path / "mixed", 4, scores, "BertForSequenceClassification", "")
    mixed = ModelCard.load(tmp_path / "mixed" / "README.md").data
    assert mixed.datasets is None and mixed.eval_results[0].dataset_name == "two.yaml"


def test_a_hub_that_cannot_be_reached_is_one_line(monkeypatch, tmp_path):
    """Whatever library its client uses."""
    from huggingface_hub import HfApi
    from huggingface_hub.utils import httpx

    def unreachable(*args, **options):
        raise httpx.ConnectError("Name or service not known")

    monkeypatch.setattr(HfApi, "create_repo", unreachable)
    with pytest.raises(UserError, match=r"--push me/x: .*cannot be reached: Name or service not known"):
        upload.push(tmp_path, "me/x", False, "a message")
