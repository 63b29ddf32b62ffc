"""Tables to train and to evaluate on: builtin data, files, folders laid out like a Hub data set, or the Hub.

The readers are those of datasets. Our own are the choice of rows, so that nothing is both trained on and evaluated on;
what datasets reads differently from file to file (csv, json, txt: see these modules); and messages that name the flag,
the file and the fix.
"""

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from app.config.needs import EVERYTHING, Needs
from app.data.boxes.files import box_tables
from app.data.cache import cache_of, using_cache
from app.data.config import Streams, TableData
from app.data.images.class_folders import image_tables
from app.data.leaks import NOTHING, Place, Taken, Trained, places_read, refuse_files, refuse_rows, refuse_shared
from app.data.mixtures.joined import MixedRows
from app.data.mixtures.mix_file import MixedSource, read_mix
from app.data.mixtures.tables import Make, MixedTables, SourceTable, as_flags_say, common, concatenated
from app.data.reading import near
from app.data.rows import NO_MEASURES, Measures
from app.data.rows import Rows as Sampled
from app.data.streams.opening import evaluation_set, is_streamed, is_streamed_set, open_stream
from app.data.streams.rows import StreamedRows
from app.data.streams.samples import Finish, StreamedSamples
from app.data.tables import parallel_files
from app.data.tables.builtin import BUILTINS
from app.data.tables.columns import name_of, name_table, plain_text
from app.data.tables.conll_files import splits_in
from app.data.tables.files import check_holds_data, check_whole, find_files, is_file_name, reader_of
from app.data.tables.readers import builder_of, read, read_files, read_folder
from app.data.tables.splits import Rows, hold_out, hold_out_end, named_sets, names_in, own_eval_splits, rows_of
from app.data.tables.text_files import COLUMNS
from app.errors import UserError
from app.sampling.hashing import key_of

if TYPE_CHECKING:
    from datasets import Dataset

NAMELESS = ("csv", "conll")  # formats whose files may lack names of columns
Samples = TypeVar("Samples", bound=Sampled)
HUB_ID = re.compile(r"(hf://|buckets/).+|[\w.-]+(/[\w.-]+)?")


@dataclass
class Tables:
    """The rows to train on and the rows to evaluate on."""

    train: "Dataset"
    evaluation: "Dataset"
    stayed: int = 0
    """Rows that were drawn to be held out, but are trained on because no other row has their class."""
    held_out: bool = False
    """The rows to evaluate on were taken out of the training split."""
    note: str = ""
    """What the user should know of the choice of splits, on a line of its own."""
    others: "dict[str, Dataset]" = field(default_factory=dict)
    """Further sets to evaluate on, by name."""
    has_training_rows: bool = True
    """If not, a finished model is evaluated, and `train` is the rows to evaluate on too."""
    stream: StreamedRows | None = None
    """The rows to train on, if they are streamed; `train` is some of them, to learn from what they hold."""
    shards: list[str] = field(default_factory=list)
    """Which shards are streamed, in lines."""
    trained: Trained = NOTHING
    """Where the rows to train on are read from."""
    mixed: MixedTables | None = None
    """The sources to train on, if there are several; `train` has the rows of all, but of streams some."""

    @property
    def streams(self) -> bool:
        """Tell whether rows to train on are streamed."""
        return self.stream is not None or (self.mixed is not None and self.mixed.streams)

    def notes(self) -> list[str]:
        """Return what the user should know of the data, a line each."""
        return [*filter(None, [self.note, *self.shards, self.mixed.described() if self.mixed else ""])]

    def samples(
        self,
        whole: Callable[[], Samples],
        made: Make,
        identity: Sequence[object],
        measures: Measures = NO_MEASURES,
        finish: Finish = list,
    ) -> Samples | MixedRows | StreamedSamples:
        """Return the samples to train on: made of all rows at once, or chunk by chunk where any of them are streamed.

        Args:
            whole: returns the samples of the table `train`.
            made: takes the table of a chunk, or of a source of a mixture that is not streamed while another one is; it
                returns its samples, which should do their work when they are read.
            identity: what decides samples that are made so, besides the rows.
            measures: of such a sample when it is read.
            finish: what is still to be done to samples that are read together, of whatever chunks.
        """
        if not self.streams:
            samples = whole()
            return samples if self.mixed is None else self.mixed.cut(samples)
        if self.mixed is not None:
            return self.mixed.joined(made, identity, measures, finish)
        assert self.stream is not None
        return StreamedSamples(self.stream, made, identity, measures, finish)

    @property
    def streamed(self) -> str:
        """Say that the rows to train on are streamed, to stand after their number; nothing if they are not."""
        return "" if self.stream is None else f" streamed in {self.stream.chunks:,} chunks"

    @property
    def sets(self) -> "dict[str, Dataset]":
        """Return all sets to evaluate on; the first one has no name."""
        return {"": self.evaluation, **self.others}

    def to_evaluate_on(self, rows: str = "") -> str:
        """Say what the rows of the main set are, to stand after their number: `rows` names them, such as images."""
        return "held out" if self.held_out else f"{rows} to evaluate on ({name_of(self.evaluation)})".lstrip()

    def describe_others(self, amounts: dict[str, str]) -> list[str]:
        """Describe the further sets, a line each.

        Args:
            amounts: how much each set has, in words.
        """
        return [f"evaluated too, as eval-{n}: {amounts[n]} ({name_of(table)})" for n, table in self.others.items()]


