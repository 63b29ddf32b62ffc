"""Whoever reads a picture sees the same: upright, on white where it is transparent, the first one of its file."""

import ast
import io
import json
import struct
import zlib
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from PIL import Image
from PIL.TiffImagePlugin import AppendingTiffWriter
from support.launching import ROOT
from support.tables import python, refused

from app.data.config import BoxData, ClassData
from app.data.images import formats, pictures
from app.errors import UserError

pytestmark = pytest.mark.usefixtures("data_cache")
SIDE = 32
ORIENTATION = 0x0112
EYE = np.random.default_rng(0).integers(0, 256, (SIDE, SIDE, 3), np.uint8)
EYE[:8, :20] = (250, 20, 20)  # no turn or mirror image of it is alike, after compression too
GREY = EYE[..., 0]
# What a camera stores, from what is to be seen, by the orientation that it notes.
TURNS = {
    1: lambda seen: seen,
    2: lambda seen: seen[:, ::-1],
    3: lambda seen: seen[::-1, ::-1],
    4: lambda seen: seen[::-1],
    5: lambda seen: seen.swapaxes(0, 1),
    6: lambda seen: np.rot90(seen, 1),
    7: lambda seen: np.rot90(seen, 2).swapaxes(0, 1),
    8: lambda seen: np.rot90(seen, -1),
}


def encoded(array, kind="PNG", **settings):
    """Return a picture file of an array, or of a picture."""
    stream = io.BytesIO()
    picture = array if isinstance(array, Image.Image) else Image.fromarray(np.ascontiguousarray(array))
    picture.save(stream, kind, **settings)
    return stream.getvalue()


def photoshop(*planes, merged=1):
    """Return a document of Photoshop: a header (RGB of 8 bits), one resource, and plane after plane."""
    header = struct.pack(">4sH6xHIIHH", b"8BPS", 1, len(planes), *planes[0].shape, 8, 3)
    resource = struct.pack(">4sH2xI4sBx", b"8BIM", 1057, 5, bytes(4), merged)
    parts = b"".join(struct.pack(">I", len(part)) + part for part in (b"", resource, b""))
    return header + parts + struct.pack(">H", 0) + b"".join(plane.tobytes() for plane in planes)


def with_orientation(array, orientation, kind):
    tag = Image.Exif()
    tag[ORIENTATION] = orientation
    more = {"JPEG": {"quality": 100, "subsampling": 0}, "MPO": {"quality": 100, "subsampling": 0}}
    more["WEBP"] = {"lossless": True}
    return encoded(TURNS[orientation](array), kind, exif=tag, **more.get(kind, {}))


def raw_png(depth, colour, rows, sides=(SIDE, SIDE), **chunks):
    """Write a PNG as its specification says: of depths and with keys of transparency that Pillow does not write."""

    def chunk(name, data):
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    head = struct.pack(">IIBBBBB", sides[1], sides[0], depth, colour, 0, 0, 0)
    more = b"".join(chunk(name.encode(), data) for name, data in chunks.items())
    body = chunk(b"IDAT", zlib.compress(b"".join(b"\0" + row for row in rows)))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + more + body + chunk(b"IEND", b"")


def on_white(colours, alpha):
    share = alpha[..., None] / 255 if colours.ndim == 3 else alpha / 255
    return np.round(colours * share + 255 * (1 - share))


def palette_of(numbers, **settings):
    picture = Image.fromarray(numbers, "P")
    picture.putpalette(PALETTE.flatten().tolist())
    return encoded(picture, **settings)


