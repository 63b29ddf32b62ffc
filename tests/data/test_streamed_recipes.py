"""What recipes make of streamed data: the rows that they make of the same shards as a whole, and the same refusals."""

import re
from dataclasses import replace

import datasets
import numpy as np
import pyarrow as pa
import pytest
import torch
from pyarrow import parquet
from support.launching import ROOT
from support.stream_shards import lines
from support.streamed_data import COLOURS, pairs, pictures, preferences
from support.tables import refused

from app.data.config import Augment, ClassData, PairData, PreferenceData, Streams, TextData
from app.data.images import labeled_images
from app.data.images.augment import ImageCollate, augmentation
from app.data.rows import MISSING, read_rows
from app.data.text import labeled_text, pair_text
from app.data.text import preferences as preference_text
from app.data.text.pair_text import PairCollate
from app.data.text.tokenizer import byte_tokenizer
from app.launching.flags import parse
from app.sampling.batch_plan import BatchPlan
from app.tasks.class_loss import ClassLoss, ClassLossConfig
from app.tasks.language.lora import Lora
from app.tasks.language.preference import Distill, PreferenceLossConfig, check_preferences, reference_of
from laws.many import load

pytestmark = pytest.mark.usefixtures("own_data_cache")
TOKENIZER = byte_tokenizer(64)
OF_TAR = {"image": "png", "label": "cls"}


def both(config, folder, evaluation):
    """Return the flags that stream the data of a folder, and those that read them as a whole."""
    config = replace(config, path=(str(folder),), eval_path=str(evaluation), window=2)
    return replace(config, stream="true"), replace(config, stream="false")


def check_same(rows, whole, collate):
    """Check that an epoch of streamed rows, collated one by one, is that of a whole table; return the rows."""
    plan = BatchPlan(len(rows), len(rows), 10, 4, seed=7)
    plan = plan.ordered(rows.order(plan))
    ids = np.concatenate([ids for step in range(plan.steps) for ids, _ in plan.micro_batches(step)]).tolist()
    assert sorted(ids) == [*range(len(rows))] != ids
    read = [row for row in read_rows(rows, ids) if row is not MISSING]
    expected = read_rows(whole, range(len(whole)))
    collated, wanted = ([told(collate([row])) for row in some] for some in (read, expected))
    assert sorted(collated) == sorted(wanted) and collated != wanted
    return read


def told(batch):
    """Return all that a batch holds, in a form that can be sorted."""
    return repr([(name, value.tolist() if torch.is_tensor(value) else value) for name, value in sorted(batch.items())])


@pytest.mark.parametrize("kind", ["parquet", "jsonl.zst"])
def test_pairs(kind, tmp_path):
    folder, evaluation = pairs(tmp_path / "train", kind), pairs(tmp_path / "eval", "jsonl", 7)
    config, read_whole = both(PairData(prefix="to: ", max_source=20), folder, evaluation)
    tables = pair_text.load_pairs(config)
    rows = pair_text.training_rows(tables, config, TOKENIZER)
    whole = pair_text.training_rows(pair_text.load_pairs(read_whole), read_whole, TOKENIZER)
    read = check_same(rows, whole, PairCollate(TOKENIZER))
    assert sorted(map(rows.weights, read)) == sorted(whole.weights.tolist())
    assert sorted(map(rows.lengths, read)) == sorted(whole.lengths.tolist())
    sets = {"": pair_text.tokenize(tables.evaluation, config, TOKENIZER)}
    about = pair_text.describe(tables, rows, sets, config)
    assert re.match(r"43 pairs streamed in \d+ chunks to train on, 7 pairs with \d+ tokens to write to evaluate", about)
    assert re.search(r"\d evaluation sources are longer than 20 tokens", about)
    other = pair_text.training_rows(tables, replace(config, prefix=""), TOKENIZER)
    assert rows.fingerprint != other.fingerprint


def test_languages_of_a_column_are_columns_of_streamed_pairs(tmp_path):
    rows = [{"translation": {"de": f"ein {i}", "en": f"a {i}"}} for i in range(6)]
    for name in ("train", "test"):
        (tmp_path / f"{name}.jsonl").write_bytes(lines(rows))
    config = PairData(path=(str(tmp_path),), source="de", target="en", stream="true")
    tables = pair_text.load_pairs(config)
    read = read_rows(pair_text.training_rows(tables, config, TOKENIZER), range(6))
    assert [bytes(row["labels"][:3].tolist()).decode() for row in read] == [f"a {i}" for i in range(6)]
    assert tables.evaluation["en"][0] == "a 0"


