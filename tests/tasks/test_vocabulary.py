"""A model and its tokenizer fit: every recipe that takes --model with texts says so before it trains, in one line."""

import json
import re

import pytest
from support.launching import ROOT
from transformers import (
    AutoConfig,
    AutoTokenizer,
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    BertForMaskedLM,
    LlamaConfig,
    LlamaForCausalLM,
    PretrainedConfig,
)

from app import parse
from app.data.text.tokenizer import byte_tokenizer, train_pair_tokenizer, train_tokenizer
from app.errors import UserError
from app.tasks.pretrained import load_tokenizer
from app.tasks.vocabulary import check_vocabulary, rows_of
from recipes import cls, dpo, lm, s2s, tag

pytestmark = pytest.mark.usefixtures("data_cache")
SIZE = {"num_hidden_layers": 1, "num_attention_heads": 1, "hidden_size": 8, "intermediate_size": 8}
BART = {f"{part}_{name}": 1 for part in ("encoder", "decoder") for name in ("layers", "attention_heads", "ffn_dim")}
WITHOUT_TOKENIZER = {"img", "seg", "det", "graph"}
# One row of data that each recipe reads, and the kind of model that it takes.
RECIPES = {
    "lm": (lm, {"text": "some words"}, "llama"),
    "dpo": (dpo, {"prompt": "some", "chosen": "words", "rejected": "more"}, "llama"),
    "cls": (cls, {"text": "some words", "label": "a"}, "bert"),
    "tag": (tag, {"tokens": ["some", "words"], "tags": ["a", "b"]}, "bert"),
    "s2s": (s2s, {"source": "some words", "target": "more"}, "bart"),
}


