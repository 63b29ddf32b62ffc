"""Pictures: the one place that opens them, for every recipe and command, and for a recipe of your own.

A picture is turned as its EXIF orientation says, and laid on white where it is transparent. It is the first one of its
file (a JPEG may hold a preview, a GIF an animation), except for TIFF, whose pages form a stack. What Pillow would leave
out or cut off is refused: more than 8 bits of a colour, channels that are neither colour nor transparency.
"""

import contextlib
import io
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from app.config.file_kinds import HEAD, head_of
from app.data.reading import unreadable
from app.errors import UserError

if TYPE_CHECKING:
    from PIL.Image import Image
    from PIL.PsdImagePlugin import PsdImageFile
    from PIL.TiffImagePlugin import TiffImageFile

Source = str | Path | bytes
"""A file, or what stands in one."""

# Pillow warns of pictures that are half as large as the largest that it reads. Those are read, and larger ones refused.
warnings.filterwarnings("ignore", message="Image size .* exceeds limit")

WHITE = (255, 255, 255, 255)
# With these orientations, height and width change places.
ORIENTATION, TURNED = 0x0112, (5, 6, 7, 8)
# Tags of TIFF, and bits of the first that mark a page as a smaller copy or as the transparency of another one.
SUBFILE, BITS, PHOTOMETRIC, DESCRIPTION, SAMPLES, EXTRA, FORMATS = 254, 258, 262, 270, 277, 338, 339
NO_PAGE = 1 | 4
ALPHA = (1, 2)
VERSION_INFO = 1057  # of a Photoshop document; its fifth byte says whether it holds the picture of all layers
WITH_ALPHA = ("LA", "La", "PA", "RGBA", "RGBa")
# Greys of few bits are spread over 0 to 255; the transparent one is not.
SPREAD = {"1": 255, "L;2": 85, "L;4": 17}


class _Header(NamedTuple):
    """What the header of a picture says."""

    stored: tuple[int, int]
    """Width and height before it is turned, in pixels."""
    orientation: int
    """As EXIF numbers them, from 1."""

    @property
    def size(self) -> tuple[int, int]:
        """Return width and height after the turn."""
        width, height = self.stored
        return (height, width) if self.orientation in TURNED else (width, height)


def read_picture(source: Source, what: str = "image", name: str = "", advice: str = "") -> "Image":
    """Return a picture in a mode without transparency: L or RGB; I;16, I or F if it has one channel of more bits.

    Args:
        what: what the picture is, for errors.
        name: of the picture, for errors; default: the file's.
        advice: what else can be done about a picture that cannot be read, for errors.

    Raises:
        UserError: it cannot be read, or not without loss; or it is one of many pages.
    """
    name = name or _name_of(source)
    with _opened(source, what, name, advice) as image:
        pages = _pages(image, what, name)
        picture = _on_white(*_upright(image, pages[0], what, name))
    if len(pages) > 1:
        raise UserError(
            f"{what} {name} has {len(pages)} pages, and a picture is one: save the page that counts, or each page, as "
            "a file of its own"
        )
    return picture


def read_pages(file: Source, what: str = "image") -> list[np.ndarray]:
    """Return the pages of a TIFF file, or the only picture of another one, as [height, width, channels].

    Raises:
        UserError: as `read_picture`.
    """
    name = _name_of(file)
    with _opened(file, what, name, "") as image:
        numbers = _pages(image, what, name)
        return [_array(_on_white(*_upright(image, number, what, name))) for number in numbers]


def read_numbers(file: Source, what: str = "mask") -> tuple[list[np.ndarray], np.ndarray | None]:
    """Return the pages of a mask as [height, width, channels], and the colours of its palette, uint8 [colours, 3].

    A palette's pixels are its numbers. What it says of transparency counts for those who look at it, and not here.

    Raises:
        UserError: it cannot be read, is a JPEG, or has transparent pixels, whose class nobody knows.
    """
    name = _name_of(file)
    pages, palette = [], None
    with _opened(file, what, name, "") as image:
        for number in _pages(image, what, name):
            page, _ = _upright(image, number, what, name)
            _refuse_changed(image, name)
            if page.mode == "P":
                palette = np.zeros((256, 3), np.uint8)
                listed = np.array(page.getpalette("RGB"), np.uint8).reshape(-1, 3)
                palette[: len(listed)] = listed
            else:
                page = _without_alpha(page, name)
            pages.append(_array(page))
    return pages, palette


