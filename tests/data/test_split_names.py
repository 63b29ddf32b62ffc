"""Which split a file is of: one list of words, and the same answer for a folder that is streamed and that is mapped."""

import ast
import inspect
import random
import typing
from pathlib import Path

import pytest

from app.data.folders import splits_meant, words_in
from app.data.images import class_folders
from app.data.loading import open_source
from app.data.streams.shards import survey
from app.data.tables import readers
from app.data.tables.files import check_whole
from app.data.tables.splits import SPLIT_WORDS, SPLITS, kind_of
from app.errors import UserError

pytestmark = pytest.mark.usefixtures("own_data_cache")
APP = Path(__file__).parents[2] / "app"
SAID = {
    "words": ("train-0.jsonl", "validation-0.jsonl", "test.jsonl"),
    "other words": ("training_0.jsonl", "a.dev.jsonl", "my eval.jsonl", "evaluation2.jsonl"),
    "no words": ("a.jsonl", "contest.jsonl", "deep/protest.jsonl"),
    "the rest": ("part-0.jsonl", "part-1.jsonl", "val.jsonl"),
    "accents": ("évals.jsonl", "testé.jsonl", "e\u0301val.jsonl", "dev\u0301.jsonl", "naïve-é.jsonl"),
    "folders": ("train/a.jsonl", "train/b.jsonl", "val/a.jsonl"),
    "folders first": ("train/a-test.jsonl", "train/dev.jsonl", "test/train.jsonl"),
    "deep folders": ("x/my-train/y/a.jsonl", "x/valid/y/z/a.jsonl"),
    "a folder and files": ("train/a.jsonl", "validation.jsonl"),
    "a folder for one and a file": ("dev/a.jsonl", "train.jsonl", "test.jsonl"),
    "a file of none": ("train.jsonl", "test.jsonl", "more.jsonl"),
    "two in one name": ("train-val.jsonl", "test.jsonl"),
    "two in a folder": ("train_val/a.jsonl", "test/a.jsonl"),
    "two folders": ("test/train/a.jsonl", "train/a.jsonl"),
    "capitals": ("Train.jsonl", "Test.jsonl"),
    "a capital folder": ("Validation/a.jsonl", "a.jsonl"),
    "other borders": ("split=train/a.jsonl", "split=test/a.jsonl"),
    "brackets": ("a(train).jsonl", "a(dev).jsonl"),
    "numbered": (
        "data/train-00000-of-00002.jsonl",
        "data/train-00001-of-00002.jsonl",
        "data/test-00000-of-00001.jsonl",
    ),
    "numbered and others": ("data/train-00000-of-00001.jsonl", "more/a.jsonl", "test/a.jsonl"),
    "numbered, other splits": ("data/train_sft-00000-of-00001.jsonl", "data/test_sft-00000-of-00001.jsonl"),
    "numbered, two words": (
        "data/train-00000-of-00001.jsonl",
        "data/dev-00000-of-00001.jsonl",
        "data/validation-00000-of-00001.jsonl",
    ),
    "numbered, a capital folder": ("data/dev-00000-of-00001.jsonl", "Test/a.jsonl"),
    "a capital and a word": ("Train_a.jsonl", "training-1.jsonl"),
    "all capitals": ("Train_a.jsonl", "sub/TRAINING.jsonl"),
    "numbered, short words": ("data/train-00000-of-00001.jsonl", "data/dev-00000-of-00001.jsonl"),
    "numbered elsewhere": ("rows/train-00000-of-00001.jsonl", "rows/val-00000-of-00001.jsonl"),
}
HEAD = "---\nconfigs:\n{}---\n# A data set\n"
ONE = "- config_name: default\n  data_files:\n  - split: train\n    path: {}\n  - split: test\n    path: {}\n"
TWO = "- config_name: x\n  data_dir: x\n- config_name: y\n  data_dir: y\n"
FOLDER = "- config_name: x\n  data_dir: in\n"
CARDS = {
    "a card": ("# A data set\n", ("train.jsonl", "test.jsonl")),
    "a card that agrees": (ONE.format('"train*"', "test.jsonl"), ("train-0.jsonl", "train-1.jsonl", "test.jsonl")),
    "a card of all": ("- config_name: x\n  data_files: '*.jsonl'\n", ("a.jsonl", "b.jsonl")),
    "a card of a folder": (FOLDER, ("in/train.jsonl", "in/test.jsonl")),
    "another split": (ONE.format("test.jsonl", "train.jsonl"), ("train.jsonl", "test.jsonl")),
    "some files": (ONE.format("train-0.jsonl", "test.jsonl"), ("train-0.jsonl", "train-1.jsonl", "test.jsonl")),
    "other names": (ONE.format("a.jsonl", "b.jsonl"), ("a.jsonl", "b.jsonl")),
    "more than the folder": (FOLDER, ("in/train.jsonl", "train.jsonl")),
    "one file in two splits": (ONE.format("'*.jsonl'", "test.jsonl"), ("train.jsonl", "test.jsonl")),
    "two": (TWO, ("x/a.jsonl", "y/b.jsonl")),
    "a broken card": ("[\n", ("a.jsonl",)),
}
"""Of each folder with a card its configurations, or all of the card, and its files."""
AGREE = {
    *("a card", "a card that agrees", "a card of all", "a card of a folder"),
    *("words", "other words", "no words", "accents", "folders", "folders first", "deep folders", "numbered"),
    *("numbered, short words", "numbered elsewhere", "all capitals"),
}
"""Of which both forms take the same; of the others, one or both are refused."""


