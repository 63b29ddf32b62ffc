"""Conversations, in every recipe that reads them: nobody's words are taken for another's, left out, or dated anew."""

import datetime
import json
from types import SimpleNamespace

import pytest
import yaml
from support.launching import ROOT, steps
from transformers import LlamaConfig, LlamaForCausalLM

from app import parse
from app.config import put, to_dict, when_begun
from app.data.cache import cache_folder
from app.data.config import CorpusData, PreferenceData
from app.data.corpus import corpus
from app.data.corpus.encode import tokenize
from app.data.corpus.messages import CALL, LEARNT, MARKS, SPEAKERS, THOUGHTS
from app.data.text import preferences
from app.data.text.tokenizer import byte_tokenizer
from app.errors import UserError
from recipes import dpo, lm

pytestmark = pytest.mark.usefixtures("data_cache")
CHATML = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% for c in m.tool_calls or [] %}[{{ c.function.name }}"
    " {{ c.function.arguments | tojson }}]{% endfor %}</s>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def with_template(template):
    made = byte_tokenizer(256)
    made.chat_template = template
    return made


def learnt_by_lm(folder, messages, template=CHATML, **flags):
    """Return what a row's tokens say, and what of them is learnt."""
    file = folder / "rows.jsonl"
    file.write_text(f"{json.dumps({'c': messages})}\n" * 4)
    config = CorpusData(path=(str(file),), messages="c", block=64, **flags)
    tokenizer = with_template(template)
    documents = tokenize(corpus.load(config).train, config, tokenizer)
    ids, learnt = documents.tokens(0, len(documents) // documents.count), documents.supervised(0, len(documents))
    return tokenizer.decode(ids), tokenizer.decode(ids[learnt[: len(ids)]])


def learnt_by_dpo(folder, messages, template=CHATML, **flags):
    """Return the same of the answer that is chosen: the last message, or all that is not asked."""
    file = folder / "pairs.jsonl"
    *asked, answer = messages
    other = {key: "worse" if key in ("content", "value") else value for key, value in answer.items()}
    other = {"role": "assistant", "content": "worse"} if CALL in answer.values() else other
    row = {"prompt": asked, "chosen": [answer], "rejected": [other]}
    file.write_text(f"{json.dumps(row)}\n" * 4)
    config = PreferenceData(path=(str(file),), holdout=0.5, max_length=256, **flags)
    tokenizer = with_template(template)
    pair = preferences.tokenize(preferences.load_preferences(config).train, config, tokenizer)[0]
    prompt, chosen = (tokenizer.decode(pair[name]) for name in ("prompt", "chosen"))
    return prompt + chosen, chosen


READERS = {"lm": learnt_by_lm, "dpo": learnt_by_dpo}
each_reader = pytest.mark.parametrize("read", READERS.values(), ids=READERS)


def test_every_recipe_that_writes_chats_is_here():
    """A new one must read its rows as these do, and get the run's date."""
    chats = {
        file.stem
        for file in (ROOT / "recipes").glob("*.py")
        if "chats" in file.read_text() or ".messages" in file.read_text()
    }
    assert chats == set(READERS)
    for recipe in (lm, dpo):
        assert "data.date" in when_begun(recipe.Config(), {})


@each_reader
@pytest.mark.parametrize("keys", [("role", "content"), ("from", "value")])
@pytest.mark.parametrize("change", [str, str.title, str.upper, lambda word: f" {word}\n"])
def test_every_word_for_a_speaker_is_the_template_s(tmp_path, read, keys, change):
    who, what = keys
    template = (
        "{% for m in messages %}" + "{% if m.role not in ['a'] %}" + CHATML.removeprefix("{% for m in messages %}")
    )
    template = template.replace("</s>", "</s>{% endif %}")
    for word, role in SPEAKERS.items():
        asked = [{who: "user", what: "Why?"}]
        answer = {who: change("gpt"), what: "So."}
        spoken = {who: change(word), what: f"I am {word}."}
        whole, learnt = read(tmp_path, [*asked, spoken, answer] if role != LEARNT else [*asked, {**spoken}], template)
        assert f"<{role}>I am {word}.</s>" in whole
        assert (
            ("I am" in learnt) == (role == LEARNT)
            and "Why?" not in learnt
            and learnt.startswith(("I am", "So.", "<assistant>"))
        )


@each_reader
@pytest.mark.parametrize("keys", [("role", "content"), ("from", "value")])
@pytest.mark.parametrize("word", ["robot", "asistant", "chat gpt", "", "narrator"])
def test_an_unknown_speaker_is_refused_with_its_place(tmp_path, read, keys, word):
    who, what = keys
    with pytest.raises(UserError, match=rf"message 1 of row \d+ \(counted from 0\) of .*jsonl has the role {word!r}"):
        read(tmp_path, [{who: role, what: "a"} for role in ("user", word, "gpt")])


@each_reader
def test_a_role_that_the_template_names_is_its_own(tmp_path, read):
    template = CHATML.replace("{% for m", "{% set own = 'narrator' %}{% for m", 1)
    messages = [
        {"role": "user", "content": "a"},
        {"role": "narrator", "content": "n"},
        {"role": "model", "content": "b"},
    ]
    whole, learnt = read(tmp_path, messages, template)
    assert "<narrator>n</s>" in whole and learnt.endswith("b</s>") and "n</s>" not in learnt


@each_reader
def test_a_template_may_call_the_assistant_otherwise(tmp_path, read):
    own = CHATML.replace("messages %}", "messages if m.role in ['human', 'gpt'] %}", 1).replace("<assistant>", "<gpt>")
    whole, learnt = read(tmp_path, [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}], own)
    assert (whole, learnt) == ("<human>a</s><gpt>b</s>", "b</s>")
    gemma = own.replace("m.role in ['human', 'gpt']", "m.role in ['assistant', 'model', 'user']")
    _, learnt = read(tmp_path, [{"role": "user", "content": "a"}, {"role": "model", "content": "b"}], gemma)
    assert learnt == "<assistant>b</s>", "whose name is not the one before what a model writes"


@each_reader
def test_a_call_of_a_function_is_written_as_one(tmp_path, read):
    call = {"from": "function_call", "value": json.dumps({"name": "look", "arguments": {"at": "x"}})}
    _, learnt = read(tmp_path, [{"from": "human", "value": "a"}, call])
    assert learnt.endswith('[look {"at": "x"}]</s>')
    with pytest.raises(UserError, match=r"row \d+ .* is a function_call, and no json with a name and arguments"):
        read(tmp_path, [{"from": "human", "value": "a"}, {**call, "value": "look at x"}])
    with pytest.raises(UserError, match=r"template of --model leaves out message 1 of row \d+ .*\(its tool_calls\)"):
        read(tmp_path, [{"from": "human", "value": "a"}, call], CHATML.replace("m.tool_calls or []", "[]"))


@each_reader
@pytest.mark.parametrize(
    ("template", "says"),
    [
        (
            CHATML.replace("messages %}", "messages if m.role != 'system' %}", 1),
            r"leaves out message 0 .*role is system",
        ),
        (CHATML.replace("messages %}", "messages if m.role != 'tool' %}", 1), r"leaves out message 2 .*role is tool"),
        (CHATML.replace("{{ m.role }}", "{{ {'user': 1, 'assistant': 2}[m.role].real }}"), r"refuses row \d+"),
        (CHATML + "{{ raise_exception('no tools') if messages[2:] }}", r"refuses row \d+ .*no tools"),
        (CHATML + "{{ messages[0].name | length + 'x' }}", r"refuses row \d+ .*TypeError"),
    ],
)
def test_what_a_template_leaves_out_or_refuses_is_said(tmp_path, read, template, says):
    roles = ("system", "user", "tool", "assistant")
    with pytest.raises(UserError, match=says):
        read(tmp_path, [{"role": role, "content": "aeiou"[i]} for i, role in enumerate(roles)], template)


@each_reader
def test_contents_in_parts_are_joined_or_refused(tmp_path, read):
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    user = {"role": "user", "content": parts}
    whole, _ = read(tmp_path, [user, {"role": "assistant", "content": parts}])
    assert whole.count("one two") == 2
    for bad in ([*parts, {"type": "image_url", "image_url": {"url": "x"}}], [{"text": "a", "type": None}]):
        with pytest.raises(UserError, match=r"message 0 of row \d+ .* parts that are no texts"):
            read(tmp_path, [{**user, "content": bad}, {"role": "assistant", "content": parts}])


def test_conversations_without_an_answer_are_counted(tmp_path):
    answered = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps({"c": row}) + "\n" for row in [answered, answered[:1]] * 4))
    config = CorpusData(path=(str(file),), messages="c", block=64, holdout=0.25)
    tables, tokenizer = corpus.load(config), with_template(CHATML)
    train, held_out = (corpus.blocks(table, config, tokenizer) for table in (tables.train, tables.evaluation))
    assert "nothing is learnt of 4 conversations without a message of the assistant" in corpus.describe(
        tables, train, {"": held_out}, tokenizer
    )
    file.write_text(f"{json.dumps({'c': answered[:1]})}\n" * 4)
    with pytest.raises(
        UserError, match=r"rows.jsonl has nothing to learn: no conversation in c has a message of the as"
    ):
        corpus.blocks(corpus.load(config).train, config, tokenizer)


