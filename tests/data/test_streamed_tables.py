"""Streamed and mixed tables as cls reads them: the rows of the mapped form, and what is refused."""

import json
import re

import datasets
import numpy as np
import pytest
import yaml
from support.stream_shards import write_members

from app.config import RunConfig
from app.data.config import TextData
from app.data.mixtures.mix_file import read_mix
from app.data.rows import MISSING
from app.data.streams.chunk_reader import BadChunk, ChunkReader
from app.data.streams.index import Index
from app.data.streams.opening import _held_out, open_stream
from app.data.streams.shards import Shard, Shards
from app.data.tables.columns import pieces_of, row_name
from app.data.text import labeled_text
from app.errors import UserError
from app.sampling.batch_plan import BatchPlan

pytestmark = pytest.mark.usefixtures("own_data_cache")
ROWS = [{"text": f"row {i} " * (1 + i % 5), "label": i % 3} for i in range(100)]
CLASSES = ("x", "y", "z")


@pytest.fixture
def folder(tmp_path):
    """Return a folder of parquet shards, in row groups of seven rows."""
    table = datasets.Dataset.from_list(ROWS)
    (tmp_path / "web").mkdir()
    for number, part in enumerate((range(40), range(40, 41), range(41, 100))):
        table.select(part).to_parquet(tmp_path / "web" / f"part-{number}.parquet", batch_size=7)
    (tmp_path / "eval.jsonl").write_text("\n".join(json.dumps(row) for row in ROWS[:9]))
    lines = [json.dumps({"a": i, "b": f"t{i}", "label": i % 3}) for i in range(50)]
    (tmp_path / "lines.jsonl").write_text("\n".join(lines))
    return tmp_path


def flags(folder, **more):
    more = {"path": (str(folder / "web"),), "eval_path": str(folder / "eval.jsonl"), "stream": "true", **more}
    return TextData(classes=more.pop("classes", CLASSES), **more)


def loaded(config):
    """Return the rows to train on, their tables, and what is said of them."""
    tables, labels = labeled_text.load_labelled(config)
    tokenizer = labeled_text.own_tokenizer(tables.sets[""], config.text, 300, 64)
    rows = labeled_text.training_rows(tables, config, tokenizer, labels)
    evaluated = {"": labeled_text.tokenize(tables.evaluation, config.text, tokenizer, 64, labels.eval_values)}
    return rows, tables, labeled_text.describe(tables, labels, rows, evaluated, 64)


def plain(rows):
    return [{name: np.asarray(value).tolist() for name, value in row.items()} for row in rows]


def epoch(rows, settings=None):
    """Return the ids of an epoch in the order of training."""
    settings = settings or RunConfig(global_batch=24, micro_batch=5, epochs=1.0)
    plan = BatchPlan.of_run(settings, len(rows))
    plan = plan.ordered(rows.order(plan)) if hasattr(rows, "order") else plan
    plan.check_limit()
    return [int(i) for step in range(plan.steps) for ids, _ in plan.micro_batches(step) for i in ids], plan


def test_streamed_and_mapped_rows_are_each_others_permutation(folder):
    streamed, tables, about = loaded(flags(folder))
    mapped, *_ = loaded(flags(folder, stream="false"))
    assert "100 training rows streamed in 16 chunks, 9 rows to evaluate on" in about
    order, plan = epoch(streamed)
    other, _ = epoch(mapped)
    assert sorted(order) == sorted(other) == [*range(100)] and order != other
    assert plan.order.lanes == 5
    assert plain(streamed.__getitems__(order)) == plain(mapped.__getitems__(order))
    assert streamed.fingerprint and tables.streams
    assert list(map(streamed.lengths, streamed.__getitems__(order))) == mapped.lengths[order].tolist()


def test_texts_of_several_chunks_become_tokens_in_one_call(folder, monkeypatch):
    streamed, *_ = loaded(flags(folder))
    calls, encoded = [], labeled_text.Encoder._encoded
    monkeypatch.setattr(labeled_text.Encoder, "_encoded", lambda self, texts: calls.append(1) or encoded(self, texts))
    assert len(streamed.__getitems__([0, 20, 50, 99])) == 4 and len(calls) == 1
    assert streamed.__getitems__([]) == []


