"""Folders of images as tables: the first folder below the split is the class, whatever lies inside of it.

datasets takes the last folder for the class, drops all classes where images lie at several depths, and finds splits in
the names of files. So only folders with a list of their images (metadata.csv) or a card are left to it.
"""

import contextlib
import os
import re
import unicodedata
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from app.data.cache import cache_of
from app.data.file_names import is_readme
from app.data.folders import files_below, is_hidden, words_in
from app.data.images import formats
from app.data.reading import explained, read_whole
from app.data.tables.splits import SPLIT_WORDS, SPLITS
from app.errors import UserError
from app.sampling.hashing import key_of

if TYPE_CHECKING:
    from datasets import Dataset

# Part of the cache's key: raise it when the rows change.
VERSION = 1
# Words that leave the name of a split what it is: train_images, Test Set.
PLAIN = {"images", "image", "imgs", "img", "set", "data", "dataset", "photos", "pictures", "pics", "folder", "split"}
# What may hold the data instead of the images: where there are more of these, datasets reads the folder.
OTHERS = {".parquet", ".arrow", ".zip", ".tar", ".gz", ".tgz"}
TABLES = {".csv", ".tsv", ".json", ".jsonl"}
DESCRIBED = {"metadata.csv", "metadata.jsonl", "metadata.parquet", "dataset_dict.json", "state.json"}

Parts = tuple[str, ...]


class FolderTables(NamedTuple):
    """The splits of a folder, and what the user should know of how it was read."""

    tables: "dict[str, Dataset]"
    note: str


def image_tables(flag: str, path: str, strict: bool) -> FolderTables | None:
    """Return the splits of a folder of images; none if it is something else.

    Args:
        strict: every image needs a class, where any has; else the folder is left to datasets if one has none.

    Raises:
        UserError: what is a class and what is a split cannot be told, or an image lies beside the classes' folders.
    """
    if not os.path.isdir(path) or _has_card(path):
        return None
    files = list(files_below(path))
    if {parts[-1].lower() for parts in files} & DESCRIBED:
        return None
    images, rest = _images_of(files)
    others = [
        parts for parts in rest if os.path.splitext(parts[-1])[1].lower() in OTHERS | (set() if strict else TABLES)
    ]
    if len(images) <= len(others):
        return None
    try:
        splits = _splits_of(f"{flag} {path}", images)
        classes = {name: _classes_of(f"{flag} {path}", split) for name, split in splits.items()}
    except UserError:
        if strict:
            raise
        return None
    folder = cache_of([path])
    trained = set(classes.get("train", ()))
    tables_of = {}
    with explained(flag, path):  # of names that are not UTF-8
        for name, split in splits.items():
            class_names = sorted(trained if set(classes[name]) <= trained else trained | set(classes[name]))
            tables_of[name] = _table(path, name, split, class_names if classes[name] else [], folder)
    return FolderTables(tables_of, "; ".join(_notes(path, splits, classes, rest)))


class Split(NamedTuple):
    """The images of a split."""

    base: Parts
    """The folder with the classes' folders."""
    images: list[Parts]
    """Paths below the base."""


def _images_of(files: Sequence[Parts]) -> tuple[list[Parts], list[Parts]]:
    is_image = [os.path.splitext(parts[-1])[1].lower() in formats.ENDINGS for parts in files]
    images = [parts for parts, is_one in zip(files, is_image, strict=True) if is_one]
    return images, [parts for parts, is_one in zip(files, is_image, strict=True) if not is_one]


def _has_card(path: str) -> bool:
    """Tell whether a folder has a card that says how its files are read."""
    card = Path(path, "README.md")
    head = None
    with contextlib.suppress(ValueError):  # what is no text is no card
        head = re.match(r"---\s*\n(.*?)\n---", read_whole(card), re.DOTALL) if card.is_file() else None
    return bool(head and re.search(r"^(configs|dataset_info):", head[1], re.MULTILINE))


def _splits_of(what: str, images: list[Parts]) -> dict[str, Split]:
    """Find the folders of splits, and in each the folder that holds the classes.

    Raises:
        UserError: folders of splits lie beside others, or two are for one split.
    """
    base, images = _inside((), images)
    folders = sorted({parts[0] for parts in images if len(parts) > 1})
    named = _named_splits(folders)
    if not named:
        return {"train": Split(*_inside(base, images))}
    beside = [parts for parts in images if len(parts) == 1 or parts[0] not in named]
    if beside:
        one = next(iter(named))
        other = beside[0][0] + "/" * (len(beside[0]) > 1)
        raise UserError(
            f"{what}: {_shown(base, one)}/ is named like a split, and {_shown(base, other)} lies beside it: if it is a "
            "split, put all others into train/; if it is a class, put all classes into train/"
        )
    splits: dict[str, Split] = {}
    for folder, split in named.items():
        if split in splits:
            raise UserError(
                f"{what}: {_shown(splits[split].base)}/ and {_shown(base, folder)}/ are both for {split}: put them "
                "together, or rename one"
            )
        splits[split] = Split(*_inside((*base, folder), [parts[1:] for parts in images if parts[0] == folder]))
    return {split: splits[split] for split in SPLIT_WORDS if split in splits}


