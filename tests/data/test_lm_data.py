"""Texts as blocks: every token learnt once, documents apart, and what a model makes of it."""

import gzip
import itertools
import json
import pickle

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from app.data.config import CorpusData
from app.data.corpus import corpus
from app.data.corpus.blocks import IGNORED, Blocks, token_loss
from app.data.corpus.documents import start_of
from app.data.corpus.encode import tokenize
from app.data.corpus.shorter import RampedCollate
from app.data.rows import stack
from app.data.tables.text_files import PIECE, piece_rows
from app.data.text.tokenizer import byte_tokenizer, character_tokenizer, train_lm_tokenizer
from app.errors import UserError
from app.sampling.batch_plan import BatchPlan, EvaluationPlan
from app.training.feeding.loader import load

SIZE = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 16, "intermediate_size": 32}
LLAMA = LlamaConfig(vocab_size=258, max_position_embeddings=64, num_key_value_heads=1, **SIZE)
GPT2 = GPT2Config(vocab_size=258, n_positions=64, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
BEGIN, END = 256, 257


@pytest.fixture
def write(tmp_path):
    """Give a function that writes rows as a jsonl file, and returns its path."""

    def write(rows, name="rows.jsonl"):
        path = tmp_path / name
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return path

    return write


def config_of(path, **flags):
    return CorpusData(path=(str(path),), **{"block": 8, "holdout": 0.5, **flags})


def documents_of(path, tokenizer=None, **flags):
    """Tokenize all that a file holds, before anything is held out."""
    from app.data.loading import open_source

    config = config_of(path, **flags)
    table = open_source("--data.path", config.path, txt=config.txt)["train"]
    return tokenize(table, config, tokenizer or byte_tokenizer(8))


TEXTS = ["alpha beta", "", "c", "delta epsilon zeta eta theta iota", "kappa"]


def expected(texts, apart):
    """Pair each token with what it is predicted from, its place included, document by document."""
    pairs, last = [], BEGIN
    for text in filter(None, texts):
        for place, token in enumerate([*text.encode(), END]):
            pairs.append((BEGIN if apart and not place else last, token))
            last = token
    return pairs


@pytest.mark.parametrize("apart", [True, False])
@pytest.mark.parametrize("size", [2, 7, 16, 1000])
def test_every_token_is_a_target_once_behind_the_one_before_it(data_cache, write, apart, size):
    documents = documents_of(write({"text": text} for text in TEXTS))
    blocks = Blocks(documents, size, BEGIN, apart)
    rows = [blocks[i] for i in range(len(blocks))]
    found = [pair for row in rows for pair in zip(row["input_ids"], row["targets"], strict=True) if pair[1] != IGNORED]
    assert found == expected(TEXTS, apart)
    assert blocks.weights.tolist() == [np.count_nonzero(row["targets"] != IGNORED) for row in rows]
    assert blocks.tokens == len(documents) == len(found)
    assert documents.count == 4 and documents.bytes == sum(map(len, TEXTS))
    assert {len(row["input_ids"]) for row in rows} == {size}


def test_positions_restart_with_documents_and_blocks(data_cache, write):
    blocks = Blocks(documents_of(write([{"text": "abcd"}, {"text": "ef"}, {"text": "ghijk"}])), 6, BEGIN, True)
    assert [blocks[i]["position_ids"].tolist() for i in range(3)] == [
        [0, 1, 2, 3, 4, 0],
        [1 - 1, 1, 0, 1, 2, 3],
        [0, 1, 0, 1, 2, 3],
    ]
    assert "position_ids" not in Blocks(blocks.documents, 6, BEGIN, False)[0]


@pytest.mark.parametrize("apart", [True, False])
def test_a_block_ramp_cuts_blocks_into_shorter_ones(data_cache, write, apart):
    """The rows of a block that is cut are the blocks of that size, position by position; evaluations see it whole."""
    documents = documents_of(write({"text": text} for text in TEXTS))
    whole, short = (Blocks(documents, size, BEGIN, apart) for size in (24, 6))
    batches = RampedCollate(stack, config_of("", block=24, block_ramp=("2:6", "5:12")))
    plan = BatchPlan(len(whole), 2 * len(whole), len(whole), 2)
    for step in load(plan, range(2), whole, batches, 0, 1, torch.device("cpu")):
        for turn in step.turns:
            for i, sample in enumerate(turn.ids):
                rows = stack([short[row] for row in range(4 * sample, min(4 * sample + 4, len(short)))])
                for name, values in rows.items():
                    assert torch.equal(turn.inputs[name][4 * i : 4 * i + len(values)], values), name
            assert (turn.inputs["targets"] != IGNORED).sum() == whole.weights[turn.ids].sum()
    assert [batches.at(step)([whole[0]])["input_ids"].shape for step in (1, 4, 5)] == [(4, 6), (2, 12), (1, 24)]
    evaluated = load(EvaluationPlan(len(whole), 2), range(1), whole, batches, 0, 1, torch.device("cpu"))
    assert next(evaluated).turns[0].inputs["input_ids"].shape == (2, 24)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("shape", [LLAMA, GPT2], ids=["llama", "gpt2"])
def test_packed_documents_get_the_logits_that_each_gets_alone(data_cache, write, shape, attention):
    """Rests on transformers 5.23 finding documents by their positions, in every row of a batch of its own."""
    torch.manual_seed(0)
    shape._attn_implementation = attention
    model = (LlamaForCausalLM if shape is LLAMA else GPT2LMHeadModel)(shape).eval()
    blocks = Blocks(documents_of(write({"text": text} for text in TEXTS)), 40, BEGIN, True)
    batch = stack([blocks[0], blocks[1]])
    with torch.no_grad():
        packed = model(batch["input_ids"], position_ids=batch["position_ids"], use_cache=False).logits
        starts = [i for i, place in enumerate(batch["position_ids"][0].tolist()) if not place] + [40]
        assert len(starts) == 4
        for start, end in itertools.pairwise(starts):
            alone = model(batch["input_ids"][:1, start:end], use_cache=False).logits
            torch.testing.assert_close(packed[:1, start:end], alone, rtol=0, atol=1e-5)


def test_a_prompt_is_read_and_not_learnt(data_cache, write):
    rows = [{"q": "one", "a": " 1"}, {"q": "two and a half, which is long", "a": " 2"}, {"q": "three", "a": "é"}]
    documents = documents_of(write(rows), prompt="q", completion="a")
    blocks = Blocks(documents, 8, BEGIN, True)
    supervised = [t for i in range(len(blocks)) for t in blocks[i]["targets"].tolist() if t != IGNORED]
    assert bytes(token for token in supervised if token != END).decode() == " 1 2é"
    assert supervised.count(END) == 3 and documents.bytes == 6
    assert blocks.tokens == len(supervised) and (blocks.weights > 0).all()
    assert len(blocks) < -(-len(documents) // 8), "a block without anything to learn is left out"


TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def test_of_a_conversation_the_answers_are_learnt(data_cache, write):
    def turn(role, content):
        return {"role": role, "content": content}

    rows = [
        {"chat": [turn("user", "hi"), turn("assistant", "ho"), turn("user", "so?"), turn("assistant", "so!")]},
        {"chat": [turn("system", "be brief"), turn("user", "why"), turn("assistant", "no")]},
    ]
    tokenizer = byte_tokenizer(8)
    tokenizer.chat_template = TEMPLATE
    documents = documents_of(write(rows), tokenizer, messages="chat")
    tokens, supervised = documents.tokens(0, len(documents)), documents.supervised(0, len(documents))
    assert tokenizer.decode(tokens[supervised]) == "".join(f"{text}<|end_of_text|>" for text in ("ho", "so!", "no"))
    assert BEGIN not in tokens.tolist(), "packing puts it in front"
    assert documents.begins(0, len(documents)).sum() == 2
    with pytest.raises(UserError, match="no chat template"):
        documents_of(write(rows), messages="chat")
    tokenizer.chat_template = "{{ messages | length }}" + TEMPLATE
    with pytest.raises(UserError, match=r"message 1 of row 0 .* differently"):
        documents_of(write(rows), tokenizer, messages="chat")


@pytest.mark.parametrize("unit", ["file", "blank-lines", "line"])
def test_the_pieces_of_a_txt_file_are_its_documents(tmp_path, unit):
    paragraphs = [f"{i} " + "word " * (i * 300) + "\nnext line" for i in range(12)]
    path = tmp_path / "a.txt.gz"
    with gzip.open(path, "wt") as file:
        file.write("\n\n".join(paragraphs) + "\n")
    rows = list(piece_rows([str(path), str(path)], unit))
    texts, open_ = [], False
    for row in rows:
        assert row["begins"] == (not open_) and 0 < len(row["text"]) <= PIECE
        texts = [*texts, row["text"]] if row["begins"] else [*texts[:-1], texts[-1] + row["text"]]
        open_ = not row["ends"]
    one = {
        "file": ["\n\n".join(paragraphs) + "\n"],
        "blank-lines": [paragraph + "\n" for paragraph in paragraphs],
        "line": [line for paragraph in paragraphs for line in paragraph.split("\n")],
    }
    assert texts == one[unit] * 2 and not open_


def test_of_a_txt_file_the_end_is_held_out(data_cache, tmp_path):
    text = "".join(f"line {i}\n" for i in range(5000))
    (tmp_path / "a.txt").write_text(text)
    tables = corpus.load(config_of(tmp_path / "a.txt", holdout=0.1, block=16))
    train, held = (corpus.blocks(t, config_of(""), byte_tokenizer(16)) for t in (tables.train, tables.evaluation))
    parts = [
        bytes(part.documents.tokens(0, len(part.documents)).tolist()[: part.documents.bytes]) for part in (train, held)
    ]
    assert b"".join(parts).decode() == text
    assert len(parts[1]) / len(text) == pytest.approx(0.1, abs=0.05)
    assert tables.held_out and train.documents.count == 1


def test_a_document_over_many_pieces_ends_once(data_cache, tmp_path):
    (tmp_path / "a.txt").write_text("x" * (3 * PIECE + 5))
    (tmp_path / "b.txt").write_text("y\n")
    from app.data.loading import open_source

    table = open_source("--data.path", [str(tmp_path / "a.txt"), str(tmp_path / "b.txt")])["train"]
    documents = tokenize(table, config_of(""), byte_tokenizer(8))
    tokens = documents.tokens(0, len(documents)).tolist()
    assert tokens.count(END) == documents.count == 2 and tokens[-3:] == [*b"y\n", END]
    assert np.flatnonzero(documents.begins(0, len(documents))).tolist() == [0, 3 * PIECE + 6]


def test_blocks_are_read_alike_across_chunks_and_in_another_process(data_cache, write):
    rng = np.random.default_rng(0)
    rows = [{"text": "w" * int(n)} for n in rng.integers(0, 9, 2500)]  # chunks have 1000 rows
    blocks = Blocks(documents_of(write(rows)), 50, BEGIN, True)
    assert len(blocks.documents._ids) > 2
    whole = expected([row["text"] for row in rows], True)
    again = pickle.loads(pickle.dumps(blocks))
    for i in range(len(blocks) - 1):
        pairs = list(zip(blocks[i]["input_ids"], blocks[i]["targets"], strict=True))
        assert pairs[1:] == whole[i * 50 + 1 : (i + 1) * 50]
        assert all((blocks[i][name] == again[i][name]).all() for name in blocks[i])
    assert again.fingerprint == blocks.fingerprint
    other = Blocks(documents_of(write([*rows[:-1], {"text": "v"}], "other.jsonl")), 50, BEGIN, True)
    assert other.fingerprint != blocks.fingerprint
    with pytest.raises(IndexError):
        blocks[len(blocks)]


def test_several_processes_tokenize_to_the_same(data_cache, write, monkeypatch):
    monkeypatch.setattr("app.data.corpus.encode.BYTES_PER_PROCESS", 1)
    many = documents_of(write({"text": f"text {i}"} for i in range(40)))
    assert len(many.info["files"]) > 1
    monkeypatch.setattr("app.data.corpus.encode.BYTES_PER_PROCESS", 10**9)
    monkeypatch.setattr("app.data.corpus.encode.CHARACTERS_AT_ONCE", 20)
    one = documents_of(write(({"text": f"text {i}"} for i in range(40)), "again.jsonl"))
    assert len(one.info["files"]) == 1
    assert one.tokens(0, len(one)).tolist() == many.tokens(0, len(many)).tolist()
    assert one.fingerprint == many.fingerprint


def test_tokenizing_is_done_once(data_cache, write, monkeypatch):
    path = write([{"text": "abc"}] * 3)
    first = documents_of(path)
    monkeypatch.setattr("app.data.corpus.encode._encode", None)
    assert documents_of(path).info == first.info
    (data_cache / "samestep" / first.info["files"][0]).unlink()
    with pytest.raises(TypeError):
        documents_of(path)


@pytest.mark.parametrize("text", ["plain", " two  spaces\n\n\tdef f(x): return 'é'\r\n", "日本 🎉 \x00", "<s> </s>"])
def test_own_tokenizers_give_every_text_back(text, tmp_path):
    trained = train_lm_tokenizer(["some words and more words\n"] * 3, 300, 64)
    for tokenizer in (byte_tokenizer(64), character_tokenizer([text], 64), trained):
        tokenizer.save_pretrained(tmp_path)
        loaded = AutoTokenizer.from_pretrained(tmp_path)
        assert loaded.decode(loaded(text)["input_ids"]) == text
        assert start_of(loaded) == loaded.bos_token_id != loaded.eos_token_id
    assert byte_tokenizer(64)(text)["input_ids"] == list(text.encode())


def test_characters_are_tokens_in_order_of_their_code_points(tmp_path):
    character_tokenizer(["bé\n", "ab"], 64).save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer("abé\n")["input_ids"] == [1, 2, 3, 0]
    assert tokenizer.decode(tokenizer("ab?")["input_ids"]) == "ab<|unknown|>"
    assert len(tokenizer) == 4 + 3, "what is unknown, and the marks of a document's two ends"


def test_the_loss_is_the_mean_over_what_is_learnt():
    logits = torch.randn(2, 3, 5, requires_grad=True)
    targets = torch.tensor([[1, IGNORED, 2], [IGNORED, IGNORED, 4]])
    chosen = logits.log_softmax(-1)[[0, 0, 1], [0, 2, 2], [1, 2, 4]]
    torch.testing.assert_close(token_loss(logits, targets), -chosen.mean())
    nothing = token_loss(logits, torch.full((2, 3), IGNORED))
    nothing.backward()
    assert nothing.item() == 0 and logits.grad.isfinite().all()


@pytest.mark.parametrize(
    ("rows", "flags", "words"),
    [
        ([{"body": "a"}] * 4, {}, ["--data.text text", "body"]),
        ([{"text": 1.5}] * 4, {}, ["--data.text text", "no text"]),
        ([{"text": ""}] * 4, {}, ["all of it is empty"]),
        ([{"text": "a"}] * 4, {"prompt": "text"}, ["--data.prompt and --data.completion"]),
        ([{"text": "a"}] * 4, {"prompt": "text", "completion": "answer"}, ["--data.completion answer"]),
        ([{"text": "a"}] * 4, {"messages": "text"}, ["no chat template"]),
        ([{"text": "a"}] * 4, {"block": 1}, ["--data.block 1"]),
        ([{"text": "a"}] * 4, {"block_ramp": ("9:3",)}, ["--data.block-ramp 9:3: 3 does not divide --data.block 8"]),
        ([{"text": "a"}] * 4, {"block_ramp": ("9:9",)}, ["--data.block-ramp 9:9: 9 must be", "--data.block 8"]),
    ],
)
def test_bad_flags_and_columns_are_refused(data_cache, write, rows, flags, words):
    config = config_of(write(rows), **flags)
    with pytest.raises(UserError) as error:
        corpus.blocks(corpus.load(config).train, config, byte_tokenizer(8))
    assert all(word in str(error.value) for word in words), error.value


def test_a_conversation_is_a_list_of_messages(data_cache, write):
    tokenizer = byte_tokenizer(8)
    tokenizer.chat_template = TEMPLATE
    for rows in ([{"chat": [{"who": "me", "value": "hi"}]}], [{"chat": "hi"}], [{"chat": ["hi"]}]):
        with pytest.raises(UserError, match="list of messages with role and content, or with from and value"):
            documents_of(write(rows * 2), tokenizer, messages="chat")


def test_conversations_of_sharegpt_are_those_of_chat_templates(data_cache, write):
    def rows(words, speaker, text):
        return [{"c": [{speaker: who, text: f"{i} {who == words[0]}"} for i, who in enumerate(words)]}] * 2

    tokenizer = byte_tokenizer(8)
    tokenizer.chat_template = TEMPLATE
    plain, other = (
        documents_of(write(given, name), tokenizer, messages="c")
        for name, given in (
            ("plain.jsonl", rows(["system", "user", "assistant", "tool", "assistant"], "role", "content")),
            ("other.jsonl", rows(["system", "human", "gpt", "tool", "gpt"], "from", "value")),
        )
    )
    assert other.fingerprint == plain.fingerprint and not other.all_supervised
    with pytest.raises(UserError, match=r"--data.text text: .*, but conversations in c: give --data.messages c"):
        documents_of(write(rows(["user", "assistant"], "from", "value")), tokenizer)


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ([{"from": "human", "value": "a"}, {"from": "robot", "value": "b"}], "message 1 of ROW has the role 'robot'"),
        ([{"role": "Assistent", "content": "a"}], "message 0 of ROW has the role 'Assistent'"),
        ([{"from": "human", "value": "a"}, {"from": "gpt", "value": None}], "message 1 of ROW has from: each row"),
        ([{"from": "human", "value": "a"}, {"value": "b"}], "message 1 of ROW has value: each row"),
        ([], "ROW holds an empty list"),
        (None, "ROW holds nothing"),
        ("hello", "ROW holds a str"),
        ([{"from": "gpt", "value": "a"}], "refuses ROW, whose roles are assistant: the user begins"),
    ],
)
def test_a_row_that_is_no_conversation_is_named(data_cache, write, row, says):
    """By its number in the file, whichever rows are held out."""
    tokenizer = byte_tokenizer(8)
    tokenizer.chat_template = (
        "{% if messages[0].role != 'user' %}{{ raise_exception('the user begins') }}{% endif %}" + TEMPLATE
    )
    good = {"c": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}
    for wrong in (3, 8):
        path = write([good] * wrong + [{"c": row}] + [good] * 3)
        config = config_of(path, messages="c", holdout=0.3)
        tables = corpus.load(config)
        with pytest.raises(UserError) as error:
            for table in (tables.train, tables.evaluation):
                corpus.blocks(table, config, tokenizer)
        assert says.replace("ROW", f"row {wrong} (counted from 0) of --data.path {path}") in str(error.value)


