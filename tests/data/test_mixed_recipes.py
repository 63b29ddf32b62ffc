"""Mixtures in every recipe that has --data.mix: sources with their own columns, mapped, streamed, and both at once."""

import json
import re

import datasets
import numpy as np
import pytest
import yaml
from support.launching import ROOT, steps
from support.streamed_data import COLOURS, pairs, pictures, preferences
from support.tables import refused
from support.token_shards import write_tokens

from app.config import RunConfig
from app.data.config import Augment, ClassData, CorpusData, PairData, PreferenceData, Streams
from app.data.corpus import corpus
from app.data.images import labeled_images
from app.data.images.augment import ImageCollate, augmentation
from app.data.rows import MISSING, read_rows
from app.data.text import pair_text
from app.data.text import preferences as preference_text
from app.data.text.tokenizer import byte_tokenizer
from app.launching.flags import parse
from app.sampling.batch_plan import BatchPlan
from app.training.loop.by_source import BySource
from laws.many import load

pytestmark = pytest.mark.usefixtures("own_data_cache")
TOKENIZER = byte_tokenizer(64)
# Which of the two sources is streamed.
WAYS = {"mapped": (False, False), "streamed": (True, True), "both": (False, True)}
TINY = ["--scratch.layers", 1, "--scratch.width", 16]
RECIPES = {
    "cls": [*TINY, "--scratch.vocab", 300, "--data.classes", *COLOURS, "--data.text", "label"],
    "s2s": [*TINY, "--scratch.heads", 2, "--scratch.vocab", 300, "--smoothing", 0.1, "--generate.rows", 0],
    "dpo": [*TINY, "--scratch.heads", 2, "--scratch.tokenizer", "byte", "--data.max-length", 64],
    "img": ["--scratch.layers", 1, "--scratch.width", 8, "--data.classes", *COLOURS, "--loss.weights", 1, 0, 2.5],
    "lm": [*TINY, "--scratch.heads", 2, "--scratch.tokenizer", "byte", "--data.block", 16],
}
NAMES = {
    "cls": {"label": "colour"},
    "s2s": {"source": "en", "target": "de"},
    "dpo": {"prompt": "asked", "chosen": "good", "rejected": "bad"},
    "img": {"image": "photo", "label": "colour"},
}
WRITERS = {"cls": pictures, "img": pictures, "s2s": pairs, "dpo": preferences}


def write_sources(folder, recipe):
    """Write the shards of two sources, of which the second has names of its own for columns."""
    WRITERS[recipe](folder / "a", "parquet", 43)
    others = NAMES[recipe]
    for file in WRITERS[recipe](folder / "raw", "parquet", 31).iterdir():
        table = datasets.Dataset.from_parquet(str(file), cache_dir=str(folder / "cache"))
        (folder / "b").mkdir(exist_ok=True)
        table.rename_columns(others).to_parquet(folder / "b" / file.name, batch_size=4)


def mixed(folder, recipe, way, **second):
    """Write the file of a mixture of these sources; return it."""
    one, two = WAYS[way]
    renamed = dict(NAMES[recipe])
    if recipe == "cls":
        renamed = {"label": ["colour"], "text": ["colour"]}
    first = {"name": "a", "path": str(folder / "a"), "weight": 2, "stream": one}
    other = {"name": "b", "path": str(folder / "b"), "weight": 1, "stream": two, **renamed, **second}
    (folder / f"{way}.yaml").write_text(yaml.safe_dump({"sources": [first, other]}))
    return folder / f"{way}.yaml"


