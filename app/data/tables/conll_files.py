"""CoNLL files as tables: a token and its tags in each line, and an empty line after each sentence."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from app.data.reading import naming, open_text
from app.data.tables.columns import PLACE
from app.data.tables.files import extension, reader_of
from app.data.tables.splits import SPLITS, split_of
from app.errors import UserError
from app.sampling.hashing import key_of

if TYPE_CHECKING:
    from datasets import Dataset

# Part of the cache's key: raise it when the rows change.
VERSION = 2
CONLLU = ("id", "tokens", "lemma", "tags", "xpos", "feats", "head", "deprel", "deps", "misc")
"""Columns of CoNLL-U (universaldependencies.org), under the names that --data.tokens and --data.tags have."""
DOCUMENT = "-DOCSTART-"


def splits_in(folder: str) -> dict[str, list[str]]:
    """Return the CoNLL file of each split in a folder: train.conll, dev.txt, or test without an extension."""
    found: dict[str, list[str]] = {}
    for split in SPLITS:
        files = [path for path in sorted(Path(folder).iterdir()) if path.is_file() and _stem(path) == split]
        if files and reader_of(str(files[0]), "conll") == "conll":
            found[split_of(split)] = [str(files[0])]
    return found


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

    names = _names(files[0], columns, flag)
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
        ValueError: a line has more or fewer fields than there are names.
    """
    for file in files:
        rows: list[list[str]] = []
        lines: list[int] = []
        for number, fields in _lines(file):
            if fields and len(fields) != len(names):
                raise ValueError(
                    f"line {number} of {file} has {len(fields)} fields, and others have {len(names)}: write a token "
                    "and its tags in each line, and an empty line after each sentence"
                )
            if fields:
                rows.append(fields)
                lines.append(number)
            elif rows:
                found = {name: list(values) for name, values in zip(names, zip(*rows, strict=True), strict=True)}
                yield found if set(names) & set(PLACE) else {**found, **dict(zip(PLACE, (file, lines), strict=True))}
                rows, lines = [], []


def _lines(file: str) -> Iterator[tuple[int, list[str]]]:
    """Yield the number of each line, from 1, and its fields; none for an empty line, and one such line at the end."""
    is_conllu, number = extension(file) == ".conllu", 0
    with naming(file), open_text(file) as stream:
        for number, line in enumerate(stream, 1):
            line = line.rstrip("\r\n")
            fields = line.split("\t") if "\t" in line else line.split()
            if is_conllu and (line.startswith("#") or (fields and not fields[0].isdigit())):
                continue  # a comment, or a word that other lines spell out
            yield number, [] if line.startswith(DOCUMENT) else fields
    yield number + 1, []


def _names(file: str, columns: Sequence[str], flag: str) -> Sequence[str]:
    first = next((fields for _, fields in _lines(file) if fields), [])
    if extension(file) == ".conllu" and not columns:
        columns = CONLLU
    if columns and first and len(columns) != len(first):
        raise UserError(
            f"{flag} {file} has {len(first)} columns, and --data.columns names {len(columns)}: name each, from left "
            "to right"
        )
    if len(first) == 1:
        raise UserError(f"{flag} {file} has one column: write a token and its tag in each line, with a space between")
    return columns or ["tokens", *(f"column-{i}" for i in range(2, len(first))), "tags"]