def test_a_tool_call_needs_no_content(data_cache, write):
    tokenizer = byte_tokenizer(8)
    tokenizer.chat_template = TEMPLATE.replace(
        "{{ eos", "{% for c in m.tool_calls or [] %}[{{ c.name }}]{% endfor %}{{ eos"
    )
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "look"}]}
    rows = [{"c": [{"role": "user", "content": "a"}, call, {"role": "assistant", "content": "b"}]}] * 2
    assert documents_of(write(rows), tokenizer, messages="c").count == 2
    rows[0]["c"][1] = {"role": "assistant", "content": None}
    with pytest.raises(UserError, match=r"message 1 of row 0 .* has a role and no content"):
        documents_of(write(rows, "without.jsonl"), tokenizer, messages="c")


@pytest.mark.parametrize(
    ("documents", "held_out"),
    [
        (["a" * 40_000], "tokens, the end of one document, held out"),
        (["a" * 30_000, "b" * 4_000], "tokens, the end of one document and 1 document after it, held out"),
        (["a" * 4_000] * 8, "tokens of 1 document held out"),
    ],
)
def test_what_is_held_out_is_said_in_terms_that_are_true(data_cache, tmp_path, documents, held_out):
    (tmp_path / "a.txt").write_text("\n".join(documents) + "\n")
    config = config_of(tmp_path / "a.txt", txt="line", holdout=0.2 if len(documents) < 3 else 0.1)
    tables = corpus.load(config)
    train, held = (corpus.blocks(table, config, byte_tokenizer(8)) for table in (tables.train, tables.evaluation))
    about = corpus.describe(tables, train, {"": held}, byte_tokenizer(8))
    assert held_out in about and " 0 documents" not in about


def test_the_library_is_there_whole(data_cache):
    from app.data.tables.builtin import BUILTINS

    table = BUILTINS["stdlib-files"]()
    assert table.column_names == ["text", "file"] and len(table) > 300
    row = table[table["file"].index("json/decoder.py")]
    assert row["text"].startswith('"""Implementation of JSONDecoder') and row["text"].endswith("\n")


def test_contents_in_parts_are_joined_if_all_are_texts():
    """OpenAI's form; a picture among them is named by its row."""
    from app.data.corpus.conversations import messages_of

    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    (message,) = messages_of([{"role": "user", "content": parts}], lambda: "row 3")
    assert message == {"role": "user", "content": "one two"}
    picture = [*parts, {"type": "image_url", "image_url": {"url": "x"}, "text": None}]
    with pytest.raises(UserError, match=r"message 0 of row 3 has parts that are no texts"):
        messages_of([{"role": "user", "content": picture}], lambda: "row 3")
