"""Pretrained models, from folders: what cannot be used says why, before anything is trained."""

import json
import shutil
import sys

import pytest
import torch
from support.tables import refused
from transformers import CONFIG_MAPPING, AutoModelForSequenceClassification, BertConfig, BertForSequenceClassification
from transformers.utils import logging

from app.data.text.tokenizer import train_tokenizer
from app.tasks.pretrained import load_model, load_processor, load_tokenizer, longest_input


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Give the folder of a tiny model with two labels and 32 positions, and its tokenizer, which knows no limit."""
    folder = tmp_path_factory.mktemp("model")
    tokenizer = train_tokenizer(["some words", "more words"], 270, 32)
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
    config = BertConfig(vocab_size=len(tokenizer), max_position_embeddings=32, **sizes)
    BertForSequenceClassification(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps({k: v for k, v in json.loads(file.read_text()).items() if k != "model_max_length"}))
    return folder


def test_tokenizer_and_longest_text(model):
    assert load_tokenizer(str(model), 32).model_max_length == 32
    with refused("--data.max-length 33", "32", f"--model {model}"):
        load_tokenizer(str(model), 33)


def test_weights_are_float32_whatever_they_were_saved_as(model, tmp_path):
    BertForSequenceClassification.from_pretrained(model, dtype=torch.bfloat16).save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"
    loaded = load_model(AutoModelForSequenceClassification, str(tmp_path))
    assert {parameter.dtype for parameter in loaded.parameters()} == {torch.float32}


@pytest.mark.parametrize("kind", ["bert", "roberta", "gpt2", "t5", "mpnet"])
def test_a_folder_without_a_tokenizer_is_refused(tmp_path, kind):
    """transformers makes one of the config, which knows nothing but its marks."""
    CONFIG_MAPPING[kind]().save_pretrained(tmp_path)
    with refused(f"--model {tmp_path}", "tokenizer"):
        load_tokenizer(str(tmp_path), 32)


def test_a_folder_that_lacks_a_file_is_told_which(model, tmp_path):
    """And not to download itself, as a name that is no folder is."""
    for name in ("model.safetensors", "config.json", "tokenizer.json"):
        folder = tmp_path / name
        shutil.copytree(model, folder)
        for file in folder.glob("tokenizer*" if name == "tokenizer.json" else name):
            file.unlink()
        with refused(f"--model {folder}", f"({name})", "save_pretrained") as error:
            load_tokenizer(str(folder), 32)
            load_model(AutoModelForSequenceClassification, str(folder))
        assert "hf download" not in str(error.value)
    with refused(f"--model {model}", "(preprocessor_config.json)", "has no image processor") as error:
        load_processor(str(model))
    assert "hf download" not in str(error.value)
    with refused("--model some/model", "hf download some/model"):
        load_tokenizer("some/model", 32)


@pytest.mark.parametrize(
    ("kind", "settings", "longest"),
    [
        ("bert", {}, 512),
        ("distilbert", {}, 512),
        ("gpt2", {}, 1024),
        ("roberta", {"max_position_embeddings": 514}, 512),
        ("xlm-roberta", {"max_position_embeddings": 514}, 512),
        ("camembert", {"max_position_embeddings": 514}, 512),
        ("longformer", {"max_position_embeddings": 4098}, 4096),
        ("bart", {}, 1024),
        ("deberta-v2", {}, 512),
        ("deberta-v2", {"position_biased_input": False}, None),
        ("modernbert", {}, None),
        ("llama", {}, None),
        ("t5", {}, None),
        ("xlnet", {}, None),
        ("bloom", {}, None),
        ("funnel", {}, None),
    ],
)
def test_how_long_a_text_a_model_takes(kind, settings, longest):
    assert longest_input(CONFIG_MAPPING[kind](**settings)) == longest


@pytest.mark.parametrize("kind", ["bert", "roberta", "longformer"])
def test_the_longest_text_is_really_the_longest(kind):
    """Canary: the position tables of transformers are as long as assumed here."""
    import torch

    small = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
    small |= {"vocab_size": 50, "max_position_embeddings": 40}
    config = CONFIG_MAPPING[kind](**small, **({"attention_window": 4} if kind == "longformer" else {}))
    network = AutoModelForSequenceClassification.from_config(config)
    longest = longest_input(config)
    network(torch.full((1, longest), 5))
    with pytest.raises((IndexError, RuntimeError)):
        network(torch.full((1, longest + 1), 5))


def test_a_damaged_file_of_weights_is_named(model, tmp_path):
    folder = shutil.copytree(model, tmp_path / "cut")
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])
    with refused(f"--model {folder}", str(file), "damaged"):
        load_model(AutoModelForSequenceClassification, str(folder))


@pytest.mark.parametrize(("rank", "terminal"), [(0, False), (0, True), (1, True)])
def test_what_loading_prints(model, monkeypatch, capfd, caplog, rank, terminal):
    """A bar on the main process's terminal alone; that the head is new, once; nothing about the number of labels."""
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    logging.enable_progress_bar()  # an earlier run in this process has switched them off
    settings = {"id2label": {0: "a", 1: "b", 2: "c"}, "ignore_mismatched_sizes": True}
    network = load_model(AutoModelForSequenceClassification, str(model), **settings)
    assert network.config.num_labels == network.classifier.out_features == 3
    assert ("Loading weights" in capfd.readouterr().err) == (rank == 0 and terminal)
    assert caplog.text.count("classifier.weight") == (rank == 0)
    assert "num_labels" not in caplog.text