def test_rows_held_out_are_whole_chunks_that_are_not_trained_on(folder):
    rows, tables, about = loaded(flags(folder, eval_path="", holdout=0.2))
    scored = [row["text"] for row in tables.evaluation]
    texts = [row["text"] for row in tables.stream.__getitems__(range(len(rows)))]
    assert sorted(texts + scored) == sorted(row["text"] for row in ROWS)
    assert "held out" in about and len(scored) >= 7


@pytest.mark.parametrize("pattern", ["part-2.parquet", "part-*.parquet"])
def test_files_that_are_named_are_not_evaluated_on_as_well(folder, pattern):
    config = flags(folder, path=(str(folder / "web" / pattern),), eval_path="")
    rows, tables, about = loaded(config)
    texts = [row["text"] for row in tables.stream.__getitems__(range(len(rows)))]
    assert tables.held_out and "held out" in about and not {*texts} & {row["text"] for row in tables.evaluation}
    config.eval_split = "validation"
    with pytest.raises(UserError, match="names files, all to train on"):
        loaded(config)


def test_what_is_held_out_takes_a_part_of_the_cache_at_most(folder):
    few, tables, _ = loaded(flags(folder, eval_path="", holdout=0.5, cache_gb=8e-7))
    assert len(few) + len(tables.evaluation) == 100 and 1 <= len(tables.evaluation) <= 14
    many, tables, _ = loaded(flags(folder, eval_path="", holdout=0.5))
    assert len(many) + len(tables.evaluation) == 100 and len(tables.evaluation) > 30


def test_the_datas_own_split_is_evaluated_on(folder):
    datasets.Dataset.from_list(ROWS[:5]).to_parquet(folder / "web" / "validation-0.parquet")
    rows, tables, _ = loaded(flags(folder, eval_path=""))
    assert len(rows) == 100 and tables.evaluation["text"][:] == [row["text"] for row in ROWS[:5]]
    assert not tables.held_out


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"classes": ()}, "the classes of streamed data are not known before all rows are read: name them"),
        ({"split": "train[:10]"}, "--data.split train[:10]: of streamed data"),
        ({"text": ("texts",)}, "--data.text texts: no such"),
        ({"path": ("s3://nobody-has-this/x",), "stream": "false"}, "a URL is read by chunks"),
        ({"eval_path": ""}, None),
        ({"columns": ("a", "b")}, "--data.columns: streamed data have no such thing"),
    ],
)
def test_what_streams_cannot_do_is_refused(folder, more, says):
    if says is None:  # one chunk
        (folder / "one").mkdir()
        datasets.Dataset.from_list(ROWS).to_parquet(folder / "one" / "a.parquet")
        more, says = {"path": (str(folder / "one"),), "eval_path": ""}, "has one chunk"
    with pytest.raises(UserError) as told:
        loaded(flags(folder, **more))
    assert says in str(told.value)


@pytest.mark.parametrize("stream", ["auto", "true", "false"])
def test_several_urls_are_refused_as_such(folder, stream):
    paths = (str(folder / "lines.jsonl"), "s3://b/a.parquet", "s3://b/b.parquet")
    for given in (paths[1:], paths):
        with pytest.raises(UserError, match=rf"^--data.path names {len(given)} places: stream one folder, pattern or"):
            loaded(flags(folder, path=given, stream=stream))


def test_eval_path_that_is_trained_on_is_refused(folder):
    with pytest.raises(UserError, match="both trained on and evaluated on"):
        loaded(flags(folder, eval_path=str(folder / "web")))


def test_a_file_that_is_trained_on_is_not_evaluated_on(folder):
    with pytest.raises(UserError, match=r"part-1\.parquet would be both trained on and evaluated on"):
        loaded(flags(folder, eval_path=str(folder / "web" / "part-1.parquet")))


def test_a_missing_text_names_its_shard(folder):
    table = datasets.Dataset.from_list([*ROWS[:30], {"text": None, "label": 1}, *ROWS[:5]])
    table.to_parquet(folder / "web" / "part-3.parquet", batch_size=7)
    rows, *_ = loaded(flags(folder))
    with pytest.raises(UserError, match=r"part-3.parquet, chunk at byte \d+ \(7 rows\).* has no text"):
        rows.__getitems__(range(100, 136))
    wrong = datasets.Dataset.from_list([{"text": "t", "label": 7}])
    wrong.to_parquet(folder / "web" / "part-1.parquet")
    rows, *_ = loaded(flags(folder))
    with pytest.raises(UserError, match=r"part-1.parquet, chunk at byte .*none of the 3 classes"):
        rows[40]


