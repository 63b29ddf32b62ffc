"""Preferences: data of any form, refused where a row prefers nothing; the loss is TRL's; the reference is cached."""

import json
import re
import shutil
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support.evaluating import as_it_is
from support.launching import ROOT, launch, metrics, scores, steps
from support.supplies import CHAT
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from app import parse
from app.data.config import PreferenceData
from app.data.tables.builtin_code import halves, with_slip
from app.data.text import preferences
from app.data.text.preference_table import PreferenceTable, TrainingPairs
from app.data.text.tokenizer import byte_tokenizer
from app.errors import UserError
from app.tasks.language import reference
from app.tasks.language.lora import Lora
from app.tasks.language.preference import (
    Distill,
    PreferenceLoss,
    PreferenceLossConfig,
    answer_logits,
    check_preferences,
    log_probabilities,
)
from app.tasks.language.teacher import load_teacher
from app.training.scores.preference import PreferenceScores
from recipes import dpo

pytestmark = pytest.mark.usefixtures("data_cache")
RECIPE = ROOT / "recipes" / "dpo.py"


def said(role, content):
    return {"role": role, "content": content}


USER, GOOD, BAD = said("user", "Why?"), said("assistant", "So."), said("assistant", "No idea.")
TEXTS = [{"prompt": f"{i} and 1 is ", "chosen": f"{i + 1}", "rejected": "x" * (i % 7 + 1)} for i in range(12)]
CHATS = [{"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]}] * 12


def tokenizer(longest=64, template=CHAT):
    made = byte_tokenizer(longest)
    made.chat_template = template
    return made


def write(folder, rows):
    file = folder / "rows.jsonl"
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return file


def read(folder, rows, longest=64, **flags):
    config = PreferenceData(path=(str(write(folder, rows)),), holdout=0.25, max_length=longest, **flags)
    tables = preferences.load_preferences(config)
    return tables, *(preferences.tokenize(t, config, tokenizer(longest)) for t in (tables.train, tables.evaluation))


def described(tables, train, held_out, config):
    """Describe pairs that nothing is mixed with."""
    return preferences.describe(tables, TrainingPairs(train, False, "", 0, 1), {"": held_out}, config)


def in_words(row, longest=64):
    return tuple(tokenizer(longest).decode(row[kind]) for kind in ("prompt", "chosen", "rejected"))


BEGIN, END = "<|begin_of_text|>", "<|end_of_text|>"
CHAT_TEXTS = (f"user: Why?{END}", f"assistant: So.{END}", f"assistant: No idea.{END}")


@pytest.mark.parametrize(
    ("row", "flags", "expected"),
    [
        ({"prompt": "a b", "chosen": " c", "rejected": " d"}, {}, (f"{BEGIN}a b", f" c{END}", f" d{END}")),
        ({"q": "a", "y": "b", "n": "c"}, {"prompt": "q", "chosen": "y", "rejected": "n"}, None),
        ({"chosen": "ask: yes sir", "rejected": "ask: yes"}, {}, (f"{BEGIN}ask:", f" yes sir{END}", f" yes{END}")),
        ({"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]}, {}, CHAT_TEXTS),
        ({"prompt": [USER], "chosen": "So.", "rejected": "No idea."}, {}, CHAT_TEXTS),
        ({"chosen": [USER, GOOD], "rejected": [USER, BAD]}, {}, CHAT_TEXTS),
        ({"prompt": "Why?", "chosen": [USER, GOOD], "rejected": [USER, BAD]}, {}, CHAT_TEXTS),
    ],
)
def test_every_form_gives_prompt_and_answers(tmp_path, row, flags, expected):
    _, train, held_out = read(tmp_path, [row] * 8, **flags)
    assert len(train) == 6 and len(held_out) == 2
    assert in_words(train[3]) == (expected or (f"{BEGIN}a", f"b{END}", f"c{END}"))


@pytest.mark.parametrize(
    ("row", "flags", "expected"),
    [
        ({"prompt": "a", "chosen": "b", "rejected": "b"}, {}, r"both answers of row 0 .*rows.jsonl are the same"),
        ({"prompt": "a", "chosen": "b", "rejected": " \n"}, {}, r"--data.rejected: row 0 .*rows.jsonl has an empty"),
        ({"prompt": "a", "chosen": None, "rejected": "b"}, {}, r"--data.chosen chosen: row 0 .* has no text"),
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, {"prompt": "q"}, r"--data.prompt q: no such key"),
        ({"prompt": "a", "chosen": "b", "bad": "c"}, {}, r"--data.rejected rejected: no such key"),
        ({"chosen": [USER, GOOD], "rejected": [USER, GOOD]}, {}, r"both answers of row 0 .* are the same"),
        ({"chosen": [USER, GOOD], "rejected": [GOOD, BAD]}, {}, r"row 0 .* do not begin with the same message"),
        ({"prompt": [USER], "chosen": [GOOD], "rejected": [said("assistant", "")]}, {}, r"row 0 .* an empty answer"),
        (
            {"prompt": [USER], "chosen": [GOOD], "rejected": [said("asistant", "x")]},
            {},
            r"rejected: message 0 of row 0",
        ),
        ({"chosen": [USER, GOOD], "rejected": "x"}, {}, r"one column holds texts and the other one conversations"),
    ],
)
def test_what_prefers_nothing_is_named(tmp_path, row, flags, expected):
    good = (
        {**dict.fromkeys(row, "a"), "chosen": "b", "rejected": "c"}
        if isinstance(row["chosen"], str | None)
        else {
            **{key: [USER] for key in row if key == "prompt"},
            **(
                {"chosen": [GOOD], "rejected": [BAD]}
                if "prompt" in row
                else {"chosen": [USER, GOOD], "rejected": [USER, BAD]}
            ),
        }
    )
    if isinstance(row.get("rejected"), str) and not isinstance(row["chosen"], str | None):
        good = row
    if "rejected" not in row:
        good.pop("rejected")
    with pytest.raises(UserError, match=expected):
        read(tmp_path, [row, *[good] * 9], **flags)


def test_conversations_need_a_template(tmp_path):
    config = PreferenceData(path=(str(write(tmp_path, CHATS)),), holdout=0.25)
    tables = preferences.load_preferences(config)
    for use in (
        lambda: preferences.tokenize(tables.train, config, tokenizer(64, None)),
        lambda: preferences.own_tokenizer(tables.train, config, "byte", 300),
    ):
        with pytest.raises(UserError, match=r"no chat template .* --model"):
            use()


def test_prompts_in_a_column_of_another_name_are_not_lost(tmp_path):
    """Where answers share nothing, they are asked for; where they share their beginning, a line says so."""
    rows = [{"instruction": f"{i} and 1?", "id": i, "win": f"{i + 1}", "lose": "x"} for i in range(12)]
    flags = {"chosen": "win", "rejected": "lose"}
    said = (
        r"--data.prompt prompt: no such column in .*, and 9 of the first 9 pairs do not .* --data.prompt instruction \("
    )
    with pytest.raises(UserError, match=said):
        read(tmp_path, rows, **flags)
    assert in_words(read(tmp_path, rows, prompt="", **flags)[1][0])[0] == BEGIN
    assert in_words(read(tmp_path, rows, prompt="instruction", **flags)[1][0])[0].endswith(" and 1?")
    with pytest.raises(UserError, match=r"--data.chosen chosen: no such key in .*lose$"):
        read(tmp_path, rows)
    for more, said in (
        ({}, "begin with$"),
        ({"id": 1, "why": "x"}, r"begin with \(--data.prompt names another; not used are id, why\)"),
    ):
        tables, train, held_out = read(tmp_path, [{"chosen": "ask: yes", "rejected": "ask: no", **more}] * 8)
        line = described(tables, train, held_out, PreferenceData()).splitlines()[0]
        assert re.search(f"; no column prompt, so a prompt is what both answers {said}", line)


def test_a_template_decides_where_answers_begin(tmp_path):
    """Also one that another template's tokens of the same rows lie in the cache for."""
    config = PreferenceData(path=(str(write(tmp_path, CHATS)),), holdout=0.25, max_length=64)
    table = preferences.load_preferences(config).train
    opened = "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}"
    opened += "{% if add_generation_prompt %}assistant: {% endif %}"
    prompt, *_ = CHAT_TEXTS
    expected = {CHAT: CHAT_TEXTS, opened: (f"{prompt}assistant: ", f"So.{END}", f"No idea.{END}")}
    for template, texts in expected.items():
        assert in_words(preferences.tokenize(table, config, tokenizer(64, template))[0]) == texts


def test_prompts_lose_their_beginning_and_long_answers_are_left_out(tmp_path):
    rows = [{"prompt": "0123456789", "chosen": "yes", "rejected": "n" * (3 + i)} for i in range(40)]
    tables, train, held_out = read(tmp_path, rows, longest=20)
    about = described(tables, train, held_out, PreferenceData(max_length=20))
    assert train.lengths.max() == 20 and len(train) + len(held_out) == 40 - train.left_out - held_out.left_out < 40
    assert train.left_out + held_out.left_out == sum(3 + i + 1 >= 20 for i in range(40))
    for row in [train[i] for i in range(len(train))]:
        prompt, chosen, rejected = in_words(row, 20)
        assert chosen == f"yes{END}" and rejected.endswith(END) and f"{BEGIN}0123456789".endswith(prompt)
        assert len(row["prompt"]) == min(11, 20 - len(row["rejected"]))
    given = described(replace(tables, held_out=False), train, held_out, PreferenceData(max_length=20))
    assert f"{len(train)} pairs to train on, {len(held_out)} pairs to evaluate on (--data.path" in given
    assert "24 pairs left out" in about and "prompts lose their beginning, to fit 20 tokens" in about
    with pytest.raises(UserError, match=r"--data.max-length 3: all answers .* are longer"):
        read(tmp_path, rows, longest=3)


def tiny(seed=0, vocab=258):
    torch.manual_seed(seed)
    size = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    return LlamaForCausalLM(LlamaConfig(vocab_size=vocab, initializer_range=0.3, **size)).eval()


def collated(rows, reference=None, multiple=1):
    """Collate rows that have no file."""
    return PreferenceTable.collate(SimpleNamespace(pad_id=257, multiple=multiple, reference=reference), rows)


def pairs(seed, count, longest=9):
    random = np.random.default_rng(seed)
    lengths = random.integers(1, longest, (count, 3))
    names = ("prompt", "chosen", "rejected")
    parts = [[random.integers(0, 256, size) for size in row] for row in lengths]
    return [{**dict(zip(names, row, strict=True)), "row": i} for i, row in enumerate(parts)]


@torch.no_grad()
@pytest.mark.parametrize("multiple", [1, 8])
def test_each_answer_has_its_own_probability_whatever_it_is_padded_to(multiple):
    model, rows = tiny(), pairs(0, 6)
    batch = collated(rows, multiple=multiple)
    found = log_probabilities(answer_logits(model, batch), batch)
    expected = []
    for row in [{**row, "answer": row[kind]} for kind in ("chosen", "rejected") for row in rows]:
        ids, start = torch.from_numpy(np.concatenate([row["prompt"], row["answer"]]))[None], len(row["prompt"])
        each = model(ids).logits.log_softmax(-1)[0, :-1].gather(1, ids[0, 1:, None])
        expected.append(each[start - 1 :].double().sum().item())
    assert found.tolist() == pytest.approx(expected, rel=1e-6)
    assert batch["input_ids"].shape[1] % multiple == 0 and batch["tokens"].sum() == len(batch["targets"])


@pytest.mark.parametrize("cut", [1, 3, 8])
def test_pairs_weigh_the_same_however_they_are_split(cut):
    """Of one long pair and short ones, with all terms: the gradient does not depend on accumulation."""
    rows = [*pairs(1, 1, 60), *pairs(2, 7)]
    reference = np.random.default_rng(0).normal(-20, 5, (8, 2))
    rows = [{**row, "row": i} for i, row in enumerate(rows)]
    loss = PreferenceLoss(PreferenceLossConfig(sft_weight=0.5), "cached", Distill(temperature=2.0), tiny(3))
    gradients = []
    for size in (8, cut):
        model = tiny()
        for i in range(0, 8, size):
            part = rows[i : i + size]
            (loss(model, collated(part, reference)).loss * len(part) / 8).backward()
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    assert gradients[0].norm() > 0.1 and (gradients[0] - gradients[1]).norm() < 1e-5 * gradients[0].norm()


@pytest.fixture(scope="module")
def trainer(tmp_path_factory, data_cache):
    """Give TRL's own trainer for conversations, with a reference model."""
    trl = pytest.importorskip("trl")
    import datasets

    args = trl.DPOConfig(
        output_dir=str(tmp_path_factory.mktemp("trl")),
        use_cpu=True,
        report_to=[],
        bf16=False,
        max_length=None,
        beta=0.3,
        disable_dropout=True,
        gradient_checkpointing=False,
    )
    replies = [said("assistant", "so " * (i % 4 + 1)) for i in range(8)]
    rows = [{"prompt": [USER], "chosen": [reply], "rejected": [BAD]} for reply in replies]
    data = datasets.Dataset.from_list(rows)
    return trl.DPOTrainer(tiny(), tiny(1), args=args, train_dataset=data, processing_class=tokenizer(1024)), rows


@pytest.mark.parametrize(
    ("kind", "theirs"), [("sigmoid", "sigmoid"), ("hinge", "hinge"), ("ipo", "ipo"), ("simpo", "sigmoid_norm")]
)
def test_the_loss_is_trls(trainer, tmp_path, kind, theirs):
    """On the batch that its own collator makes of the same conversations, whose tokens are the same."""
    trainer, rows = trainer
    trainer.loss_types = [theirs]
    examples = [trainer.train_dataset[i] for i in range(8)]
    inputs = trainer.data_collator(examples)
    theirs = trainer._compute_loss(trainer.model, inputs, False)
    own = [
        {key: np.array(row[f"{key}_ids"]) for key in ("prompt", "chosen", "rejected")} | {"row": i}
        for i, row in enumerate(examples)
    ]
    _, train, held_out = read(tmp_path, rows)
    ours = sorted(in_words(row) for table in (train, held_out) for row in (table[i] for i in range(len(table))))
    assert ours == sorted(in_words(row) for row in own)
    with torch.no_grad():
        batch = collated(own)
        reference = log_probabilities(answer_logits(tiny(1), batch), batch).view(2, -1).T.numpy()
    judged = PreferenceLoss(PreferenceLossConfig(kind, beta=0.3), "cached", Distill())(tiny(), collated(own, reference))
    assert judged.loss.item() == pytest.approx(theirs.item(), rel=1e-5)
    if kind in ("sigmoid", "hinge"):
        logged = {name: values[-1] for name, values in trainer._metrics["eval"].items() if "rewards" in name}
        names = {"chosen": "chosen", "rejected": "rejected", "margin": "margins", "accuracy": "accuracies"}
        for name, other in names.items():
            assert judged.means[f"reward/{name}"].item() == pytest.approx(logged[f"rewards/{other}"], rel=1e-4)


@torch.no_grad()
def test_terms_of_the_loss():
    """Smoothing after its formula; the likelihood of the chosen answers; a teacher's divergence, at a temperature."""
    rows, model, teacher = pairs(4, 5), tiny(), tiny(7)
    batch = collated(rows)
    sums, tokens = log_probabilities(answer_logits(model, batch), batch), batch["tokens"]
    chosen, rejected = sums.chunk(2)
    margin = 0.1 * (chosen - rejected)
    smooth = -0.8 * margin.sigmoid().log() - 0.2 * (-margin).sigmoid().log()
    config = PreferenceLossConfig(smoothing=0.2, sft_weight=0.5)
    plain = PreferenceLoss(config, "none", Distill())(model, batch).loss.item()
    assert plain == pytest.approx((smooth - 0.5 * chosen / tokens[:5]).mean().item(), rel=1e-6)
    both = PreferenceLoss(config, "none", Distill(weight=3, temperature=2), teacher)(model, batch)
    expected = []
    for row in rows:
        ids = torch.from_numpy(np.concatenate([row["prompt"], row["chosen"]]))[None]
        a, b = ((each(ids).logits[0, len(row["prompt"]) - 1 : -1] / 2).log_softmax(-1) for each in (teacher, model))
        expected.append(3 * 4 * (a.exp() * (a - b)).sum(-1).mean().item())
    assert both.loss.item() - plain == pytest.approx(np.mean(expected), rel=1e-5)
    assert both.means["part/distill"].item() == pytest.approx(np.mean(expected), rel=1e-5)
    same = PreferenceLoss(config, "none", Distill(), model)(model, batch)
    assert same.loss.item() == pytest.approx(plain, rel=1e-6)


@torch.no_grad()
def test_a_copy_in_each_step_is_the_reference_as_its_numbers_are():
    rows, copied = pairs(4, 5), tiny(7)
    batch = collated(rows)
    reference = log_probabilities(answer_logits(copied, batch), batch).view(2, -1).T.numpy()
    cached = PreferenceLoss(PreferenceLossConfig(), "cached", Distill())(tiny(), collated(rows, reference))
    judged = PreferenceLoss(PreferenceLossConfig(), "copy", Distill(), copied=copied)(tiny(), batch)
    assert judged.chosen.equal(cached.chosen) and judged.loss.equal(cached.loss)


def test_scores_are_means_over_pairs():
    chosen, rejected = torch.randn(2, 30, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    whole = PreferenceScores()
    for a, b in zip(chosen.split(7), rejected.split(7), strict=True):
        whole.update(a, b)
    found = whole.alone()
    assert found["accuracy"] == (chosen > rejected).double().mean()
    assert found["margin"] == pytest.approx((chosen - rejected).mean().item())
    assert found["reward_chosen"] == pytest.approx(chosen.mean().item())


@pytest.mark.parametrize(
    ("loss", "distill", "said"),
    [
        ({"beta": 0}, {}, "--loss.beta 0"),
        ({"smoothing": 0.5}, {}, "below 0.5"),
        ({"smoothing": 0.1, "kind": "ipo"}, {}, "--loss.kind ipo has none"),
        ({"reference": "adapters"}, {}, "give --lora.rank 8"),
        ({}, {"temperature": 0}, "--distill.temperature 0"),
    ],
)
def test_settings_that_cannot_be(loss, distill, said):
    with pytest.raises(UserError, match=said):
        check_preferences(PreferenceLossConfig(**loss), Distill(**distill), Lora())


def test_slips():
    assert halves("def f():\n    a\n    b\n    c\n    d") == ("def f():\n    a\n    b\n", "    c\n    d")
    slips = [with_slip("a = b(1)", number) for number in range(4)]
    assert slips == ["= a b(1)", " = b(1)", "a a = b(1)", "a = b(1)"]
    assert with_slip("a = b(1)", 3 + 4 * (1 + 5 * 2)) == "a b b(1)" and with_slip("a", 5) == "a"


COMMON = ["--run.global-batch", 6, "--run.micro-batch", 2, "--run.steps", 3, "--run.trackers", "--run.log-every", 1]
COMMON += ["--optim.lr", 0.01, "--run.exact", "true"]


def train(folder, *more):
    return dpo.main(parse(dpo.Config, [str(word) for word in [*COMMON, *more, "--run.dir", folder]]))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    tiny().save_pretrained(folder)
    tokenizer(1024).save_pretrained(folder)
    return folder


def test_the_reference_is_the_same_by_any_layout_and_by_adapters_off(model, tmp_path, own_data_cache):
    """Computed by one process, by two under FSDP2, and step by step; and once only."""
    data = ["--data.path", write(tmp_path, TEXTS), "--model", model, "--lora.rank", 2, "--data.max-length", 64]
    train(tmp_path / "one", *data)
    (file,) = sorted((own_data_cache / "samestep").glob("reference-*"), key=lambda each: each.stat().st_size)[1:]
    first = np.load(file)
    file.unlink()
    result = launch("fsdp_cpu", 2, RECIPE, *COMMON, *data, "--run.dir", tmp_path / "two")
    assert result.status == 0, result.output
    assert "computing what the model says of 11 pairs of training, once" in result.output and len(first) == 11
    assert np.array_equal(np.load(file), first)
    one = steps(tmp_path / "one")
    assert steps(tmp_path / "two") == one and scores(tmp_path / "two") == scores(tmp_path / "one")
    assert one[0]["reward/margin"] == pytest.approx(0, abs=1e-6) and one[-1]["reward/margin"] > 1e-3
    assert one[0]["loss"] == pytest.approx(np.log(2), rel=1e-6)
    train(tmp_path / "off", *data, "--loss.reference", "adapters")
    off = steps(tmp_path / "off")
    assert [line["loss"] for line in off] == pytest.approx([line["loss"] for line in one], rel=1e-5)
    assert metrics(tmp_path / "off")[-1]["eval/accuracy"] == metrics(tmp_path / "one")[-1]["eval/accuracy"]


def test_the_reference_is_computed_once_for_the_same_weights_and_pairs(model, tmp_path, own_data_cache, capsys):
    """And anew for others: what the model says at first is what its reference says."""
    other, changed, swapped = tmp_path / "other", tmp_path / "changed", tmp_path / "swapped"
    tiny(1).save_pretrained(other)
    tokenizer(1024).save_pretrained(other)
    shutil.copytree(model, tmp_path / "moved")
    changed.mkdir()
    swapped.mkdir()

    def computes(name, folder, texts, *more):
        data = ["--data.path", texts, "--model", folder, "--data.max-length", 64]
        train(tmp_path / name, *data, "--run.steps", 1, *more)
        assert steps(tmp_path / name)[0]["reward/margin"] == pytest.approx(0, abs=1e-6)
        return "computing what the model says" in capsys.readouterr().out

    texts = write(changed, [{**row, "chosen": f"{row['chosen']}!"} for row in TEXTS])
    assert computes("first", model, texts) and not computes("again", model, texts)
    assert computes("weights", other, texts) and not computes("folder", tmp_path / "moved", texts)
    assert computes("pairs", model, write(swapped, [{**row, "rejected": f"{row['rejected']}?"} for row in TEXTS]))
    assert computes("lora", model, texts, "--lora.rank", 2)
    assert not computes("seed", model, texts, "--lora.rank", 2, "--run.seed", 1)


def test_a_finished_model_writes_texts_and_learns_from_a_teacher(model, tmp_path, capsys):
    from transformers import pipeline

    data = ["--data.path", write(tmp_path, TEXTS), "--model", model, "--data.max-length", 64]
    found = train(tmp_path / "run", *data, "--distill.teacher", model, "--distill.weight", 2)
    line = steps(tmp_path / "run")[0]
    assert line["part/distill"] == pytest.approx(0, abs=1e-6) and line["part/preference"] == pytest.approx(np.log(2))
    assert set(found) >= {"eval/accuracy", "eval/margin", "eval/reward_chosen", "eval/loss", "eval/samples"}
    again = as_it_is(tmp_path / "run")["scores"]  # relative to the model that it began with
    assert again == {name: found[name] for name in again} and again["eval/margin"] != 0
    assert 'pipeline("text-generation"' in capsys.readouterr().out
    write_on = pipeline("text-generation", str(tmp_path / "run" / "model"))
    assert write_on("1 and 1 is ", max_new_tokens=3, do_sample=False)[0]["generated_text"].startswith("1 and 1 is ")
    other = tmp_path / "other"
    AutoModelForCausalLM.from_pretrained(model).save_pretrained(other)
    changed = tokenizer(1024)
    changed.add_tokens(["<more>"])
    changed.save_pretrained(other)
    with pytest.raises(UserError, match=r"--distill.teacher .*its tokens are not those of the model \(259 and 258"):
        train(tmp_path / "refused", *data, "--distill.teacher", other)
    changed = tokenizer(1024)
    changed.add_tokens(["<other>"])  # as many tokens, but others
    with pytest.raises(UserError, match=r"\(259 and 259"):
        load_teacher(Distill(str(other)), changed, None, None)
    assert not (tmp_path / "refused").exists()


@pytest.mark.parametrize(
    ("flag", "more", "said"),
    [("--distill.teacher", ["--loss.reference", "none"], "the teacher"), ("--model", [], "the reference model")],
)
def test_a_run_does_not_go_on_with_another_teacher_or_reference(model, tmp_path, flag, more, said, capsys):
    """In a folder of the same name, whose files are others."""
    copy = shutil.copytree(model, tmp_path / "copy")
    words = ["--data.path", write(tmp_path, TEXTS), "--model", model, "--data.max-length", 64, flag, copy, *more]
    words += ["--run.save-every", 1, "--run.steps"]
    train(tmp_path / "run", *words, 2)
    tiny(1).save_pretrained(copy)
    refused = (
        rf"since it began {said} has changed: its weights or its config are others\. Give it what it had, .* accept"
    )
    with pytest.raises(UserError, match=refused):
        train(tmp_path / "run", *words, 3)
    train(tmp_path / "run", *words, 3, "--run.changed", "accept")
    assert f"{said} has changed, which is accepted" in capsys.readouterr().out


def test_numbers_of_the_reference_are_kept_apart_by_what_changes_them():
    """Among it what only `run.prepare` does to the weights."""

    def key(dtype=torch.float32, precision="bf16", **config):
        asked = {"exact": True, "slices": 0, "micro_batch": 4} | config
        ours = SimpleNamespace(device=torch.device("cpu"), mixed_precision=precision)
        run = SimpleNamespace(accelerator=ours, config=SimpleNamespace(**asked))
        return reference._key(run, torch.nn.Linear(2, 2, dtype=dtype), SimpleNamespace(fingerprint="f", multiple=8))

    keys = [key(), key(torch.bfloat16), key(precision="no"), key(slices=2), key(exact=False), key(micro_batch=2)]
    assert len({*keys}) == len(keys) and key() == keys[0]