@pytest.mark.parametrize("prompt", [[{"role": "user", "content": "q"}], {"from": "human", "value": "q"}, "q"])
@pytest.mark.parametrize("wrap", [lambda m: m, lambda m: [m]])
@pytest.mark.parametrize("whole", [False, True])
def test_answers_are_messages_or_lists_of_them(tmp_path, prompt, wrap, whole):
    """After their prompt, or with it; the prompt a text, a message or a list."""
    user = {"from": "human", "value": "q"}
    answers = {name: {"from": "gpt", "value": name} for name in ("chosen", "rejected")}
    answers = {name: [user, one] if whole else wrap(one) for name, one in answers.items()}
    file = tmp_path / "rows.jsonl"
    file.write_text(f"{json.dumps({'prompt': prompt, **answers})}\n" * 4)
    config = PreferenceData(path=(str(file),), holdout=0.5)
    tokenizer = with_template(CHATML)
    pair = preferences.tokenize(preferences.load_preferences(config).train, config, tokenizer)[0]
    texts = [tokenizer.decode(pair[name]) for name in ("prompt", "chosen", "rejected")]
    assert texts == ["<user>q</s><assistant>", "chosen</s>", "rejected</s>"]


def test_an_answer_is_the_assistant_s(tmp_path):
    row = {name: [{"role": "user", "content": name}] for name in ("prompt", "chosen", "rejected")}
    file = tmp_path / "rows.jsonl"
    file.write_text(f"{json.dumps(row)}\n" * 4)
    config = PreferenceData(path=(str(file),), holdout=0.5)
    with pytest.raises(UserError, match=r"--data.chosen: the answer of row \d+ .* begins with a message of the user"):
        preferences.tokenize(preferences.load_preferences(config).train, config, with_template(CHATML))