ALPHA = np.resize(np.array([0, 255, 128], np.uint8), (SIDE, SIDE))
NUMBERS = np.resize(np.arange(3, dtype=np.uint8), (SIDE, SIDE))
PALETTE = np.array([(10, 20, 30), (200, 0, 9), (0, 90, 255)], np.uint8)
KEYED = np.where((GREY == 250)[..., None], 255, np.repeat(GREY[..., None], 3, 2))
INKS = np.array(Image.fromarray(EYE).convert("CMYK"))
SHRUNK = Image.fromarray(EYE[:16, :16])
BITS = GREY[:, :1] > 0
HALF = NUMBERS[:, : SIDE // 2]


def seen(array):
    """Bring an expected picture to red, green and blue."""
    return np.repeat(array[..., None], 3, 2) if array.ndim == 2 else array


# Files, and what is to be seen in them.
PICTURES = {
    **{
        f"{kind} held as {turn}": (with_orientation(EYE, turn, kind), EYE)
        for kind in ("PNG", "JPEG", "TIFF", "WEBP", "MPO")
        for turn in TURNS
    },
    "grey JPEG held as 6": (with_orientation(GREY, 6, "JPEG"), GREY),
    "RGBA": (encoded(np.dstack([EYE, ALPHA])), on_white(EYE, ALPHA)),
    "RGBA held as 5": (with_orientation(np.dstack([EYE, ALPHA]), 5, "PNG"), on_white(EYE, ALPHA)),
    "RGBA of TIFF": (encoded(np.dstack([EYE, ALPHA]), "TIFF"), on_white(EYE, ALPHA)),
    "RGBA of WebP": (encoded(np.dstack([EYE, ALPHA]), "WEBP", lossless=True, exact=True), on_white(EYE, ALPHA)),
    "LA": (encoded(np.dstack([GREY, ALPHA])), on_white(GREY, ALPHA)),
    "P": (palette_of(NUMBERS), PALETTE[NUMBERS]),
    "P of GIF": (palette_of(NUMBERS, kind="GIF"), PALETTE[NUMBERS]),
    "P of TIFF": (palette_of(NUMBERS, kind="TIFF"), PALETTE[NUMBERS]),
    "P with a transparent colour": (
        palette_of(NUMBERS, transparency=1),
        np.where((NUMBERS == 1)[..., None], 255, PALETTE[NUMBERS]),
    ),
    "P of GIF with a transparent colour": (
        palette_of(NUMBERS, kind="GIF", transparency=2),
        np.where((NUMBERS == 2)[..., None], 255, PALETTE[NUMBERS]),
    ),
    "P with half transparent colours": (
        palette_of(NUMBERS, transparency=bytes([255, 128, 0])),
        on_white(PALETTE[NUMBERS], np.array([255, 128, 0])[NUMBERS]),
    ),
    "L with a transparent grey": (raw_png(8, 0, map(bytes, GREY), tRNS=b"\0\xfa"), KEYED),
    "L of 4 bits with a transparent grey": (
        raw_png(4, 0, map(bytes, HALF * 17), (SIDE, SIDE), tRNS=b"\0\1"),
        np.repeat(np.where(HALF == 1, 255, HALF * 17), 2, 1),
    ),
    "1 bit": (encoded(Image.fromarray(GREY).point(lambda v: v > 99, "1")), np.where(GREY > 99, 255, 0)),
    "1 bit with transparent black": (
        raw_png(1, 0, map(bytes, np.packbits(GREY > 99, axis=1)), tRNS=b"\0\0"),
        np.full_like(GREY, 255),
    ),
    "1 bit with transparent white": (
        raw_png(1, 0, map(bytes, np.packbits(GREY > 99, axis=1)), tRNS=b"\0\1"),
        np.where(GREY > 99, 255, 0),
    ),
    "RGB with a transparent colour": (
        raw_png(8, 2, [row.tobytes() for row in EYE], tRNS=struct.pack(">HHH", 250, 20, 20)),
        np.where((EYE == (250, 20, 20)).all(2, keepdims=True), 255, EYE),
    ),
    "CMYK of TIFF": (encoded(Image.fromarray(EYE).convert("CMYK"), "TIFF"), EYE),
    "CMYK of JPEG": (encoded(Image.fromarray(EYE).convert("CMYK"), "JPEG", quality=100), EYE),
    "YCbCr of TIFF": (encoded(Image.fromarray(EYE).convert("YCbCr"), "TIFF"), EYE),
    "LAB of TIFF": (encoded(Image.fromarray(EYE).convert("LAB"), "TIFF"), EYE),
    "MPO with a preview": (
        encoded(Image.fromarray(EYE), "MPO", save_all=True, append_images=[SHRUNK], quality=100, subsampling=0),
        EYE,
    ),
    "animated PNG": (encoded(Image.fromarray(EYE), save_all=True, append_images=[Image.fromarray(255 - EYE)]), EYE),
    "animated WebP": (
        encoded(Image.fromarray(EYE), "WEBP", save_all=True, append_images=[Image.fromarray(255 - EYE)], lossless=True),
        EYE,
    ),
    "animated GIF": (
        palette_of(NUMBERS, kind="GIF", save_all=True, append_images=[Image.fromarray(2 - NUMBERS, "P")]),
        PALETTE[NUMBERS],
    ),
    "Photoshop": (photoshop(*EYE.transpose(2, 0, 1)), EYE),
}
EXTENSIONS = {"PSD": "psd", "PNG": "png", "JPEG": "jpg", "TIFF": "tif", "WEBP": "webp", "MPO": "jpg", "GIF": "gif"}


def written(folder, name, data):
    """Write a picture with the extension of its format."""
    kind = Image.open(io.BytesIO(data)).format
    file = folder / f"{name}.{EXTENSIONS[kind]}"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(data)
    return file


def by_column(folder, data, as_bytes):
    from datasets import Dataset

    from app.data.images.image_column import ImageColumn
    from app.data.tables.columns import name_table

    file = written(folder, "one", data)
    pd.DataFrame({"image": [data if as_bytes else str(file)]}).to_parquet(folder / "rows.parquet")
    column = ImageColumn(name_table(Dataset.from_parquet(str(folder / "rows.parquet")), "rows"), "image")
    picture = column.read(0)
    assert column.size(0) == picture.size
    return np.array(picture)


def by_img(folder, data):
    from app.data.images.image_column import ImageColumn
    from app.data.images.labeled_images import load_images, load_labelled, own_processor

    for label in ("a", "b"):
        for index in range(4):
            written(folder, f"{label}/{index}", data)
    tables, labels = load_labelled(ClassData(path=(str(folder),)))
    column = ImageColumn(tables.train, "image")
    return load_images(column, own_processor(column, SIDE), 1.0, labels.train_values)[0]["pixels"].transpose(1, 2, 0)


def by_det(folder, data):
    from app.data.boxes import detections

    for index in range(4):
        written(folder, f"images/{index}", data)
        (folder / "labels").mkdir(exist_ok=True)
        (folder / f"labels/{index}.txt").write_text("0 0.5 0.5 0.5 0.5\n")
    config = BoxData(path=(str(folder),), size=SIDE)
    _, sets, _ = detections.load_boxes(config)
    processor = detections.own_processor(sets["train"].column, SIDE)
    return detections.load_images_of(sets["train"], processor, config)[0]["pixels"].transpose(1, 2, 0)


def by_seg(folder, data):
    from app.data.volumes.pairs import Pair
    from app.data.volumes.volumes import _decode

    image, mask = written(folder, "one", data), written(folder, "mask", encoded(NUMBERS))
    _decode(Pair("one", image, mask), None, folder / "0")
    return np.moveaxis(np.load(folder / "0-image.npy"), 0, -1)


def by_predict_masks(folder, data):
    from types import SimpleNamespace

    from app.commands.predict.masks import _case

    image = written(folder, "one", data)
    channels = np.moveaxis(np.array(pictures.read_pages(image)[0]), -1, 0)
    network = SimpleNamespace(dims=2, card={"channels": len(channels)})
    return np.moveaxis(_case(image, network).image, 0, -1)


def by_predict_table(folder, data):
    """Return what the pipeline of transformers is given."""
    from app.commands.predict import command

    written(folder, "one", data)
    written(folder, "two", data)
    given = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(command, "classes_of", lambda task, model, inputs, batch: given.extend(inputs) or [])
        rows = command._open(str(folder), "train", "image-classification")
        list(command._predictions(command.Options("model", str(folder)), "model", rows, {}, "image-classification"))
    return np.array(given[0])


def by_predict_boxes(folder, data):
    """Return what the boxes are drawn on, which is what the model is given."""
    from types import SimpleNamespace

    from app.commands.predict import boxes
    from app.commands.predict.command import _open
    from app.data.boxes.detections import own_processor
    from app.data.images.image_column import ImageColumn
    from app.tasks.detection import networks

    written(folder, "one", data)
    written(folder, "two", data)
    column, given = ImageColumn(_open(str(folder), "train", "image-classification"), "image"), []
    processor = own_processor(column, SIDE)
    processor.image_mean, processor.image_std = [0.0] * 3, [1.0] * 3
    detector = SimpleNamespace(processor=processor, device="cpu", _plain=lambda found: found)
    detector.model = lambda pixel_values: given.append(pixel_values)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(networks, "found_in", lambda *_: [None, None])
        shown = np.array(boxes.Detector.find(detector, column, [0, 1], 0.5)[1][0])
    assert np.allclose(given[0][1].numpy() * 255, shown.transpose(2, 0, 1), atol=1e-3)
    return shown


# By name: the reader, and the modules that read pictures in it.
READERS = {
    "a column of files": (lambda *given: by_column(*given, as_bytes=False), ["data.images.image_column"]),
    "a column of bytes": (lambda *given: by_column(*given, as_bytes=True), ["data.images.image_column"]),
    "img": (by_img, ["data.images.labeled_images", "recipes.img", "recipes.gan"]),
    "det": (by_det, ["data.boxes.checks", "data.boxes.detections", "recipes.det"]),
    "seg": (by_seg, ["data.volumes.pairs", "data.volumes.volumes"]),
    "predict, masks": (by_predict_masks, ["commands.predict.masks", "data.volumes.mask_files"]),
    "predict, a table": (by_predict_table, ["commands.predict.command"]),
    "predict, boxes": (by_predict_boxes, ["commands.predict.boxes"]),
}
# What modules import to read pictures.
ENTRANCES = {"ImageColumn", "read_image", "read_mask", "pictures", "nifti", "labeled_images", "detections"}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("name", PICTURES)
def test_every_reader_sees_the_same(reader, name, tmp_path):
    data, expected = PICTURES[name]
    found = READERS[reader][0](tmp_path, data).astype(float)
    found = np.repeat(found, 3, 2) if found.shape[-1:] == (1,) else found
    difference = np.abs(found - seen(np.asarray(expected)).astype(float))
    lossy = any(kind in name for kind in ("JPEG", "MPO", "LAB", "YCbCr"))
    assert difference.mean() < 12 if lossy else difference.max() <= 1


def modules():
    return [*sorted((ROOT / "app").rglob("*.py")), *sorted((ROOT / "recipes").glob("*.py"))]


def dotted(path):
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removeprefix("app.")


def test_every_module_that_reads_pictures_is_a_reader_here():
    """One that is not imports a way to read them, and stands in no entry of READERS."""
    found = set()
    for path in modules():
        nodes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)]
        names = {alias.name for node in nodes if (node.module or "").startswith("app.data") for alias in node.names}
        found |= {dotted(path)} if names & ENTRANCES else set()
    known = {module for _, read_by in READERS.values() for module in read_by}
    assert found == known


