"""What an error advises fits the recipe that shows it: its flags, its formats, the files that are there."""

import dataclasses
import re

import pytest
from PIL import Image

from app.data.boxes.detections import load_boxes
from app.data.config import BoxData, ClassData, CorpusData, PairData, PreferenceData, TagData, TextData
from app.data.corpus import corpus
from app.data.images import labeled_images
from app.data.text import labeled_text, pair_text, preferences, tagged_text
from app.errors import UserError

pytestmark = pytest.mark.usefixtures("data_cache")
RECIPES = {
    "cls": (TextData, labeled_text.load_labelled),
    "tag": (TagData, tagged_text.load_tagged),
    "dpo": (PreferenceData, preferences.load_preferences),
    "s2s": (PairData, pair_text.load_pairs),
    "lm": (CorpusData, lambda config: corpus.own_tokenizer(corpus.load(config).train, config, "char", 50)),
    "img": (ClassData, labeled_images.load_labelled),
    "det": (BoxData, load_boxes),
}
"""Of each recipe that reads tables: its flags of data, and what opens them."""
FOREIGN = {"det": (".tsv", "subfolder", "CoNLL"), "img": ("COCO", "YOLO", "CoNLL"), "cls": ("COCO", "CoNLL")}
"""What a recipe's messages never speak of."""


def image(path):
    Image.new("RGB", (8, 8)).save(path)


def made(folder, kind):
    """Write something that no recipe reads as it is; return what --data.path is."""
    texts = {
        "table.txt": "a\tb\nx\t1\ny\t2\n" * 3,
        "table.csv": "a,b\nx,1\ny,2\n" * 3,
        "table.xml": "<a/>",
        "noextension": "",
        "notes.md": "# notes",
    }
    if kind in texts:
        (folder / kind).write_text(texts[kind])
        return folder / kind
    if kind == "floats":
        import datasets

        image(folder / "1.png")
        columns = {"text": ["x"], "label": [0.5], "tokens": [["x"]], "tags": [[0.5]], "image": [str(folder / "1.png")]}
        columns |= {"boxes": [[[0.0, 0.0, 4.0, 4.0]]], "classes": [[0.5]], "chosen": [0.5], "rejected": [0.5]}
        columns |= {"source": [0.5], "target": [0.5]}
        rows = {name: values * 30 for name, values in columns.items()}
        rows["label"] = [index + 0.5 for index in range(30)]
        datasets.Dataset.from_dict(rows).to_parquet(folder / "floats.parquet")
        return folder / "floats.parquet"
    names = {
        "empty": (),
        "notes": ("README.md",),
        "texts": ("a.txt", "b.txt"),
        "classes of texts": ("pos/a.txt", "neg/b.txt"),
        "formats": ("train.csv", "test.jsonl"),
        "xml": ("a/b.xml", "c.xml"),
        "images": ("1.png", "2.png"),
    }[kind]
    target = folder / "data"
    target.mkdir()
    for name in names:
        (target / name).parent.mkdir(exist_ok=True)
        if name.endswith(".png"):
            image(target / name)
        else:
            rows = {".csv": "a,b\nx,1\n", ".jsonl": '{"a": 1}\n', ".xml": "<image/>"}
            (target / name).write_text(rows.get((target / name).suffix, "some words\nmore words\n"))
    return target


MISTAKES = (
    *("table.txt", "table.csv", "table.xml", "noextension", "notes.md", "floats", "empty", "notes", "texts"),
    *("classes of texts", "formats", "xml", "images", "builtin:none", "nowhere.csv", ""),
)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("kind", MISTAKES)
def test_advice_fits_the_recipe(tmp_path, recipe, kind):
    flags, load = RECIPES[recipe]
    given = kind if kind in MISTAKES[-3:] else str(made(tmp_path, kind))
    try:
        load(flags(path=(given,)))
    except UserError as error:
        said = str(error)
    else:
        allowed = {"lm": ("texts", "table.txt", "classes of texts", "floats"), "cls": ("floats",)}
        assert kind in allowed.get(recipe, ())
        return
    known = {field.name.replace("_", "-") for field in dataclasses.fields(flags)}
    named = set(re.findall(r"--data\.([\w-]+)", said))
    assert named <= known, said
    assert "\n" not in said and not [word for word in FOREIGN.get(recipe, ()) if word in said.replace(given, "")], said


def test_a_table_that_is_called_txt(tmp_path):
    """Is read as plain text, and the message says so; with the flag, or another name, it is a table."""
    file = tmp_path / "rows.txt"
    file.write_text("text\tlabel\n" + "good, so\tyes\nbad\tno\n" * 10)
    with pytest.raises(UserError, match=r"read as plain text.*name it .tsv, or give --data.txt table"):
        labeled_text.load_labelled(TextData(path=(str(file),)))
    tables, labels = labeled_text.load_labelled(TextData(path=(str(file),), txt="table"))
    assert labels.names == ["no", "yes"] and tables.train["text"][0] in ("good, so", "bad")
    file.write_text("chosen,rejected\n" + "a,b\n" * 10)
    with pytest.raises(UserError, match=r"--data.txt table"):
        preferences.load_preferences(PreferenceData(path=(str(file),)))
    assert len(preferences.load_preferences(PreferenceData(path=(str(file),), txt="table")).train) == 9
    assert len(corpus.load(CorpusData(path=(str(file),), txt="table", text="chosen")).train) == 9
    folder = tmp_path / "data"
    folder.mkdir()
    for split in ("train", "test"):
        (folder / f"{split}.txt").write_text("text,label\n" + "good,yes\nbad,no\n" * 5)
    tables, _ = labeled_text.load_labelled(TextData(path=(str(folder),), txt="table"))
    assert (len(tables.train), len(tables.evaluation)) == (10, 10)


def test_files_of_several_formats_are_those_that_are_there(tmp_path):
    with pytest.raises(
        UserError, match=r"several formats: name those to read, of one format; .*data has test.jsonl, train.csv"
    ):
        labeled_text.load_labelled(TextData(path=(str(made(tmp_path, "formats")),)))


def test_a_folder_without_boxes_is_told_what_boxes_are(tmp_path):
    folder = made(tmp_path, "xml")
    with pytest.raises(UserError, match=r"begins with <image>, and Pascal VOC's|has a/, c.xml, which is no layout"):
        load_boxes(BoxData(path=(str(folder),)))
    (folder / "c.xml").unlink()
    (folder / "a/b.xml").rename(folder / "a/b.svg")
    with pytest.raises(
        UserError, match=r"data has a/, which is no layout that is known; what is read: COCO's json file"
    ):
        load_boxes(BoxData(path=(str(folder),)))


def test_parallel_files_have_no_header_to_name(tmp_path):
    for language in ("de", "en"):
        (tmp_path / f"train.{language}").write_text("x\n" * 20)
    with pytest.raises(UserError, match="its columns are de, en") as refused:
        pair_text.load_pairs(PairData(path=(str(tmp_path),), source="de", target="fr"))
    assert "header" not in str(refused.value)
