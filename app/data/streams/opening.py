"""Streamed data as a recipe's flags name them: rows to train on, rows to evaluate on, and some rows to learn from."""

import itertools
import os
import shutil
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from app.data.cache import cache_folder, written_once
from app.data.config import Streams, TableData
from app.data.reading import refuse_url
from app.data.streams.chunk_cache import ChunkCache, folder_of
from app.data.streams.chunk_folder import lacking_disk
from app.data.streams.chunk_reader import ChunkReader
from app.data.streams.index import Index, index_of
from app.data.streams.left_out import LeftOut, readable
from app.data.streams.rows import StreamedRows
from app.data.streams.shards import Survey, find_shards, format_at, is_url, survey
from app.data.tables.columns import Piece, name_table
from app.data.tables.splits import EVAL_KINDS, count_of, for_evaluation, kind_of
from app.errors import UserError
from app.sampling.hashing import key_of
from app.sampling.permutation import permute

if TYPE_CHECKING:
    from datasets import Dataset

GB = 10**9
# Rows from which a tokenizer or the kind of labels is learnt, of chunks from all over the data.
LEARNT, LEARNT_CHUNKS = 10_000, 4
MOST_NAMED = 10_000  # chunks of a table by which its rows are named; each costs some bytes in every selection
HELD_OUT_SHARE = 8  # of the room for chunks, what is held out may take one part in so many
TOLD = 0.2  # how far the share of rows that is held out may be from the one asked for, before it is said
HELD_OUT_EPOCH = 1 << 40  # of the order of chunks, whose first ones are held out


class Opened(NamedTuple):
    """Streamed data."""

    rows: StreamedRows
    """To train on."""
    learnt: "Dataset"
    """Some of these rows, from which a tokenizer or the kind of labels may be learnt."""
    evaluation: "Dataset | None"
    """All rows to evaluate on; None where another flag gives them."""
    held_out: bool
    """Whether these were held out of the rows to train on."""
    note: str
    """What the user should know of the room for chunks, and of what is held out; empty if there is nothing."""
    shards: list[str]
    """Which shards there are, and which files are none, in lines."""


def stream(
    path: str,
    split: str = "train",
    window: int = 16,
    cache_gb: float = 16.0,
    skips: bool = False,
    sort_over: int = 1,
) -> StreamedRows:
    """Open shards for a recipe of your own: rows for run.batches and run.evaluation, each a dictionary by columns.

    Args:
        path: a folder, a pattern such as 'data/*.parquet', or a URL, as --data.path of recipes that stream.
        split: train, validation or test, by the words in the names of the shards.
        window: chunks whose rows are shuffled together in each micro-batch of a step, as --data.window.
        cache_gb: GB of disk for chunks on each machine, as --data.cache-gb.
        skips: leave out the rows of chunks that stay damaged, as --data.bad skip, instead of ending the run.
        sort_over: micro-batches of a step that are sorted together, as --data.sort-over, if run.batches gets a function
            that returns the length of a row.

    Raises:
        UserError: there are no shards, or one cannot be read.
    """
    flag, path = "stream", os.path.expanduser(path)
    index = index_of(flag, path, find_shards(flag, path, split), split, skips)
    return StreamedRows(index, ChunkCache(flag, index, folder_of(index), int(cache_gb * GB)), window, skips, sort_over)


def is_streamed(flag: str, config: TableData) -> bool:
    """Tell whether the data to train on are streamed.

    Raises:
        UserError: they are to be, and this recipe or these flags cannot.
    """
    if not isinstance(config, Streams):
        for path in config.path:
            refuse_url(flag, path)
        return False
    several = UserError(f"{flag} names {len(config.path)} places: stream one folder, pattern or URL")
    if url := next(filter(is_url, config.path), ""):
        if len(config.path) > 1:
            raise several
        if config.stream == "false":
            raise UserError(f"{flag} {url}: a URL is read by chunks: leave out --data.stream false")
    if not config.streams(lambda: _only_by_chunks(config.path)):
        return False
    for name, asked in (("name", config.name), ("columns", config.columns)):
        if asked:
            raise UserError(f"--data.{name}: streamed data have no such thing: leave it out")
    if config.split != "train":
        raise UserError(f"--data.split {config.split}: of streamed data, the split train is taken: leave it out")
    if len(config.path) != 1:
        raise several
    return True


