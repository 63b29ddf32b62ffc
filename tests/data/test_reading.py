"""Every file that any recipe reads: damaged, it is refused in one line that names it; a byte order mark is no word."""

import ast
import codecs
import contextlib
import gzip
import io
import os
import re
import shutil
import stat
import tarfile
import tempfile
from pathlib import Path

import datasets
import pyarrow as pa
import pytest
import zstandard
from pyarrow import parquet
from support.formats import FORMATS, HARMS
from support.launching import ROOT
from support.stream_shards import WRITERS

from app.data.images.formats import ENDINGS, EXACT, LOSSY
from app.data.streams import index, shards
from app.data.tables.files import READERS
from app.data.volumes.nifti import ENDINGS as NIFTI
from app.errors import UserError
from app.tasks.graphs.shape import read_config
from app.tasks.segmentation.networks import read_card

CASES = [(name, how) for name in FORMATS for how in HARMS]
NOBODY = 65534


@pytest.fixture
def place(monkeypatch):
    """Give a folder, and a cache in it, that other users may read and write too."""
    folder = Path(tempfile.mkdtemp())
    (folder / "data").mkdir()
    (folder / "cache").mkdir()
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", folder / "cache")
    yield folder
    shutil.rmtree(folder)


@contextlib.contextmanager
def somebody_else(folder):
    """Be a user who may not do everything, as root may; files that root has written stay readable."""
    if os.geteuid():
        yield
        return
    for path in (folder, *folder.rglob("*")):
        path.chmod(
            stat.S_IMODE(path.stat().st_mode) | (0o777 if path.is_dir() else 0o666) * bool(path.stat().st_mode & 0o777)
        )
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


def harm(file, how):
    content = file.read_bytes()
    middle = len(content) // 2
    if how == "cut":
        file.write_bytes(content[:middle])
    elif how == "flipped":
        file.write_bytes(content[:middle] + bytes([content[middle] ^ 255]) + content[middle + 1 :])
    elif how == "empty":
        file.write_bytes(b"")
    elif how == "folder":
        file.unlink()
        file.mkdir()
    else:
        file.chmod(0)


@pytest.mark.parametrize(("name", "how"), CASES)
def test_a_damaged_file_is_refused_in_one_line_that_names_it(place, name, how):
    made, folder = FORMATS[name], place / "data"
    file = made.write(folder)
    healthy = made.read(file, folder)
    shutil.rmtree(place / "cache")
    (place / "cache").mkdir()
    harm(file, how)
    with somebody_else(place) if how == "denied" else contextlib.nullcontext():
        try:
            found = made.read(file, folder)
        except UserError as error:
            assert str(file.relative_to(folder)) in str(error) or how in made.unseen, error
            assert "\n" not in str(error) and len(str(error)) < 900
        else:
            assert how in made.unseen, f"it was read as {found!r:.300}"
            assert how == "flipped" or found != healthy or name.startswith("saved")


def test_no_format_is_left_out():
    """One that readers learn must be added to FORMATS."""
    wanted = {f"table{ending}" for ending in READERS} | {f"table{e}.gz" for e in READERS if e != ".parquet"}
    wanted |= {f"image{ending}" for ending in ENDINGS} | {f"volume{ending}" for ending in (*NIFTI, *EXACT, *LOSSY)}
    wanted |= {f"stream {ending}" for ending in WRITERS}
    assert {shards.FORMATS[f".{ending.partition('.')[0]}"] for ending in WRITERS} == {*index.FORMATS}
    wanted |= {f"mask{ending}" for ending in (*NIFTI, *EXACT)}
    assert wanted <= set(FORMATS)
    readers = {path.stem for path in (ROOT / "app/data/boxes").glob("*.py") if "def parts(" in path.read_text()}
    assert {name for name in readers if not any(each.startswith(name) for each in FORMATS)} == set()


TEXTS = [name for name, made in FORMATS.items() if made.text]


@pytest.mark.parametrize("name", TEXTS)
def test_a_byte_order_mark_is_no_part_of_a_word(place, name):
    made, folder = FORMATS[name], place / "data"
    file = made.write(folder)
    expected = made.read(file, folder)
    zipped = file.suffix == ".gz"
    content = gzip.decompress(file.read_bytes()) if zipped else file.read_bytes()
    marked = codecs.BOM_UTF8 + content
    file.write_bytes(gzip.compress(marked) if zipped else marked)
    assert made.read(file, folder) == expected


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be"])
@pytest.mark.parametrize("name", [name for name in TEXTS if not FORMATS[name].other_encodings])
def test_another_encoding_is_refused_with_what_to_do(place, name, encoding):
    made, folder = FORMATS[name], place / "data"
    file = made.write(folder)
    zipped = file.suffix == ".gz"
    content = (gzip.decompress(file.read_bytes()) if zipped else file.read_bytes()).decode().encode(encoding)
    file.write_bytes(gzip.compress(content) if zipped else content)
    with pytest.raises(UserError) as error:
        made.read(file, folder)
    assert file.name in str(error.value) and "UTF-8" in str(error.value) and "\n" not in str(error.value)


