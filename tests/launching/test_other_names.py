"""Flags of other trainers are answered with the name that the setting has here."""

import pytest
from support.launching import ROOT

from app import UserError, parse
from app.launching.other_names import flags_of
from laws.many import load

RECIPES = {name: load(ROOT / "recipes" / f"{name}.py").Config for name in ("cls", "lm", "img")}


@pytest.mark.parametrize(
    "recipe, words, meant",
    [
        ("cls", "--learning-rate 1e-3", "--optim.lr"),
        ("cls", "--learning_rate=1e-3", "--optim.lr"),
        ("cls", "--lr 1e-3", "--optim.lr"),
        ("cls", "--batch-size 8", "--run.global-batch"),
        ("cls", "--per_device_train_batch_size 8", "--run.micro-batch"),
        ("cls", "--epochs 3", "--run.epochs"),
        ("cls", "--output_dir out", "--run.dir"),
        ("cls", "--num_train_epochs 3", "--run.epochs"),
        ("cls", "--seed 1", "--run.seed"),
        ("cls", "--max_seq_length 64", "--data.max-length"),
        ("lm", "--max_seq_length 64", "--data.block"),
        ("lm", "--gradient_checkpointing true", "--activation-checkpointing"),
        ("img", "--run.steps 3 --model_name_or_path resnet", "--model"),
        ("cls", "--run.lr 1e-3", "--optim.lr"),
        ("cls", "--optim.learning-rate 1e-3", "--optim.lr"),
        ("cls", "--run.batch-size 8", "--run.global-batch"),
    ],
)
def test_the_name_here_is_said(recipe, words, meant):
    with pytest.raises(UserError) as refusal:
        parse(RECIPES[recipe], words.split())
    flag = next(word for word in reversed(words.split()) if word.startswith("--")).partition("=")[0]
    assert str(refusal.value) == f"{flag}: there is no such flag; did you mean {meant}?"


@pytest.mark.parametrize(
    "words, told",
    [
        ("--bf16 true", "python -m app launch fsdp:8"),
        ("--device cuda", "python -m app launch fsdp:8"),
        ("--accumulate_grad_batches 4", "follows from"),
        ("--push_to_hub true", "export RUN --push"),
    ],
)
def test_what_is_no_setting_here_is_explained(words, told):
    with pytest.raises(UserError, match=told):
        parse(RECIPES["cls"], words.split())


@pytest.mark.parametrize("flag", ["--model", "--model_name_or_path"])
def test_a_recipe_without_pretrained_models_says_so(flag):
    """And does not name --run.model, which chooses among a run's own weights."""
    with pytest.raises(UserError, match="it takes no pretrained model"):
        parse(load(ROOT / "recipes" / "gan.py").Config, [flag, "x"])


def test_what_another_trainer_calls_it_names_flags_that_exist():
    """Of all recipes together; a renamed setting must be renamed here too."""
    from app.launching.other_names import NAMES

    known = {flag for config in RECIPES.values() for flag in flags_of(config)}
    assert NAMES.keys() <= known


@pytest.mark.parametrize("recipe", RECIPES)
def test_own_flags_are_taken(recipe):
    config = parse(RECIPES[recipe], ["--run.steps", "3", "--optim.lr", "0.5", "--data.path=x"])
    assert (config.run.steps, config.optim.lr) == (3, 0.5) and "x" in config.data.path


def test_values_that_look_like_flags_of_others_are_values():
    assert parse(RECIPES["lm"], ["--sample=--lr"]).sample == "--lr"