@pytest.mark.parametrize(("text", "says"), [("  ", "is empty; leave such rows out"), (None, "has no text")])
def test_a_pair_without_a_text_is_named_by_its_shard_and_row(text, says, tmp_path):
    folder, evaluation = pairs(tmp_path / "train", "parquet"), pairs(tmp_path / "eval", "jsonl", 7)
    table = [{"source": "one", "target": "two"}] * 9
    # Row 1 of the third row group, of which no tokenizer is learnt: the shard is not the first or the last.
    parquet.write_table(
        pa.Table.from_pylist([*table[:5], {"source": "one", "target": text}, *table]),
        folder / "part-2.parquet",
        row_group_size=2,
    )
    config, _ = both(PairData(), folder, evaluation)
    tables = pair_text.load_pairs(config)
    rows = pair_text.training_rows(tables, config, TOKENIZER)
    with refused(
        "--data.target target: row 1 (counted from 0 in the chunk) of --data.path",
        "part-2.parquet, chunk at byte",
        says,
    ):
        read_rows(rows, range(len(rows)))


@pytest.mark.parametrize("kind", ["parquet", "jsonl.zst"])
def test_preferences(kind, tmp_path):
    folder, evaluation = preferences(tmp_path / "train", kind), preferences(tmp_path / "eval", "jsonl", 7)
    config, read_whole = both(PreferenceData(max_length=64), folder, evaluation)
    tables = preference_text.load_preferences(config)
    train = preference_text.training_pairs(tables, config, TOKENIZER)
    whole = preference_text.training_pairs(preference_text.load_preferences(read_whole), read_whole, TOKENIZER)
    rows = train.rows
    read = check_same(rows, whole.rows, train.collate)
    assert (
        train.table is None
        and whole.table.left_out == 1
        and len(rows) == 43
        and len(read) == 42 == sum(map(rows.weights, read))
    )
    assert sorted(map(rows.lengths, read)) == sorted(whole.rows.lengths.tolist())
    sets = {"": preference_text.tokenize(tables.evaluation, config, TOKENIZER)}
    about = preference_text.describe(tables, train, sets, config)
    assert re.match(r"43 pairs streamed in \d+ chunks to train on, 6 pairs to evaluate .*; 1 evaluation pairs", about)


def test_the_reference_of_streamed_preferences_is_computed_in_each_step():
    loss, lora = PreferenceLossConfig(), Lora(rank=8)
    of = {
        (model, adapters.rank, streamed): reference_of(loss, model, adapters, streamed)
        for model in ("", "some")
        for adapters in (Lora(), lora)
        for streamed in (False, True)
    }
    assert of == {
        ("", 0, False): "none",
        ("", 0, True): "none",
        ("", 8, False): "none",
        ("", 8, True): "none",
        ("some", 0, False): "cached",
        ("some", 0, True): "copy",
        ("some", 8, False): "cached",
        ("some", 8, True): "adapters",
    }
    for model, adapters, instead in (("some", Lora(), "copy"), ("some", lora, "adapters"), ("", Lora(), "none")):
        with refused("--loss.reference cached: ", f"give --loss.reference {instead}"):
            reference_of(PreferenceLossConfig(reference="cached"), model, adapters, streamed=True)
    with refused("--loss.reference copy: there is no --model"):
        check_preferences(PreferenceLossConfig(reference="copy"), Distill(), Lora())


def loaded_pictures(config, from_scratch=True):
    """Return tables, the processor, labels, and the images to train on, of a config."""
    tables, labels = labeled_images.load_labelled(config)
    processor = labeled_images.own_processor(labeled_images.ImageColumn(tables.train, config.image), 0)
    images = labeled_images.training_images(tables, config, processor, labels, measured=from_scratch)
    return tables, processor, labels, images


@pytest.mark.parametrize("from_scratch", [True, False])
@pytest.mark.parametrize("kind", ["parquet", "tar"])
def test_pictures(kind, from_scratch, tmp_path):
    config = ClassData(classes=COLOURS, **(OF_TAR if kind == "tar" else {}))
    config, read_whole = both(config, pictures(tmp_path / "train", kind), pictures(tmp_path / "eval", kind, 7))
    tables, processor, labels, train = loaded_pictures(config, from_scratch)
    _, other, _, whole = loaded_pictures(read_whole)
    assert processor.size == other.size and train.shape == whole.shape == (43, 3, 32, 32)
    looked_at = labeled_images.load_images(labeled_images.ImageColumn(tables.train, config.image), processor, 0)
    statistics = train.statistics(1 / 255)
    assert statistics == looked_at.statistics(1 / 255) and len(looked_at) < 43
    check_same(train.rows, whole.rows, ImageCollate(*statistics, 1 / 255))
    column = labeled_images.ImageColumn(tables.evaluation, config.image)
    about = labeled_images.describe(tables, labels, train, {"": labeled_images.load_images(column, processor, 1)})
    assert re.match(r"43 training images streamed in \d+ chunks brought to 32 x 32, 7 images to evaluate", about)
    assert labels.names == list(COLOURS) and train.example["pixels"].shape == (3, 32, 32)


