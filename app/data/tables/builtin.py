"""Data that needs no download: each function in BUILTINS returns a `datasets.Dataset`, or one for each split."""

import sys
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from app.data.boxes import scenes as box_scenes
from app.data.cache import using_cache
from app.data.tables import builtin_code
from app.data.tables.python_library import source_rows, stdlib_files, stdlib_rows
from app.errors import UserError
from app.sampling.hashing import key_of

if TYPE_CHECKING:
    from datasets import Dataset

# Parts of the cache's key: raise them when the rows change.
VERSIONS = {"stdlib": 1, "stdlib-files": 1, "names": 1, "slips": 1, "signs": 1}
DIGITS_VERSION = 1


def stdlib() -> "Dataset":
    """Load the functions of Python's standard library: `text` is the source, `label` the package that has it.

    The same Python gives the same rows in the same order on every machine. Parsing takes about 2 s, once: the rows
    stay in the cache of datasets until Python, its library or its entry in VERSIONS changes.
    """
    return _from_stdlib("stdlib", stdlib_rows, {"text": "string", "label": "string"})


def stdlib_sources() -> "Dataset":
    """Load whole source files of Python's standard library: `text`, and `file`, the path below the library's root."""
    return _from_stdlib("stdlib-files", source_rows, {"text": "string", "file": "string"})


def names() -> "Dataset":
    """Load functions of Python's standard library as `tokens`, and `tags` that say what each name in them is."""
    return _from_stdlib("names", builtin_code.name_rows, {"tokens": ["string"], "tags": ["string"]})


def slips() -> "Dataset":
    """Load first halves of functions as `prompt`, second ones as `chosen`, and those with a slip as `rejected`."""
    columns = {"prompt": "string", "chosen": "string", "rejected": "string"}
    return _from_stdlib("slips", builtin_code.slip_rows, columns)


def signs() -> "Dataset":
    """Load lines of Python's standard library: `source` has their names and numbers, `target` the signs too."""
    return _from_stdlib("signs", builtin_code.sign_rows, {"source": "string", "target": "string"})


def _from_stdlib(name: str, rows: Callable[[str], Iterator[dict[str, Any]]], columns: dict[str, Any]) -> "Dataset":
    """Make a table of the rows that a generator yields for the library's folder.

    Args:
        columns: the type of each; in a list, that of its items.
    """
    import datasets

    root = Path(sysconfig.get_path("stdlib"))
    files = stdlib_files(root)
    if not files:
        raise UserError(f"--data.path builtin:{name}: {root} has no packages of Python sources; give other data")
    listing = [(file, (root / file).stat().st_size) for file in files]
    with using_cache():
        return datasets.Dataset.from_generator(
            rows,
            features=datasets.Features(
                {
                    column: datasets.List(datasets.Value(kind[0])) if isinstance(kind, list) else datasets.Value(kind)
                    for column, kind in columns.items()
                }
            ),
            gen_kwargs={"root": str(root)},
            fingerprint=key_of(name, VERSIONS[name], sys.version, listing),
        )


def digits() -> "Dataset":
    """Load scikit-learn's 1,797 scanned digits: `image` is 8 x 8 grey, `label` one of ten."""
    import datasets

    names = [str(digit) for digit in range(10)]
    with using_cache():
        return datasets.Dataset.from_generator(
            digits_rows,
            features=datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=names)}),
            fingerprint=key_of("digits", DIGITS_VERSION),
        )


def scenes() -> "dict[str, Dataset]":
    """Load scenes of several digits, train and test: `image` is grey, `boxes` are in pixels, `classes` one of ten."""
    import datasets

    kinds = datasets.Features(
        {
            "image": datasets.Image(),
            "boxes": datasets.List(datasets.List(datasets.Value("float64"))),
            "classes": datasets.List(datasets.ClassLabel(names=list(box_scenes.NAMES))),
        }
    )
    with using_cache():
        return {
            split: datasets.Dataset.from_generator(
                box_scenes.scene_rows,
                features=kinds,
                gen_kwargs={"split": split},
                fingerprint=key_of("scenes", box_scenes.VERSION, split),
            )
            for split in box_scenes.SPLITS
        }


# By name: what loads a table, or the tables of several splits.
BUILTINS: "dict[str, Callable[[], Dataset | dict[str, Dataset]]]" = {
    "stdlib": stdlib,
    "stdlib-files": stdlib_sources,
    "names": names,
    "slips": slips,
    "signs": signs,
    "digits": digits,
    "scenes": scenes,
}


def digits_rows() -> Iterator[dict]:
    """Yield the digits in scikit-learn's order, with their 17 levels of grey scaled to 0 to 255."""
    from PIL import Image
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    levels = (images.reshape(-1, 8, 8) * 255 / 16).round().astype("uint8")
    for level, label in zip(levels, labels.tolist(), strict=True):
        yield {"image": Image.fromarray(level), "label": label}
