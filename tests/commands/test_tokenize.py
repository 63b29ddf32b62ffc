"""The command tokenize: the tokens of texts, whatever these are read from, written whole and resumed after a kill."""

import gzip
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import datasets
import numpy as np
import psutil
import pyarrow as pa
import pytest
import zstandard
from pyarrow import parquet
from support.buckets import BUCKET
from support.disks import mounted
from support.launching import environment as of_processes
from support.launching import python
from support.stream_shards import write_members
from support.token_shards import tokenize, write_rows

from app import storage
from app.commands.tokenize import command, shards
from app.commands.tokenize.sources import TableSource
from app.commands.tokenize.tokenizer import loaded
from app.commands.tokenize.workers import made_by
from app.data.cache import cache_folder
from app.data.config import CorpusData
from app.data.corpus import token_sets
from app.data.corpus.documents import Documents
from app.data.corpus.encode import tokenize as tokenize_table
from app.data.corpus.token_shards import ShardWriter, Tokens, read_in_shard, tokens_of
from app.data.loading import open_source
from app.data.streams import chunks
from app.data.text.tokenizer import byte_tokenizer
from app.errors import UserError

ROWS = [{"text": " ".join(f"word {i}" for i in range(n % 7)), "q": f"q {n} " * (n % 3), "n": n} for n in range(150)]
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture
def rows(own_data_cache, tmp_path):
    return write_rows(tmp_path / "rows.jsonl", ROWS)


def tokens_in(folder: Path, split: str = "train") -> Tokens:
    """Read the tokens of a split, in their order."""
    files = sorted(folder.glob(f"{split}-*.parquet"))
    return Tokens.joined([tokens_of(parquet.read_table(file)) for file in files])


def expected(file, tokenizer=None, **flags) -> Documents:
    """Tokenize the texts as a run does that takes them as they are."""
    config = CorpusData(path=(str(file),), **flags)
    table = open_source("--data.path", config.path, txt=config.txt)["train"]
    return tokenize_table(table, config, tokenizer or byte_tokenizer(8))


def check_same(tokens: Tokens, documents: Documents) -> None:
    count = len(documents)
    assert tokens.ids.tolist() == documents.tokens(0, count).tolist()
    assert tokens.begins.tolist() == documents.begins(0, count).tolist()
    assert tokens.supervised.tolist() == documents.supervised(0, count).tolist()


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


KINDS = {
    "text": {},
    "prompt": {"prompt": "q", "completion": "text"},
}


@pytest.mark.parametrize("flags", KINDS.values(), ids=KINDS)
def test_tokens_are_those_of_a_run_on_the_texts(rows, tmp_path, flags, capsys):
    words = [word for name, value in flags.items() for word in (f"--data.{name}", value)]
    assert tokenize(rows, tmp_path / "out", *words) == 0
    documents = expected(rows, **flags)
    check_same(tokens_in(tmp_path / "out"), documents)
    record = json.loads((tmp_path / "out/tokens.json").read_text())
    amounts = [each["amount"] for each in record["shards"]]
    assert len(amounts) > 5 and sum(each["tokens"] for each in amounts) == len(documents)
    assert sum(each["documents"] for each in amounts) == documents.count
    assert sum(each["bytes"] for each in amounts) == documents.bytes
    assert f"{len(documents):,} tokens of {documents.count:,} documents" in capsys.readouterr().out
    for each in record["shards"]:
        file = tmp_path / "out" / each["name"]
        with file.open("rb") as opened:
            assert read_in_shard(opened).amount.to_json() == each["amount"] and file.stat().st_size == each["size"]


@pytest.mark.parametrize("unit", ["file", "line", "blank-lines"])
def test_texts_that_lie_in_several_rows_begin_once(own_data_cache, tmp_path, monkeypatch, unit):
    monkeypatch.setattr("app.data.corpus.encode.BYTES_AT_ONCE", 9000)  # a few rows
    lines = [f"line {i} " + "x" * (i * 40 % 7000) + "\n" * (1 + (i % 5 == 0)) for i in range(60)]
    (tmp_path / "a.txt").write_text("".join(lines))
    tokenize(tmp_path / "a.txt", tmp_path / "out", "--data.txt", unit, "--tokens-per-shard", 9000)
    check_same(tokens_in(tmp_path / "out"), expected(tmp_path / "a.txt", txt=unit))
    files = sorted((tmp_path / "out").glob("train-*.parquet"))
    firsts = [tokens_of(parquet.read_table(file)).begins[0] for file in files]
    assert len(files) > 5 and sum(firsts) >= (1 if unit == "file" else 3)


