"""Masks of images or volumes, by a model that recipes/seg.py has trained: a file for each, written one by one."""

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from app.errors import UserError

if TYPE_CHECKING:
    from app.commands.predict.command import Options
    from app.data.volumes.cases import Case

FOLDER = "masks"
OVERLAYS, PROBABILITIES = "overlays", "probabilities"


def main(options: "Options", model: str) -> int:
    """Write a mask for each image, in the order of their names, and return the exit status.

    Raises:
        UserError: there are no images, one does not fit the model, or the folder to write is not empty.
    """
    from app.data.volumes import pairs
    from app.tasks.segmentation import networks

    card = networks.checked_card(model)
    images = pairs.find_pictures("DATA", options.data)
    target = _target(options, images)
    network = _Network(model, card, options.batch)
    with tempfile.TemporaryDirectory(dir=target, prefix=".draft-") as draft:
        for done, image in enumerate(images):
            try:
                for name in _written(network, image, Path(draft), options):
                    (target / name).parent.mkdir(exist_ok=True)
                    Path(draft, name).rename(target / name)
            except UserError as error:
                written = f"; {done} of {len(images)} images have their masks: repeat with --overwrite" if done else ""
                raise UserError(f"{error}{written}") from error
    print(f"{target}: masks of {len(images):,} image{'s' * (len(images) != 1)}")
    return 0


def _target(options: "Options", images: list[Path]) -> Path:
    """Make the folder to write."""
    target = Path(options.to or FOLDER)
    if target.suffix in (".parquet", ".jsonl", ".csv"):
        raise UserError(f"--to {target}: masks are written into a folder: give its name")
    if target.exists() and not target.is_dir():
        raise UserError(f"--to {target} is a file: masks are written into a folder")
    if target.resolve() in {image.resolve().parent for image in images}:
        raise UserError(f"--to {target} has the images themselves: give another folder")
    if target.is_dir() and any(target.iterdir()) and not options.overwrite:
        raise UserError(
            f"--to {target} is not empty: give another folder, or --overwrite to replace masks of the same names"
        )
    target.mkdir(parents=True, exist_ok=True)
    return target


class _Network:
    """A finished model, and how it takes images."""

    def __init__(self, folder: str, card: dict[str, Any], at_once: int):
        import torch

        from app.tasks.pretrained import check_installed
        from app.tasks.segmentation import networks

        check_installed("monai")
        self.card, self.at_once = card, at_once
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.model = networks.finished(folder).eval().to(self.device)
        self.values = np.array(card["values"], np.int64)
        self.dims = len(card["window"])

    def predict(self, case: "Case") -> tuple[np.ndarray, np.ndarray]:
        """Return the classes, [*sides], and the probability of each, float32 [classes, *sides]."""
        from functools import partial

        import torch

        from app.data.volumes.cases import Cases
        from app.tasks.segmentation.losses import classes_of
        from app.tasks.segmentation.networks import logits_of
        from app.tasks.segmentation.windows import sliding_window

        card = self.card
        window = tuple(card["window"])
        rows = Cases([case], self.values, card["classes"], card["channels"], window, card["overlap"])
        image = torch.from_numpy(rows[0]["image"][None]).to(self.device)
        with torch.inference_mode():
            logits = sliding_window(
                partial(logits_of, self.model), image, window, self.at_once, card["overlap"]
            ).float()
            second = logits.sigmoid()
            shares = torch.cat([1 - second, second], 1) if card["outputs"] == 1 else logits.softmax(1)
        return classes_of(logits)[0, 0].cpu().numpy(), shares[0].cpu().numpy()


def _case(file: Path, network: _Network) -> "Case":
    """Read an image as the recipe does."""
    from app.data.volumes.cases import Case
    from app.data.volumes.pairs import check_finite, read_image
    from app.data.volumes.volumes import measure

    image, axis = read_image(file)
    check_finite(image, file)
    if image.ndim - 1 < network.dims:
        raise UserError(f"{file} is an image of two dimensions, and the model takes volumes")
    if len(image) not in (1, network.card["channels"]):
        raise UserError(f"{file} has {len(image)} channels, and the model takes {network.card['channels']}")
    nothing = np.zeros(image.shape[1:], np.uint8)
    return Case(file.name, image, nothing, {**measure(image, nothing), "axis": axis})


def _written(network: _Network, file: Path, draft: Path, options: "Options") -> Iterator[str]:
    """Write what is asked for of one image into a draft folder, and yield the names of the files."""
    from app.data.volumes import mask_files
    from app.data.volumes.pairs import stem_of

    case = _case(file, network)
    if case.mask.ndim > network.dims:
        pairs, axis = zip(*map(network.predict, case.slices()), strict=True), case.about["axis"]
        classes, shares = (np.stack(part, where) for part, where in zip(pairs, (axis - 1, axis), strict=True))
    else:
        classes, shares = network.predict(case)
    name = mask_files.mask_name(file, case.mask.ndim == 3)
    colours = network.card["colours"]
    lookup = dict(zip(network.card["values"], colours, strict=True)) if colours else None
    mask_files.write_mask(draft / name, network.values[classes], file, lookup)
    yield name
    plain = stem_of(Path(name))
    if options.probabilities:
        (draft / PROBABILITIES).mkdir(exist_ok=True)
        mask_files.write_shares(draft / PROBABILITIES / f"{plain}.npy", shares, file)
        yield f"{PROBABILITIES}/{plain}.npy"
    if options.overlay:
        from PIL import Image

        from app.tasks.segmentation.panels import overlay

        (draft / OVERLAYS).mkdir(exist_ok=True)
        palette = np.array(colours, np.uint8) if colours else None
        picture = overlay(case.image, classes, len(network.values), palette)
        Image.fromarray(picture).save(draft / OVERLAYS / f"{plain}.png")
        yield f"{OVERLAYS}/{plain}.png"