DATED = "{{ strftime_now('%d %b %Y') if strftime_now is defined else 'never' }}" + CHATML
ASKED = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]


@each_reader
def test_a_template_writes_the_run_s_date(tmp_path, read):
    """Whatever day it is, and whatever lies in the cache."""
    for day, words in (("2026-02-28", "28 Feb 2026"), ("2027-12-01", "01 Dec 2027")):
        assert read(tmp_path, ASKED, DATED, date=day)[0].startswith(words)
    with pytest.raises(UserError, match=r"--data.date 2026-02-30: give a date"):
        read(tmp_path, ASKED, DATED, date="2026-02-30")


def test_a_template_without_a_date_has_one_text_for_all_days():
    from app.data.corpus.chat_template import ChatTemplate

    keys = {
        ChatTemplate(with_template(text), day).identity
        for text in (CHATML, DATED)
        for day in ("2026-02-28", "2026-03-01")
    }
    assert len(keys) == 3


def test_a_run_that_goes_on_keeps_its_date():
    config = lm.Config()
    fields = to_dict(config)
    put(config, fields, when_begun(config, {"data": {"date": "2026-02-28"}}))
    assert config.data.date == fields["data"]["date"] == "2026-02-28"
    assert when_begun(config, {"data": {"date": "2027-01-01"}}) == {}