@dataclass
class Source:
    """A data set: its splits, as memory-mapped tables."""

    flag: str
    path: str
    tables: dict[str, "Dataset"]
    places: list[Place]
    """The files, or the folder or Hub id with the configuration."""
    is_running_text: bool
    """Rows are pieces of texts in order, so the end is held out and not rows drawn at random."""
    faults: dict[str, UserError] = field(default_factory=dict)
    """Why splits cannot be used."""
    note: str = ""
    """What the user should know of how it was read."""

    def taken(self, split: str, flag: str) -> Taken:
        """Return the rows that a split stands for, with where they are from; `flag` names it in errors."""
        return Taken(self.places, self.rows(split, flag))

    def rows(self, split: str, flag: str) -> list[Rows]:
        """Return the rows that a split stands for; `flag` names it in errors."""
        for name in names_in(split):
            if name in self.faults:
                raise self.faults[name]
        return rows_of(split, {name: len(table) for name, table in self.tables.items()}, flag, self.path)

    def __getitem__(self, split: str) -> "Dataset":
        """Return a split, a slice of one such as train[:10%], or several of them joined by +."""
        import datasets

        parts = []
        for name, start, end in self.rows(split, self.flag):
            key = key_of(self.tables[name]._fingerprint, start, end)
            parts.append(self.tables[name].select(range(start, end), new_fingerprint=key))
        shown = "" if list(self.tables) == ["train"] else f", split {split}"
        table = parts[0] if len(parts) == 1 else datasets.concatenate_datasets(parts)
        return name_table(table, f"{self.flag} {self.path}{shown}")


def load_tables(
    config: TableData,
    needed: Callable[..., np.ndarray] | None = None,
    seed: int = 0,
    columns: Sequence[str] = (),
    needs: Needs = EVERYTHING,
    optional: Sequence[str] = (),
    trained: Trained = NOTHING,
) -> Tables:
    """Load the table to train on and the table to evaluate on.

    The rows to evaluate on are those of eval_path or eval_split where given, else of the data's own validation or test
    split, else a fraction `holdout` of the training rows, chosen by the seed and taken out of the training table.

    Args:
        needed: see `hold_out`.
        columns: a split without them is not chosen to evaluate on.
        needs: of the run, `run.needs`.
        optional: further columns that are used where they are there; of a mixture, all sources or none must have them.
        trained: what is trained on, if only what to evaluate on is loaded here.

    Raises:
        UserError: data cannot be read, or rows would be both trained on and evaluated on.
    """
    with using_cache():
        if needs.skips_training_rows(config):
            asked = "--data.eval-path", config.eval_path, config.eval_split
            table, note = _other_set(config, needs, *asked, columns, trained)
            tables = Tables(table, table, note=note, has_training_rows=False, trained=trained)
        elif isinstance(config, Streams) and config.mix:
            tables = _mixture(config, needs, needed, seed, columns, optional)
        elif is_streamed("--data.path", config):
            tables = _streamed(config, needs, columns)
        else:
            source = open_source("--data.path", config.path, config.name, config.columns, config.txt, used=columns)
            taken = source.taken(config.split, "--data.split")
            tables = _first_tables(config, needs, source, taken, needed, seed, columns)
        for name, other in named_sets(config.eval_sets).items():
            tables.others[name], _ = _other_set(config, needs, needs.set_flag, *other, columns, tables.trained)
        if only := needs.only_set:
            return Tables(
                tables.train, tables.others[only], has_training_rows=tables.has_training_rows and not tables.streams
            )
        return tables


