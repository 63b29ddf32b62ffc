"""Text files as tables: documents in pieces, so that no file is ever in memory whole."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from app.data.cache import fingerprint
from app.data.tables.reading import open_text

# Characters of a piece, which ends with a line where it can. Small beside a file, large beside a word.
PIECE = 4096
# Part of the cache's key: raise it when the rows change.
VERSION = 1


def table_of(files: Sequence[str], unit: str, folder: Path):
    """Read text files into a `datasets.Dataset`, kept in a folder whose name says what the files hold.

    A row is a piece: `text`, and whether a document `begins` and `ends` with it. The pieces of a document, put
    together, are its text.

    Args:
        unit: what a document is: a "file", a "line", or what stands between "blank-lines".
    """
    import datasets

    flags = {"begins": datasets.Value("bool"), "ends": datasets.Value("bool")}
    return datasets.Dataset.from_generator(
        piece_rows,
        features=datasets.Features({"text": datasets.Value("string"), **flags}),
        cache_dir=str(folder),
        gen_kwargs={"files": tuple(files), "unit": unit},
        fingerprint=fingerprint("txt", VERSION, folder.name, unit, *files),
    )


def piece_rows(files: Sequence[str], unit: str) -> Iterator[dict]:
    """Yield the pieces of all documents in order; a document without a character is none."""
    for file in files:
        yield from _pieces(_parts(file, unit))


def _parts(file: str, unit: str) -> Iterator[tuple[str, bool]]:
    """Yield what a file holds in parts of at most PIECE characters, and whether a document ends with each."""
    with open_text(file) as stream:
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