def streamed(folder):
    return {split: {shard.name for shard in files} for split, files in survey("x", str(folder)).by_split.items()}


def mapped(folder):
    source = open_source("x", [str(folder)])
    tables = {split: set(table["file"]) for split, table in source.tables.items()}
    return {kind_of(split) or split: files for split, files in tables.items()}


def taken(read, folder):
    """Return the files of each split to evaluate on and to train on, or why they are refused."""
    try:
        files = read(folder)
    except UserError as error:
        return str(error)
    return files if "train" in files else "there is nothing to train on"


@pytest.mark.parametrize("case", [*SAID, *CARDS])
def test_both_forms_of_a_folder_have_the_same_files_in_a_split_or_refuse(case, tmp_path):
    card, names = CARDS.get(case) or ("", SAID[case])
    if card:
        (tmp_path / "README.md").write_text(card if card.startswith("#") else HEAD.format(card))
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f'{{"file": "{name}"}}\n')
    one, other = taken(streamed, tmp_path), taken(mapped, tmp_path)
    if case in AGREE:
        assert one == other and isinstance(one, dict)
        assert {name for files in one.values() for name in files} == {*names}
    else:
        assert isinstance(one, str) or isinstance(other, str), (one, other)
        if case != "the rest":
            assert isinstance(one, str) == isinstance(other, str) or card, (one, other)
        if case == "one file in two splits":
            assert "test.jsonl is read for train and for test" in other
    if isinstance(one, str):
        assert "pattern" in one or "README.md cannot be read: its head is no YAML" in one


FOLDERS = ("", "", "", "data/", "train/", "x/val/", "Test/", "my dev.2/", "évals/", "data/test/", "a=train/", "__old/")
WORDS = ("train", "train", "training-1", "x_dev", "test.b", "val0", "b eval", "0evaluation", "valid", "testing", "b")
NUMBERED = tuple(
    f"data/{split}-{number:05}-of-00002"
    for number, split in enumerate(("train", "train", "dev", "test", "validation", "training", "x"))
)
ODD = ("part-0", "contest", "Train_a", "TEST", "a-Val", "é-val", "split=train", "(dev)", "evalé", "data/a-000-of-001")


def drawn_folder(draw):
    """Return names of a few files, in most folders of one form, so that many are taken."""
    folders, stems = draw.sample(FOLDERS, draw.randint(1, 2)), draw.choice((WORDS, NUMBERED, (*WORDS, *NUMBERED, *ODD)))
    chosen = draw.sample(stems, draw.randint(1, 4))
    return sorted({draw.choice(folders) * ("/" not in stem) + stem + ".jsonl" for stem in chosen for _ in "ab"})


def test_a_walk_over_folders_finds_none_that_both_forms_take_with_other_splits(tmp_path, monkeypatch):
    """Of the mapped form, what datasets would read is asked, and its checks are made; nothing is read."""
    monkeypatch.setattr(readers, "read_files", lambda flag, path, files, *_: files)
    draw, taken_by_both = random.Random(0), set()
    for number in range(100):
        folder = tmp_path / f"{number}"
        for name in (names := drawn_folder(draw)):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text("{}\n")

        def resolved(folder):
            check_whole("x", str(folder))
            files_by_split = readers.read_folder("x", str(folder), "", "file")
            return {
                kind_of(split) or split: {str(Path(file).relative_to(folder)) for file in files}
                for split, files in files_by_split.items()
            }

        one, other = taken(streamed, folder), taken(resolved, folder)
        if isinstance(one, dict) and isinstance(other, dict):
            assert one == other and set().union(*one.values()) == {*names}, names
            taken_by_both.add(frozenset(one))
        elif isinstance(other, dict):
            assert " is of the split x, and what is streamed has train, validation, test" in one, (one, names)
        elif isinstance(one, dict):  # what is named for no split is trained on, next to other splits
            assert " would be left out: " in other, (other, names)
            assert frozenset(["train"]) not in splits_meant(names).values()
    assert {frozenset(["train"]), frozenset(["train", "validation"]), frozenset(["train", "test"])} <= taken_by_both


def test_accents_are_no_borders_of_words():
    assert words_in("é-val") == ["é", "val"] and words_in("éval") == ["éval"] == words_in("e\u0301val")
    assert words_in("тест-val2x") == ["тест", "val", "x"]
    assert class_folders._named_splits(["éval", "TestSet", "Train"]) == {"TestSet": "test", "Train": "train"}


def test_the_words_for_splits_stand_in_one_place():
    """Other lists of them would go apart again, as four of them had."""
    elsewhere = []
    for file in APP.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            inner = getattr(node, "elts", None) or getattr(node, "keys", None) or []
            words = {each.value for each in inner if isinstance(each, ast.Constant) and isinstance(each.value, str)}
            if len(words & {*SPLITS} - {"train"}) > 1:
                elsewhere.append((str(file.relative_to(APP)), node.lineno, words))
    allowed = ("data/tables/splits.py", "commands/index/command.py", "commands/tokenize/command.py")
    assert not [place for place in elsewhere if place[0] not in allowed]
    for command in ("index", "tokenize"):
        options = __import__(f"app.commands.{command}.command", fromlist=["Options"]).Options
        assert typing.get_args(inspect.get_annotations(options, eval_str=True)["split"]) == tuple(SPLIT_WORDS)