def test_of_conversations_the_answers_are_learnt(own_data_cache, tmp_path):
    tokenizer = byte_tokenizer(8)
    tokenizer.chat_template = "{{ strftime_now('%Y-%m-%d') }}" + TEMPLATE
    tokenizer.save_pretrained(tmp_path / "model")
    told = [[("user", f"why {i}"), ("assistant", "so" * (i % 4))][: 1 + (i % 5 > 0)] for i in range(40)]
    file = write_rows(tmp_path / "c.jsonl", [{"c": [{"role": r, "content": t} for r, t in each]} for each in told])
    words = ("--data.messages", "c", "--tokenizer", tmp_path / "model")
    tokenize(file, tmp_path / "out", *words, "--data.date", "2026-11-20")
    documents = expected(file, tokenizer, messages="c", date="2026-11-20")
    check_same(tokens_in(tmp_path / "out"), documents)
    record = json.loads((tmp_path / "out/tokens.json").read_text())
    assert sum(each["amount"]["unlearnt"] for each in record["shards"]) == documents.unlearnt == 8
    assert record["settings"]["date"] == "2026-11-20"
    assert tokenize(file, tmp_path / "out", *words) == 0, "the same date, on any day"
    with pytest.raises(UserError, match=r"with other settings: --data\.date differ"):
        tokenize(file, tmp_path / "out", *words, "--data.date", "2026-11-21")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(tmp_path / "model")
    with pytest.raises(UserError, match=r"with other settings: the chat template, --data\.date differ"):
        tokenize(file, tmp_path / "out", *words)
    with pytest.raises(UserError, match=r"has no chat template to write conversations with; use a --tokenizer whose"):
        tokenize(file, tmp_path / "other", "--data.messages", "c")


def write_parquet(file: Path, rows) -> None:
    parquet.write_table(pa.Table.from_pylist(rows), file, row_group_size=40)


def packed(pack):
    return lambda file, rows: file.write_bytes(
        b"".join(pack("".join(f"{json.dumps(row)}\n" for row in rows[i : i + 40]).encode()) for i in range(0, 150, 40))
    )


def write_texts(file: Path, rows) -> None:
    write_members(file, [(f"{row['n']:04}.text", row["text"].encode()) for row in rows])


STREAMED = {
    "tar": write_texts,
    "parquet": write_parquet,
    "jsonl": write_rows,
    "jsonl.gz": packed(gzip.compress),
    "jsonl.zst": packed(zstandard.compress),
}


@pytest.mark.parametrize("kind", STREAMED)
def test_shards_read_by_chunks_have_the_tokens_of_the_table(rows, tmp_path, monkeypatch, kind):
    monkeypatch.setattr(chunks, "LEAST", 200)
    (tmp_path / "data").mkdir()
    for number in range(2):
        STREAMED[kind](tmp_path / f"data/part-{number}.{kind}", ROWS)
    assert tokenize(tmp_path / "data", tmp_path / "out", "--data.stream", "true") == 0
    check_same(tokens_in(tmp_path / "out"), expected(write_rows(tmp_path / "twice.jsonl", ROWS * 2)))
    assert len(list((tmp_path / "out").glob("*.parquet"))) > 2
    assert list(cache_folder().glob("streams/*")) and not list(cache_folder().glob("streams/tokenize-*"))


def test_parts_of_a_source_begin_with_texts_where_some_begin_near():
    begins = {"text": ["a"] * 100, "begins": [row % 3 == 0 for row in range(100)], "ends": [True] * 100}
    parts = TableSource(datasets.Dataset.from_dict(begins), CorpusData()).parts(25)
    assert parts == [range(0, 27), range(27, 51), range(51, 75), range(75, 100)]
    long = {**begins, "begins": [row == 0 for row in range(100)]}
    assert TableSource(datasets.Dataset.from_dict(long), CorpusData()).parts(40) == [
        range(40),
        range(40, 80),
        range(80, 100),
    ]