def _only_by_chunks(paths: tuple[str, ...]) -> bool:
    """Tell whether data can only be streamed, or are too large for the disk of the cache."""
    if len(paths) != 1 or paths[0].startswith(("builtin:", "hf://")):
        return False
    if is_url(paths[0]):
        return True
    path = os.path.expanduser(paths[0])
    if (kind := format_at(path)) in ("", "tar"):
        return kind == "tar"
    try:
        shards = find_shards("", path).files
    except UserError:  # what cannot be streamed may still be read as a whole
        return False
    folder = cache_folder()
    while not folder.exists():
        folder = folder.parent
    return sum(shard.size for shard in shards) > shutil.disk_usage(folder).free


def open_stream(config: TableData, holdout: bool, flag: str = "--data.path") -> Opened:
    """Open the data to train on, and the data's own rows to evaluate on.

    Args:
        flag: what names the data, for errors.
        holdout: whether rows to evaluate on are wanted: the data's own, else some chunks that are held out.

    Raises:
        UserError: the data cannot be read, or none can be held out.
    """
    assert isinstance(config, Streams)
    path = os.path.expanduser(config.path[0])
    skips, surveyed = config.skips, survey(flag, path)
    index = index_of(flag, path, surveyed.of("train"), skips=skips)
    evaluation, held_out, told = None, False, ""
    if holdout:
        evaluation = _own_evaluation(config, surveyed)
        if evaluation is None:
            room = config.cache_gb * GB / HELD_OUT_SHARE
            index, others, told = _held_out(index, f"{flag} {path}", config.holdout, room)
            evaluation, held_out = whole(flag, others, f"{flag} {path}, held out", skips), True
    limit = int(config.cache_gb * GB)
    cache = ChunkCache(flag, index, folder_of(index), limit)
    rows = StreamedRows(index, cache, config.window, skips, config.sort_over)
    note = "; ".join(filter(None, (told, lacking_disk(folder_of(index), limit))))
    return Opened(rows, _learnt(flag, path, index, skips), evaluation, held_out, note, surveyed.notes())


def is_streamed_set(path: str) -> bool:
    """Tell whether data to evaluate on are read by chunks, into one table: URLs and tar files are."""
    return is_url(path) or format_at(path) == "tar"


def evaluation_set(
    flag: str, path: str, split: str, check: Callable[[frozenset[str]], None], skips: bool = False
) -> "Dataset":
    """Read data to evaluate on: of a split, or of the first of validation, test and train that there is.

    Args:
        check: is called with the paths or URLs of the shards before any of them is read, and may refuse them.
        skips: leave out the rows of chunks that stay damaged.

    Raises:
        UserError: they cannot be read.
    """
    surveyed = survey(flag, path)
    chosen = kind_of(split) or split or next(iter(for_evaluation(surveyed.by_split)), "train")
    shards = surveyed.of(chosen)
    check(shards.places)
    return whole(flag, index_of(flag, path, shards, chosen, skips), f"{flag} {path}", skips)


def _own_evaluation(config: TableData, surveyed: Survey) -> "Dataset | None":
    """Return the rows of the data's own split to evaluate on, the one asked for or the first there is."""
    flag, path = surveyed.flag, surveyed.path
    if config.eval_split and surveyed.files:
        raise UserError(
            f"--data.eval-split {config.eval_split}: {flag} {path} names files, all to train on: give the folder, or "
            "--data.eval-path"
        )
    split = kind_of(config.eval_split) or config.eval_split or next(iter(for_evaluation(surveyed.by_split)), "")
    if not split:
        return None
    if split not in EVAL_KINDS:
        raise UserError(f"--data.eval-split {split}: of streamed data, give {' or '.join(EVAL_KINDS)}")
    assert isinstance(config, Streams)
    skips = config.skips
    index = index_of(flag, path, surveyed.of(split), split, skips)
    return whole(flag, index, f"{flag} {path}, split {split}", skips)


