"""Predict with a finished model: a table with probabilities, boxes, or texts that it writes; or masks of images.

    python -m app predict runs/cls new.jsonl --to predictions.parquet
    python -m app predict runs/img photos/ --to predictions.jsonl
    python -m app predict runs/s2s new.jsonl --to written.jsonl
    python -m app predict models/sentiment reviews.csv --text title body
    python -m app predict runs/tag new.conll --each token --to tags.jsonl
    python -m app predict runs/det photos/ --to boxes.parquet --overlay
    python -m app predict runs/graph graph/ --split test
    python -m app predict runs/dpo prompts.jsonl --tokens 100
    python -m app predict runs/seg micrographs/ --to masks/ --overlay

Takes a run's finished model, or any folder or Hub id that transformers' pipelines read. The data need no labels. The
table has a line for each row, in the order of the data, and is written while it grows, so it may be of any length. Of a
tagger, rows are lists of tokens, or texts, which are cut into words and signs. Of a detector, the table has a line for
each box, in pixels of the upright image; --to NAME.json writes the results format of COCO instead. A classifier of
nodes takes a graph, as --data.path of its recipe. A language model goes on with each prompt, or answers a conversation.

A model that recipes/seg.py has trained writes a mask for each image of a folder, one at a time: PNG, TIFF of several
pages or NIfTI, as the image is, with the name of the image and the values, or colours, of the masks in training.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from app import storage
from app.checkpoints.export import LOADS, WEIGHTS
from app.commands.output import check_local
from app.commands.predict.classes import Right, classes_of
from app.errors import UserError
from app.launching import program
from app.tasks.kinds import kind_of

if TYPE_CHECKING:
    from datasets import Dataset

IMAGES = "image-classification"
MASKS, TAGS, TEXTS, NODES = "segmentation", "token-classification", "text-to-text", "node-classification"
BOXES, WRITES = "object-detection", "text-generation"
TAKEN = ("cls", "img", "tag", "s2s", "det", "lm")  # recipes whose models it takes, besides seg and graph
ONLY = {
    "each": (TAGS,),
    "probabilities": (MASKS,),
    "overlay": (MASKS, BOXES),
    "overwrite": (MASKS, BOXES),
    "threshold": (BOXES,),
    "annotations": (BOXES,),
    "nodes": (NODES,),
    "tokens": (WRITES,),
    "image": (IMAGES, BOXES),
    "text": ("text-classification", TAGS, TEXTS, WRITES),
    "split": ("text-classification", "image-classification", TAGS, TEXTS, WRITES, BOXES, NODES),
    "keep": ("text-classification", IMAGES, TAGS, TEXTS, WRITES, BOXES),
}
"""The tasks that an option is for; others are for all."""
OWN = ("row", "prediction", "probability")
OF_TAGS = {"row": ("tokens",), "token": ("place", "token")}  # further columns of a table of tags
PROMPTS = ("prompt", "messages", "text")  # columns that a language model goes on with, the preferred one first
CONFIG = "config.json"


@dataclass
class Options:
    """The model, the data, and the file to write."""

    model: Annotated[str, tyro.conf.Positional]
    """A run's folder, the folder of a model, either perhaps in a bucket, or a model's Hub id."""
    data: Annotated[str, tyro.conf.Positional]
    """Data to predict: a file, a folder, or the id of a data set on the Hub, as --data.path of a recipe."""
    to: str = ""
    """File to write, .parquet or .jsonl, or of boxes .json; default: predictions.parquet. Of masks, a folder; default:
    masks."""
    split: str = ""
    """Split to predict, or a slice of one, of data that have several. Default: train, or of a graph, all nodes."""
    text: tuple[str, ...] = ()
    """Column of the text, or the two of a pair; for a tagger, of the tokens or of the text. Default: that of the run,
    or else `text`; for a tagger `tokens`, if the data have it; for a model that writes texts, `source`; for a language
    model the first of `prompt`, `messages` and `text` that the data have."""
    image: str = ""
    """Column of the image. Default: that of the run, or else `image`."""
    keep: tuple[str, ...] = ()
    """Columns of the data to copy into the table."""
    each: Literal["row", "token"] = "row"
    """Tags: a line of the table for each row, with lists, or for each token, with a probability for each tag."""
    batch: int = 32
    """Rows, or windows of an image, in one forward pass."""
    probabilities: bool = False
    """Masks: also write the probabilities of the classes, to probabilities/NAME.npy, float32 [classes, *sides]."""
    overlay: bool = False
    """Masks and boxes: also draw them over each image, to overlays/NAME.png; of a volume, its middle slice."""
    overwrite: bool = False
    """Masks and pictures: write into a folder that is not empty, and replace files of the same names."""
    threshold: float = 0.3
    """Boxes: the least score of those that are written; 0: all, as a mAP needs them."""
    annotations: str = ""
    """Boxes in the results format of COCO: the annotation file whose numbers of images (by their file names) and of
    categories (by their names) they have. Default: images are counted from 0, classes from 1."""
    nodes: str = ""
    """Graphs: table of the nodes, where the data are a table of edges."""
    tokens: int = 128
    """Language models: the most tokens to write for a prompt."""


def main(options: Options) -> int:
    """Predict, write the table, and return the exit status.

    Raises:
        UserError: there is no such model or data, or the model is for another task.
    """
    from app.commands.predict import boxes, masks, nodes, tables

    check_local("--to", options.to)
    model, run_data = _find(options.model)
    if options.batch < 1:
        raise UserError(f"--batch {options.batch}: must be 1 or more")
    task = _task(model)
    _check_options(options, task)
    if task == MASKS:
        return masks.main(options, model)
    file = options.to or tables.FILE
    tables.check(file, (".parquet", ".jsonl", *([".json"] if task == BOXES else [])))
    if task == NODES:
        return nodes.main(options, model)
    rows = _open(options.data, options.split or "train", task)
    if task == BOXES:
        _check_kept(rows, options.keep, boxes.OWN)
        return boxes.main(options, model, run_data, rows)
    columns = (*OWN, *(OF_TAGS[options.each] if task == TAGS else ("file",) if task == IMAGES else ()))
    _check_kept(rows, options.keep, columns)
    copies = tables.to_copy(rows, options.keep) if options.keep else None
    accuracy = Right(rows, run_data.get("label") or "label", options.keep)
    lines_of = _lines_of_tags if task == TAGS else partial(_lines_of_rows, task=task)
    kinds = copies.features.arrow_schema if copies and options.each == "row" else None
    count = 0
    with tables.Writer(Path(file), kinds) as writer:
        for count, lines in enumerate(lines_of(options, model, rows, run_data), 1):
            copied = copies[count - 1] if copies else {}
            for place, line in enumerate(lines):
                values = copied if options.each == "row" else _at(copied, place, len(lines))
                writer.add({"row": count - 1, **values, **line})
                accuracy.count(copied, line)
    print(f"{file}: {count:,} {'row' if count == 1 else 'rows'}{accuracy}")
    return 0


def _check_options(options: Options, task: str) -> None:
    """Refuse options that say nothing to a model for this task."""
    default = Options(options.model, options.data)
    for name, tasks in ONLY.items():
        if task not in tasks and getattr(options, name) != getattr(default, name):
            raise UserError(f"--{name} is for {' and '.join(tasks)}, and {options.model} is for {task}: leave it out")
    if options.tokens < 1:
        raise UserError(f"--tokens {options.tokens}: must be 1 or more")
    if not 0 <= options.threshold <= 1:
        raise UserError(f"--threshold {options.threshold:g}: must be from 0 to 1")


def _find(model: str) -> tuple[str, dict[str, Any]]:
    """Return the folder or Hub id of a model, and the run's own flags of data."""
    from app.rundir import history

    folder = Path(model)
    history.check_reachable(folder)
    files = storage.at(folder)
    if not files.exists("run.json"):
        return str(files.down()) if files.is_remote else model, {}
    run = history.read(folder)
    if not files.is_folder("model"):
        raise UserError(
            f"{run.folder} has no finished model: finish the run, or take one out of a checkpoint with "
            f"`{program.typed('export')} {run.folder}` and give that folder"
        )
    return str(files.down("model")), run.config.get("data", {})


