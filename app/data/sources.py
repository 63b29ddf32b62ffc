"""Raw tables: from builtin data, files, folders in Hub layout and the Hub itself; with a set to evaluate on."""

import contextlib
import logging
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from app.data.builtin import BUILTINS
from app.data.cache import fingerprint, using_cache
from app.data.files import READERS, extension, file_builder, find_files, is_file_name, near, unreadable, with_numbers
from app.errors import UserError
from app.order import permute

# Splits that are for evaluation, the best first. Hub sets keep the labels of some test splits to themselves.
EVAL_SPLITS = ("validation", "valid", "val", "dev", "test")
HUB_ID = re.compile(r"(hf://|buckets/).+|[\w.-]+(/[\w.-]+)?")
# The permutation of this epoch chooses the held-out rows; training never comes so far.
HOLDOUT_EPOCH = 2**63


@dataclass
class Source:
    """Splits of one data set, read when asked for."""

    path: str
    splits: list[str]
    read: Callable[[str], "datasets.Dataset"]  # noqa: F821

    def __getitem__(self, split: str):
        """Read a split or a slice of one, such as train[:10%]; a UserError names the splits there are."""
        for name in re.sub(r"\[[^\]]*\]|\([^)]*\)", "", split).split("+"):
            if name.strip() not in self.splits:
                have = ", ".join(self.splits)
                raise UserError(
                    f"{self.path} has no split {name.strip()}, it has {have}: choose with --data.split (and "
                    "--data.eval-split)"
                )
        return self.read(split)


def load_table(
    path: str | os.PathLike | Sequence[str | os.PathLike],
    *,
    name: str = "",
    split: str = "train",
    eval_split: str = "",
    eval_path: str | os.PathLike = "",
    columns: Sequence[str] = (),
    holdout: float = 0.1,
    seed: int = 0,
):
    """Load the table to train on and the one to evaluate on, as two `datasets.Dataset`s.

    The rows to evaluate on are those of eval_path or eval_split where given, else of the data's own validation or test
    split, else a fraction `holdout` of the training rows, chosen by the seed and taken out of the training table.
    """
    paths = [path] if isinstance(path, str | os.PathLike) else list(path)
    with using_cache():
        source = open_source(paths, name, columns)
        train = source[split]
        if eval_path:
            other = open_source([eval_path], name, columns)
            evaluation = other[eval_split or _own_eval_split(other, "") or "train"]
        elif eval_split := eval_split or _own_eval_split(source, split):
            evaluation = source[eval_split]
        else:
            train, evaluation = hold_out(train, holdout, seed)
    for flag, table in (("split", train), ("eval-split", evaluation)):
        if not len(table):
            raise UserError(f"--data.{flag}: {table.split} of {source.path} is empty; name another split or other data")
    return train, evaluation


def open_source(paths: Sequence[str | os.PathLike], name: str = "", columns: Sequence[str] = ()) -> Source:
    """Find out what the paths name, and open it."""
    paths = [os.path.expanduser(os.fspath(path)) for path in paths]
    path = " ".join(paths)
    if not path:
        raise UserError("--data.path is empty: give builtin:stdlib, a Hub data set id, a folder or files")
    if len(paths) > 1 or is_file_name(path):
        return _open_files(paths, columns)
    if columns:
        raise UserError(f"--data.columns names columns of csv and tsv files; {path} is none: name the files themselves")
    if path.startswith("builtin:"):
        return _open_builtin(path)
    if os.path.isdir(path) or HUB_ID.fullmatch(path):
        return _open_hub(path, name)
    raise UserError(f"--data.path {path}: no such file or folder{near(path)}")


