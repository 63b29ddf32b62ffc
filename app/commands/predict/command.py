"""Predict the classes of texts or images with a finished model: a table with a probability for each class.

    python -m app predict runs/cls new.jsonl --to predictions.parquet
    python -m app predict runs/img photos/ --to predictions.jsonl
    python -m app predict models/sentiment reviews.csv --text title body

Takes a run's finished model, or any folder or Hub id that transformers' pipelines read. The data need no labels. The
table has a line for each row, in the order of the data, and is written while it grows, so it may be of any length.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from app.errors import UserError

if TYPE_CHECKING:
    from datasets import Dataset

TASKS = {"ForSequenceClassification": "text-classification", "ForImageClassification": "image-classification"}
OWN = ("row", "prediction", "probability")
LIKELY = 0.5  # from this probability on, a label of several is predicted


@dataclass
class Options:
    """The model, the data, and the file to write."""

    model: Annotated[str, tyro.conf.Positional]
    """A run's folder, the folder of a model, or its Hub id."""
    data: Annotated[str, tyro.conf.Positional]
    """Data to predict: a file, a folder, or the id of a data set on the Hub, as --data.path of a recipe."""
    to: str = "predictions.parquet"
    """File to write: .parquet or .jsonl."""
    split: str = "train"
    """Split to predict, or a slice of one, of data that have several."""
    text: tuple[str, ...] = ()
    """Column of the text, or the two of a pair. Default: that of the run, or else `text`."""
    image: str = ""
    """Column of the image. Default: that of the run, or else `image`."""
    keep: tuple[str, ...] = ()
    """Columns of the data to copy into the table."""
    batch: int = 32
    """Rows in one forward pass."""


def main(options: Options) -> int:
    """Predict, write the table, and return the exit status.

    Raises:
        UserError: there is no such model or data, or the model is for another task.
    """
    from app.commands.predict import tables

    model, data = _find(options.model)
    task = _task(model)
    tables.check(options.to)
    if options.batch < 1:
        raise UserError(f"--batch {options.batch}: must be 1 or more")
    rows = _open(options.data, options.split, list(options.keep))
    columns = list(options.text or data.get("text") or ["text"])
    inputs = (
        _texts(rows, columns)
        if task.startswith("text")
        else _images(rows, options.image or data.get("image") or "image")
    )
    kept = rows.select_columns(list(options.keep)) if options.keep else None
    count = 0
    kinds = kept.features.arrow_schema if kept else None
    with tables.Writer(Path(options.to), kinds) as writer:
        for count, found in enumerate(_predict(task, model, inputs, options.batch), 1):
            writer.add({"row": count - 1, **(kept[count - 1] if kept else {}), **found})
    print(f"{options.to}: {count:,} rows")
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

    try:
        kinds = AutoConfig.from_pretrained(model).architectures or []
    except (OSError, ValueError) as error:
        if Path(model, "network.json").exists():
            kinds = ["MONAI's networks"]
        else:
            raise UserError(f"{model} is no model that transformers can read: {str(error).splitlines()[0]}") from None
    for kind in kinds:
        for end, task in TASKS.items():
            if kind.endswith(end):
                return task
    raise UserError(
        f"{model} is a {', '.join(kinds) or 'model without a task'}: predict takes classifiers of texts or images"
    )


def _open(data: str, split: str, keep: list[str]) -> "Dataset":
    from app.data.cache import using_cache
    from app.data.tables.sources import open_source

    with using_cache():
        source = open_source("DATA", [data])
        only = next(iter(source.tables)) if len(source.tables) == 1 else split
        rows = source[only if split == "train" and split not in source.tables else split]
    _check_columns(rows, keep, "keep")
    if taken := [name for name in keep if name in OWN or name.startswith("p/")]:
        raise UserError(f"--keep {taken[0]}: the table has a column of its own with this name; rename it in the data")
    if not len(rows):
        raise UserError(f"{data}, split {split}, has no rows")
    return rows


def _check_columns(rows: "Dataset", columns: list[str], flag: str) -> None:
    for name in columns:
        if name not in rows.column_names:
            have = ", ".join(rows.column_names)
            raise UserError(f"--{flag} {name}: the data have no such column; they have {have}")


def _texts(rows: "Dataset", columns: list[str]) -> Iterator[Any]:
    from app.data.tables.columns import check_texts

    _check_columns(rows, columns, "text")
    for name in columns:
        check_texts(rows, name)
    if len(columns) > 2:
        raise UserError(f"--text {' '.join(columns)}: a model takes one text or a pair, not {len(columns)}")
    names = ("text", "text_pair")
    for row in rows.select_columns(columns):
        yield {name: str(row[column]) for name, column in zip(names, columns, strict=False)}


def _images(rows: "Dataset", column: str) -> Iterator[Any]:
    from app.data.images.image_column import ImageColumn

    _check_columns(rows, [column], "image")
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
    run = pipeline(task, model, device=device)
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
