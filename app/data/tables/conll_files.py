"""CoNLL files as tables: a token and its tags in each line, and an empty line after each sentence.

What a file does not say by itself is found by a first look at all of its lines: whether tabs or blanks part its
columns, how many there are, whether the first one numbers the words, and which lines are comments.
"""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from app.data.cache import remember
from app.data.reading import naming, open_text
from app.data.tables.columns import PLACE
from app.data.tables.files import extension, reader_of
from app.data.tables.splits import SPLITS, split_of
from app.errors import UserError
from app.sampling.hashing import key_of

if TYPE_CHECKING:
    from datasets import Dataset

# Part of the cache's key: raise it when the rows change.
VERSION = 3
CONLLU = ("id", "tokens", "lemma", "tags", "xpos", "feats", "head", "deprel", "deps", "misc")
"""Columns of CoNLL-U (universaldependencies.org), under the names that --data.tokens and --data.tags have."""
DOCUMENT = "-DOCSTART-"
ENTITY = re.compile(r"O|[A-Z]-.+")
"""Tags that mark entities."""


class Shape(NamedTuple):
    """What a look at a whole file shows."""

    tabs: bool
    """Columns are parted by tabs; else by blanks."""
    columns: int
    """Of most lines; 0 if there are none."""
    numbered: bool
    """The first column numbers the words of each sentence, as in CoNLL-U: lines with # are comments, and words with
    numbers such as 1-2 and 1.1 are spelt out by other lines."""
    tags: frozenset[str]
    """What the last column of the lines holds that do not begin with #."""

    def fields(self, line: str) -> list[str]:
        """Cut a line into its columns."""
        if self.tabs:
            return [field.strip(" ") for field in line.rstrip().split("\t")]
        return re.split("[ \t]+", line.strip(" \t\r\n"))


def splits_in(folder: str) -> dict[str, list[str]]:
    """Return the CoNLL file of each split in a folder: train.conll, dev.txt, or test without an extension."""
    files_by_split: dict[str, list[str]] = {}
    for split in SPLITS:
        files = [path for path in sorted(Path(folder).iterdir()) if path.is_file() and _stem(path) == split]
        if files and reader_of(str(files[0]), "conll") == "conll":
            files_by_split[split_of(split)] = [str(files[0])]
    return files_by_split


def _stem(path: Path) -> str:
    return Path(path.name.lower().removesuffix(".gz")).stem


def sentences_of(files: Sequence[str], columns: Sequence[str], flag: str, folder: Path) -> "Dataset":
    """Read CoNLL files into a `datasets.Dataset` whose columns are lists of strings, kept in a folder for their cache.

    It has the columns of PLACE too, unless the files have one of such a name.

    Args:
        columns: from left to right; default: tokens for the first one, tags for the last, column-2 and so on between.
        flag: the one that names the files, for errors.
    """
    import datasets

    names_file = folder / f"columns-{key_of(VERSION, files[0], *columns)}.json"
    names = remember(names_file, lambda: list(_names(files[0], columns, flag)))
    kinds = {name: datasets.List(datasets.Value("string")) for name in names}
    if not set(names) & set(PLACE):
        kinds |= dict(zip(PLACE, (datasets.Value("string"), datasets.List(datasets.Value("int32"))), strict=True))
    return datasets.Dataset.from_generator(
        sentence_rows,
        features=datasets.Features(kinds),
        cache_dir=str(folder),
        gen_kwargs={"files": tuple(files), "names": tuple(names)},
        fingerprint=key_of("conll", VERSION, folder.name, *names, *files),
    )


