"""Files and folders as tables, read by datasets, which takes only splits together that have the same columns."""

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from app.data import card
from app.data.cache import cache_of
from app.data.file_names import is_readme, looks_like_data, run_folders
from app.data.folders import check_numbered, files_below, splits_meant
from app.data.reading import explained, read_whole, reading
from app.data.tables.conll_files import sentences_of
from app.data.tables.csv_files import csv_groups, damaged, with_numbers
from app.data.tables.files import READERS, check_one_format, extension, file_builder, reader_of, unknown_format
from app.data.tables.json_files import read_json_tables
from app.data.tables.parquet_files import read_parquet
from app.data.tables.splits import kind_of
from app.data.tables.text_files import table_of
from app.errors import UserError
from app.sampling.hashing import key_of

if TYPE_CHECKING:
    from datasets import Dataset, DatasetBuilder

Files = dict[str, list[str]]
"""The files of each split."""
METADATA = ("metadata.csv", "metadata.jsonl", "metadata.parquet")


def read_files(
    flag: str,
    path: str,
    files: Files,
    folder: Path,
    columns: Sequence[str],
    txt: str,
    words: Sequence[str] = (),
) -> "dict[str, Dataset]":
    """Read files of one format, those of each split; `folder` is their cache."""
    every = [file for names in files.values() for file in names]
    reader = reader_of(every[0], txt)
    tables: dict[str, Dataset] = {}
    if reader == "text":
        with explained(flag, path):
            tables = {split: table_of(names, txt, folder) for split, names in files.items()}
        return {split: table for split, table in tables.items() if len(table)}
    if reader == "conll":
        with explained(flag, path):
            tables = {split: sentences_of(names, columns, flag, folder) for split, names in files.items()}
        return {split: table for split, table in tables.items() if len(table)}
    if reader == "csv":
        for group, options in csv_groups(files, columns, folder, flag):
            try:
                tables |= read(flag, path, partial(file_builder, group, folder, reader, **options), folder)
            except UserError as error:
                raise damaged(flag, [file for names in group.values() for file in names], options) or error from None
        return with_numbers(_in_order(tables, files), words)
    if reader == "json":
        return read_json_tables(flag, path, files, folder)
    return read_parquet(flag, path, files, folder)


def read_folder(flag: str, path: str, name: str, txt: str, words: Sequence[str] = ()) -> "dict[str, Dataset]":
    """Read a folder that is laid out like a data set of the Hub, or was written by `save_to_disk`."""
    folder, names_files = cache_of([path]), _names_files(flag, path)
    with explained(flag, path):
        builder = builder_of(path, name, folder)
    files = {str(split): list(names) for split, names in (builder.config.data_files or {}).items()}
    every = [file for names in files.values() for file in names]
    if every and not names_files:
        _check_taken(flag, path, files, builder.name)
    if not every or _card_says_how(builder, every[0]):
        return read(flag, path, lambda: builder, folder)
    _check_splits(flag, path, files, by_name=not names_files and builder.name != "text")
    if builder.name == "arrow":
        _check_arrow(flag, every)
    if builder.name == "text" and reader_of(every[0], txt) is None:
        raise unknown_format(flag, every[0], txt)
    if builder.name in ("csv", "json", "text", "parquet") and all(extension(file) in READERS for file in every):
        if builder.name == "csv":
            check_one_format(every, f"{flag} {path}")
        return read_files(flag, path, files, folder, (), txt, words)  # so that a file reads the same as by itself
    groups = _alike(files, _shapes(builder.name, files))
    if len(groups) == 1:
        return read(flag, path, lambda: builder, folder)
    tables: dict[str, Dataset] = {}
    for group in groups:
        tables |= read(flag, path, partial(_part_of, builder, group, folder), folder)
    return _in_order(tables, files)


def _names_files(flag: str, path: str) -> bool:
    """Tell whether a folder's card names the files of a split, so that their own names do not count.

    Raises:
        UserError: the card cannot be read.
    """
    file = Path(path, card.NAME)
    try:
        return file.is_file() and any(each.patterns for each in card.configurations(read_whole(file)))
    except (OSError, ValueError) as error:
        raise UserError(f"{flag} {path}: {card.NAME} cannot be read: {error}") from None


def _check_taken(flag: str, path: str, files: Files, reader: str) -> None:
    """Refuse a folder of which datasets takes some files of data, and leaves others out without a word.

    Args:
        reader: of datasets, for the format that most of the files have.
    """
    if reader not in {*READERS.values(), "arrow"}:
        return
    root = os.path.realpath(path)
    split_of_file = {os.path.relpath(file, root): split for split, names in files.items() for file in names}
    first, split = next(iter(split_of_file.items()))
    names = sorted("/".join(parts) for parts in files_below(path))
    of_runs = run_folders(names)
    for name in names:
        if name in split_of_file or is_readme(name) or not _may_hold_rows(name, reader) or name.startswith(of_runs):
            continue
        if READERS.get(extension(name)) == READERS.get(extension(first)):
            raise UserError(
                f"{flag} {path}: {name} would be left out: the name of {first} says its split, {split}, and that of "
                f"{name} does not in the same way: put the files of each split into a folder of its name (train, "
                "validation, test), or name the files to train on by a pattern"
            )
        raise UserError(
            f"{flag} {path}: {name} would be left out, as {first} has another format: take it away, or name the files "
            "to train on by a pattern"
        )