def _mixture(
    config: Streams,
    needs: Needs,
    needed: Callable[..., np.ndarray] | None,
    seed: int,
    columns: Sequence[str],
    optional: Sequence[str],
) -> Tables:
    """Return the sources of a mixture to train on, and the main set to evaluate on: rows of all of them.

    Raises:
        UserError: --data.path is given too, or a source cannot be read.
    """
    assert isinstance(config, TableData)
    check_alone(config)
    mix = read_mix(config, config.mix)
    parts, scored, shards, notes = [], [], list[str](), list[str]()
    trained_by_source: dict[str, Trained] = {}
    for each in mix.sources:
        tables = source_tables(each, each.applied(config, 1 / len(mix.sources)), needs, needed, seed, columns)
        parts.append(SourceTable(each, tables.train, tables.stream))
        scored.append(tables.evaluation)
        trained_by_source[each.name] = tables.trained
        shards += [f"{each.name}: {line}" for line in tables.shards]
        notes += [f"{each.name}: {tables.note}"] if tables.stream is not None and tables.note else []
    names = [each.name for each in mix.sources]
    tables_to_train = [part.table for part in parts]
    columns = [*columns, *common(tables_to_train, optional, names)]
    train = concatenated(tables_to_train, columns, names)
    trained, note = Trained.of(trained_by_source.values()), ""
    if config.eval_path:
        flag, split = "--data.eval-path", config.eval_split
        evaluation, note = _other_set(config, needs, flag, config.eval_path, split, columns, trained)
    else:
        refuse_shared(trained_by_source)
        evaluation = concatenated(scored, columns, names)
    mixed, note = MixedTables(mix, tuple(parts)), _joined(*notes, note)
    held_out = not config.eval_path
    return Tables(train, evaluation, held_out=held_out, note=note, shards=shards, trained=trained, mixed=mixed)


def check_alone(config: TableData) -> None:
    """Refuse a path beside a mixture.

    Raises:
        UserError: there is one.
    """
    defaults = {each.name: each.default for each in fields(config)}
    if config.path != defaults["path"]:
        raise UserError("--data.mix names the sources: leave out --data.path")


def source_tables(
    source: MixedSource,
    config: TableData,
    needs: Needs,
    needed: Callable[..., np.ndarray] | None,
    seed: int,
    columns: Sequence[str],
) -> Tables:
    """Return the rows of a mixture's source to train on, and its own rows to evaluate on, if they are wanted."""
    flag = f"--data.mix {source.name}:"
    if is_streamed(flag, config):
        stream = open_stream(config, not config.eval_path, flag)
        scored = None if stream.evaluation is None else as_flags_say(stream.evaluation, source)
        learnt = as_flags_say(stream.learnt, source)
        trained = Trained(streamed=stream.rows.places_of_shards)
        scored = learnt if scored is None else scored
        return Tables(learnt, scored, note=stream.note, stream=stream.rows, shards=stream.shards, trained=trained)
    opened = open_source(flag, config.path, config.name, config.columns, config.txt)
    for split, table in opened.tables.items():
        opened.tables[split] = as_flags_say(name_table(table, f"{flag} {opened.path}, split {split}"), source)
    taken = opened.taken(config.split, flag)
    if config.eval_path:
        return Tables(opened[config.split], opened[config.split], trained=Trained((taken,)))
    return _first_tables(config, needs, opened, taken, needed, seed, columns)


def _streamed(config: TableData, needs: Needs, columns: Sequence[str]) -> Tables:
    """Return streamed rows to train on, and the main set to evaluate on."""
    stream = open_stream(config, not config.eval_path)
    evaluation, note, trained = stream.evaluation, stream.note, Trained(streamed=stream.rows.places_of_shards)
    if evaluation is None:
        asked = "--data.eval-path", config.eval_path, config.eval_split
        evaluation, more = _other_set(config, needs, *asked, columns, trained)
        note = _joined(note, more)
    return Tables(
        stream.learnt,
        evaluation,
        held_out=stream.held_out,
        note=note,
        stream=stream.rows,
        shards=stream.shards,
        trained=trained,
    )


