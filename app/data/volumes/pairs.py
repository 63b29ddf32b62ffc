"""Image files and the files of their masks: which belong together, and how both are read as arrays."""

from pathlib import Path
from typing import NamedTuple

import numpy as np

from app.data.folders import is_hidden
from app.data.images import formats, pictures
from app.data.reading import near, reading, refuse_url
from app.data.tables.splits import EVAL_SPLITS, TRAIN_SPLITS, chosen_of, kind_of
from app.data.volumes import nifti
from app.data.volumes.class_file import numbers_of, numbers_of_palette
from app.errors import UserError

# Folders of images and of their masks inside one folder, as people lay them out.
LAYOUTS = (
    *(("image", "label"), ("images", "labels"), ("image", "mask"), ("images", "masks")),
    *(("imagesTr", "labelsTr"), ("images", "annotations"), ("leftImg8bit", "gtFine")),
)
# Of Cityscapes, how the names of the files end: they are in a folder for each city.
CITIES = {"leftImg8bit": "_leftImg8bit", "gtFine": "_gtFine_labelIds"}
MOST_VALUES = 256


class Pair(NamedTuple):
    """The files of an image and of its mask."""

    name: str
    image: Path
    mask: Path


class Splits(NamedTuple):
    """The pairs of each split, `train` and perhaps `evaluation`, and what the user should know of the choice."""

    pairs: dict[str, list[Pair]]
    note: str


def find_splits(flag: str, path: str, masks: str) -> Splits:
    """Find the pairs at the path that a flag gives: those of each split if it has the folders train and, say, val.

    Raises:
        UserError: there is no such path, it has no file that can be read, or an image or mask lacks its partner.
    """
    refuse_url(flag, path)
    with reading(flag, path):  # of a folder that may not be read
        return _splits_at(flag, path, masks)


def _splits_at(flag: str, path: str, masks: str) -> Splits:
    root = Path(path).expanduser()
    if not path or not root.exists():
        raise UserError(f"{flag} {path}: no such file or folder{near(str(root)) if path else ''}")
    train = next((name for name in TRAIN_SPLITS if _has_split(root, name)), "")
    others = [name for name in EVAL_SPLITS if _has_split(root, name)]
    if masks or not train or not (others or _folders(root, train)):
        return Splits({"train": find_pairs(flag, root, masks)}, "")
    # The masks of a test split are often withheld.
    withheld = [name for name in others if kind_of(name) == "test" and not _folders(root, name)]
    others = [name for name in others if name not in withheld]
    pairs = {"train": _pairs_of(flag, root, train)}
    if others:
        pairs["evaluation"] = _pairs_of(flag, root, others[0])
    notes = chosen_of(others, "--data.eval-path")
    notes += [f"{name} has no masks and is left out" for name in withheld]
    return Splits(pairs, "; ".join(notes))


def _has_split(root: Path, split: str) -> bool:
    return (root / split).is_dir() or any((root / image / split).is_dir() for image, _ in LAYOUTS)


def _folders(root: Path, split: str) -> tuple[Path, Path] | None:
    """Return the folders of a split's images and masks, if both are there."""
    ways = [(root / split, root / f"{split}annot")]
    ways += [(root / split / image, root / split / mask) for image, mask in LAYOUTS]
    ways += [(root / image / split, root / mask / split) for image, mask in LAYOUTS]
    return next((way for way in ways if way[0].is_dir() and way[1].is_dir()), None)


def _pairs_of(flag: str, root: Path, split: str) -> list[Pair]:
    if folders := _folders(root, split):
        return _matched(flag, *folders)
    return find_pairs(flag, root / split, "")


def find_pairs(flag: str, root: Path, masks: str) -> list[Pair]:
    """Match the images at a path with their masks by name, and return the pairs in the order of the names."""
    images, other = root, Path(masks).expanduser()
    asked = flag.replace("path", "masks")
    if not masks:
        layouts = [(root / image, root / label) for image, label in LAYOUTS if (root / image).is_dir()]
        whole = [pair for pair in layouts if pair[1].is_dir()]
        if not whole:
            wanted = ", ".join(f"{image} and {label}" for image, label in LAYOUTS)
            raise UserError(f"{flag} {root}: give the masks with {asked}, or a folder with two in it: {wanted}")
        images, other = whole[0]
    elif not other.exists():
        raise UserError(f"{asked} {masks}: no such file or folder{near(str(other))}")
    if images.is_file() and other.is_file():
        return [Pair(stem_of(images), images, other)]
    return _matched(flag, images, other)


def _matched(flag: str, images: Path, masks: Path) -> list[Pair]:
    """Match the files of two folders by name."""
    by_name = _files(flag, images, (*nifti.ENDINGS, *formats.EXACT, *formats.LOSSY))
    mask_of = _files(flag.replace("path", "masks"), masks, (*nifti.ENDINGS, *formats.EXACT))
    for have, lack, what, where in ((by_name, mask_of, "mask", masks), (mask_of, by_name, "image", images)):
        lonely = [name for name in have if name not in lack]
        if lonely:
            more = f", nor have {len(lonely) - 1} others" if len(lonely) > 1 else ""
            raise UserError(
                f"{have[lonely[0]]} has no {what}: {where} has no file of the name {lonely[0]}{more}; give an "
                "image and its mask the same name, with any extensions"
            )
    return [Pair(name, by_name[name], mask_of[name]) for name in sorted(by_name)]