def _inside(base: Parts, images: list[Parts]) -> tuple[Parts, list[Parts]]:
    """Go down as long as there is one folder alone, which holds only folders: archives are unpacked so."""
    while len(tops := {parts[0] for parts in images}) == 1 and all(len(parts) > 2 for parts in images):
        (top,) = tops
        if base == () and _named_splits([top]):
            break
        base, images = (*base, top), [parts[1:] for parts in images]
    return base, images


def _named_splits(folders: Sequence[str]) -> dict[str, str]:
    """Return the split of each folder that is named like one: train, Test Set, or seg_train next to seg_test."""
    words = {folder: [each for word in words_in(folder) for each in _humps(word)] for folder in folders}
    split_of_folder: dict[str, tuple[str, Parts]] = {}
    for folder, folder_words in words.items():
        split = next((split for split, names in SPLIT_WORDS.items() if set(folder_words) & set(names)), "")
        if split:
            split_of_folder[folder] = split, tuple(word for word in folder_words if word not in SPLIT_WORDS[split])
    pairs = {
        rest
        for split, rest in split_of_folder.values()
        if split == "train" and any(other != "train" and its == rest for other, its in split_of_folder.values())
    }
    return {folder: split for folder, (split, rest) in split_of_folder.items() if set(rest) <= PLAIN or rest in pairs}


def _humps(word: str) -> list[str]:
    """Return the words that capitals part a word into, as in TestSet, in lower case; of one with accents, itself."""
    return [each.lower() for each in (re.findall("[A-Z]?[a-z]+|[A-Z]+", word) if word.isascii() else [word])]


def _classes_of(what: str, split: Split) -> list[str]:
    """Return the classes of a split; none if all of its images lie in no folder.

    Raises:
        UserError: some images lie beside the folders, folders mean the same class, or hold splits.
    """
    loose = [parts for parts in split.images if len(parts) == 1]
    folders = sorted({parts[0] for parts in split.images if len(parts) > 1})
    if loose and folders:
        more = f" and {len(loose) - 1} more images lie" if loose[1:] else " lies"
        raise UserError(
            f"{what}: {_shown(split.base, *loose[0])}{more} beside the folders of classes ({', '.join(folders[:3])}): "
            "put each image into the folder of its class, or take it out"
        )
    spelt: dict[str, str] = {}
    for folder in folders:
        other = spelt.setdefault(class_of(folder).casefold(), folder)
        if other != folder:
            raise UserError(
                f"{what}: the folders {_shown(split.base, other)} and {_shown(split.base, folder)} have one name but "
                "for its spelling: put their images together, or rename one"
            )
    for parts in split.images:
        if len(parts) > 2 and parts[1].lower() in SPLITS:
            raise UserError(
                f"{what}: {_shown(split.base, *parts[:2])} is a split inside of a class: put splits above classes, as "
                f"{parts[1]}/{parts[0]}"
            )
    return [class_of(folder) for folder in folders]


def class_of(folder: str) -> str:
    """Return the name of a folder as a class: systems write letters such as é in two ways."""
    return unicodedata.normalize("NFC", folder)


def _notes(path: str, splits: dict[str, Split], classes: dict[str, list[str]], rest: Sequence[Parts]) -> Iterator[str]:
    """Say what was left out, and where the first of several folders is the class."""
    inner = [_shown(split.base, *parts) for split in splits.values() for parts in split.images if len(parts) > 2]
    if inner:
        several = f"{len(inner):,} images lie in folders inside of their class's, such as {inner[0]}"
        yield several if inner[1:] else f"{inner[0]} lies in a folder inside of its class's"
    lost = [parts for parts in rest if not is_readme(parts[-1])]
    if lost:
        first = os.path.join(*lost[0])
        several = f"{len(lost):,} files are left out that are no images, such as {first}"
        yield several if lost[1:] else f"{first} is left out, as it is no image"
    for name, split in splits.items():
        entries = sorted(os.scandir(os.path.join(path, *split.base)), key=lambda entry: entry.name)
        filled = {parts[0] for parts in split.images}
        empty = [e.name for e in entries if e.is_dir() and not is_hidden(e.name) and e.name not in filled]
        if empty and classes[name]:
            yield f"without images, and so no class: {', '.join(_shown(split.base, each) for each in empty[:3])}"


def _shown(base: Parts, *parts: str) -> str:
    return "/".join((*base, *parts))


def _table(path: str, name: str, split: Split, names: list[str], folder: Path) -> "Dataset":
    """Make the table of a split: `image`, and `label` if there are classes."""
    import datasets

    kinds: dict[str, Any] = {"image": datasets.Image()}
    kinds |= {"label": datasets.ClassLabel(names=names)} if names else {}
    files = sorted(os.path.join(os.path.abspath(path), *split.base, *parts) for parts in split.images)
    return datasets.Dataset.from_generator(
        image_rows,
        features=datasets.Features(kinds),
        cache_dir=str(folder),
        gen_kwargs={
            "files": tuple(files),
            "base": os.path.join(os.path.abspath(path), *split.base),
            "named": bool(names),
        },
        fingerprint=key_of("images", VERSION, folder.name, name, *names, *files),
        split=datasets.NamedSplit(name),
    )


def image_rows(files: Sequence[str], base: str, named: bool) -> Iterator[dict[str, Any]]:
    """Yield the images, with the name of the folder below the base as their class."""
    for file in files:
        yield {"image": file, **({"label": class_of(os.path.relpath(file, base).split(os.sep)[0])} if named else {})}