def size_of(source: Source, what: str = "image", name: str = "", advice: str = "") -> tuple[int, int]:
    """Return width and height of a picture after its turn, from its header alone where that tells all.

    Args:
        what, name, advice: as of `read_picture`.

    Raises:
        UserError: it cannot be read.
    """
    return _header(source, what, name, advice).size


def turn_of(source: Source) -> str:
    """Say how a picture is turned when it is read, in a clause for messages; nothing if it is not.

    Raises:
        UserError: it cannot be read.
    """
    turn = _header(source, "image", "", "").orientation
    return "" if turn == 1 else f"after its EXIF turn (orientation {turn})"


def _header(source: Source, what: str, name: str, advice: str) -> _Header:
    with _opened(source, what, name or _name_of(source), advice) as image:
        orientation = image.getexif().get(ORIENTATION, 1)
        width, height = image.size
        if getattr(image, "tag_v2", {}).get(ORIENTATION) in TURNED:  # Pillow says the size of a TIFF after its turn
            width, height = height, width
        return _Header((width, height), orientation if orientation in range(1, 9) else 1)


def _name_of(source: Source) -> str:
    return "in memory" if isinstance(source, bytes) else str(source)


@contextlib.contextmanager
def _opened(source: Source, what: str, name: str, advice: str) -> Iterator["Image"]:
    """Open a picture, whose readers raise errors of any type; in the block, Pillow alone is at work."""
    from PIL import Image, UnidentifiedImageError

    most = f"{2 * (Image.MAX_IMAGE_PIXELS or 0):,} pixels"
    try:
        # Not by its name, by which Pillow maps files into memory: with wrong rows, of a grey TIFF that is turned.
        with io.BytesIO(source) if isinstance(source, bytes) else open(source, "rb") as stream:
            image = Image.open(stream)
            if image.format == "PNG":  # whose checksums Pillow leaves aside while it reads
                image.verify()
                stream.seek(0)
                image = Image.open(stream)
            yield image
    except UserError:
        raise
    except Image.DecompressionBombError as error:
        raise UserError(
            f"{what} {name} has more than {most}, the most that are read: cut it into tiles, or make it smaller"
        ) from error
    except UnidentifiedImageError as error:  # its text has the name once more, or an address in memory
        unknown = ValueError("it is no picture of a known format, or damaged")
        raise unreadable(what, name, unknown, advice, _head_of(source)) from error
    except Exception as error:
        raise unreadable(what, name, error, advice, _head_of(source)) from error


def _head_of(source: Source) -> bytes:
    return source[:HEAD] if isinstance(source, bytes) else head_of(str(source))


def _pages(image: "Image", what: str, name: str) -> list[int]:
    """Return the numbers of the pages that count: of TIFF all but reduced copies, of other formats the first one."""
    if image.format != "TIFF":
        return [image.tell()]
    tiff: TiffImageFile = image  # type: ignore[assignment]  # by its format
    whole = []
    for number in range(tiff.n_frames):
        tiff.seek(number)
        if not tiff.tag_v2.get(SUBFILE, 0) & NO_PAGE:
            whole.append(number)
    tiff.seek(0)
    # ImageJ writes one page, and what lies after it, for a stack of more than 4 GB.
    told = re.match(r"ImageJ=.*?^images=(\d+)", str(tiff.tag_v2.get(DESCRIPTION, "")), re.DOTALL | re.MULTILINE)
    if told and int(told[1]) > tiff.n_frames:
        raise UserError(
            f"{what} {name} holds {told[1]} images of which ImageJ lists {tiff.n_frames}: save it as BigTIFF, or as "
            "several files"
        )
    return whole or [*range(tiff.n_frames)]


def _upright(image: "Image", number: int, what: str, name: str) -> tuple["Image", str]:
    """Return a page, turned as its EXIF orientation says, and how its pixels were packed."""
    from PIL import ImageOps

    image.seek(number)
    packed = next((args if isinstance(args, str) else str(args[0]) for *_, args in _tiles(image) if args), "")
    _refuse_lossy(image, packed, f"{what} {name}")
    return ImageOps.exif_transpose(image), packed


def _tiles(image: "Image") -> list[tuple]:
    return [tuple(tile) for tile in getattr(image, "tile", [])]


