"""Raw tables: from builtin data, files, folders in Hub layout and the Hub itself; with a set to evaluate on."""

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from app.data.cache import cache_of, fingerprint, using_cache
from app.data.config import TableData
from app.data.tables.builtin import BUILTINS
from app.data.tables.columns import name_table
from app.data.tables.csv_files import csv_options, with_numbers
from app.data.tables.files import READERS, check_one_format, extension, file_builder, find_files, is_file_name
from app.data.tables.json_objects import by_column
from app.data.tables.reading import explained, near
from app.data.tables.splits import hold_out, hold_out_end, overlap, own_eval_split, parts_of
from app.data.tables.text_files import table_of
from app.errors import UserError

HUB_ID = re.compile(r"(hf://|buckets/).+|[\w.-]+(/[\w.-]+)?")


@dataclass
class Tables:
    """The rows to train on and those to evaluate on, as two `datasets.Dataset`s."""

    train: "datasets.Dataset"  # noqa: F821
    evaluation: "datasets.Dataset"  # noqa: F821
    stayed: int = 0
    """Rows drawn to be held out that are trained on, being needed there."""
    held_out: bool = False
    """The rows to evaluate on were taken out of the training split."""


@dataclass
class Source:
    """Splits of one data set, read when asked for."""

    flag: str
    path: str
    sizes: dict[str, int]
    """Rows of each split."""
    read: Callable[[str], "datasets.Dataset"]  # noqa: F821
    is_stream: bool = False
    """Rows are pieces of texts, in order: what is held out is their end."""

    def __getitem__(self, split: str):
        """Read a split or a slice of one, such as train[:10%], whose name is known to be good."""
        several = "" if list(self.sizes) == ["train"] else f", split {split}"
        return name_table(self.read(split.replace(" ", "")), f"{self.flag} {self.path}{several}")


def load_tables(config: TableData, needed: Callable[..., np.ndarray] | None = None, seed: int = 0) -> Tables:
    """Load the table to train on and the one to evaluate on.

    The rows to evaluate on are those of eval_path or eval_split where given, else of the data's own validation or test
    split, else a fraction `holdout` of the training rows, chosen by the seed and taken out of the training table.

    Args:
        needed: see `hold_out`.
    """
    with using_cache():
        source = open_source("--data.path", config.path, config.name, config.columns, config.txt)
        trained = parts_of(config.split, source.sizes, "--data.split", source.path)
        train = source[config.split]
        if config.eval_path:
            other = _open_other(config)
            split = config.eval_split or own_eval_split(other.sizes, []) or "train"
            scored = parts_of(split, other.sizes, "--data.eval-split", other.path)
            _refuse_same(config, trained, split, scored)
            return Tables(train, other[split])
        if config.eval_split:
            scored = parts_of(config.eval_split, source.sizes, "--data.eval-split", source.path)
            if rows := overlap(trained, scored):
                raise UserError(
                    f"--data.eval-split {config.eval_split}: --data.split {config.split} trains on {rows} too; give "
                    "splits or slices apart, such as train[:90%] and train[90%:], or leave out --data.eval-split to "
                    "have a part held out"
                )
            return Tables(train, source[config.eval_split])
        if split := own_eval_split(source.sizes, trained):
            return Tables(train, source[split])
        if source.is_stream:
            return Tables(*hold_out_end(train, config.holdout), held_out=True)
        return Tables(*hold_out(train, config.holdout, seed, needed), held_out=True)


def _open_other(config: TableData) -> Source:
    """Open the data of --data.eval-path: --data.name and --data.columns are for it too, where it can have such."""
    path = os.path.expanduser(config.eval_path)
    file = is_file_name(path)
    columns = config.columns if file and extension(path) in (".csv", ".tsv") else ()
    name = "" if file or path.startswith("builtin:") else config.name
    return open_source("--data.eval-path", [path], name, columns, config.txt)


def _refuse_same(
    config: TableData, trained: list[tuple[str, int, int]], split: str, scored: list[tuple[str, int, int]]
) -> None:
    """Refuse a --data.eval-path that has rows of what --data.path trains on."""
    ours, theirs = (_places(paths, config.name) for paths in (config.path, [config.eval_path]))
    rows = overlap(trained, scored) if ours == theirs else ", ".join(place for place in theirs if place in ours)
    if rows:
        raise UserError(
            f"--data.eval-path {config.eval_path} is data of --data.path too: {rows} (split {config.split}) would be "
            f"both trained on and evaluated (split {split}); give data of their own, or slices apart with --data.split "
            "and --data.eval-split, such as train[:90%] and train[90%:], or leave out --data.eval-path to have a part "
            "held out"
        )


def _places(paths: Sequence[str], name: str) -> list[str]:
    """List where data lie, links followed, so that two ways to name the same are known; of a Hub set, its name."""
    paths = [os.path.expanduser(os.fspath(path)) for path in paths]
    if len(paths) > 1 or is_file_name(paths[0]):
        return [os.path.realpath(file) for file in find_files(paths, "--data.path")]
    return [f"{os.path.realpath(paths[0]) if os.path.isdir(paths[0]) else paths[0]} {name}".strip()]


def open_source(
    flag: str, paths: Sequence[str], name: str = "", columns: Sequence[str] = (), txt: str = "file"
) -> Source:
    """Find out what the paths that a flag gives are, and open it; txt says what a document is in txt files."""
    paths = [os.path.expanduser(os.fspath(path)) for path in paths]
    path = " ".join(paths)
    if not path:
        raise UserError(f"{flag} is empty: give builtin:stdlib, a Hub data set id, a folder or files")
    files, builtin = len(paths) > 1 or is_file_name(path), path.startswith("builtin:")
    if name and (files or builtin):
        raise UserError(f"--data.name {name} names a configuration, and {path} has none: leave out the flag")
    if files:
        return _open_files(flag, paths, columns, txt)
    if columns:
        raise UserError(f"--data.columns names columns of csv and tsv files; {path} is none: name the files themselves")
    if builtin:
        return _open_builtin(flag, path)
    if os.path.isdir(path):
        return _open_folder(flag, path, name, txt)
    if HUB_ID.fullmatch(path):
        import datasets

        return _open_builder(flag, path, lambda: datasets.load_dataset_builder(path, name or None))
    raise UserError(f"{flag} {path}: no such file or folder{near(path)}")


