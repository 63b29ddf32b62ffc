"""Data that needs no download: each function in BUILTINS returns a `datasets.Dataset`."""

import ast
import os
import sys
import sysconfig
import tokenize
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from app.data.cache import using_cache
from app.errors import UserError
from app.sampling.hashing import key_of

if TYPE_CHECKING:
    from datasets import Dataset

# Parts of the cache's key: raise them when the rows change.
STDLIB_VERSION = 1
DIGITS_VERSION = 1
STDLIB_PACKAGES = 12
STDLIB_LINES = 3
LEFT_OUT = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}


def stdlib() -> "Dataset":
    """Load the functions of Python's standard library: `text` is the source, `label` the package that has it.

    The same Python gives the same rows in the same order on every machine. Parsing takes about 2 s, once: the rows
    stay in the cache of datasets until Python, its library or STDLIB_VERSION changes.
    """
    return _from_stdlib("stdlib", stdlib_rows, "label")


def stdlib_sources() -> "Dataset":
    """Load whole source files of Python's standard library: `text`, and `file`, the path below the library's root."""
    return _from_stdlib("stdlib-files", source_rows, "file")


def _from_stdlib(name: str, rows: Callable[[str], Iterator[dict[str, str]]], other: str) -> "Dataset":
    """Make a table of the rows that a generator yields for the library's folder: `text` and one other column."""
    import datasets

    root = Path(sysconfig.get_path("stdlib"))
    files = stdlib_files(root)
    if not files:
        raise UserError(f"--data.path builtin:{name}: {root} has no packages of Python sources; give other data")
    listing = [(file, (root / file).stat().st_size) for file in files]
    with using_cache():
        return datasets.Dataset.from_generator(
            rows,
            features=datasets.Features({"text": datasets.Value("string"), other: datasets.Value("string")}),
            gen_kwargs={"root": str(root)},
            fingerprint=key_of(name, STDLIB_VERSION, sys.version, listing),
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


BUILTINS = {"stdlib": stdlib, "stdlib-files": stdlib_sources, "digits": digits}


def digits_rows() -> Iterator[dict]:
    """Yield the digits in scikit-learn's order, with their 17 levels of grey scaled to 0 to 255."""
    from PIL import Image
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    levels = (images.reshape(-1, 8, 8) * 255 / 16).round().astype("uint8")
    for level, label in zip(levels, labels.tolist(), strict=True):
        yield {"image": Image.fromarray(level), "label": label}


def stdlib_files(root: Path) -> list[str]:
    """List the sources of the packages under root, as sorted paths relative to it with forward slashes."""
    files = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in LEFT_OUT]
        if Path(folder) != root:  # modules that are one file belong to no package
            files += [(Path(folder) / name).relative_to(root).as_posix() for name in names if name.endswith(".py")]
    return sorted(files)


def stdlib_rows(root: str) -> Iterator[dict[str, str]]:
    """Yield the functions of the largest packages in the order of their files and lines, no text twice."""
    labels: dict[str, str] = {}
    for file in stdlib_files(Path(root)):
        for text in functions_of(Path(root) / file):
            labels.setdefault(text, file.partition("/")[0])
    # Ties go to the name that comes first, so that the choice does not depend on the order of counting.
    sizes = sorted(Counter(labels.values()).items(), key=lambda item: (-item[1], item[0]))
    largest = {package for package, _ in sizes[:STDLIB_PACKAGES]}
    for text, label in labels.items():
        if label in largest:
            yield {"text": text, "label": label}


def source_rows(root: str) -> Iterator[dict[str, str]]:
    """Yield the sources in the order of their paths, no text twice; those in no known encoding are left out."""
    seen = set()
    for file in stdlib_files(Path(root)):
        try:
            with tokenize.open(Path(root) / file) as stream:
                text = stream.read()
        except (SyntaxError, UnicodeDecodeError):
            continue
        if text and text not in seen:
            seen.add(text)
            yield {"text": text, "file": file}


def functions_of(path: Path) -> Iterator[str]:
    """Yield the source of each function and method in a file, dedented, without decorators.

    A function inside another is only part of the other's text: else its lines could be both in the training set and
    held out. A file that this Python cannot parse (a template, say) has no functions.
    """
    try:
        with tokenize.open(path) as stream:
            source = stream.read()
        tree = ast.parse(source)
    except (SyntaxError, UnicodeDecodeError):
        return
    # The parser's lines: splitlines() would also split at form feeds, which occur in the library.
    lines = source.split("\n")
    for node in _outermost_functions(tree.body):
        if node.end_lineno - node.lineno + 1 >= STDLIB_LINES:
            yield _dedent(lines[node.lineno - 1 : node.end_lineno], node.col_offset)


def _outermost_functions(statements: list) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in statements:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node
            continue
        for field in ("body", "orelse", "handlers", "finalbody", "cases"):
            inner = getattr(node, field, None)
            if isinstance(inner, list):
                yield from _outermost_functions(inner)


def _dedent(lines: list[str], width: int) -> str:
    """Remove the first line's indentation from all lines that have it; lines of a string may lack it."""
    return "\n".join(line[width:] if not line[:width].strip() else line for line in lines)