def corpora(folder, way):
    """Write a mixture of a text and of a folder of tokens, which alone is streamed; return its file."""
    texts = [f"the square of {i} is {i * i}" for i in range(60)]
    (folder / "a.txt").write_text("\n\n".join(texts))
    (folder / "eval.txt").write_text(texts[0])
    write_tokens(folder / "b", texts)
    paths = {"mapped": ("a.txt", "a.txt"), "streamed": ("b", "b"), "both": ("a.txt", "b")}[way]
    sources = [
        {"name": name, "path": str(folder / path), "weight": weight}
        for name, path, weight in zip("ab", paths, (2, 1), strict=True)
    ]
    for source, path in zip(sources, paths, strict=True):
        source["stream"] = path == "b"
    (folder / f"{way}.yaml").write_text(yaml.safe_dump({"sources": sources}))
    return folder / f"{way}.yaml"


@pytest.fixture
def totals(monkeypatch):
    """Return a list that gets, for each step, the sums of losses and of weights of each source."""
    seen, losses = [], BySource.losses

    def recorded(step, slots):
        seen.append(np.array(slots).reshape(-1, 2, 2).sum(0))
        return losses(step, slots)

    monkeypatch.setattr(BySource, "losses", recorded)
    return seen


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("recipe", sorted(path.stem for path in (ROOT / "recipes").glob("*.py")))
def test_every_recipe_with_the_flag_trains_on_two_sources(recipe, way, totals, tmp_path, capsys):
    module = load(ROOT / "recipes" / f"{recipe}.py")
    if not isinstance(module.Config().data, Streams):
        assert recipe not in RECIPES
        return
    if recipe == "lm":
        file, more = corpora(tmp_path, way), ["--data.eval-path", tmp_path / "eval.txt"]
    else:
        write_sources(tmp_path, recipe)
        file, more = mixed(tmp_path, recipe, way), []
    run = ["--run.steps", 2, "--run.global-batch", 12, "--run.micro-batch", 4, "--run.log-every", 1, "--run.trackers"]
    words = ["--data.mix", file, *more, *RECIPES[recipe], *run, "--run.dir", tmp_path / "run"]
    module.main(parse(module.Config, list(map(str, words))))
    told = capsys.readouterr().out
    assert re.search(r"a mix of a, weight 2: [\d,]+ \w+.*; b, weight 1: [\d,]+ \w+", told), told
    lines = steps(tmp_path / "run")
    assert len(lines) == len(totals) == 2
    for line, (losses, weights) in zip(lines, totals, strict=True):
        assert losses.sum() / weights.sum() == pytest.approx(line["loss"], rel=1e-5)
        assert [line["loss/a"], line["loss/b"]] == pytest.approx(losses / weights) and line["loss/a"] != line["loss/b"]
        assert line["samples/a"] + line["samples/b"] == line["samples"]


def test_a_corpus_that_is_new_on_resume_begins(tmp_path):
    file, run = corpora(tmp_path, "both"), ["--run.steps", 4, "--run.global-batch", 12, "--run.log-every", 1]
    words = ["--data.mix", file, "--data.eval-path", tmp_path / "eval.txt", *RECIPES["lm"], *run, "--run.trackers"]
    words += ["--sample-length", 0, "--run.dir", tmp_path / "run"]
    module = load(ROOT / "recipes" / "lm.py")
    module.main(parse(module.Config, list(map(str, [*words, "--run.stop-at", 2]))))
    (tmp_path / "c.txt").write_text("\n\n".join(f"{i} is half of {2 * i}" for i in range(60)))
    mix = yaml.safe_load(file.read_text())
    mix["sources"].append({"name": "c", "path": str(tmp_path / "c.txt"), "weight": 3})
    file.write_text(yaml.safe_dump(mix))
    module.main(parse(module.Config, list(map(str, words))))
    before, after = steps(tmp_path / "run")[1::2]
    assert "samples/c" not in before and after["samples/c"] >= 9 and after["samples"] == 48
    assert before["samples/a"] < after["samples/a"] and before["samples/b"] < after["samples/b"]
    assert sum(after[f"samples/{name}"] for name in "abc") == 48