def find_pictures(flag: str, path: str) -> list[Path]:
    """List the images in a folder, in the order of their names; or a single one.

    Raises:
        UserError: there are none.
    """
    refuse_url(flag, path)
    root = Path(path).expanduser()
    with reading(flag, path):
        there = bool(path) and root.exists()
    if not there:
        raise UserError(f"{flag} {path}: no such file or folder{near(str(root)) if path else ''}")
    if root.is_file():
        return [root]
    return sorted(_files(flag, root, (*nifti.ENDINGS, *formats.EXACT, *formats.LOSSY)).values())


def _files(flag: str, folder: Path, extensions: tuple[str, ...]) -> dict[str, Path]:
    if folder.is_file():
        raise UserError(f"{flag} {folder} is a file, and its partner is a folder: give two files or two folders")
    file_by_stem: dict[str, Path] = {}
    end = next((CITIES[name] for name in (folder.name, folder.parent.name) if name in CITIES), "")
    with reading(flag, folder):
        files = sorted(folder.glob(f"*/*{end}.*") if end else folder.iterdir())
    for file in files:
        if file.name.lower().endswith(extensions) and not is_hidden(file.name):
            if not file.is_file():
                raise UserError(f"{file} is a folder, or a link that leads nowhere: {flag} takes files of this name")
            if (name := stem_of(file).removesuffix(end)) in file_by_stem:
                raise UserError(f"{file} and {file_by_stem[name].name} have the same name: keep one of them")
            file_by_stem[name] = file
    if not file_by_stem:
        raise UserError(f"{flag} {folder}: no file there ends in {', '.join(extensions)}{near(str(folder / '*'))}")
    return file_by_stem


def stem_of(file: Path) -> str:
    """Return the name of a file without its extension, of which .nii.gz is one."""
    return file.name[:-7] if file.name.lower().endswith(".nii.gz") else file.stem


def check_finite(image: np.ndarray, file: Path) -> None:
    """Raise a UserError if the image of a file has NaN or infinity in it."""
    if not np.isfinite(image).all():
        raise UserError(f"{file} has voxels that are NaN or infinite: replace them")


def read_image(file: Path) -> tuple[np.ndarray, int]:
    """Read an image as [channels, *sides], with the file's values, and say along which axis its slices are.

    NIfTI volumes are turned to the closest canonical orientation (RAS+), pictures as their EXIF orientation says.
    """
    if nifti.is_nifti(file):
        array = nifti.read_volume(file)
        return array, array.ndim - 1 if array.ndim == 4 else -1
    return np.moveaxis(_stacked(pictures.read_pages(file), file), -1, 0), 1


def read_mask(file: Path, colours: np.ndarray | None = None) -> np.ndarray:
    """Read a mask as [*sides]: a whole number for each voxel, in the smallest type that holds them.

    Args:
        colours: of the classes that a mask of red, green and blue shows, uint8 [classes, 3].
    """
    mask = nifti.read_numbers(file) if nifti.is_nifti(file) else _read_picture(file, colours)
    values = np.unique(mask)
    if not np.isfinite(values).all() or (values != np.round(values)).any():
        raise UserError(f"{file} has values such as {values[values != np.round(values)][0]}: classes are whole numbers")
    if len(values) > MOST_VALUES:
        raise UserError(f"{file} has {len(values):,} values: a mask has one for each class, and at most {MOST_VALUES}")
    return mask.astype(np.min_scalar_type(int(values[0]) if values[0] < 0 else int(values[-1])))


def _read_picture(file: Path, colours: np.ndarray | None) -> np.ndarray:
    """Read a mask that is a picture: the numbers of its pixels or of their colours."""
    pages, palette = pictures.read_numbers(file)
    channels = _stacked(pages, file)
    mask = channels[..., 0]
    if palette is not None and colours is not None:
        return numbers_of_palette(mask, palette, colours, file)
    if colours is not None and channels.shape[-1] == 3:
        return numbers_of(channels, colours, file)
    if (channels != mask[..., None]).any():
        raise UserError(
            f"{file} is coloured: give a mask with a single number for each pixel, its class, or with a palette; "
            "or name the classes' colours with --data.classes"
        )
    return mask


def _stacked(pages: list[np.ndarray], file: Path) -> np.ndarray:
    """Return [(pages,) height, width, channels]."""
    if len({page.shape for page in pages}) > 1:
        raise UserError(f"{file} has pages of several sizes: the pages of a volume have one size")
    return pages[0] if len(pages) == 1 else np.stack(pages)


def check_sizes(pair: Pair, image: tuple[int, ...], mask: tuple[int, ...]) -> None:
    """Refuse an image and a mask that do not lie over each other, by their sizes or by what their headers say.

    Raises:
        UserError: it has both sizes, and how the files were turned.
    """
    if image != mask:
        said = [_size_words(file, sides) for file, sides in ((pair.image, image), (pair.mask, mask))]
        raise UserError(f"{pair.image} is {said[0]}, its mask {pair.mask} {said[1]}: give both the same size")
    nifti.check_place(pair.image, pair.mask, image)


def _size_words(file: Path, sides: tuple[int, ...]) -> str:
    """Name a size, height first, and the turn that has made it."""
    turn = "" if nifti.is_nifti(file) else pictures.turn_of(file)
    return " x ".join(map(str, sides)) + (f" {turn}" if turn else "")
