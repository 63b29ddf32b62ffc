"""Predict with a finished model: a table with probabilities, or with texts that it writes; or masks of images.

    python -m app predict runs/cls new.jsonl --to predictions.parquet
    python -m app predict runs/img photos/ --to predictions.jsonl
    python -m app predict runs/s2s new.jsonl --to written.jsonl
    python -m app predict models/sentiment reviews.csv --text title body
    python -m app predict runs/tag new.conll --each token --to tags.jsonl
    python -m app predict runs/seg micrographs/ --to masks/ --overlay

Takes a run's finished model, or any folder or Hub id that transformers' pipelines read. The data need no labels. The
table has a line for each row, in the order of the data, and is written while it grows, so it may be of any length. Of a
tagger, rows are lists of tokens, or texts, which are cut into words and signs.

A model that recipes/seg.py has trained writes a mask for each image of a folder, one at a time: PNG, TIFF of several
pages or NIfTI, as the image is, with the name of the image and the values, or colours, of the masks in training.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from app.commands.predict.accuracy import Right
from app.errors import UserError
from app.tasks.kinds import kind_of

if TYPE_CHECKING:
    from datasets import Dataset

MASKS, TAGS, TEXTS = "segmentation", "token-classification", "text-to-text"
TAKEN = ("cls", "img", "tag", "s2s")  # recipes whose models it takes, besides seg
OWN = ("row", "prediction", "probability")
OF_TAGS = {"row": ("tokens",), "token": ("place", "token")}  # further columns of a table of tags
LIKELY = 0.5  # from this probability on, a label of several is predicted


@dataclass
class Options:
    """The model, the data, and the file to write."""

    model: Annotated[str, tyro.conf.Positional]
    """A run's folder, the folder of a model, or its Hub id."""
    data: Annotated[str, tyro.conf.Positional]
    """Data to predict: a file, a folder, or the id of a data set on the Hub, as --data.path of a recipe."""
    to: str = ""
    """File to write, .parquet or .jsonl; default: predictions.parquet. Of masks, a folder; default: masks."""
    split: str = "train"
    """Split to predict, or a slice of one, of data that have several."""
    text: tuple[str, ...] = ()
    """Column of the text, or the two of a pair; for a tagger, of the tokens or of the text. Default: that of the run,
    or else `text`; for a tagger `tokens`, if the data have it; for a model that writes texts, `source`."""
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
    """Masks: also draw each mask over its image, to overlays/NAME.png; of a volume, its middle slice."""
    overwrite: bool = False
    """Masks: write into a folder that is not empty, and replace files of the same names."""


def main(options: Options) -> int:
    """Predict, write the table, and return the exit status.

    Raises:
        UserError: there is no such model or data, or the model is for another task.
    """
    from app.commands.predict import masks, tables

    model, data = _find(options.model)
    if options.batch < 1:
        raise UserError(f"--batch {options.batch}: must be 1 or more")
    task = _task(model)
    if task == MASKS:
        return masks.main(options, model)
    if wrong := [name for name in ("probabilities", "overlay", "overwrite") if getattr(options, name)]:
        raise UserError(f"--{wrong[0]} is for masks, and {options.model} is for {task}: leave it out")
    file = options.to or "predictions.parquet"
    tables.check(file)
    if options.each != "row" and task != TAGS:
        raise UserError(f"--each {options.each} is for tags, and {options.model} is for {task}: leave it out")
    rows = _open(options.data, options.split, task == TAGS)
    own = (*OWN, *(OF_TAGS[options.each] if task == TAGS else ()))
    _check_kept(rows, options.keep, own)
    kept = rows.select_columns(list(options.keep)) if options.keep else None
    right = Right(rows, data.get("label") or "label", options.keep)
    found = _tags(options, model, rows, data) if task == TAGS else _classes(options, task, model, rows, data)
    kinds = kept.features.arrow_schema if kept and options.each == "row" else None
    count = 0
    with tables.Writer(Path(file), kinds) as writer:
        for count, lines in enumerate(found, 1):
            known = kept[count - 1] if kept else {}
            for place, line in enumerate(lines):
                given = known if options.each == "row" else _at(known, place, len(lines))
                writer.add({"row": count - 1, **given, **line})
                right.count(known, line)
    print(f"{file}: {count:,} rows{right}")
    return 0


def _find(model: str) -> tuple[str, dict[str, Any]]:
    """Return the folder or Hub id of a model, and the run's own flags of data."""
    from app.rundir import history

    folder = Path(model)
    if not (folder / "run.json").exists():
        return model, {}
    run = history.read(folder)
    if not (run.folder / "model").is_dir():
        raise UserError(
            f"{run.folder} has no finished model: finish the run, or take one out of a checkpoint with `python -m app "
            f"export {run.folder}` and give that folder"
        )
    return str(run.folder / "model"), run.config.get("data", {})


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
        raise UserError(
            f"{model} classifies nodes of graphs, which predict does not read: python -c 'from app.tasks.graphs.use "
            f"""import classify; print(classify("{model}", "GRAPH"))'"""
        )
    make_known()  # else transformers asks whether to run the code next to a detector
    try:
        kinds = AutoConfig.from_pretrained(model, trust_remote_code=False).architectures or []
    except (OSError, ValueError) as error:
        raise UserError(f"{model} is no model that transformers can read: {str(error).splitlines()[0]}") from None
    known = kind_of(kinds)
    if known and known.recipe in TAKEN:
        return TEXTS if known.recipe == "s2s" else known.task
    raise UserError(
        f"{model} is a {', '.join(kinds) or 'model without a task'}: predict takes classifiers of texts, tokens or "
        "images, models that write a text for a text, and what recipes/seg.py has trained; detectors and language "
        "models work in transformers' pipelines"
    )