@pytest.mark.parametrize("bad", ["stop", "skip"])
def test_a_damaged_chunk_stops_or_is_left_out(folder, bad, monkeypatch, capsys):
    rows, *_ = loaded(flags(folder, bad=bad))
    decoded = ChunkReader._decoded

    def damaged(reader, chunk):
        if chunk.shard.name == "part-2.parquet" and chunk.part.rows == 3:
            raise ValueError("it is damaged")
        return decoded(reader, chunk)

    monkeypatch.setattr(ChunkReader, "_decoded", damaged)
    if bad == "stop":
        with pytest.raises(
            BadChunk, match=r"part-2.parquet, chunk at byte \d+ \(3 rows\).*it is damaged; leave .* --data.bad skip, or"
        ):
            rows.__getitems__(range(100))
        return
    for _ in range(2):
        read = rows.__getitems__(range(100))
        assert [i for i, row in enumerate(read) if row is MISSING] == [97, 98, 99]
    assert capsys.readouterr().err.count("its rows are left out (--data.bad skip)") == 1
    assert rows.skips


@pytest.mark.parametrize("what", ["evaluation", "learnt"])
def test_damaged_chunks_of_what_is_read_before_training_are_left_out(folder, what, monkeypatch, capsys):
    """And told at each start; without --data.bad skip they end it."""

    def opened(bad):
        return open_stream(flags(folder, eval_path="", holdout=0.4, bad=bad), what == "evaluation")

    whole = getattr(opened("stop"), what)
    chosen = pieces_of(whole)[1].name
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", folder / "cache")
    decoded = ChunkReader._decoded

    def damaged(reader, chunk):
        if f"{chunk.shard.name}, chunk at byte {chunk.part.start} " in chosen:
            raise ValueError("it is damaged")
        return decoded(reader, chunk)

    monkeypatch.setattr(ChunkReader, "_decoded", damaged)
    for _ in range(2):
        with pytest.raises(
            BadChunk, match=r"it is damaged; leave out the rows of damaged chunks with --data.bad skip, or"
        ):
            opened("stop")
        capsys.readouterr()
        some = getattr(opened("skip"), what)
        told = re.findall(r"^warning: --data.path .*web.*", capsys.readouterr().err, re.M)
        assert len(told) == 1 and told[0].endswith(f": 1 damaged chunks are left out (--data.bad skip): {chosen}")
        left, right = pieces_of(whole)[1].start, pieces_of(whole)[2].start
        assert some["text"] == [*whole["text"][:left], *whole["text"][right:]]
        assert row_name(some, left) == row_name(whole, right)
    monkeypatch.setattr(ChunkReader, "_decoded", decoded)
    assert getattr(opened("stop"), what)["text"] == whole["text"] == getattr(opened("skip"), what)["text"]