def test_workers_make_no_difference_nor_does_a_kill(rows, tmp_path):
    """Killed by -9 with its processes at work; what it started ends too, and no draft is left behind by the next.

    What two processes make to the end, `test_from_a_bucket_to_a_bucket` compares.
    """
    many = write_rows(tmp_path / "many.jsonl", ROWS * 40)
    small = ["--tokens-per-shard", "900", "--tokens-per-chunk", "64", "--scratch.tokenizer", "byte"]
    words = [sys.executable, "-m", "app", "tokenize", str(many)]
    out = tmp_path / "killed"
    begun = subprocess.Popen([*words, str(out), *small, "--workers", "2"], env=of_processes())
    end = time.monotonic() + 100
    while len(list(out.glob("*.parquet"))) < 3:
        assert begun.poll() is None and time.monotonic() < end
        time.sleep(0.005)
    started = psutil.Process(begun.pid).children(recursive=True)
    begun.send_signal(signal.SIGKILL)
    begun.wait()
    assert len(started) >= 2
    _, alive = psutil.wait_procs(started, timeout=30)
    assert not alive
    assert "shards" not in json.loads((out / "tokens.json").read_text())
    with pytest.raises(UserError, match="has not finished the split train: run the same command again"):
        token_sets._open("--data.path", str(out), "train", CorpusData(path=(str(out),)))
    done = {path.name: path.stat().st_mtime_ns for path in out.glob("*.parquet")}
    first, damaged, moved = sorted(done)[:3]
    (out / damaged).write_bytes(b"PAR1 no shard")
    (out / f"{damaged}.{'0' * 16}.tmp").write_bytes(b"a draft of a killed one")
    (out / moved).write_bytes((out / first).read_bytes())
    tokenize(many, out, *small, "--workers", "1")
    tokenize(many, tmp_path / "whole", *small, "--workers", "1")
    assert contents(out) == contents(tmp_path / "whole")
    kept = [name for name, changed in done.items() if (out / name).stat().st_mtime_ns == changed]
    assert len(kept) == len(done) - 2 > 0 and len(contents(out)) > len(done) + 1


def test_an_error_of_a_worker_is_told_once(rows, tmp_path):
    file = tmp_path / "rows.parquet"
    write_parquet(file, [*ROWS, {"text": None, "q": "", "n": 0}])
    flags = ["--scratch.tokenizer", "byte", "--workers", "2", "--tokens-per-shard", "900", "--data.stream"]
    result = python("-m", "app", "tokenize", str(file), str(tmp_path / "out"), *flags, "true")
    assert result.status == 2 and "Traceback" not in result.output
    assert result.output.count("has no text; leave such rows out of the data") == 1
    assert (
        "row 30 (counted from 0 in the chunk) of SOURCE" in result.output
        and "rows.parquet, chunk at byte" in result.output
    )


def test_a_process_that_is_killed_is_named(rows, tmp_path, monkeypatch):
    with pytest.raises(UserError, match=r"--workers 2: one of the processes was killed.*the same command again"):
        list(made_by(_Killed(), [range(1), range(2)], 2))


class _Killed:
    """A job in which processes die."""

    def make(self, number, part):
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_second_split_gets_the_tokenizer_of_the_first(rows, tmp_path):
    dev = write_rows(tmp_path / "dev.jsonl", [{"text": "other words"}] * 3)
    out = tmp_path / "out"
    bpe = ("--scratch.tokenizer", "bpe", "--scratch.vocab", 300)
    tokenize(rows, out, *bpe)
    first = contents(out)
    assert command.main(command.Options(str(dev), str(out), split="validation", workers=1)) == 0
    assert contents(out).items() >= first.items() and {"tokens-validation.json"} < contents(out).keys() - first.keys()
    tokenizer = loaded(str(out / "tokenizer"))
    assert len(tokenizer) < 301 and tokenizer.decode(tokens_in(out, "validation").ids).startswith("other words<|end")
    with pytest.raises(
        UserError, match="split train with other settings: the tokenizer, the marks of documents differ"
    ):
        tokenize(dev, out, "--split", "test", "--scratch.tokenizer", "byte")
    with pytest.raises(UserError, match="the tokenizer"):
        tokenize(dev, out, "--split", "test", "--scratch.tokenizer", "bpe", "--scratch.vocab", 301)
    with pytest.raises(UserError, match=r"what is learnt \(--data.text"):
        tokenize(rows, out, "--split", "test", *bpe, "--data.prompt", "q", "--data.completion", "text")