def _refuse_lossy(image: "Image", packed: str, called: str) -> None:
    """Refuse what Pillow would read with less than the file holds."""
    if image.format == "PSD":
        _refuse_layers(image, called)
    bands = len(image.getbands())
    tags = image.tag_v2 if image.format == "TIFF" else {}  # type: ignore[attr-defined]  # by its format
    if bands > 1 and (";16" in packed or max(tags.get(BITS, (8,))) > 8):
        raise UserError(
            f"{called} has more than 8 bits a colour, of which 8 would be read: convert it to 8 bits, or give each "
            "channel as a picture of its own"
        )
    if tags.get(PHOTOMETRIC) == 0 and image.mode[0] in "IF":
        raise UserError(
            f"{called} stores white as 0 in more than 8 bits, of which a negative would be read: convert it"
        )
    if 2 in tags.get(FORMATS, ()) and image.mode[0] not in "IF":  # of SampleFormat: with a sign
        raise UserError(f"{called} has bytes with a sign, of which -1 would be read as 255: convert it to 16 bits")
    colours, samples = bands - (image.mode in WITH_ALPHA), tags.get(SAMPLES, bands)
    if tags and samples > colours and (samples > bands or not set(tags.get(EXTRA, ())) & set(ALPHA)):
        raise UserError(
            f"{called} has {samples} channels, and does not say that the last one is transparency: give it "
            f"{colours} of them, or a NIfTI file with all of them along its fourth axis"
        )
    if image.format in ("JPEG", "MPO") and image.mode == "CMYK" and "adobe" not in image.info:
        raise UserError(f"{called} is CMYK and does not say whether its inks are inverted: convert it to RGB")


def _refuse_layers(image: "Image", called: str) -> None:
    """Refuse a Photoshop document whose picture of all layers is missing, or has more channels than colours."""
    document: PsdImageFile = image  # type: ignore[assignment]  # by its format
    merged = next((data for number, _, data in document.resources if number == VERSION_INFO), b"")
    if merged[4:5] == b"\0":
        raise UserError(
            f"{called} was saved without the picture of all its layers: save it with 'Maximize compatibility', or "
            "as PNG"
        )
    assert document.fp is not None  # it was opened, and nothing is loaded yet
    document.fp.seek(0)
    header = document.fp.read(26)
    channels, colours = int.from_bytes(header[12:14], "big"), len(document.getbands())
    if channels > colours or document.mode in WITH_ALPHA:
        raise UserError(
            f"{called} has {channels} channels, and does not say which of them is transparency: flatten its layers and "
            "leave out saved selections, or save it as PNG"
        )


def _on_white(image: "Image", packed: str) -> "Image":
    """Lay a picture on white where it is transparent, and bring other colours to red, green and blue."""
    from PIL import Image

    key = image.info.get("transparency")
    if image.mode in ("1", "L", "I", "I;16", "I;16B") and isinstance(key, int):
        values = np.array(image.convert("L") if image.mode == "1" else image)
        values[values == key * SPREAD.get(packed, 1)] = 255 if values.dtype == np.uint8 else 65535
        return Image.fromarray(values)
    if image.has_transparency_data:
        plain = "L" if image.mode in ("LA", "La") else "RGB"
        image = image.convert("LA") if image.mode == "La" else image
        white = Image.new("RGBA", image.size, WHITE)
        return Image.alpha_composite(white, image.convert("RGBA")).convert(plain)
    return _plain(image)


def _without_alpha(image: "Image", name: str) -> "Image":
    """Leave the alpha channel of a mask out if it hides nothing."""
    if image.mode in WITH_ALPHA:
        if image.getchannel(image.mode[-1]).getextrema() != (255, 255):
            raise UserError(
                f"mask {name} has transparent pixels, whose class is not known: save it without transparency"
            )
        return image.convert("L" if image.mode in ("LA", "La") else "RGB")
    return _plain(image)


def _plain(image: "Image") -> "Image":
    """Bring a picture without transparency to one channel, or to red, green and blue."""
    if image.mode == "1":
        return image.convert("L")
    deep = image.mode[0] in "IF"  # one channel of more bits
    return image if deep or image.mode == "L" else image.convert("RGB")


def _refuse_changed(image: "Image", name: str) -> None:
    """Refuse a mask whose pixels are not the numbers that were stored."""
    if image.format in ("JPEG", "MPO") or "jpeg" in str(image.info.get("compression", "")):
        raise UserError(f"mask {name} is a JPEG inside, whose compression changes values: save masks as PNG")
    tags = image.tag_v2 if image.format == "TIFF" else {}  # type: ignore[attr-defined]  # by its format
    if tags.get(PHOTOMETRIC) == 0 and image.mode == "L":
        raise UserError(
            f"mask {name} stores white as 0, so that its numbers would be read as 255 - number: save it anew"
        )


def _array(image: "Image") -> np.ndarray:
    """Return [height, width, channels]."""
    array = np.array(image)
    return array[..., None] if array.ndim == 2 else array