def _may_hold_rows(name: str, reader: str) -> bool:
    if reader == "text" and extension(name) == ".txt":
        return True
    return looks_like_data(name, "jsonl" if reader == "json" else reader)


def _check_splits(flag: str, path: str, files: Files, by_name: bool) -> None:
    """Refuse files that are in two splits, whose names say another split than they are read for, or say it in two ways.

    Args:
        by_name: whether names say it: not where a card does, or where files are called as their texts are.
    """
    root = os.path.realpath(path)
    split_of_file: dict[str, str] = {}
    for split, names in files.items():
        for name in (os.path.relpath(file, root) for file in names):
            if split_of_file.setdefault(name, split) != split:
                raise UserError(
                    f"{flag} {path}: {name} is read for {split_of_file[name]} and for {split}: give it the name of one "
                    "split, or name the files by a pattern"
                )
    if by_name:
        check_numbered(f"{flag} {path}", split_of_file)
    kinds = splits_meant([*split_of_file] if by_name else [])
    for name, split in split_of_file.items():
        if by_name and extension(name) in READERS and kinds[name] - {kind_of(split) or split}:
            raise UserError(
                f"{flag} {path}: {name} is named for {' and '.join(sorted(kinds[name]))}, and read for {split}: write "
                "the words for splits in lower case, parted from others by -, _, . or a blank, or name the files by a "
                "pattern"
            )


def _check_arrow(flag: str, files: Sequence[str]) -> None:
    """Refuse the first file of `save_to_disk` that is damaged, which datasets would not name."""
    import pyarrow as pa

    for file in files:
        with reading(flag, file, pa.ArrowException), pa.memory_map(file) as mapped:
            try:
                batches = iter(pa.ipc.open_stream(mapped))
            except pa.ArrowInvalid:
                opened = pa.ipc.open_file(mapped)
                batches = map(opened.get_batch, range(opened.num_record_batches))
            for _ in batches:
                pass


def builder_of(path: str, name: str, folder: Path | None = None) -> "DatasetBuilder":
    """Return the builder of datasets for a folder or a Hub id."""
    import datasets

    return datasets.load_dataset_builder(path, name or None, cache_dir=folder and str(folder))


def read(
    flag: str, path: str, build: "Callable[[], DatasetBuilder]", folder: Path | None = None
) -> "dict[str, Dataset]":
    """Let a builder of datasets read its splits; `folder` is the cache of data that are files of this machine."""
    with explained(flag, path):
        builder = build()
        with contextlib.suppress(StopIteration):  # what the json reader raises for a file without rows
            builder.download_and_prepare()
        splits = [split for split, info in (builder.info.splits or {}).items() if info.num_examples]
        tables = {split: builder.as_dataset(split) for split in splits}
    if folder is not None:
        for table in tables.values():
            # The folder's name is a hash of what the files are, which datasets' own key does not know.
            table._fingerprint = key_of(folder.name, table._fingerprint)
    return tables


def _alike(files: Files, shapes: Mapping[str, object]) -> list[Files]:
    """Group splits of one shape: datasets refuses others together, or drops the columns that not all have."""
    groups: dict[object, Files] = {}
    for split, names in files.items():
        groups.setdefault(shapes[split], {})[split] = names
    return list(groups.values())


def _shapes(reader: str, files: Files) -> dict[str, object]:
    """Return what must be equal for splits of images in folders to be read together."""
    if reader == "imagefolder" and not any(os.path.basename(f) in METADATA for names in files.values() for f in names):
        return {split: frozenset(file.count("/") for file in names) for split, names in files.items()}
    return dict.fromkeys(files)


def _part_of(builder: "DatasetBuilder", files: Files, folder: Path) -> "DatasetBuilder":
    """Return a builder like another, for some of its splits."""
    from datasets.data_files import DataFilesDict

    of_splits = DataFilesDict({split: builder.config.data_files[split] for split in files})
    return type(builder)(
        cache_dir=str(folder), dataset_name=builder.dataset_name, hash=builder.hash, data_files=of_splits
    )


def _in_order(tables: "dict[str, Dataset]", files: Files) -> "dict[str, Dataset]":
    return {split: tables[split] for split in files if split in tables}


def _card_says_how(builder: "DatasetBuilder", file: str) -> bool:
    """Tell whether a folder's card has options for reading its files, or the types of their columns."""
    options, defaults = vars(builder.config), vars(type(builder.config)())
    where = {"name", "version", "data_dir", "data_files", "description"}
    if builder.name == "csv":
        defaults["sep"] = "\t" if extension(file) == ".tsv" else ","
    return bool(builder.info.features) or any(options[key] != defaults[key] for key in options.keys() - where)