def test_a_slice_or_another_split_of_the_source(rows, tmp_path):
    tokenize(rows, tmp_path / "out", "--source-split", "train[:40]")
    tokenize(rows, tmp_path / "out", "--source-split", "train[40:]", "--split", "validation")
    parts = [tokens_in(tmp_path / "out", split) for split in ("train", "validation")]
    check_same(Tokens.joined(parts), expected(rows))
    (tmp_path / "folder").mkdir()
    write_rows(tmp_path / "folder/train.jsonl", ROWS)
    with pytest.raises(UserError, match=r"--source-split validation: .* has no split validation; there are train"):
        tokenize(tmp_path / "folder", tmp_path / "other", "--split", "validation")
    with pytest.raises(UserError, match="it has no shards"):
        tokenize(tmp_path / "folder", tmp_path / "other", "--split", "validation", "--data.stream", "true")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--data.text", "body"], "--data.text body: no such key in SOURCE"),
        (["--data.text", "body", "--data.stream", "true"], "--data.text body: no such column in SOURCE"),
        (["--data.text", "n", "--data.prompt", "q"], "--data.prompt and --data.completion belong together"),
        (["--tokenizer", "nowhere"], "--tokenizer nowhere cannot be loaded"),
        (["--tokenizer", "x", "--scratch.tokenizer", "byte"], "--tokenizer x and --scratch.tokenizer byte: give one"),
        (["--scratch.tokenizer", "none"], "--tokenizer: give a model whose tokenizer to take, or --scratch.tokenizer"),
        (["--source-split", "train[:5]", "--data.stream", "true"], "--source-split train[:5]: what is read by chunks"),
        (["--data.columns", "a", "--data.stream", "true"], "--data.columns and --data.name are for tables"),
        (["--tokens-per-shard", "1"], "--tokens-per-shard 1: there would be"),
        (["--data.date", "soon"], "--data.date soon: give a date"),
    ],
)
def test_bad_options_are_refused_before_anything_is_written(rows, tmp_path, monkeypatch, words, says):
    monkeypatch.setattr(shards, "MOST", 20)
    with pytest.raises(UserError) as error:
        tokenize(rows, tmp_path / "out", *words)
    assert says in str(error.value)
    assert not [*(tmp_path / "out").glob("train-*")]