def _task(model: str) -> str:
    """Return the name of the pipeline for a model.

    Raises:
        UserError: it is not there, or for something else.
    """
    from transformers import AutoConfig

    from app.tasks.detection.networks import make_known
    from app.tasks.graphs.shape import read_config

    if Path(model, "network.json").is_file():
        return MASKS
    if read_config(model) is not None:
        return NODES
    if Path(model, WEIGHTS).is_file() and not Path(model, CONFIG).is_file():
        raise UserError(
            f"{model} has the weights of a network of its recipe's own, and predict does not know what its rows are: "
            f"in Python, build `network` as the recipe does, then {LOADS.format(model=model)}"
        )
    make_known()  # else transformers asks whether to run the code next to a detector
    try:
        kinds = AutoConfig.from_pretrained(model, trust_remote_code=False).architectures or []
    except (OSError, ValueError) as error:
        raise UserError(f"{model} is no model that transformers can read: {str(error).splitlines()[0]}") from None
    kind = kind_of(kinds)
    if kind and kind.recipe in TAKEN and kind.task != "fill-mask":
        return TEXTS if kind.recipe == "s2s" else kind.task
    raise UserError(
        f"{model} is a {', '.join(kinds) or 'model without a task'}: predict takes classifiers of texts, tokens, "
        "images or nodes, detectors, models that write texts, and what recipes/seg.py has trained"
    )


def _at(row: dict[str, Any], place: int, count: int) -> dict[str, Any]:
    """Return what a row's columns say of one of its tokens: of a list with a value for each, its own."""
    return {k: v[place] if isinstance(v, list) and len(v) == count else v for k, v in row.items()}


def _lines_of_rows(
    options: Options, model: str, rows: "Dataset", run_data: dict[str, Any], task: str
) -> Iterator[list[dict[str, Any]]]:
    """Yield the lines of each row: one."""
    for line in _predictions(options, model, rows, run_data, task):
        yield [line]