def _at(row: dict[str, Any], place: int, count: int) -> dict[str, Any]:
    """Return what a row's columns say of one of its tokens: of a list with a value for each, its own."""
    return {k: v[place] if isinstance(v, list) and len(v) == count else v for k, v in row.items()}


def _classes(
    options: Options, task: str, model: str, rows: "Dataset", data: dict[str, Any]
) -> Iterator[list[dict[str, Any]]]:
    """Yield the line of each row."""
    from app.commands.predict import written

    writes = task == TEXTS
    if task.startswith("text"):
        own = "source" if writes else "text"
        inputs = _texts(rows, _inputs(rows, options.text, "text", data, own))
    else:
        inputs = _images(rows, *_inputs(rows, (options.image,) if options.image else (), "image", data, "image"))
    found = (
        written.texts(model, inputs, data, options.batch) if writes else _predict(task, model, inputs, options.batch)
    )
    for line in found:
        yield [line]


def _tags(options: Options, model: str, rows: "Dataset", data: dict[str, Any]) -> Iterator[list[dict[str, Any]]]:
    """Yield the lines of each row: one, or one for each token."""
    from app.commands.predict import tags

    if len(options.text) > 1:
        raise UserError(f"--text {' '.join(options.text)}: a tagger takes one column, of tokens or of texts")
    given = options.text
    if not given and (data.get("tokens") or "tokens") not in rows.column_names and "text" in rows.column_names:
        given = ("text",)
    (column,) = _inputs(rows, given, "text", data, "tokens")
    tagger = tags.Tagger(model)
    for found in tagger.tag(tags.sentences(rows, column), options.batch):
        yield tags.lines(tagger.tags, found, options.each)


def _open(data: str, split: str, in_tokens: bool) -> "Dataset":
    from app.data.cache import using_cache
    from app.data.tables.sources import open_source

    with using_cache():
        source = open_source("DATA", [data], txt="conll" if in_tokens else "file")
        only = next(iter(source.tables)) if len(source.tables) == 1 else split
        rows = source[only if split == "train" and split not in source.tables else split]
    if not len(rows):
        raise UserError(f"{data}, split {split}, has no rows")
    return rows


def _check_kept(rows: "Dataset", keep: tuple[str, ...], own: tuple[str, ...]) -> None:
    _check_columns(rows, list(keep), "keep")
    if taken := [name for name in keep if name in own or name.startswith("p/")]:
        raise UserError(f"--keep {taken[0]}: the table has a column of its own with this name; rename it in the data")


def _inputs(rows: "Dataset", given: tuple[str, ...], flag: str, data: dict[str, Any], own: str) -> list[str]:
    """Return the columns to read: those that --FLAG gives, else the run's --data.OWN, else the one of that name.

    Raises:
        UserError: there is no such column.
    """
    if given:
        _check_columns(rows, list(given), flag)
        return list(given)
    known = data.get(own)
    names = [known or own] if isinstance(known, str | None) else list(known)
    if missing := [name for name in names if name not in rows.column_names]:
        whose = f", the run's --data.{own}" if known else ""
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


def _images(rows: "Dataset", column: str) -> Iterator[Any]:
    from app.data.images.image_column import ImageColumn

    images = ImageColumn(rows, column)
    for index in range(len(images)):
        yield images.read(index)


def _predict(task: str, model: str, inputs: Iterator[Any], batch: int) -> Iterator[dict[str, Any]]:
    """Yield what the model says of each input: the predicted class and a probability for each; or an amount."""
    import torch
    import transformers

    device = 0 if torch.cuda.is_available() else -1
    transformers.utils.logging.disable_progress_bar()
    pipeline: Any = transformers.pipeline  # whose types know each task's name alone
    run = pipeline(task, model, device=device, trust_remote_code=False)
    # All classes: pipelines of texts understand None, those of images (5.23) a number.
    more = {"truncation": True, "top_k": None} if task.startswith("text") else {"top_k": run.model.config.num_labels}
    kind = run.model.config.problem_type
    for found in run(inputs, batch_size=batch, **more):
        if kind == "regression":
            values = [each["score"] for each in found]
            yield {"prediction": values[0] if len(values) == 1 else values}
            continue
        known = {each["label"]: each["score"] for each in found}
        scores = {f"p/{label}": known[label] for _, label in sorted(run.model.config.id2label.items())}
        if kind == "multi_label_classification":
            yield {"prediction": [each["label"] for each in found if each["score"] >= LIKELY], **scores}
        else:
            yield {"prediction": found[0]["label"], "probability": found[0]["score"], **scores}