def test_what_is_read_before_training_may_not_all_be_damaged(folder, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", folder / "cache")
    open_stream(flags(folder, bad="skip"), False)
    monkeypatch.setattr(ChunkReader, "_decoded", lambda *_: int("it is damaged"))
    with pytest.raises(
        UserError, match=r"part-\d.*it is damaged'; all that is read of --data.path \S+, held out is dam"
    ):
        open_stream(flags(folder, bad="skip", eval_path=""), True)


def mixed(folder, later=(), **more):
    sources = [
        {"name": "web", "path": str(folder / "web"), "weight": 3},
        {"name": "lines", "path": str(folder / "lines.jsonl"), "weight": 1, "text": "b"},
    ]
    sources[1] |= more.pop("second", {})
    (folder / "mix.yaml").write_text(yaml.safe_dump({"sources": sources, "later": [*later]}))
    return TextData(mix=str(folder / "mix.yaml"), classes=CLASSES, **more)


@pytest.mark.parametrize("stream", ["true", "false", "auto"])
def test_sources_are_mixed_with_their_own_columns(folder, stream):
    rows, _, about = loaded(mixed(folder, stream=stream, eval_path=str(folder / "eval.jsonl")))
    assert len(rows) == 150
    assert "a mix of web, weight 3: 100 rows" in about and "; lines, weight 1: 50 rows" in about
    alone, *_ = loaded(flags(folder, stream="false"))
    read = rows.__getitems__(range(150))
    assert [len(row["input_ids"]) for row in read[:100]] == alone.lengths.tolist()
    assert [int(row["labels"]) for row in read] == [i % 3 for i in [*range(100), *range(50)]]
    order, plan = epoch(rows)
    assert plan.order.lanes == (5 if stream == "true" else 1)
    assert sum(i < 100 for i in order) / len(order) == pytest.approx(0.75, abs=0.05)
    assert plan.order.counts(40) == pytest.approx({"web": 30, "lines": 10}, abs=4)
    assert callable(rows.lengths) == (stream == "true")


def test_a_template_makes_the_text(folder):
    config = mixed(folder, second={"template": "<{b}|{a}>", "text": None}, eval_path=str(folder / "eval.jsonl"))
    content = yaml.safe_load((folder / "mix.yaml").read_text())
    del content["sources"][1]["text"]
    (folder / "mix.yaml").write_text(yaml.safe_dump(content))
    for stream in ("true", "false"):
        config.stream = stream
        tables, _ = labeled_text.load_labelled(config)
        assert tables.mixed.tables[1].table["text"][:2] == ["<t0|0>", "<t1|1>"]


def test_a_template_of_nothing_is_refused(folder):
    (folder / "lines.jsonl").write_text("\n".join(json.dumps({"a": i or None, "label": i % 3}) for i in range(50)))
    mixed(folder)
    content = yaml.safe_load((folder / "mix.yaml").read_text())
    content["sources"][1] = content["sources"][1] | {"template": "{a}"}
    del content["sources"][1]["text"]
    (folder / "mix.yaml").write_text(yaml.safe_dump(content))
    config = TextData(mix=str(folder / "mix.yaml"), classes=CLASSES, eval_path=str(folder / "eval.jsonl"))
    with pytest.raises(UserError, match=r"the template of lines: row 0 .* has nothing in a"):
        loaded(config)


def test_a_source_may_come_later_and_give_no_more_than_its_epochs(folder):
    config = mixed(
        folder,
        later=[{"from": 0.5, "weights": {"lines": 3}}],
        second={"weight": 0, "epochs": 0.5},
        eval_path=str(folder / "eval.jsonl"),
    )
    rows, *_ = loaded(config)
    settings = RunConfig(global_batch=20, micro_batch=5, steps=20)
    order, plan = epoch(rows, settings)
    assert all(i < 100 for i in order[:200]) and sum(i >= 100 for i in order) == 25
    assert [part.start for part in plan.order.parts] == [0, 200]


WRONG = {
    "weight 'a'": ({"weight": "a"}, "sources[1].weight is 'a', not a number"),
    "weight -1": ({"weight": -1}, "sources[1].weight is -1, not a number of 0 or more"),
    "same name": ({"name": "web"}, "two sources are called web"),
    "no such field": ({"wieght": 1}, "sources[1].wieght: there is no such field; there are name, path, weight"),
    "no column": ({"text": "c"}, "the source lines has no column c; it has a, b, label"),
    "epochs": ({"epochs": 0}, "sources[1].epochs is 0, not a number above 0"),
    "no path": ({"path": None}, "sources[1].path is None, not a text"),
    "not there": ({"path": "/nobody/has/this.jsonl"}, "--data.mix lines: /nobody/has/this.jsonl"),
    "template": ({"template": "{c}"}, "it is the text of a row, so leave out `text`"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_mix_that_is_none_is_refused_with_its_place(folder, name):
    second, says = WRONG[name]
    with pytest.raises(UserError) as told:
        loaded(mixed(folder, second=second, eval_path=str(folder / "eval.jsonl")))
    assert says in str(told.value) and "\n" not in str(told.value)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("sources: [{name: a, path: b, weight: 1, weight: 2}]", "the key weight stands there twice"),
        ("sources: [{name: a, path: b, weight: 1}]\nsources: []", "the key sources stands there twice"),
        ("", "it holds None, not an object with `sources`"),
        ("sources: []", "`sources` is empty"),
        ("sources: [3]", "sources[0]"),
        ("sources: [", "it is no YAML"),
        ("sources: [{name: a, path: b, weight: 0}]", "every source has the weight 0"),
        (
            "sources: [{name: a, path: b, weight: 1}]\nlater: [{from: 1, weights: {c: 1}}]",
            "later[0].weights.c: there is",
        ),
        ("sources: [{name: a, path: b, weight: 1}]\nlater: [{from: 0, weights: {a: 1}}]", "later[0].from is 0"),
        ("sources: [{name: a, path: b}]", "sources[0].weight is missing"),
    ],
)
def test_a_file_that_is_no_mix_is_refused(folder, content, says):
    (folder / "mix.yaml").write_text(content)
    with pytest.raises(UserError) as told:
        loaded(TextData(mix=str(folder / "mix.yaml"), classes=CLASSES))
    assert says in str(told.value)


ODD = {
    "weight: 1e3": "1e3 is a text to YAML, and no number: write 1000.0, or",
    "weight: 1.5e3": "1.5e3 is a text to YAML, and no number: write 1500.0, or",
    "weight: 010": "010 is the number 8 to YAML: write 8 if that is meant, or",
    "weight: 0x1F": "0x1F is the number 31 to YAML: write 31 if that is meant, or",
    "weight: 0o17": "0o17 is a text to YAML, and no number: write 15, or",
    "weight: 089": "089 is a text to YAML, and no number: write 89, or",
    "weight: 1_000": "1_000 is the number 1000 to YAML: write 1000 if that is meant, or",
    "weight: 1:30": "1:30 is the number 90 to YAML: write 90 if that is meant, or",
    "weight: 1:30.5": "1:30.5 is the number 90.5 to YAML: write 90.5 if that is meant, or",
    "split: no": "no is false to YAML: write false, or write it in quotes if it is a text",
    "stream: yes": "yes is true to YAML: write true, or write it in quotes if it is a text",
    "On: 1": "On is true to YAML: write true, or write it in quotes if it is a text",
    "split: 2026-11-25": "2026-11-25 is a date to YAML: write it in quotes",
    "split: 2026-13-45": "2026-13-45 is a date to YAML: write it in quotes",
}


@pytest.mark.parametrize("field", ODD)
def test_words_that_yaml_reads_as_something_else_are_refused_with_their_line(folder, field):
    content = f"sources:\n  - name: web\n    path: x\n    {field}\n"
    (folder / "mix.yaml").write_text(content)
    with pytest.raises(UserError) as told:
        read_mix(TextData(), str(folder / "mix.yaml"))
    assert str(told.value).startswith(f"--data.mix {folder}/mix.yaml: line 4: {ODD[field]}")


@pytest.mark.parametrize(
    ("word", "name"), [("yes_", "yes_"), ("'no'", "no"), ('"1e3"', "1e3"), ("a1", "a1"), ("1e", "1e"), ("'010'", "010")]
)
@pytest.mark.parametrize(("weight", "number"), [("1000.0", 1000), (".5", 0.5), ("1.0e+3", 1000), ("0", 0), ("+2", 2)])
def test_words_that_yaml_reads_as_they_seem_to_be_are_taken(folder, word, name, weight, number):
    first = "{name: other, path: x, weight: 1, stream: true, epochs: 2.5}"
    (folder / "mix.yaml").write_text(f"sources: [{first}, {{name: {word}, path: y, weight: {weight}}}]")
    source = read_mix(TextData(), str(folder / "mix.yaml")).sources[1]
    assert (source.name, source.weight) == (name, number)


@pytest.mark.parametrize("name", ["2026", "1.5"])
def test_a_number_as_a_name_is_refused_with_the_quotes_that_it_needs(folder, name):
    (folder / "mix.yaml").write_text(f"sources: [{{name: {name}, path: x, weight: 1}}]")
    with pytest.raises(UserError, match=rf"sources\[0\].name is {name}, not a name of .*, in quotes"):
        read_mix(TextData(), str(folder / "mix.yaml"))


@pytest.mark.parametrize("content", ["[" * 10_000, "sources: !!int x", "sources: [" + "{a: " * 3_000])
def test_yaml_that_python_cannot_read_is_no_yaml(folder, content):
    (folder / "mix.yaml").write_text(content)
    with pytest.raises(UserError, match=r"mix.yaml: it is no YAML: "):
        read_mix(TextData(), str(folder / "mix.yaml"))


CHUNKS = {
    "equal": ([10] * 40, 0.1, 40, ""),
    "one that is large": ([10] * 39 + [10_000], 0.1, 390, "3.8% of the rows are held out, not 10.0%"),
    "some that are large": ([1000, 10, 10, 10] * 25, 0.1, None, ""),
    "all large": ([100, 200, 300], 0.02, 100, "16.7% of the rows are held out, not 2.0%"),
    "two": ([1, 999], 0.1, 1, "0.1% of the rows are held out, not 10.0%"),
    "nearly all": ([10, 10, 10], 0.9, 20, "66.7% of the rows are held out, not 90.0%"),
    "growing": ([*range(1, 200)], 0.1, None, ""),
}


@pytest.mark.parametrize("name", CHUNKS)
def test_the_share_of_rows_that_is_held_out_is_the_one_asked_for_or_said(name):
    rows, share, count, says = CHUNKS[name]
    counted = np.array(rows, np.int32)
    nothing = np.zeros(len(rows), np.int64)
    shards = Shards("x", (Shard("a.jsonl", 1, ""),))
    index = Index(shards, (0,), ("",), nothing, np.arange(len(rows)), nothing, counted, datasets.Features())
    train, held, note = _held_out(index, "x", share, 1.0)
    assert sorted([*train.start, *held.start]) == [*range(len(rows))] and len(train.rows)
    assert note.startswith(says) and bool(note) == bool(says)
    held_rows = int(held.rows.sum())
    assert held_rows == count if count is not None else abs(held_rows / sum(rows) - share) < share / 5


def test_the_user_is_told_of_another_share_also_of_a_source(folder):
    _, tables, _ = loaded(flags(folder, eval_path="", holdout=0.5, cache_gb=8e-7))
    says = "of the rows are held out, not 50.0% (--data.holdout): more would take too much of --data.cache-gb"
    assert says in tables.note
    _, tables, _ = loaded(mixed(folder, second={"stream": False}, stream="true", holdout=0.5, cache_gb=16e-7))
    assert tables.note.startswith("web: ") and says in tables.note


def test_sources_that_share_a_file_are_refused_where_rows_are_held_out(folder):
    config = mixed(folder, second={"path": str(folder / "web" / "part-0.parquet"), "text": "text"})
    for config.stream in ("true", "false"):
        with pytest.raises(UserError, match=r"web and lines both read .*part-0.parquet.*give --data.eval-path"):
            loaded(config)


def test_a_small_source_and_a_path_beside_the_mix_are_refused(folder):
    rows, *_ = loaded(mixed(folder, eval_path=str(folder / "eval.jsonl")))
    with pytest.raises(UserError, match=r"the source lines has 50 rows, fewer than --run.global-batch 60"):
        epoch(rows, RunConfig(global_batch=60, micro_batch=5))
    config = mixed(folder)
    config.path = ("x.jsonl",)
    with pytest.raises(UserError, match=r"leave out --data\.path"):
        loaded(config)


def test_a_run_longer_than_the_sources_may_give_is_refused(folder):
    content = yaml.safe_load((mixed(folder) and folder / "mix.yaml").read_text())
    for source in content["sources"]:
        source["epochs"] = 2
    (folder / "mix.yaml").write_text(yaml.safe_dump(content))
    rows, *_ = loaded(TextData(mix=str(folder / "mix.yaml"), classes=CLASSES, eval_path=str(folder / "eval.jsonl")))
    with pytest.raises(UserError, match="the run sees 320 samples, and its sources may give 300"):
        epoch(rows, RunConfig(global_batch=20, micro_batch=5, steps=16))


def test_tar_files_are_streamed_without_being_asked(folder):
    (folder / "tar").mkdir()
    members = [
        (f"{i:03}.{ending}", str(row[column]).encode())
        for i, row in enumerate(ROWS)
        for ending, column in (("txt", "text"), ("cls", "label"))
    ]
    write_members(folder / "tar" / "a.tar", members)
    lines = [json.dumps({"txt": row["text"], "cls": row["label"]}) for row in ROWS[:9]]
    (folder / "eval.jsonl").write_text("\n".join(lines))
    rows, _, about = loaded(flags(folder, path=(str(folder / "tar"),), stream="auto", text=("txt",), label=("cls",)))
    assert "100 training rows streamed in 1 chunks" in about
    assert [int(row["labels"]) for row in rows.__getitems__(range(100))] == [row["label"] for row in ROWS]