class Day:
    """What is asked for the day, in place of datetime."""

    def __init__(self, day):
        self.date = SimpleNamespace(
            today=lambda: datetime.date.fromisoformat(day), fromisoformat=datetime.date.fromisoformat
        )


@pytest.mark.parametrize("name", READERS)
def test_a_run_has_one_date(tmp_path, monkeypatch, name):
    """Where it goes on a day later, without its cache; and where it is read again from its config.yaml."""
    size = {"num_hidden_layers": 1, "num_attention_heads": 1, "hidden_size": 8, "intermediate_size": 8}
    LlamaForCausalLM(LlamaConfig(vocab_size=258, max_position_embeddings=256, **size)).save_pretrained(tmp_path / "m")
    with_template(DATED).save_pretrained(tmp_path / "m")
    recipe, rows = {
        "lm": (lm, [{"c": [{**ASKED[0], "content": f"{i}"}, ASKED[1]]} for i in range(40)]),
        "dpo": (
            dpo,
            [
                {"prompt": [ASKED[0]], "chosen": [ASKED[1]], "rejected": [{**ASKED[1], "content": f"{i}"}]}
                for i in range(40)
            ],
        ),
    }[name]
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    flags = [
        "--model",
        tmp_path / "m",
        "--data.path",
        tmp_path / "rows.jsonl",
        "--run.steps",
        4,
        "--run.global-batch",
        4,
    ]
    flags += ["--run.micro-batch", 2, "--run.trackers", "--run.log-every", 1]
    flags += ["--data.messages", "c", "--data.block", 64] if name == "lm" else ["--data.max-length", 128]

    def train(day, run, *more):
        monkeypatch.setattr("app.data.config.datetime", Day(day))
        for file in cache_folder().glob("*.arrow"):
            file.unlink()
        words = [str(word) for word in (*flags, "--run.dir", tmp_path / run, *more)]
        return recipe.main(parse(recipe.Config, words))

    train("2026-01-31", "run", "--run.stop-at", 2)
    train("2026-02-01", "run")
    settings = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert settings["data"]["date"] == "2026-01-31"
    train("2026-01-31", "whole")
    assert steps(tmp_path / "run") == steps(tmp_path / "whole")
    train("2026-02-02", "again", "--config", tmp_path / "run" / "config.yaml", "--run.dir", tmp_path / "again")
    assert steps(tmp_path / "again") == steps(tmp_path / "whole")
    train("2026-02-02", "later")
    assert steps(tmp_path / "later") != steps(tmp_path / "whole"), "another run has another date"
    with pytest.raises(UserError, match="the training data have changed"):
        train("2026-02-02", "run", "--data.date", "2026-02-02", "--run.steps", 6)


@pytest.mark.parametrize("mark", MARKS)
@pytest.mark.parametrize(("no", "yes"), [(0, 1), (False, True), (0.0, 1.0), (0, None)])
def test_a_message_that_is_marked_so_is_not_learnt(tmp_path, mark, no, yes):
    user = {"role": "user", "content": "a", mark: 0}
    row = [user, {"from": "gpt", "value": "bad", mark: no}, user, {"role": "assistant", "content": "good", mark: yes}]
    whole, learnt = learnt_by_lm(tmp_path, row)
    assert "bad" in whole and learnt == "good</s>"


@each_reader
@pytest.mark.parametrize("mark", MARKS)
def test_marks_that_cannot_be_heeded_are_refused(tmp_path, read, mark):
    answer = {"role": "assistant", "content": "b"}
    for value in (0.5, "no"):
        with pytest.raises(
            UserError, match=rf"row \d+ .*has the {mark} {value!r}, and a message is learnt \(1, true\)"
        ):
            read(tmp_path, [{"role": "user", "content": "a"}, {**answer, mark: value}])
    if read is learnt_by_dpo:
        with pytest.raises(UserError, match=r"--data.chosen: the answer of row \d+ .* marked as not to be learnt"):
            read(tmp_path, [{"role": "user", "content": "a"}, {**answer, mark: 0}])