def test_errors_of_tokens_name_their_source_and_its_path(tmp_path):
    config = CorpusData(mix=str(corpora(tmp_path, "both")), eval_path=str(tmp_path / "eval.txt"), block=16)
    source, tables = f"--data.mix b: {tmp_path / 'b'}", corpus.load(config)
    with refused(f"--scratch.tokenizer char: {source} was tokenized with byte"):
        corpus.own_tokenizer(tables.train, config, "char", 0)
    other = byte_tokenizer(64)
    other.add_tokens(["more"])
    with refused(f"{source} holds tokens of another tokenizer"):
        corpus.blocks(tables.train, config, other)
    (tmp_path / "b" / "tokenizer" / "tokenizer.json").write_text("{")
    with refused(f"{source}: tokenizer/tokenizer.json, or a file next to it, cannot be loaded"):
        corpus.own_tokenizer(tables.train, config, "byte", 0)
    (tmp_path / "b" / "train-00000.parquet").rename(tmp_path / "elsewhere")
    with refused(f"{source}: train-00000.parquet is gone"):
        corpus.load(config)


def loaded_pairs(file, **flags):
    """Return tables, rows and the description of pairs."""
    config = PairData(mix=str(file), **{"max_source": 64, "window": 2, **flags})
    tables = pair_text.load_pairs(config)
    rows = pair_text.training_rows(tables, config, TOKENIZER)
    sets = {"": pair_text.tokenize(tables.evaluation, config, TOKENIZER)}
    return tables, rows, pair_text.describe(tables, rows, sets, config)


def texts(rows):
    """Return the texts of rows of bytes."""
    parts = ("input_ids", "labels")
    return [tuple(bytes(i for i in row[part].tolist() if i < 256).decode() for part in parts) for row in rows]


@pytest.mark.parametrize("way", WAYS)
def test_pairs_have_a_prefix_and_weights_of_their_source(way, tmp_path):
    write_sources(tmp_path, "s2s")
    scored = pairs(tmp_path / "eval", "jsonl", 7)
    tables, rows, about = loaded_pairs(mixed(tmp_path, "s2s", way, prefix="to: "), eval_path=str(scored))
    read = read_rows(rows, range(74))
    alone, other = (datasets.load_dataset("parquet", data_files=f"{tmp_path}/{name}/*")["train"] for name in "ab")
    assert texts(read[:43]) == [(row["source"], row["target"]) for row in alone]
    assert texts(read[43:]) == [(f"to: {row['en']}", row["de"]) for row in other]
    plan = BatchPlan.of_run(RunConfig(global_batch=10, micro_batch=4, epochs=1.0), len(rows))
    assert plan.ordered(rows.order(plan)).order.lanes == (1 if way == "mapped" else 3)
    counts = [len(row["labels"]) for row in read]
    if way == "mapped":
        assert rows.weights[np.arange(74)].tolist() == counts and len(rows.lengths) == 74
        assert about.startswith(f"74 pairs with {sum(counts):,} tokens to write to train on")
    else:
        assert [rows.weights(row) for row in read] == counts
        assert [rows.lengths(row) for row in read] == [len(row["input_ids"]) + len(row["labels"]) for row in read]
        assert about.startswith("74 pairs to train on, 7 pairs with")
    assert not texts(read_rows(pair_text.tokenize(tables.evaluation, PairData(), TOKENIZER), [0]))[0][0].startswith(
        "to"
    )