# What opens files by itself, and why. Everything else in app/data goes through app/data/reading.py, which hands on
# app/config/text_files.py.
OWN = {
    "cache.py": "its own files",
    "graphs/store.py": "its own files",
    "images/pictures.py": "pictures, for Pillow",
    "images/labeled_images.py": "its own files",
    "volumes/nifti.py": "the rest of a compressed volume, for its checksum",
    "volumes/volumes.py": "its own files",
    "boxes/coco.py": "one byte, to tell json from other files",
    "graphs/calls.py": "Python's sources, which say their encoding: tokenize.open",
    "streams/chunk_folder.py": "its own files",
    "streams/index.py": "bytes of shards; what is text is decoded in line_chunks.py and tar_chunks.py",
    "streams/left_out.py": "its own files",
    "streams/shards.py": "a README.md, which may lie in a store",
    "streams/tar_chunks.py": "tar files",
    "tables/python_library.py": "Python's sources, which say their encoding: tokenize.open",
}


def openers(path: Path) -> list[str]:
    """Name what a module opens files by."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call):
            called = node.func
            name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
            of = called.value.id if isinstance(called, ast.Attribute) and isinstance(called.value, ast.Name) else ""
            if of == "Image":
                continue
            alone = isinstance(called, ast.Name)  # read_text is then the owner's
            if name in ("open", "fdopen") or (name in ("read_text", "read_bytes") and not alone):
                found.append(f"{of}.{name} in line {node.lineno}")
    return found


def test_texts_of_data_are_opened_in_one_place():
    root = ROOT / "app" / "data"
    found = {str(path.relative_to(root)): openers(path) for path in sorted(root.rglob("*.py"))}
    assert {name: places for name, places in found.items() if places and name not in OWN} == {}
    assert [name for name in OWN if not found[name]] == []


@pytest.mark.parametrize("name", [name for name in TEXTS if not FORMATS[name].other_encodings])
def test_a_zip_file_under_another_name_is_no_text(place, name):
    """Excel's files are such: they are often renamed to .csv."""
    folder = place / "data"
    file = FORMATS[name].write(folder)
    data = b"PK\x03\x04\x14\x00" + bytes(99)
    file.write_bytes(gzip.compress(data) if file.suffix == ".gz" else data)
    with pytest.raises(UserError, match=r"it is a zip file, as Excel's are too(, and no text)?: unpack it"):
        FORMATS[name].read(file, folder)


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935c943f9e0ff69d22\nsize 12345\n"
PAGE = b"<!DOCTYPE html>\n<html><head><title>404</title></head><body><p>Not found</p></body></html>\n"
REFUSED = b'<?xml version="1.0" encoding="UTF-8"?>\n<Error><Code>AccessDenied</Code></Error>\n'


def _parquet() -> bytes:
    sink = pa.BufferOutputStream()
    parquet.write_table(pa.table({"text": ["a"] * 9, "label": ["b"] * 9}), sink)
    return sink.getvalue().to_pybytes()


def _tar() -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as tar:
        member = tarfile.TarInfo("1.txt")
        member.size = 1
        tar.addfile(member, io.BytesIO(b"a"))
    return stream.getvalue()


TEXTS_TOO = {".txt", ".conll", ".conllu", ".iob", ".bio", "", ".xml", ".en"}
OTHERS = {
    "pointer": (POINTER, "a pointer of Git LFS to a file.*: fetch the file: git lfs pull", set[str]()),
    "page": (PAGE, "a page of the web: fetch the file itself", TEXTS_TOO),
    "answer": (REFUSED, "the answer of a store", TEXTS_TOO),
    "parquet": (_parquet(), "a parquet file.*: give its name the ending .parquet", {".parquet"}),
    "tar": (_tar(), "a tar file.*: give its name the ending .tar, or unpack it", {".tar"}),
    "gzip": (gzip.compress(b"a"), "compressed by gzip.*: unpack it, or let its name end with .gz", {".gz"}),
    "zstd": (zstandard.compress(b"a"), "compressed by zstd.*: unpack it", {".zst"}),
}
"""Contents of other files, what is said of them, and the endings under which they may be right, or another's fault."""
OURS = ("model ", "config", "tokens ")
"""What programs write, and no data; their readers say to copy it again."""


@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("name", [name for name in FORMATS if not name.startswith(OURS)])
def test_another_file_of_this_name_is_told_by_what_it_is(place, name, other):
    content, says, right = OTHERS[other]
    folder = place / "data"
    file = FORMATS[name].write(folder)
    file.write_bytes(content)
    try:
        FORMATS[name].read(file, folder)
    except UserError as error:
        assert str(file.relative_to(folder)) in str(error), error
        assert "\n" not in str(error) and len(str(error)) < 900
        assert re.search(says, str(error)) or file.suffix in right, error
    else:
        assert file.suffix in right or name in UNREAD


UNREAD = {f"saved {name}" for name in ("state.json", "dataset_info.json")}
"""Files that no reader uses."""


@pytest.mark.parametrize("read, name", [(read_config, "config.json"), (read_card, "network.json")])
@pytest.mark.parametrize("text", ["[]", "1", "{", "[" * 100_000, ""])
def test_files_of_models_that_hold_something_else_are_named(read, name, text, tmp_path):
    (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match=rf"--model .*{name}: cannot be read"):
        read(str(tmp_path))