def _held_out(index: Index, name: str, fraction: float, most: float) -> tuple[Index, Index, str]:
    """Hold whole chunks out, drawn at random: return the index of the others, theirs, and what the user should know.

    Args:
        most: bytes that they may take, decoded; one chunk in any case.
    """
    chunks = len(index.rows)
    if chunks < 2:
        raise UserError(f"{name} has one chunk, of which nothing can be held out for evaluation: give --data.eval-path")
    total = int(index.rows.sum(dtype=np.int64))
    wanted = count_of(total, fraction)
    drawn = permute(np.arange(chunks), chunks, 0, HELD_OUT_EPOCH)
    small = index.rows[drawn] <= max(2 * wanted, int(index.rows.min()))  # a larger one would be worse than none
    drawn = drawn[small][: chunks - 1]
    rows = np.cumsum(index.rows[drawn], dtype=np.int64)
    nearest = int(np.argmin(np.abs(rows - wanted))) + 1
    fit = int(np.searchsorted(np.cumsum(index.size[drawn] * index.growth), most, side="right"))
    count = max(min(nearest, fit), 1)
    out = np.zeros(chunks, bool)
    out[drawn[:count]] = True
    note = ""
    share = rows[count - 1] / total
    if not 1 - TOLD <= share / fraction <= 1 + TOLD:
        why = "more would take too much of --data.cache-gb" if fit < nearest else "chunks are held out as a whole"
        note = f"{share:.1%} of the rows are held out, not {fraction:.1%} (--data.holdout): {why}"
    return index.take(np.flatnonzero(~out)), index.take(np.flatnonzero(out)), note


def whole(flag: str, index: Index, name: str, skips: bool = False) -> "Dataset":
    """Read all chunks of an index into one table, which is kept in the cache; `name` names it in errors.

    Args:
        skips: leave out the rows of chunks that stay damaged.
    """
    return _table(flag, index, "", range(len(index.rows)), name, skips)


def _learnt(flag: str, path: str, index: Index, skips: bool) -> "Dataset":
    """Read some rows from all over the data."""
    chunks = np.unique(np.linspace(0, len(index.rows) - 1, LEARNT_CHUNKS).astype(int)).tolist()
    return _table(flag, index, "-some", chunks, f"{flag} {path}", skips, LEARNT // len(chunks))


def _table(
    flag: str, index: Index, kind: str, chunks: "range | list[int]", name: str, skips: bool, most: int | None = None
) -> "Dataset":
    """Read chunks into a file of the cache, of each at most so many rows.

    Args:
        kind: ends the name of the file, which must say which chunks and rows these are.
        name: of the table, for errors.
        skips: leave out chunks that stay damaged.
    """
    folder = cache_folder() / "streams" / key_of(index.shards.folder, *index.shards.files)
    place = folder / f"{index.fingerprint}{kind}"
    if skips and not place.exists():  # else they were read before they were damaged
        place = place.with_name(f"{place.name}-skip")
    place.parent.mkdir(parents=True, exist_ok=True)
    reader, left_out = ChunkReader(flag, index), LeftOut(place, name)
    parts = left_out.readable(reader, chunks, most) if skips else readable(reader, chunks, most)
    table = written_once(place, index.features, parts, index.shards.format, "train")
    assert table is not None, "an index has no chunk without rows"
    chunks = left_out.others(reader, chunks)
    if len(chunks) > MOST_NAMED:
        return name_table(table, name)
    counts = [min(int(index.rows[chunk]), most or len(table)) for chunk in chunks]
    starts = [0, *itertools.accumulate(counts)]
    return name_table(table, name, [Piece(starts[i], reader.name_of(chunk)) for i, chunk in enumerate(chunks)])