def hold_out(table, fraction: float, seed: int):
    """Split off a random fraction of a table, at least a row; both parts keep the table's order."""
    rows = len(table)
    if not 0 < fraction < 1:
        raise UserError(f"--data.holdout {fraction} must be between 0 and 1: it is a fraction of the training split")
    if rows < 2:
        raise UserError(f"{rows} rows cannot be split into training and evaluation: give more data or --data.eval-path")
    count = min(max(1, round(rows * fraction)), rows - 1)
    out = np.zeros(rows, bool)
    out[permute(np.arange(count), rows, seed, HOLDOUT_EPOCH)] = True

    def part(keep: np.ndarray, kind: str):
        key = fingerprint(table._fingerprint, "hold_out", kind, count, seed)
        return table.select(np.flatnonzero(keep), new_fingerprint=key)

    return part(~out, "train"), part(out, "evaluation")


def _own_eval_split(source: Source, split: str) -> str:
    return next((name for name in EVAL_SPLITS if name in source.splits and name != split.partition("[")[0]), "")


def _open_builtin(path: str) -> Source:
    if (load := BUILTINS.get(path.removeprefix("builtin:"))) is None:
        raise UserError(f"--data.path {path}: no such builtin data; there are builtin:{', builtin:'.join(BUILTINS)}")

    def read(split: str):
        if split != "train":
            raise UserError(f"--data.split {split}: {path} has the split train alone, and no slices of it")
        return load()

    return Source(path, ["train"], read)


def _open_files(paths: Sequence[str], columns: Sequence[str]) -> Source:
    files = find_files(paths)
    shown = files[0] if len(files) == 1 else f"{files[0]} and {len(files) - 1} more"
    source = _open_builder(shown, lambda: file_builder(files, columns))
    if READERS[extension(files[0])] != "csv":  # the others know a number from a text
        return Source(shown, source.splits, source.read)
    return Source(shown, source.splits, lambda split: with_numbers(source.read(split)))


def _open_hub(path: str, name: str) -> Source:
    """Open a Hub data set, or a folder that is laid out like one or was written by `save_to_disk`."""
    import datasets

    return _open_builder(path, lambda: datasets.load_dataset_builder(path, name or None))


def _open_builder(path: str, build: Callable) -> Source:
    with _explained(path):
        builder = build()
        try:
            builder.download_and_prepare()
        except StopIteration:  # what the json reader makes of a file without rows
            raise UserError(f"--data.path {path} is empty: it has no rows") from None
    # A split without rows is not listed, or listed with no examples.
    splits = [split for split, info in (builder.info.splits or {}).items() if info.num_examples]
    if not splits:
        raise UserError(f"--data.path {path} is empty: it has no rows")

    def read(split: str):
        with _explained(path):
            return builder.as_dataset(split=split)

    return Source(path, splits, read)


@contextlib.contextmanager
def _explained(path: str):
    """Turn what datasets raises about data that is not there, or not as it should be, into a UserError."""
    import datasets
    import httpx
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    # Its own report of a broken file would come on top of ours.
    readers = logging.getLogger("datasets.packaged_modules")
    level = readers.level
    readers.setLevel(logging.CRITICAL)
    try:
        yield
    except (ConnectionError, httpx.TransportError, OfflineModeIsEnabled) as error:
        raise UserError(
            f"--data.path {path}: {_not_here(path)}; and the Hub cannot be reached. Offline, either set "
            "HF_HUB_OFFLINE=1 to use what the cache has, or run, where there is a network, "
            f"`hf download {path} --repo-type dataset --local-dir FOLDER` and give --data.path FOLDER"
        ) from error
    except (datasets.exceptions.DatasetNotFoundError, HfHubHTTPError) as error:
        raise UserError(f"--data.path {path}: {_not_here(path)}; {_line(error)}") from error
    except datasets.exceptions.DatasetGenerationError as error:
        raise unreadable(path, error.__cause__ or error) from error
    except (ValueError, FileNotFoundError) as error:
        fix = "; choose one with --data.name" if "config" in str(error).lower() else ""
        raise UserError(f"--data.path {path}: {_line(error)}{fix}") from error
    finally:
        readers.setLevel(level)


def _not_here(path: str) -> str:
    return f"not a file or folder here{near(path, only_close=True)}"


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())