def _first_tables(
    config: TableData,
    needs: Needs,
    source: Source,
    taken: Taken,
    needed: Callable[..., np.ndarray] | None,
    seed: int,
    columns: Sequence[str],
) -> Tables:
    """Return the rows of a source that are trained on, and the main set to evaluate on."""
    train, trained = source[config.split], Trained((taken,))
    if source.is_running_text and (lacking := [name for name in columns if name not in train.column_names]):
        hint = plain_text(has_flag="txt" in {each.name for each in fields(config)})
        raise UserError(f"{name_of(train)} has no column {lacking[0]}{hint}")
    if config.eval_path:
        flag, split = "--data.eval-path", config.eval_split
        evaluation, note = _other_set(config, needs, flag, config.eval_path, split, columns, trained)
        return Tables(train, evaluation, note=_joined(source.note, note), trained=trained)
    split, note = config.eval_split, ""
    if not split:
        split, note = own_eval_splits(source.tables, taken.rows, columns)
    note = _joined(source.note, note)
    if split:
        flag = "--data.eval-split"
        refuse_rows(flag, split, taken, source.taken(split, flag), _other_rows(config, needs, flag, split))
        return Tables(train, source[split], note=note, trained=trained)
    if source.is_running_text:
        return Tables(*hold_out_end(train, config.holdout), held_out=True, note=note, trained=trained)
    return Tables(*hold_out(train, config.holdout, seed, needed), held_out=True, note=note, trained=trained)


def _joined(*notes: str) -> str:
    return "; ".join(filter(None, notes))


def _other_set(
    config: TableData,
    needs: Needs,
    flag: str,
    path: str,
    split: str,
    columns: Sequence[str],
    trained: Trained = NOTHING,
) -> "tuple[Dataset, str]":
    """Open a set to evaluate on that a flag names, and say what the user should know of the choice of its split.

    Args:
        split: to take; empty: the validation or test split if there is one with the columns, else train.
        trained: what is trained on, none of which may be evaluated on.
    """
    path = os.path.expanduser(path)
    file = is_file_name(path)
    configuration = "" if file or path.startswith("builtin:") else config.name
    by_chunks = is_streamed_set(path)
    place = None if by_chunks else Place(os.path.realpath(path), configuration)
    files = trained.files(place)
    refuse = partial(refuse_files, flag, path, files)
    if by_chunks:
        return evaluation_set(flag, path, split, refuse, skips=isinstance(config, Streams) and config.skips), ""
    if files:
        refuse(places_read(path, split, configuration))
    names = config.columns if file and reader_of(path, config.txt) in NAMELESS else ()
    other = open_source(flag, [path], configuration, names, config.txt, used=columns)
    note = other.note
    if not split:
        chosen_split, why = own_eval_splits(other.tables, [], columns)
        split, note = chosen_split or "train", _joined(note, why)
    of_split = "--data.eval-split" if flag == "--data.eval-path" else needs.split_flag
    scored = other.taken(split, of_split)
    for each in trained.whole:
        refuse_rows(flag, path, each, scored, _other_rows(config, needs, flag, split))
    if files:
        refuse(places_read(path, split, configuration))
    return other[split], note


def _other_rows(config: TableData, needs: Needs, flag: str, split: str) -> str:
    """Say what to give instead of rows that are trained on, by which flags; ends an error."""
    if flag == needs.set_flag or (isinstance(config, Streams) and config.mix):
        return "; give other data, or leave it out"
    return (
        f" (--data.split {config.split}, --data.eval-split {split}); give other data, or slices that share no row, "
        "such as --data.split train[:90%] and --data.eval-split train[90%:], or leave the flag out to have a part held "
        "out"
    )