@pytest.mark.parametrize("way", WAYS)
def test_languages_are_columns_of_a_source(way, tmp_path):
    for name in "ab":
        (tmp_path / name).mkdir()
        for shard in range(4):
            rows = [{"translation": {"de": f"ein {name}{shard}{i}", "en": f"a {name}{shard}{i}"}} for i in range(6)]
            (tmp_path / name / f"{shard}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    file = mixed(tmp_path, "s2s", way, source="de", target="en")
    content = yaml.safe_load(file.read_text())
    content["sources"][0] |= {"source": "en", "target": "de"}
    file.write_text(yaml.safe_dump(content))
    _, rows, _ = loaded_pairs(file)
    first, *_, last = texts(read_rows(rows, range(len(rows))))
    assert first[0].startswith("a a") and first[1].startswith("ein a")
    assert last[0].startswith("ein b") and last[1].startswith("a b")


def test_templates_and_prefixes_leave_no_text_out_in_silence(tmp_path):
    rows = [{"q": f"q{i}", "a": f"a{i}", "t": "x"} for i in range(20)]
    for name in "ab":
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "eval.jsonl").write_text(json.dumps({"source": "q", "target": "t"}))
    rows[7]["q"] = None
    (tmp_path / "b.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def of(**second):
        one = {"name": "a", "path": str(tmp_path / "a.jsonl"), "weight": 1, "source": "q", "target": "t"}
        two = {**one, "name": "b", "path": str(tmp_path / "b.jsonl"), **second}
        (tmp_path / "mix.yaml").write_text(
            yaml.safe_dump({"sources": [one, {name: value for name, value in two.items() if value is not None}]})
        )
        return tmp_path / "mix.yaml"

    tables, *_ = loaded_pairs(of(source=None, template="{a}, {t}?", prefix="say "))
    assert "say a3, x?" in tables.mixed.tables[1].table["source"][:]
    for stream in (False, True):
        with refused("the template of b: row 7 (counted from 0", " of --data.mix b:", "b.jsonl", "has nothing in q"):
            loaded_pairs(of(source=None, template="{q}", stream=stream), eval_path=str(tmp_path / "eval.jsonl"))
        with refused("--data.source source: row 7 (counted from 0", " of --data.mix b:", "b.jsonl", "has no text"):
            loaded_pairs(of(prefix="say ", stream=stream), eval_path=str(tmp_path / "eval.jsonl"))
    with refused("sources[1].template: it is the text of a row, so leave out `source`"):
        loaded_pairs(of(template="{q}"))
    with refused("sources[1].prefix: --data.prefix is given too"):
        loaded_pairs(of(prefix="say "), prefix="write ")


@pytest.mark.parametrize("way", WAYS)
def test_preferences_of_sources(way, tmp_path):
    write_sources(tmp_path, "dpo")
    config = PreferenceData(mix=str(mixed(tmp_path, "dpo", way)), max_length=64)
    scored = preferences(tmp_path / "eval", "jsonl", 7)
    config.eval_path = str(scored)
    tables = preference_text.load_preferences(config)
    train = preference_text.training_pairs(tables, config, TOKENIZER)
    sets = {"": preference_text.tokenize(tables.evaluation, config, TOKENIZER)}
    about = preference_text.describe(tables, train, sets, config)
    read = read_rows(train.rows, range(len(train.rows)))
    missing = [number for number, row in enumerate(read) if row is MISSING]
    if way == "mapped":
        assert about.startswith("72 pairs to train on") and "3 pairs left out" in about
        assert [len(source) for source in train.rows.sources] == [42, 30]
        train.table.reference = np.stack([np.arange(72.0), -np.arange(72.0)], 1)
        assert train.collate([read[50], read[3]])["reference"].tolist() == [50, 3, -50, -3]
        train.table.models["the reference model"] = "some"
        assert train.rows.models == {"the reference model": "some"} and len(train.rows.lengths) == 72
    else:
        assert about.startswith("74 pairs to train on") and train.table is None
        assert {number % 43 for number in missing} and sum(row is not MISSING for row in read) == 72
        assert train.rows.weights(read[0]) == 1.0
    assert train.collate([row for row in read if row is not MISSING])["tokens"].shape == (144,)
    assert not train.chats


def test_preferences_of_another_form_are_refused(tmp_path):
    write_sources(tmp_path, "dpo")
    file = mixed(tmp_path, "dpo", "streamed")
    content = yaml.safe_load(file.read_text())
    del content["sources"][1]["prompt"]
    file.write_text(yaml.safe_dump(content))
    with refused("--data.mix: a has a column prompt, and b has none: give it to all sources, or to none"):
        preference_text.load_preferences(PreferenceData(mix=str(file)))


@pytest.mark.parametrize("way", WAYS)
def test_pictures_of_sources(way, tmp_path):
    write_sources(tmp_path, "img")
    config = ClassData(mix=str(mixed(tmp_path, "img", way)), classes=COLOURS)
    tables, labels = labeled_images.load_labelled(config)
    processor = labeled_images.own_processor(labeled_images.ImageColumn(tables.train, "image"), 0)
    train = labeled_images.training_images(tables, config, processor, labels, measured=True)
    assert train.shape == (len(train.rows), 3, 32, 32) and train.example["pixels"].shape == (3, 32, 32)
    assert (labels.known_values is None) == (way != "mapped")
    batch = ImageCollate(*train.statistics(1 / 255), 1 / 255)(read_rows(train.rows, range(len(train.rows))))
    assert len(batch["pixel_values"]) == len(train.rows) == sum(each.rows for each in tables.mixed.tables)
    brightest = batch["pixel_values"].mean((2, 3)).argmax(1)
    assert (brightest == batch["labels"]).float().mean() > 0.9
    with refused("--augment.mixup, --augment.cutmix: they would mix images from all sources of --data.mix"):
        augmentation(Augment(mixup=0.2), train.rows)


def test_pictures_of_several_formats_are_mixed_and_their_classes_agree(tmp_path):
    for name, colours in (("one", COLOURS), ("two", COLOURS), ("three", COLOURS[:2])):
        rows = datasets.Dataset.from_parquet(
            [str(file) for file in pictures(tmp_path / f"{name}-raw", "parquet").iterdir()]
        )
        for number, row in enumerate(rows):
            if row["label"] in colours:
                (tmp_path / name / row["label"]).mkdir(parents=True, exist_ok=True)
                (tmp_path / name / row["label"] / f"{number}.png").write_bytes(row["image"])
    pictures(tmp_path / "tar", "tar")
    numbers = datasets.Dataset.from_parquet([str(file) for file in sorted((tmp_path / "one-raw").iterdir())])
    numbers = numbers.map(lambda row: {"label": COLOURS.index(row["label"])}, remove_columns=["label"])
    numbers.cast_column("label", datasets.Value("int32")).to_parquet(tmp_path / "numbers.parquet")

    def load(*paths):
        more = {"tar": {"image": "png", "label": "cls"}}
        sources = [{"name": p[:3], "path": str(tmp_path / p), "weight": 1, **more.get(p, {})} for p in paths]
        (tmp_path / "mix.yaml").write_text(yaml.safe_dump({"sources": sources}))
        config = ClassData(mix=str(tmp_path / "mix.yaml"), classes=COLOURS if "tar" in paths else ())
        tables, labels = labeled_images.load_labelled(config)
        processor = labeled_images.own_processor(labeled_images.ImageColumn(tables.train, "image"), 0)
        return read_rows(labeled_images.training_images(tables, config, processor, labels, True).rows, range(60))

    for paths in (("one", "two"), ("tar", "numbers.parquet"), ("numbers.parquet", "tar")):
        rows = load(*paths)
        assert [row["pixels"].mean((1, 2)).argmax() for row in rows] == pytest.approx(
            [(2, 1, 0)[row["labels"]] if "one" in paths else row["labels"] for row in rows]
        )
    with refused("the column label of thr is of the classes green, red, and of one of the classes blue, green, red"):
        load("one", "three")


@pytest.mark.parametrize("way", WAYS)
def test_what_a_source_trains_on_is_not_evaluated_on(way, tmp_path):
    write_sources(tmp_path, "s2s")
    file = mixed(tmp_path, "s2s", way)
    for name in "ab":
        for more in ({"eval_path": str(tmp_path / name)}, {"eval_sets": (f"hard={tmp_path / name}",)}):
            with refused("would be both trained on and evaluated on; give other data"):
                loaded_pairs(file, **more)
    for number, split in enumerate(["validation", *["train"] * 4]):
        (tmp_path / "a" / f"part-{number}.parquet").rename(tmp_path / "a" / f"{split}-{number}.parquet")
    tables, *_ = loaded_pairs(file, eval_path=str(tmp_path / "a"))
    assert len(tables.evaluation) == 9


@pytest.mark.parametrize("way", WAYS)
def test_rows_to_evaluate_on_are_texts_of_their_source_or_of_none(way, tmp_path):
    """A source's own split has the template and the prefix of the source; rows of --data.eval-path are of no source."""
    plain = [{"source": f"the text {i}", "target": f"t{i}"} for i in range(20)]
    parts = [{"en": f"a text {i}", "topic": f"about {i}", "de": f"d{i}"} for i in range(20)]
    for name, rows in (("a", plain), ("b", parts)):
        (tmp_path / name).mkdir()
        for split, own in (("train", rows[:17]), ("validation", rows[17:])):
            (tmp_path / name / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in own))
    (tmp_path / "eval.jsonl").write_text("".join(json.dumps(row) + "\n" for row in plain[:2]))
    file = mixed(tmp_path, "s2s", way, source=None, template="{topic}, {en}", prefix="say ")
    content = yaml.safe_load(file.read_text())
    del content["sources"][1]["source"]
    file.write_text(yaml.safe_dump(content))

    def read(**more):
        tables, *_ = loaded_pairs(file, **more)
        return texts(
            read_rows(pair_text.tokenize(tables.evaluation, PairData(), TOKENIZER), range(len(tables.evaluation)))
        )

    own = [(f"the text {i}", f"t{i}") for i in (17, 18, 19)] + [
        (f"say about {i}, a text {i}", f"d{i}") for i in (17, 18, 19)
    ]
    assert read() == own
    assert read(eval_path=str(tmp_path / "eval.jsonl")) == [(f"the text {i}", f"t{i}") for i in range(2)]
    (tmp_path / "eval.jsonl").write_text(json.dumps(parts[0]))
    with refused("--data.source source: no such"):
        read(eval_path=str(tmp_path / "eval.jsonl"))