OPENERS = {("Image", "open"), ("nibabel", "load"), ("nib", "load"), ("PIL.Image", "open")}
OTHER_OPENERS = {"imread", "decode_image", "decode_example", "decode_jpeg", "decode_png", "TiffFile", "LoadImage"}
OWNERS = {"data.images.pictures": ("Image", "open"), "data.volumes.nifti": ("nibabel", "load")}


def test_pictures_and_volumes_are_opened_in_one_place_each():
    found = {}
    for path in modules():
        calls = [node.func for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
        for call in calls:
            name = call.attr if isinstance(call, ast.Attribute) else getattr(call, "id", "")
            whose = ast.unparse(call.value) if isinstance(call, ast.Attribute) else ""
            if (whose, name) in OPENERS or name in OTHER_OPENERS:
                found.setdefault(dotted(path), set()).add((whose, name))
    assert found == {owner: {call} for owner, call in OWNERS.items()}


def tiff_of(*pages, infos=()):
    stream = io.BytesIO()
    with AppendingTiffWriter(stream, True) as writer:
        for page, info in zip(pages, infos or [{}] * len(pages), strict=True):
            Image.fromarray(page).save(writer, "TIFF", tiffinfo=info)
            writer.newFrame()
    return stream.getvalue()


def test_pages_of_a_tiff_are_a_stack_each_turned_as_it_says(tmp_path):
    stack = tiff_of(*(TURNS[turn](EYE) for turn in (1, 6, 3)), infos=[{ORIENTATION: turn} for turn in (1, 6, 3)])
    found = pictures.read_pages(stack)
    assert len(found) == 3 and all(np.array_equal(page, EYE) for page in found)
    with refused("in memory has 3 pages", "a file of its own"):
        pictures.read_picture(stack)
    preview = tiff_of(EYE, EYE[::2, ::2], infos=[{254: 0}, {254: 1}])
    assert np.array_equal(np.array(pictures.read_picture(preview)), EYE)
    assert len(pictures.read_pages(preview)) == 1
    with refused("holds 9 images of which ImageJ lists 1"):
        pictures.read_pages(encoded(GREY, "TIFF", description="ImageJ=1.54f\nimages=9\nslices=9\n"))


# The tag of how greys are stored, of one short value: from black as 0 to white as 0.
WHITE_IS_ZERO = tuple(struct.pack("<HHIHH", 262, 3, 1, value, 0) for value in (1, 0))
REFUSED = {
    "colours of 16 bits": (raw_png(16, 2, [bytes(SIDE * 6)] * SIDE), "more than 8 bits a colour"),
    "greys of 16 bits with alpha": (raw_png(16, 4, [bytes(SIDE * 4)] * SIDE), "more than 8 bits a colour"),
    "a channel of infrared": (
        encoded(Image.fromarray(np.dstack([EYE, ALPHA]), "RGBX"), "TIFF"),
        "4 channels, and does not say that the last one is transparency",
    ),
    "white as 0 in 16 bits": (
        encoded(GREY.astype(np.uint16), "TIFF").replace(*WHITE_IS_ZERO),
        "stores white as 0",
    ),
    "bytes with a sign": (encoded(GREY, "TIFF", tiffinfo={339: 2}), "bytes with a sign"),
    "CMYK without a word": (
        PICTURES["CMYK of JPEG"][0].replace(b"Adobe", b"Other"),
        "does not say whether its inks are inverted",
    ),
    "Photoshop with one more channel": (
        photoshop(*EYE.transpose(2, 0, 1), ALPHA),
        "4 channels, and does not say which of them is transparency",
    ),
    "Photoshop without all layers in one": (
        photoshop(*EYE.transpose(2, 0, 1), merged=0),
        "without the picture of all its layers",
    ),
    "no picture": (b"GIF and so on" * 9, "no picture of a known format"),
    "nothing": (b"", "no picture of a known format"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_be_read_with_loss_is_refused(name, tmp_path):
    data, says = REFUSED[name]
    (tmp_path / "one.png").write_bytes(data)
    for read in (pictures.read_picture, pictures.read_pages, pictures.read_numbers):
        with refused("one.png", says):
            read(tmp_path / "one.png")


def test_greys_of_16_bits_keep_their_values_where_these_count():
    deep = GREY.astype(np.uint16) * 100
    for kind in ("PNG", "TIFF"):
        assert np.array_equal(pictures.read_pages(encoded(deep, kind))[0][..., 0], deep)
    for order in "<>":
        page = tiff_of(GREY) if order == "<" else encoded(Image.fromarray(deep).convert("I;16B"), "TIFF")
        assert pictures.read_pages(page)[0].shape == (SIDE, SIDE, 1)
    keyed = raw_png(16, 0, [row.astype(">u2").tobytes() for row in deep], tRNS=struct.pack(">H", 25000))
    assert np.array_equal(pictures.read_pages(keyed)[0][..., 0], np.where(deep == 25000, 65535, deep))


READ = (pictures.read_picture, pictures.read_pages, pictures.read_numbers)
QUIET = """
import contextlib, io
from PIL import Image
from app.data.images import pictures

Image.MAX_IMAGE_PIXELS = 1000
with contextlib.redirect_stderr(io.StringIO()) as told:
    print(pictures.size_of("{file}"), repr(told.getvalue()))
"""


def test_a_picture_of_too_many_pixels_is_refused_with_advice(tmp_path, monkeypatch):
    """Half as many are read without the warning of Pillow, which nobody would see."""
    (tmp_path / "large.png").write_bytes(encoded(GREY))
    assert python(QUIET.format(file=tmp_path / "large.png")) == "(32, 32) ''\n"
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", SIDE * SIDE // 2 - 1)
    for read in (pictures.size_of, *READ):
        with refused("large.png", "more than 1,022 pixels", "tiles"):
            read(tmp_path / "large.png")


@pytest.mark.parametrize("name", sorted(PICTURES))
@pytest.mark.filterwarnings("ignore")  # Pillow's of what it finds
def test_a_damaged_picture_is_refused_by_name(name, tmp_path):
    """Cut anywhere or with a byte changed: no error of another kind; and no other pixels where checksums tell."""
    data, file = PICTURES[name][0], tmp_path / "broken"
    whole = np.array(pictures.read_picture(data))
    places = [len(data) * part // 17 for part in range(1, 17)]
    cut = [data[:place] for place in places]
    flipped = [data[:place] + bytes([data[place] ^ 0xFF]) + data[place + 1 :] for place in [*places, *range(4, 60)]]
    for index, harmed in enumerate([*cut, *flipped]):
        file.write_bytes(harmed)
        for read in (*READ, pictures.size_of):
            try:
                found = read(file)
            except UserError as error:
                assert str(file) in str(error) and "\n" not in str(error)
                continue
            if read is pictures.read_picture and (index < len(cut) or data[:4] == b"\x89PNG"):
                assert np.array_equal(np.array(found), whole)


def test_a_stack_that_was_cut_is_refused_by_name(tmp_path):
    data, file = tiff_of(EYE, EYE, EYE, EYE), tmp_path / "cut.tif"
    for place in range(8, len(data), 97):
        file.write_bytes(data[:place])
        try:
            assert len(pictures.read_pages(file)) == 4  # what was cut off is of no page
        except UserError as error:
            assert str(file) in str(error)


def test_folders_and_missing_files_are_refused_by_name(tmp_path):
    (tmp_path / "folder.png").mkdir()
    for name in ("folder.png", "missing.png"):
        for read in (*READ, pictures.size_of):
            with refused(name, "cannot be read"):
                read(tmp_path / name)


WIDE = EYE[:20]


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "TIFF", "WEBP", "MPO"])
@pytest.mark.parametrize("turn", TURNS)
def test_sizes_are_those_after_the_turn(kind, turn, tmp_path):
    for seen_in in (WIDE, WIDE[..., 0], (WIDE[..., 0] > 99) * np.uint8(9)):
        data = with_orientation(seen_in, turn, kind)
        (tmp_path / "file").write_bytes(data)
        for source in (data, tmp_path / "file", str(tmp_path / "file")):
            assert pictures.size_of(source) == (SIDE, 20)
            assert pictures.turn_of(source) == (f"after its EXIF turn (orientation {turn})" if turn > 1 else "")
            found = np.array(pictures.read_picture(source).convert("RGB")).astype(int)
            assert found.shape[:2] == (20, SIDE) and np.abs(found - seen(seen_in)).mean() < 12
        assert by_column(tmp_path, data, as_bytes=False).shape[:2] == (20, SIDE)


def test_a_turn_that_xmp_alone_tells_is_one():
    packet = b'<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf:Description tiff:Orientation="6"/></x:xmpmeta>'
    for kind in ("JPEG", "TIFF"):
        more = {"xmp": packet} if kind == "JPEG" else {"tiffinfo": {700: packet}}
        data = encoded(TURNS[6](WIDE), kind, **more)
        assert pictures.size_of(data) == pictures.read_picture(data).size == (SIDE, 20)


def seg_pair(folder, image, mask, names=("0.jpg", "0.png")):
    for kind, name, data in zip(("image", "label"), names, (image, mask), strict=True):
        for index in range(2):
            (folder / kind).mkdir(parents=True, exist_ok=True)
            (folder / kind / f"{index}{Path(name).suffix}").write_bytes(data)
    return folder


def load_seg(folder, **flags):
    from app.data.config import VolumeData
    from app.data.volumes.volumes import load

    return load(VolumeData(path=str(folder), patch=(8,), **flags))[1][""].cases[0]


MASK = (WIDE[..., 0] > 99).astype(np.uint8)


@pytest.mark.parametrize("turn", TURNS)
@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
def test_images_and_masks_lie_over_each_other(turn, kind, tmp_path):
    """The camera turned the image; the mask was drawn on what it shows, or turned by a camera's note too."""
    bright = np.repeat((MASK * 200)[..., None], 3, 2)
    for name, mask in (("drawn", encoded(MASK)), ("turned", with_orientation(MASK, turn, kind))):
        case = load_seg(seg_pair(tmp_path / name, with_orientation(bright, turn, kind), mask))
        assert np.array_equal(case.mask, MASK) and np.array_equal(case.image[0] > 100, MASK == 1)


def test_sizes_that_differ_after_a_turn_name_it(tmp_path):
    held = with_orientation(WIDE, 6, "JPEG")
    with refused("image/0.jpg is 20 x 32 after its EXIF turn (orientation 6), its mask", "0.png 32 x 20: give"):
        load_seg(seg_pair(tmp_path, held, encoded(MASK.T)))


@pytest.mark.parametrize("turn", [1, 6])
@pytest.mark.parametrize("kind", ["JPEG", "TIFF"])
def test_sizes_in_files_of_boxes_are_those_after_the_turn(kind, turn, tmp_path):
    from app.data.boxes import detections

    file, second = (written(tmp_path, f"images/{n}", with_orientation(WIDE, turn, kind)) for n in (0, 1))
    image = {"id": 1, "file_name": file.name, "width": SIDE, "height": 20}
    box = {"id": 1, "image_id": 1, "category_id": 1, "bbox": [16, 5, 8, 10]}
    config = BoxData(path=(f"{tmp_path}/boxes.json",), size=SIDE)

    def load():
        images = [{**image, "id": 1}, {**image, "id": 2, "file_name": second.name}]
        boxes = [{**box, "id": number, "image_id": number} for number in (1, 2)]
        found = {"images": images, "annotations": boxes, "categories": [{"id": 1, "name": "eye"}]}
        (tmp_path / "boxes.json").write_text(json.dumps(found))
        return detections.load_boxes(config)[1]["train"].boxes.corners.tolist()

    assert load() == [[0.5, 0.25, 0.75, 0.75]]
    image.update(width=20, height=SIDE)
    turned = "32 x 20 after its EXIF turn (orientation 6): its boxes" if turn > 1 else "32 x 20: its boxes"
    with refused(f"{file.suffix} is 20 x 32 pixels, and it is {turned}"):
        load()


TURNED_BY_180 = Image.Exif()
TURNED_BY_180[ORIENTATION] = 3
MASKS = {
    "grey": (encoded(NUMBERS), NUMBERS),
    "a palette": (palette_of(NUMBERS), NUMBERS),
    "a palette of TIFF": (palette_of(NUMBERS, kind="TIFF"), NUMBERS),
    "a palette with a transparent colour": (palette_of(NUMBERS, transparency=0), NUMBERS),
    "a palette that a camera turned": (palette_of(NUMBERS[::-1, ::-1], exif=TURNED_BY_180), NUMBERS),
    "grey with a transparent value": (raw_png(8, 0, map(bytes, NUMBERS), tRNS=b"\0\1"), NUMBERS),
    "grey with an alpha that hides nothing": (encoded(np.dstack([NUMBERS, np.full_like(NUMBERS, 255)])), NUMBERS),
    "colours that are greys": (encoded(np.repeat(NUMBERS[..., None], 3, 2)), NUMBERS),
    "RGBA of greys": (encoded(np.dstack([NUMBERS] * 3 + [np.full_like(NUMBERS, 255)])), NUMBERS),
    "16 bits": (encoded(NUMBERS.astype(np.uint16) * 300), NUMBERS * 300.0),
    "1 bit": (encoded(Image.fromarray(NUMBERS).point(lambda v: v == 1, "1")), (NUMBERS == 1) * 255),
    "floats": (encoded(NUMBERS.astype(np.float32), "TIFF"), NUMBERS),
}
BAD_MASKS = {
    "alpha that hides": (encoded(np.dstack([NUMBERS, ALPHA])), "transparent pixels"),
    "RGBA that hides": (encoded(np.dstack([EYE, ALPHA])), "transparent pixels"),
    "JPEG": (encoded(NUMBERS, "JPEG"), "is a JPEG inside"),
    "JPEG in TIFF": (encoded(NUMBERS, "TIFF", compression="jpeg"), "is a JPEG inside"),
    "colours": (encoded(EYE), "is coloured"),
    "white as 0": (encoded(NUMBERS, "TIFF").replace(*WHITE_IS_ZERO), "stores white as 0"),
    "halves": (encoded(NUMBERS.astype(np.float32) / 2, "TIFF"), "whole numbers"),
}


@pytest.mark.parametrize("name", MASKS)
def test_masks_have_the_numbers_that_they_store(name, tmp_path):
    from app.data.volumes.pairs import read_mask

    data, expected = MASKS[name]
    (tmp_path / "mask.png").write_bytes(data)
    assert np.array_equal(read_mask(tmp_path / "mask.png"), expected)


@pytest.mark.parametrize("name", BAD_MASKS)
def test_masks_whose_classes_are_not_known_are_refused(name, tmp_path):
    from app.data.volumes.pairs import read_mask

    data, says = BAD_MASKS[name]
    (tmp_path / "mask.png").write_bytes(data)
    with refused("mask.png", says):
        read_mask(tmp_path / "mask.png")


def test_a_palette_next_to_colours_of_classes(tmp_path):
    """Its numbers count where its colours agree or mean nothing; its colours where all of them are of classes."""
    from app.data.volumes.pairs import read_mask

    file = tmp_path / "mask.png"
    file.write_bytes(palette_of(NUMBERS))
    for colours, expected in (
        (PALETTE, NUMBERS),  # as VOC stores masks
        (PALETTE[::-1], 2 - NUMBERS),  # a coloured mask that was stored with few colours
        (PALETTE + np.uint8(5), NUMBERS),  # a palette for the eye alone
    ):
        assert np.array_equal(read_mask(file, colours), expected)
    with refused("mask.png", "under other numbers", "0 90 255 (number 2)"):
        read_mask(file, PALETTE[[1, 0]])
    greys = Image.fromarray(NUMBERS, "P")
    greys.putpalette(np.repeat(np.arange(256), 3).tolist())
    greys.save(file)
    assert np.array_equal(read_mask(file, np.array([(9, 9, 9), (0, 0, 0)], np.uint8)), NUMBERS)


def test_folders_and_broken_links_with_the_names_of_pictures_are_named(tmp_path):
    folder = seg_pair(tmp_path, encoded(GREY), encoded(NUMBERS), ("0.png", "0.png"))
    (folder / "image/5.png").mkdir()
    with refused("image/5.png is a folder, or a link that leads nowhere"):
        load_seg(folder)
    (folder / "image/5.png").rmdir()
    (folder / "label/7.png").symlink_to(folder / "gone.png")
    with refused("label/7.png is a folder, or a link that leads nowhere"):
        load_seg(folder)


def denied(*_, **__):
    raise PermissionError(13, "Permission denied")


def test_files_that_may_not_be_read_are_named_and_not_the_cache(tmp_path, monkeypatch):
    import nibabel

    from app.data.volumes.pairs import find_splits

    for label in ("a", "b"):
        written(tmp_path / "img", f"{label}/0", encoded(EYE))
    seg_pair(tmp_path / "seg", encoded(GREY), encoded(NUMBERS), ("0.png", "0.png"))
    seg_pair(tmp_path / "volumes", b"", b"", ("0.nii", "0.nii"))
    monkeypatch.setattr(pictures, "open", denied, raising=False)
    monkeypatch.setattr(nibabel, "load", denied)
    with refused("img/a/", "cannot be read: Permission denied"):
        by_img(tmp_path / "img", encoded(EYE))
    with refused("image/0.png", "cannot be read: Permission denied"):
        load_seg(tmp_path / "seg")
    with refused("image/0.nii", "cannot be read: Permission denied"):
        load_seg(tmp_path / "volumes")
    monkeypatch.setattr(Path, "exists", denied)
    with refused("--data.path here: cannot be read: Permission denied"):
        find_splits("--data.path", "here", "")


def test_columns_of_images_are_copied_and_not_decoded(tmp_path):
    from app.commands.predict.command import _open
    from app.commands.predict.tables import to_copy

    for name in ("one", "two"):
        written(tmp_path, name, encoded(EYE))
    (tmp_path / "one.png").write_bytes(b"damaged")
    kept = to_copy(_open(str(tmp_path), "train", "image-classification"), ("image",))
    assert [row["image"] for row in kept] == [
        {"bytes": None, "path": str(tmp_path / f"{name}.png")} for name in ("one", "two")
    ]


def test_formats_of_pictures_stand_in_one_list():
    """A reader with a list of its own would not know the next format."""
    owner = ROOT / "app/data/images/formats.py"
    for path in modules():
        lists = [
            node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Set | ast.Tuple | ast.List)
        ]
        named = [{word.value for word in each.elts if isinstance(word, ast.Constant)} for each in lists]
        assert path == owner or not any(len(words & formats.ENDINGS) > 1 for words in named), path
    assert {*formats.EXACT, *formats.LOSSY} < formats.ENDINGS


def test_pillow_knows_every_format():
    from PIL import Image

    assert set(Image.registered_extensions()) >= formats.ENDINGS