@each_reader
@pytest.mark.parametrize("key", THOUGHTS)
def test_thoughts_are_written_or_refused(tmp_path, read, key):
    row = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", key: "hmm"}]
    with pytest.raises(UserError, match=rf"message 1 of row \d+ .*has {key}, which the chat template of --model does"):
        read(tmp_path, row)
    _, learnt = read(tmp_path, row, CHATML.replace("{{ m.content }}", f"{{{{ m.{key} }}}}|{{{{ m.content }}}}"))
    assert learnt == "hmm|b</s>"


WITH_TOOLS = "{% if tools %}[{{ tools | tojson }}]{% endif %}" + CHATML
FUNCTION = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


def read_with_tools(name, folder, tools, template):
    """Return what a row with this in its column of tools says."""
    answer = {"role": "assistant", "content": "b"}
    asked = [{"role": "user", "content": "a"}]
    pair = {"prompt": asked, "chosen": [answer], "rejected": [{**answer, "content": "c"}]}
    row = {"c": [*asked, answer]} if name == "lm" else pair
    file = folder / "tools.jsonl"
    file.write_text("".join(json.dumps({**row, "tools": each}) + "\n" for each in [tools, None] * 3))
    tokenizer = with_template(template)
    if name == "lm":
        config = CorpusData(path=(str(file),), messages="c", block=64)
        documents = tokenize(corpus.load(config).train, config, tokenizer)
        return tokenizer.decode(documents.tokens(0, len(documents)))
    config = PreferenceData(path=(str(file),), holdout=0.5, max_length=256)
    pairs = preferences.tokenize(preferences.load_preferences(config).train, config, tokenizer)
    return "".join(tokenizer.decode(pairs[row][part]) for row in range(len(pairs)) for part in ("prompt", "chosen"))


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize("form", [lambda tools: tools, json.dumps])
@pytest.mark.parametrize("dated", ["", "{% if strftime_now is defined %}{{ strftime_now('%Y') }}{% endif %}"])
def test_tools_of_a_row_are_written(tmp_path, name, form, dated):
    text = read_with_tools(name, tmp_path, form([FUNCTION]), dated + WITH_TOOLS)
    assert f"[{json.dumps([FUNCTION])}]<user>a</s>" in text
    assert text.count("<user>a</s>") > text.count("weather")  # rows without any have none
    with pytest.raises(UserError, match=r"row \d+ .*has functions in the column tools, and the chat template .* none"):
        read_with_tools(name, tmp_path, form([FUNCTION]), CHATML)
    with pytest.raises(UserError, match=r"row \d+ .*has in the column tools .*: give a list of functions"):
        read_with_tools(name, tmp_path, form({"a": 1}), WITH_TOOLS)


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize("nothing", [None, [], "", "[]", " "])
def test_rows_without_tools_need_no_template_for_them(tmp_path, name, nothing):
    assert "<user>a</s><assistant>b</s>" in read_with_tools(name, tmp_path, nothing, CHATML)


def test_columns_next_to_conversations_are_named(tmp_path):
    """As tools write a system message: a run that does not read it says so."""
    row = {"c": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}], "system": "Be kind.", "tools": None}
    file = tmp_path / "rows.jsonl"
    file.write_text(f"{json.dumps(row)}\n" * 4)
    assert "columns that are not read: system" in corpus.load(CorpusData(path=(str(file),), messages="c")).note


ARGUMENTS = "c.function.arguments"
AS_TEXT = f"{ARGUMENTS} if {ARGUMENTS} is string else {ARGUMENTS} | tojson"
WAYS = {f"{ARGUMENTS} | tojson": '{"a": 1}', AS_TEXT: '{"a": 1}', f"{ARGUMENTS} + ''": '{"a": 1}'}
WAYS |= {f"{ARGUMENTS}.items() | list": "[('a', 1)]"}


@each_reader
@pytest.mark.parametrize("way", WAYS)
def test_arguments_of_calls_are_written_once(tmp_path, read, way):
    """OpenAI's files have them as json in a text, of which some templates make json once more."""
    template = CHATML.replace(f"{ARGUMENTS} | tojson", way)
    call = {"type": "function", "id": "call00001", "function": {"name": "sum", "arguments": '{"a": 1}'}}
    row = [{"role": "user", "content": "a"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    _, learnt = read(tmp_path, row, template)
    assert learnt == f"[sum {WAYS[way]}]</s>"