def open_source(
    flag: str,
    paths: Sequence[str],
    name: str = "",
    columns: Sequence[str] = (),
    txt: str = "file",
    words: Sequence[str] = (),
    used: Sequence[str] = (),
) -> Source:
    """Find out what kind of data a flag names, and open it.

    Args:
        flag: the one that gives the paths, for errors.
        name: configuration of a data set that has several.
        columns: names of the columns of csv files without a header line.
        txt: what a document is in txt files, see CorpusData in app.data.config; conll: they are CoNLL files; images:
            the data are images with classes; boxes: images with boxes; parallel: files of other extensions are columns
            of lines.
        words: columns of csv files that stay text even where all values are numbers.
        used: the only columns that are needed; empty: all may be.
    """
    paths = [os.path.expanduser(os.fspath(path)) for path in paths]
    path = " ".join(paths)
    if not path:
        raise UserError(f"{flag} is empty: give builtin:NAME, a Hub data set id, a folder or files")
    if source := _images_with_labels(flag, paths, path, txt, is_plain=not name and not columns):
        return source
    builtin, is_file = path.startswith("builtin:"), len(paths) > 1 or is_file_name(path)
    if name and (is_file or builtin):
        raise UserError(f"--data.name {name} names a configuration, but {path} has none: leave the flag out")
    parallel = parallel_files.find(paths, flag) if txt == parallel_files.KIND and not columns and not builtin else {}
    files = find_files(paths, flag, txt) if is_file and not parallel else []
    faults: dict[str, UserError] = {}
    splits = splits_in(path) if txt == "conll" and os.path.isdir(path) else {}
    if columns and not splits and not (files and reader_of(files[0], txt) in NAMELESS):
        raise UserError(
            f"--data.columns names the columns of csv, tsv and conll files, but {path} has names of its own: "
            "leave the flag out, or name the files themselves instead of their folder"
        )
    if parallel:
        files = [file for groups in parallel.values() for group in groups for file in group.values()]
        tables, faults = parallel_files.read(flag, path, parallel, used)
    elif files:
        path = files[0] if len(files) == 1 else f"{files[0]} and {len(files) - 1} more"
        tables = read_files(flag, path, {"train": files}, cache_of(files), columns, txt, words)
    elif builtin:
        tables = _builtin(flag, path)
    elif splits:
        every = [file for names in splits.values() for file in names]
        tables = read_files(flag, path, splits, cache_of(every), columns, txt)
    elif os.path.isdir(path):
        check_holds_data(flag, path, txt)
        check_whole(flag, path)
        tables = read_folder(flag, path, name, txt, words)
    elif HUB_ID.fullmatch(path):
        tables = read(flag, path, lambda: builder_of(path, name))
        name = next((table.info.config_name for table in tables.values()), name)  # of the default one, too
    else:
        raise UserError(f"{flag} {path}: no such file or folder{near(path)}")
    if not tables:
        raise UserError(f"{flag} {path} is empty: it has no rows")
    if txt == parallel_files.KIND:
        tables = {split: parallel_files.spread(table) for split, table in tables.items()}
    whole = os.path.realpath(path) if os.path.isdir(path) else path
    places = [Place(os.path.realpath(file)) for file in files] or [Place(whole, name)]
    is_running_text = next(iter(tables.values())).column_names == COLUMNS
    return Source(flag, path, tables, places, is_running_text, faults)


def _images_with_labels(flag: str, paths: Sequence[str], path: str, txt: str, is_plain: bool) -> Source | None:
    """Open images whose classes or boxes stand in the names of folders or in files of their own; none of tables.

    Args:
        is_plain: neither a configuration nor columns are named, as only data sets and tables have them.
    """
    if txt == "boxes" and (tables := box_tables(flag, paths)):
        return Source(flag, path, tables, [Place(os.path.realpath(path))], is_running_text=False)
    if is_plain and txt in ("file", "images") and (folder := image_tables(flag, path, strict=txt == "images")):
        place = Place(os.path.realpath(path))
        return Source(flag, path, folder.tables, [place], is_running_text=False, note=folder.note)
    return None


def _builtin(flag: str, path: str) -> "dict[str, Dataset]":
    if (load := BUILTINS.get(path.removeprefix("builtin:"))) is None:
        raise UserError(f"{flag} {path}: no such builtin data; there are builtin:{', builtin:'.join(BUILTINS)}")
    loaded = load()
    return loaded if isinstance(loaded, dict) else {"train": loaded}