def _open_builtin(flag: str, path: str) -> Source:
    if (load := BUILTINS.get(path.removeprefix("builtin:"))) is None:
        raise UserError(f"{flag} {path}: no such builtin data; there are builtin:{', builtin:'.join(BUILTINS)}")
    table = load()

    def read(split: str):
        ranges = [(start, end) for _, start, end in parts_of(split, {"train": len(table)}, flag, path)]
        if ranges == [(0, len(table))]:
            return table
        rows = np.concatenate([np.arange(*ends) for ends in ranges])
        return table.select(rows, new_fingerprint=fingerprint(table._fingerprint, *ranges))

    return Source(flag, path, {"train": len(table)}, read)


def _open_files(flag: str, paths: Sequence[str], columns: Sequence[str], txt: str) -> Source:
    files = find_files(paths, flag)
    shown = files[0] if len(files) == 1 else f"{files[0]} and {len(files) - 1} more"
    splits, folder, reader = {"train": files}, cache_of(files), READERS[extension(files[0])]
    if reader == "csv":
        return _open_csv(flag, shown, splits, columns, folder)
    if columns:
        raise UserError(f"--data.columns names columns of csv and tsv files; {files[0]} has names of its own")
    if reader == "text":
        return _open_texts(flag, shown, splits, folder, txt)
    if reader == "json":
        splits = by_column(splits, folder, f"{flag} {shown}")
    return _open_builder(flag, shown, lambda: file_builder(splits, folder), folder)


def _open_folder(flag: str, path: str, name: str, txt: str) -> Source:
    """Open a folder that is laid out like a data set of the Hub, or was written by `save_to_disk`."""
    import datasets

    folder = cache_of([path])
    with explained(flag, path):
        builder = datasets.load_dataset_builder(path, name or None, cache_dir=str(folder))
    if builder.name not in ("csv", "json", "text") or _card_says_how(builder):
        return _open_builder(flag, path, lambda: builder, folder)
    # The same file reads the same, inside a folder or by itself.
    files = {str(split): list(names) for split, names in builder.config.data_files.items()}
    if builder.name == "text":
        return _open_texts(flag, path, files, folder, txt)
    every = [file for names in files.values() for file in names]
    if builder.name == "csv" and all(extension(file) in READERS for file in every):
        check_one_format(every, f"{flag} {path}")
        return _open_csv(flag, path, files, (), folder)
    if builder.name == "json" and (tables := by_column(files, folder, f"{flag} {path}")) is not files:
        return _open_builder(flag, path, lambda: file_builder(tables, folder), folder)
    return _open_builder(flag, path, lambda: builder, folder)


def _card_says_how(builder) -> bool:
    """Tell whether a folder's card has options for reading its files, or the types of their columns."""
    found, plain = vars(builder.config), vars(type(builder.config)())
    where = {"name", "version", "data_dir", "data_files", "description"}
    files = [file for names in builder.config.data_files.values() for file in names]
    if builder.name == "csv":
        plain["sep"] = "\t" if extension(files[0]) == ".tsv" else ","
    return bool(builder.info.features) or any(found[key] != plain[key] for key in found.keys() - where)


def _open_texts(flag: str, path: str, files: dict[str, list[str]], folder: Path, txt: str) -> Source:
    with explained(flag, path):
        tables = {split: table for split, names in files.items() if len(table := table_of(names, txt, folder))}
    if not tables:
        raise UserError(f"{flag} {path} is empty: it has no text")

    def read(split: str):
        import datasets

        parts = parts_of(split, sizes, flag, path)
        return datasets.concatenate_datasets([tables[name].select(range(start, end)) for name, start, end in parts])

    sizes = {split: len(table) for split, table in tables.items()}
    return Source(flag, path, sizes, read, is_stream=True)


def _open_csv(flag: str, path: str, files: dict[str, list[str]], columns: Sequence[str], folder: Path) -> Source:
    every = [file for names in files.values() for file in names]
    source = _open_builder(
        flag, path, lambda: file_builder(files, folder, **csv_options(every, columns, folder, flag)), folder
    )
    return replace(source, read=lambda split: with_numbers(source.read(split)))


def _open_builder(flag: str, path: str, build: Callable, folder: Path | None = None) -> Source:
    """Let a builder of datasets read what it is for; folder is the cache of data that are files of this machine."""
    import datasets

    with explained(flag, path):
        builder = _prepared(build(), flag, path)

    def read(split: str):
        with explained(flag, path):
            table = builder.as_dataset(split=split)
        if folder is None:
            return table
        key = fingerprint(folder.name, table._fingerprint)
        return datasets.Dataset(table.data, table.info, table.split, table._indices, fingerprint=key)

    sizes = {split: info.num_examples for split, info in builder.info.splits.items() if info.num_examples}
    return Source(flag, path, sizes, read)


def _prepared(builder, flag: str, path: str):
    try:
        builder.download_and_prepare()
    except StopIteration:  # what the json reader makes of a file without rows
        raise UserError(f"{flag} {path} is empty: it has no rows") from None
    if not any(info.num_examples for info in (builder.info.splits or {}).values()):
        raise UserError(f"{flag} {path} is empty: it has no rows")
    return builder