def sentence_rows(files: Sequence[str], names: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield the sentences of all files in order, with the columns of PLACE if none has such a name.

    Raises:
        ValueError: a line has more or fewer fields than there are names, or may be a comment or a word.
    """
    for file in files:
        rows: list[list[str]] = []
        lines: list[int] = []
        shape = shape_of(file)
        for number, line in _lines(file):
            if line and _is_comment(line, shape, begins=not rows, place=f"line {number} of {file}"):
                continue
            if line:
                fields = shape.fields(line)
                _check_fields(fields, line, len(names), shape, f"line {number} of {file}")
                if not (shape.numbered and not fields[0].isdigit()):
                    rows.append(fields)
                    lines.append(number)
            elif rows:
                sentence = {name: list(values) for name, values in zip(names, zip(*rows, strict=True), strict=True)}
                place = {} if set(names) & set(PLACE) else dict(zip(PLACE, (file, lines), strict=True))
                yield {**sentence, **place}
                rows, lines = [], []


def shape_of(file: str) -> Shape:
    """Look at all lines of a file. Those that begin with # count only if there are no others: they may be comments."""
    lines = [(number, line) for number, line in _lines(file) if line]
    words = [(number, line) for number, line in lines if not line.startswith("#")] or lines
    tabs = 2 * sum("\t" in line for _, line in words) > len(words)
    plain = Shape(tabs, 0, False, frozenset())
    fields = [(number, plain.fields(line)) for number, line in words]
    columns = max(Counter(len(each) for _, each in fields).items(), key=lambda item: item[1], default=(0, 0))[0]
    tags = frozenset(each[-1] for _, each in fields if len(each) == columns)
    return Shape(tabs, columns, extension(file) == ".conllu" or _are_numbered(fields), tags)


def _are_numbered(lines: Sequence[tuple[int, list[str]]]) -> bool:
    """Tell whether the first fields of each sentence's lines are 1, 2, 3 and so on, or begin with 0."""
    if not any(fields[0] == "2" for _, fields in lines):
        return False
    before, last = None, -1
    for number, fields in lines:
        before, last = before if number == last + 1 else None, number  # after an empty line a sentence begins
        if not re.fullmatch(r"\d+([-.]\d+)?", fields[0]):
            return False
        if fields[0].isdigit():
            word = int(fields[0])
            if word not in ((0, 1) if before is None else (before + 1,)):
                return False
            before = word
    return True


def _is_comment(line: str, shape: Shape, begins: bool, place: str) -> bool:
    """Tell whether a line is a comment, which begins with # and stands before a sentence, and no word such as #.

    Raises:
        ValueError: it may be both.
    """
    if not line.startswith("#") or shape.numbered or not begins:
        return shape.numbered and line.startswith("#")
    fields = shape.fields(line)
    if len(fields) != shape.columns or fields[-1] in shape.tags:
        return len(fields) != shape.columns
    if all(map(ENTITY.fullmatch, shape.tags)):
        return not ENTITY.fullmatch(fields[-1])
    raise ValueError(
        f"{place}, {line.strip()!r:.60}, may be a comment or the word {fields[0]}, whose tag no other line has: take "
        "comments out of the file"
    )


def _check_fields(fields: list[str], line: str, expected: int, shape: Shape, place: str) -> None:
    if len(fields) != expected:
        tabs = "; its other lines have tabs between the fields" if shape.tabs and "\t" not in line else ""
        raise ValueError(
            f"{place} has {len(fields)} fields, and others have {expected}{tabs}: write a token and its tags in each "
            "line, and an empty line after each sentence"
        )
    if not fields[0] or not fields[-1]:
        raise ValueError(f"{place} has no {'token' if fields[-1] else 'tag'}: {line.strip()!r:.60}")


def _lines(file: str) -> Iterator[tuple[int, str]]:
    """Yield the number of each line, from 1, and the line; nothing for an empty one, and one such line at the end."""
    number = 0
    with naming(file), open_text(file) as stream:
        for number, line in enumerate(stream, 1):
            yield number, "" if line.startswith(DOCUMENT) or not line.strip() else line.rstrip("\r\n")
    yield number + 1, ""


def _names(file: str, columns: Sequence[str], flag: str) -> Sequence[str]:
    """Return the names of a file's columns: the given ones, or else those that its format has."""
    shape = shape_of(file)
    if columns and shape.columns and len(columns) != shape.columns:
        raise UserError(
            f"{flag} {file} has {shape.columns} columns, and --data.columns names {len(columns)}: name each, from left "
            "to right"
        )
    if columns:
        return columns
    if shape.numbered and shape.columns in (0, len(CONLLU)):
        return CONLLU
    if shape.numbered:
        raise UserError(
            f"{flag} {file} has {shape.columns} columns, of which the first one numbers the words, and CoNLL-U has "
            f"{len(CONLLU)}: name each with --data.columns, from left to right, for example id tokens tags"
        )
    if shape.columns == 1:
        return ["tokens"]
    return ["tokens", *(f"column-{i}" for i in range(2, shape.columns)), "tags"]