@pytest.mark.parametrize("held_out", [False, True])
def test_rows_that_are_looked_at_are_named_by_their_shard(held_out, tmp_path):
    """Of two sources too, whose tables are joined."""
    write_sources(tmp_path, "s2s")
    for file in (tmp_path / "b").iterdir():
        table = datasets.Dataset.from_parquet(str(file), cache_dir=str(tmp_path / "cache"))
        rows = table.to_list()
        rows[-1]["de"] = None
        datasets.Dataset.from_list(rows, features=table.features).to_parquet(str(file), batch_size=100)
    scored = {} if held_out else {"eval_path": str(pairs(tmp_path / "eval", "jsonl", 7))}
    with refused(r"--data.target target: row", "of --data.mix b:", "part-", "chunk at byte", "has no text") as told:
        loaded_pairs(mixed(tmp_path, "s2s", "both"), **scored)
    row, shard = re.search(r"row (\d+) .*/(part-\d.parquet), chunk", str(told.value)).groups()
    assert datasets.Dataset.from_parquet(str(tmp_path / "b" / shard))["de"][int(row)] is None
    own = {"source": "en", "target": "de", "path": (str(tmp_path / "b"),), "stream": "true"}
    with refused(r"--data.target de: row", "of --data.path", shard[:5], "chunk at byte", "has no text") as told:
        pair_text.load_pairs(PairData(**own, **scored))
    row, shard = re.search(r"row (\d+) .*/(part-\d.parquet), chunk", str(told.value)).groups()
    assert datasets.Dataset.from_parquet(str(tmp_path / "b" / shard))["de"][int(row)] is None