def _predictions(
    options: Options, model: str, rows: "Dataset", run_data: dict[str, Any], task: str
) -> Iterator[dict[str, Any]]:
    """Return what the model says of each row."""
    from app.commands.predict import written

    if task == WRITES:
        prompts = options.text or tuple(name for name in PROMPTS if name in rows.column_names)[:1] or PROMPTS[:1]
        (column,) = _inputs(rows, prompts, "text", run_data, "")
        return written.continued(model, rows, column, run_data, options.batch, options.tokens)
    if task == TEXTS:
        texts = _texts(rows, _inputs(rows, options.text, "text", run_data, "source"))
        return written.texts(model, texts, run_data, options.batch)
    if task == IMAGES:
        return _of_images(options, model, rows, run_data)
    texts = _texts(rows, _inputs(rows, options.text, "text", run_data, "text"))
    return classes_of(task, model, texts, options.batch)


def _of_images(options: Options, model: str, rows: "Dataset", run_data: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the class of each image, and its file."""
    from app.data.images.image_column import ImageColumn

    (column,) = _inputs(rows, (options.image,) if options.image else (), "image", run_data, "image")
    images = ImageColumn(rows, column)
    pictures = (images.read(row) for row in range(len(images)))
    for row, line in enumerate(classes_of(IMAGES, model, pictures, options.batch)):
        yield {"file": images.path(row), **line}


def _lines_of_tags(
    options: Options, model: str, rows: "Dataset", run_data: dict[str, Any]
) -> Iterator[list[dict[str, Any]]]:
    """Yield the lines of each row: one, or one for each token."""
    from app.commands.predict import tags

    if len(options.text) > 1:
        raise UserError(f"--text {' '.join(options.text)}: a tagger takes one column, of tokens or of texts")
    asked = options.text
    if not asked and (run_data.get("tokens") or "tokens") not in rows.column_names and "text" in rows.column_names:
        asked = ("text",)
    (column,) = _inputs(rows, asked, "text", run_data, "tokens")
    tagger = tags.Tagger(model)
    for tagged in tagger.tag(tags.sentences(rows, column), options.batch):
        yield tags.lines(tagger.tags, tagged, options.each)


def _open(data: str, split: str, task: str) -> "Dataset":
    from app.commands.predict import boxes
    from app.data.cache import using_cache
    from app.data.loading import open_source
    from app.data.streams.shards import is_url

    if is_url(data):
        raise UserError(f"DATA {data}: predict reads no data at URLs: download it, or use `evaluate` for scores")
    # A classifier's folder is read as in training: the folders in it may be classes.
    by_itself = task == BOXES or (task == IMAGES and not Path(data).expanduser().is_dir())
    if by_itself and (photos := boxes.photos(data)) is not None:
        return photos
    with using_cache():
        source = open_source("DATA", [data], txt={TAGS: "conll", BOXES: "boxes"}.get(task, "file"))
        only = next(iter(source.tables)) if len(source.tables) == 1 else split
        rows = source[only if split == "train" and split not in source.tables else split]
    if not len(rows):
        raise UserError(f"{data}, split {split}, has no rows")
    return rows


def _check_kept(rows: "Dataset", keep: tuple[str, ...], columns: tuple[str, ...]) -> None:
    """Refuse columns to copy that are not there, or have the name of one of the table's own columns."""
    _check_columns(rows, list(keep), "keep")
    if taken := [name for name in keep if name in columns or name.startswith("p/")]:
        raise UserError(f"--keep {taken[0]}: the table has a column of its own with this name; rename it in the data")


def _inputs(rows: "Dataset", asked: tuple[str, ...], flag: str, run_data: dict[str, Any], field: str) -> list[str]:
    """Return the columns to read: those that --FLAG asks for, else the run's --data.FIELD, else the one of that name.

    Raises:
        UserError: there is no such column.
    """
    if asked:
        _check_columns(rows, list(asked), flag)
        return list(asked)
    of_run = run_data.get(field)
    names = [of_run or field] if isinstance(of_run, str | None) else list(of_run)
    if missing := [name for name in names if name not in rows.column_names]:
        whose = f", the run's --data.{field}" if of_run else ""
        have = ", ".join(rows.column_names)
        raise UserError(f"the data have no column {missing[0]}{whose}; they have {have}: name one with --{flag}")
    return names


def _check_columns(rows: "Dataset", columns: list[str], flag: str) -> None:
    for name in columns:
        if name not in rows.column_names:
            have = ", ".join(rows.column_names)
            raise UserError(f"--{flag} {name}: the data have no such column; they have {have}")


def _texts(rows: "Dataset", columns: list[str]) -> Iterator[Any]:
    from app.data.tables.columns import check_texts

    for name in columns:
        check_texts(rows, name)
    if len(columns) > 2:
        raise UserError(f"--text {' '.join(columns)}: a model takes one text or a pair, not {len(columns)}")
    names = ("text", "text_pair")
    for row in rows.select_columns(columns):
        yield {name: str(row[column]) for name, column in zip(names, columns, strict=False)}