def test_texts_without_a_token_are_refused_and_parts_without_one_left_out(own_data_cache, tmp_path):
    empty = write_rows(tmp_path / "empty.jsonl", [{"text": ""}] * 9)
    with pytest.raises(UserError, match="has no text to learn: all of it is empty"):
        tokenize(empty, tmp_path / "out")
    write_rows(tmp_path / "none.jsonl", [])
    for words in ((), ("--data.stream", "true")):
        with pytest.raises(UserError, match=r"SOURCE .*none.jsonl.* is empty"):
            tokenize(tmp_path / "none.jsonl", tmp_path / "other", *words)
    rows = [{"text": "ab" * (n // 1000 % 2)} for n in range(3000)]
    tokenize(write_rows(tmp_path / "gap.jsonl", rows), tmp_path / "gap", "--tokens-per-shard", 1)
    names = [each["name"] for each in json.loads((tmp_path / "gap/tokens.json").read_text())["shards"]]
    assert names == ["train-00001.parquet"] == [path.name for path in (tmp_path / "gap").glob("*.parquet")]
    assert tokenize(tmp_path / "gap.jsonl", tmp_path / "gap", "--tokens-per-shard", 1) == 0


def test_a_vocabulary_that_is_too_large_is_refused(rows, tmp_path, monkeypatch):
    monkeypatch.setattr(command, "LARGEST", 257)
    with pytest.raises(UserError, match="--tokenizer byte: its 258 tokens are too many"):
        tokenize(rows, tmp_path / "out")


def test_what_is_not_ours_is_left_alone(rows, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "mine").write_text("mine")
    with pytest.raises(UserError, match=r"holds something else \(mine\)"):
        tokenize(rows, out)
    assert contents(out) == {"mine": b"mine"}
    (out / "mine").rename(tmp_path / "file")
    with pytest.raises(UserError, match=r"cannot be used .*: give a folder or a URL that can be written"):
        tokenize(rows, tmp_path / "file")
    with pytest.raises(UserError, match="OUT https://localhost/x cannot be used"):
        tokenize(rows, "https://localhost/x")
    tokenize(rows, out)
    before = contents(out)
    other = write_rows(tmp_path / "other.jsonl", ROWS[:-1])
    with pytest.raises(UserError, match="with other settings: SOURCE or its contents differ; it was begun with SOURCE"):
        tokenize(other, out)
    with pytest.raises(UserError, match="with other settings: the columns differ"):
        tokenize(rows, out, "--data.text", "q")
    with pytest.raises(UserError, match="with other settings: --tokens-per-chunk differ"):
        tokenize(rows, out, "--tokens-per-chunk", 99)
    assert contents(out) == before


@pytest.mark.parametrize("text", ["[]", "{", "[" * 100_000, '{"settings": 1}', b"\xff"])
def test_a_damaged_record_is_named(rows, tmp_path, text):
    (tmp_path / "out").mkdir()
    (tmp_path / "out/tokens.json").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(UserError, match=r"OUT .*/tokens.json: cannot be read: .*; copy it again, or tokenize into"):
        tokenize(rows, tmp_path / "out")


def test_a_full_disk_is_named_and_the_command_goes_on(rows, tmp_path):
    many = write_rows(
        tmp_path / "many.jsonl", [{"text": np.random.default_rng(i).bytes(200).hex()} for i in range(9000)]
    )
    words = ("--tokens-per-shard", 400_000, "--tokens-per-chunk", 100_000)
    with mounted(tmp_path / "disk") as disk:
        with pytest.raises(
            UserError, match=r"OUT .*: train-0000\d.parquet cannot be written \(No space left on device"
        ):
            tokenize(many, disk / "out", *words)
        there = {path.name for path in (disk / "out").iterdir()}
        assert "train-00000.parquet" in there and not [name for name in there if name.endswith(".tmp")]
        done = (disk / "out/train-00000.parquet").read_bytes()
    tokenize(many, tmp_path / "out", *words)
    assert (tmp_path / "out/train-00000.parquet").read_bytes() == done


def test_a_shard_that_cannot_be_written_leaves_no_draft(rows, tmp_path, monkeypatch):
    write, calls = ShardWriter._write, []

    def failing(writer, tokens):
        calls.append(len(tokens))
        if len(calls) == 9:
            raise OSError(28, "No space left on device")
        write(writer, tokens)

    monkeypatch.setattr(ShardWriter, "_write", failing)
    with pytest.raises(UserError, match="make room or mend it, and run the same command again, which goes on"):
        tokenize(rows, tmp_path / "out")
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert len(names) == 3 and not [name for name in names if name.endswith(".tmp")]
    tokenize(rows, tmp_path / "out")
    check_same(tokens_in(tmp_path / "out"), expected(rows))


@pytest.mark.launches
def test_from_a_bucket_to_a_bucket(rows, near, tmp_path, monkeypatch):
    """With processes of its own, which use the bucket too; and read from there."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "staged"))
    url = f"s3://{BUCKET}/{tmp_path.name}"
    for number in range(2):
        write_rows(tmp_path / "part.jsonl", ROWS)
        storage.at(url).write(f"texts/part-{number}.jsonl", (tmp_path / "part.jsonl").read_bytes())
    words = ("--tokens-per-shard", 4000, "--tokens-per-chunk", 64, "--scratch.tokenizer", "byte", "--workers", 2)
    result = python("-m", "app", "tokenize", f"{url}/texts", f"{url}/tokens", *words)
    assert result.status == 0, result.output
    tokenize(f"{url}/texts", tmp_path / "here", *words, "--workers", 1)
    files = storage.at(f"{url}/tokens")
    names = [each.name for each in files.files()]
    assert [name for name in names if "/" not in name] == sorted(contents(tmp_path / "here"))
    for name in contents(tmp_path / "here"):
        assert files.read(name) == (tmp_path / "here" / name).read_bytes()
    files.delete("tokens.json")
    with pytest.raises(UserError, match="holds something else"):
        tokenize(f"{url}/texts", f"{url}/tokens", *words, "--workers", 1)
    files.write("tokens.json", (tmp_path / "here/tokens.json").read_bytes())
    config = CorpusData(path=(f"{url}/tokens",), block=16)
    tables = token_sets.load(config, ["text"], token_sets.Needs())
    here = token_sets._open("--data.path", str(tmp_path / "here"), "train", config)
    rows_read = [row for part in (tables.train, tables.evaluation) for row in part.__getitems__(range(len(part)))]
    wanted = here.__getitems__(range(len(here)))
    assert all((a[n] == b[n]).all() for a, b in zip(rows_read, wanted, strict=True) for n in a)
    assert len(token_sets.own_tokenizer(tables.train, "bpe", 16)) == 258
    assert not list((tmp_path / "staged").rglob("*.tmp"))
    public = f"{near}/{BUCKET}/{tmp_path.name}/tokens"  # for which moto wants a signature
    with pytest.raises(UserError, match=f"{public} cannot be read: the store refuses it"):
        token_sets.holds_tokens(public)