@pytest.mark.parametrize("kind", ["parquet", "tar"])
def test_a_broken_picture_is_named_by_its_shard_and_row(kind, tmp_path):
    folder = pictures(tmp_path / "train", kind)
    file = folder / f"part-2.{kind}"
    if kind == "tar":
        data = file.read_bytes()
        at = data.index(b"IDAT", data.index(b"IDAT") + 1)  # of the second picture
        file.write_bytes(data[:at] + b"JUNK" + data[at + 4 :])
    else:
        rows = parquet.read_table(file).to_pylist()
        rows[5]["image"] = rows[5]["image"].replace(b"IDAT", b"JUNK")
        parquet.write_table(pa.Table.from_pylist(rows), file, row_group_size=4)
    config = ClassData(classes=COLOURS, **(OF_TAR if kind == "tar" else {}))
    config, _ = both(config, folder, pictures(tmp_path / "eval", kind, 7))
    *_, (rows, _) = loaded_pictures(config, from_scratch=False)
    name = " (007.png)" if kind == "tar" else ""
    with refused(
        f"--data.image {config.image}: row 1 (counted from 0 in the chunk) of --data.path", f"part-2.{kind}, ", name
    ):
        read_rows(rows, range(len(rows)))


def test_a_class_that_nobody_has_named_is_refused_by_its_shard(tmp_path):
    folder = pictures(tmp_path / "train", "parquet")
    table = parquet.read_table(folder / "part-2.parquet").to_pylist()
    table[5]["label"] = "pink"
    parquet.write_table(pa.Table.from_pylist(table), folder / "part-2.parquet", row_group_size=4)
    config, _ = both(ClassData(classes=COLOURS), folder, pictures(tmp_path / "eval", "parquet", 7))
    *_, (rows, _) = loaded_pictures(config)
    with refused(
        "--data.label label: row 1 (counted from 0 in the chunk) of", "part-2.parquet, ", "none of the 3", "pink"
    ):
        read_rows(rows, range(len(rows)))


def test_classes_of_streamed_data_are_those_of_their_type(tmp_path):
    """Also where the rows that are looked at have one of them alone."""
    features = datasets.Features({"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["no", "yes"])})
    for shard in range(6):
        rows = {"text": [f"{shard}"] * 2, "label": [int(shard == 2)] * 2}
        datasets.Dataset.from_dict(rows, features).to_parquet(tmp_path / "train" / f"{shard}.parquet")
    (tmp_path / "eval.jsonl").write_bytes(lines([{"text": "a", "label": "yes"}]))
    config, _ = both(TextData(), tmp_path / "train", tmp_path / "eval.jsonl")
    tables, labels = labeled_text.load_labelled(config)
    rows = labeled_text.training_rows(tables, config, TOKENIZER, labels)
    assert set(tables.train["label"]) == {0} and labels.names == ["no", "yes"]
    assert [row["labels"] for row in read_rows(rows, range(12))] == [0] * 4 + [1] * 2 + [0] * 6


def test_the_loss_of_streamed_samples_takes_weights_as_numbers(tmp_path):
    folder, evaluation = pictures(tmp_path / "train", "parquet"), pictures(tmp_path / "eval", "parquet", 7)
    config, _ = both(ClassData(classes=COLOURS), folder, evaluation)
    _, _, labels, (rows, _) = loaded_pictures(config)
    assert labels.known_values is None
    loss = ClassLoss(ClassLossConfig(weights=("1", "0", "2.5")), labels.names, labels.known_values)
    read = read_rows(rows, range(len(rows)))
    assert {(COLOURS[row["labels"]], loss.weights(row)) for row in read} == {("red", 1), ("green", 0), ("blue", 2.5)}
    with refused("--loss.weights balanced: how many samples of streamed data", "in this order: red, green, blue"):
        ClassLoss(ClassLossConfig(weights=("balanced",)), labels.names, labels.known_values)
    with refused("--loss.weights 1: give one number for each of the 3 classes"):
        ClassLoss(ClassLossConfig(weights=("1",)), labels.names, labels.known_values)
    for mixed in ({"mixup": 0.2}, {"cutmix": 1.0}):
        with refused("--augment.mixup, --augment.cutmix: they mix images from anywhere", "leave them out"):
            augmentation(Augment(**mixed), rows)


def test_what_is_looked_at_is_no_range_of_all_amounts(tmp_path):
    for name in ("train", "test"):
        (tmp_path / f"{name}.jsonl").write_bytes(lines({"text": "a", "label": i / 2} for i in range(5)))
    config = TextData(path=(str(tmp_path),), problem="regression", stream="true")
    _, labels = labeled_text.load_labelled(config)
    assert labels.summary() == "regression: label from 0 to 2 in the rows looked at"


STREAMING = {"cls", "dpo", "img", "lm", "s2s"}


@pytest.mark.parametrize("recipe", sorted(path.stem for path in (ROOT / "recipes").glob("*.py")))
def test_recipes_that_do_not_stream_refuse_urls(recipe, tmp_path):
    module = load(ROOT / "recipes" / f"{recipe}.py")
    url = "https://example.org/data/part-0.parquet"
    config = parse(module.Config, ["--data.path", url, "--run.dir", str(tmp_path), "--run.trackers"])
    assert isinstance(config.data, Streams) == (recipe in STREAMING)
    if recipe not in STREAMING:
        with refused(f"--data.path {url}: URLs are not read here: copy the data to a disk"):
            module.main(config)
