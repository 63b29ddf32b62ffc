"""Text files as tables: documents in pieces, so that no file is ever in memory whole.

The text reader of datasets makes one row of a file, which is then in memory whole, or a row of each line or paragraph,
which no longer knows its document.
"""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from app.data.reading import naming, open_text
from app.data.tables.columns import TEXT_PIECES
from app.sampling.hashing import key_of

if TYPE_CHECKING:
    from datasets import Dataset

COLUMNS = TEXT_PIECES
# Characters of a piece, which ends with a line where it can. Small compared to a file, large compared to a word.
PIECE = 4096
# Part of the cache's key: raise it when the rows change.
VERSION = 1


def table_of(files: Sequence[str], unit: str, folder: Path) -> "Dataset":
    """Read text files into a `datasets.Dataset`, kept in a folder whose name says what the files hold.

    A row is a piece: `text`, and whether a document `begins` and `ends` with it. The pieces of a document, put
    together, are its text.

    Args:
        unit: what a document is: a "file", a "line", or what stands between "blank-lines".
    """
    import datasets

    kinds = (datasets.Value("string"), datasets.Value("bool"), datasets.Value("bool"))
    return datasets.Dataset.from_generator(
        piece_rows,
        features=datasets.Features(dict(zip(COLUMNS, kinds, strict=True))),
        cache_dir=str(folder),
        gen_kwargs={"files": tuple(files), "unit": unit},
        fingerprint=key_of("txt", VERSION, folder.name, unit, *files),
    )


def piece_rows(files: Sequence[str], unit: str) -> Iterator[dict]:
    """Yield the pieces of all documents in order; an empty document has none."""
    for file in files:
        yield from _pieces(_parts(file, unit))


def _parts(file: str, unit: str) -> Iterator[tuple[str, bool]]:
    """Yield a file's content in parts of at most PIECE characters, each with whether a document ends there."""
    with naming(file), open_text(file) as stream:
        while line := stream.readline(PIECE):
            if unit == "line":
                yield line.rstrip("\n"), line.endswith("\n")
            elif unit == "blank-lines" and not line.strip():
                yield "", True
            else:
                yield line, False
    yield "", True


def _pieces(parts: Iterable[tuple[str, bool]]) -> Iterator[dict]:
    text, begins = "", True
    for part, ends in parts:
        if text and part and len(text) + len(part) > PIECE:
            yield {"text": text, "begins": begins, "ends": False}
            text, begins = "", False
        text += part
        if ends:
            if text:
                yield {"text": text, "begins": begins, "ends": True}
            text, begins = "", True