def save(folder, kind, rows=0, added=(), **known):
    """Write a model with a tokenizer of `added` further tokens, and embeddings of so many rows more or less."""
    words = ["some words", "more words"]
    tokenizer = {
        "llama": lambda: byte_tokenizer(128),
        "bert": lambda: train_tokenizer(words, 270, 128),
        "bart": lambda: train_pair_tokenizer(words, 270, 128),
    }[kind]()
    size = len(tokenizer) + rows
    tokenizer.add_special_tokens({"additional_special_tokens": list(added)})
    longest = {"max_position_embeddings": 128}
    if kind == "llama":
        model = LlamaForCausalLM(LlamaConfig(vocab_size=size, **longest, **SIZE, **known))
    elif kind == "bert":
        model = BertForMaskedLM(BertConfig(vocab_size=size, **longest, **SIZE, **known))
    else:
        ids = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0, "decoder_start_token_id": 1, **known}
        config = BartConfig(vocab_size=size, d_model=8, **longest, **BART, forced_eos_token_id=None, **ids)
        model = BartForConditionalGeneration(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return size


def change(file, **fields):
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


def train(name, folder, model, *more):
    recipe, row, _ = RECIPES[name]
    folder.mkdir(exist_ok=True)
    data = folder / "data.jsonl"
    rows = [{**row, "label": "ab"[i % 2]} if "label" in row else row for i in range(20)]
    data.write_text("".join(f"{json.dumps(each)}\n" for each in rows))
    flags = ["--model", model, "--data.path", data, "--run.dir", folder / "run", "--run.steps", 1, "--run.trackers"]
    flags += (
        ["--data.block", 16] if name == "lm" else ["--data.max-length", 32] if name != "s2s" else ["--generate.rows", 0]
    )
    return recipe.main(parse(recipe.Config, [str(word) for word in (*flags, *more)]))


def test_every_recipe_that_takes_a_model_is_here():
    """A new recipe is added above: with what it reads, or among those whose models read no texts."""
    files = (ROOT / "recipes").glob("*.py")
    takes = {file.stem for file in files if re.search(r"^    model: str", file.read_text(), re.MULTILINE)}
    assert takes == set(RECIPES) | WITHOUT_TOKENIZER
    assert not [name for name in WITHOUT_TOKENIZER if "okenizer" in (ROOT / "recipes" / f"{name}.py").read_text()]


@pytest.mark.parametrize("name", RECIPES)
def test_a_token_without_an_embedding_is_refused(tmp_path, name, monkeypatch):
    """Before the model is loaded; and rows that no token needs do no harm."""
    monkeypatch.setattr("app.tasks.pretrained.load_model", None)
    kind = RECIPES[name][2]
    size = save(tmp_path / "m", kind, added=("<tool>",))
    said = rf"--model \S+/m: its tokenizer has tokens up to {size} \('<tool>'\), and the model embeds {size} \(0 to "
    with pytest.raises(UserError, match=said):
        train(name, tmp_path, tmp_path / "m")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", RECIPES)
def test_more_rows_than_tokens_do_no_harm(tmp_path, name):
    save(tmp_path / "m", RECIPES[name][2], rows=7)
    assert train(name, tmp_path, tmp_path / "m")


@pytest.mark.parametrize(
    ("name", "field"), [*((name, "pad_token_id") for name in ("lm", "dpo", "s2s")), ("s2s", "decoder_start_token_id")]
)
def test_ids_of_the_config_are_embedded(tmp_path, name, field):
    size = save(tmp_path / "m", RECIPES[name][2])
    change(tmp_path / "m" / "config.json", **{field: 999})
    with pytest.raises(
        UserError, match=rf"--model \S+/m: the {field} of its config.json is 999, and the model embeds {size}"
    ):
        train(name, tmp_path, tmp_path / "m")


def test_ids_that_generation_begins_with_are_embedded(tmp_path):
    save(tmp_path / "m", "bart")
    change(tmp_path / "m" / "generation_config.json", decoder_start_token_id=999)
    with pytest.raises(UserError, match=r"decoder_start_token_id of its generation_config.json is 999"):
        train("s2s", tmp_path, tmp_path / "m")


@pytest.mark.parametrize("name", RECIPES)
def test_weights_of_another_vocabulary_are_no_new_ones(tmp_path, name):
    """transformers would draw embeddings anew where a recipe lets the head have another size."""
    size = save(tmp_path / "m", RECIPES[name][2])
    change(tmp_path / "m" / "config.json", vocab_size=size + 8)
    said = rf"its weights \S+ are (1 x )?{size}( x 8)?, and its config.json asks for (1 x )?{size + 8}"
    with pytest.raises(UserError, match=said):
        train(name, tmp_path, tmp_path / "m")


def test_a_teacher_fits_too(tmp_path):
    save(tmp_path / "m", "llama")
    size = save(tmp_path / "t", "llama", rows=-1)
    with pytest.raises(UserError, match=rf"--distill.teacher \S+/t: its tokenizer has tokens up to {size} "):
        train("dpo", tmp_path, tmp_path / "m", "--distill.teacher", tmp_path / "t")


def test_a_teacher_may_have_rows_without_a_token(tmp_path):
    """As models of one family do: only the tokens of both are compared."""
    found = []
    for rows in (0, 5):
        save(tmp_path / "m", "llama", rows=rows)
        save(tmp_path / "t", "llama", rows=5 - rows)
        found.append(train("dpo", tmp_path / str(rows), tmp_path / "m", "--distill.teacher", tmp_path / "t"))
    assert all(scores["eval/loss"] > 0 for scores in found)


def test_types_of_pairs_are_embedded(tmp_path):
    save(tmp_path, "bert", type_vocab_size=1)
    assert load_tokenizer(str(tmp_path), 32)
    with pytest.raises(UserError, match=r"marks the second text of a pair by type 1, and the model has 1 types"):
        load_tokenizer(str(tmp_path), 32, pair=True)


def test_tokens_that_no_text_needs_may_lack_an_embedding(tmp_path):
    """As published: BART for summaries has no row for its mask, nor has a Gemma of texts for pictures."""
    size = save(tmp_path, "bart", added=("<mask>",))
    tokenizer, config = AutoTokenizer.from_pretrained(tmp_path), AutoConfig.from_pretrained(tmp_path)
    with pytest.raises(UserError, match="has tokens up to"):
        check_vocabulary("m", config, tokenizer, unused=("mask_token",))
    tokenizer.mask_token = "<mask>"
    check_vocabulary("m", config, tokenizer, unused=("mask_token",))
    with pytest.raises(UserError, match=f"has tokens up to {size}"):
        check_vocabulary("m", config, tokenizer)
    tokenizer.mask_token, tokenizer.image_token = None, "<mask>"
    check_vocabulary("m", config, tokenizer)


def test_a_config_that_does_not_say_it_is_let_pass():
    assert rows_of(PretrainedConfig()) is None
