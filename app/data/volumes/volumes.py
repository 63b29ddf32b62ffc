"""Images with masks: finding them, decoding them once into memory-mapped files, and splitting them."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from app.config.needs import EVERYTHING, Needs
from app.data.cache import cache_of, made_once, using_cache
from app.data.config import VolumeData
from app.data.tables.splits import drawn, named_sets
from app.data.volumes.cases import Case, Cases, Patches
from app.data.volumes.class_file import Classes, read_classes
from app.data.volumes.grains import NAMES, grains
from app.data.volumes.pairs import Pair, check_finite, check_sizes, find_splits, read_image, read_mask
from app.errors import UserError
from app.sampling.hashing import hash_of_bytes, key_of

# Part of the cache's key: raise it when what is stored changes.
FORMAT = 2
# Names of classes in the first lines of a run.
SHOWN = 12


def load(config: VolumeData, channels: int = 0, needs: Needs = EVERYTHING) -> tuple[Patches, dict[str, Cases], str]:
    """Load the patches to train on and the sets of images to evaluate on, of which the first has no name.

    The description has a line of numbers, a line of classes, and perhaps one of the choice of splits.

    Args:
        channels: channels that the model takes; 0: as many as the images have.
    """
    patch, classes = _patch(config), _listed(config)
    with using_cache():
        sets, builtin_code, note = _load_cases(config, None if classes is None else classes.colours, needs)
    train = sets.pop("train")
    there = {value for case in train for value in case.about["values"]}
    counted = (there if classes is None else set(range(len(classes.names)))) - set(config.ignore)
    values = np.array(sorted(set(config.values) or counted), np.int64)
    if classes is None:
        names, palette = config.names or builtin_code or tuple(map(str, values)), None
    else:
        names = tuple(classes.names[value] for value in values)
        palette = None if classes.colours is None else classes.colours[values]
    _check(train, [case for cases in sets.values() for case in cases], values, config, channels)
    channels = channels or len(train[0].image)

    def collected(cases: list[Case]) -> Cases:
        return Cases(cases, values, names, channels, patch, config.overlap, config.ignore, palette)

    held = len(sets[""])
    counts = f"{held} images to evaluate on" if train is sets[""] else f"{len(train)} training images, {held} held out"
    about = [
        f"{counts}; patches of {' x '.join(map(str, patch))}, {config.patches_per_image} an image",
        _say_classes(values, names) + _say_ignored(config, there, classes),
        *(f"evaluated too, as eval-{name}: {len(cases)} images" for name, cases in sets.items() if name),
    ]
    about += [note] if note else []
    patches = Patches(collected(train), config.patches_per_image, config.augment)
    return patches, {name: collected(cases) for name, cases in sets.items()}, "\n".join(about)


def _listed(config: VolumeData) -> Classes | None:
    """Return the classes that --data.classes lists, if it is given."""
    if config.classes and config.names:
        raise UserError("--data.classes and --data.names both name the classes: give one of them")
    if config.classes and config.values:
        raise UserError("--data.classes and --data.values both say what the classes are: give one of them")
    return read_classes(config.classes) if config.classes else None


def _say_classes(values: np.ndarray, names: Sequence[str]) -> str:
    said = [f"{v} {name}" if name != str(v) else name for v, name in zip(values, names, strict=True)]
    more = f" and {len(said) - SHOWN} more" if len(said) > SHOWN else ""
    return f"{len(values)} classes (value in the masks): {', '.join(said[:SHOWN])}{more}"


def _say_ignored(config: VolumeData, there: set[int], classes: Classes | None) -> str:
    """Name the ignored values, and those of them that are not there: they may be mistyped."""
    if not config.ignore:
        return ""
    names = dict(enumerate(classes.names if classes else ()))
    said = ", ".join(f"{value} {names[value]}" if value in names else str(value) for value in config.ignore)
    absent = [str(value) for value in config.ignore if value not in there]
    return f"; ignored: {said}" + (f" (no mask to train on has {', '.join(absent)})" if absent else "")


def _patch(config: VolumeData) -> tuple[int, ...]:
    """Return a patch's sides, one for each dimension."""
    written = " ".join(map(str, config.patch))
    if len(config.patch) not in (1, config.dims):
        raise UserError(f"--data.patch {written}: give one number, or {config.dims} (--data.dims {config.dims})")
    if not config.patch or min(config.patch) < 1:
        raise UserError(f"--data.patch {written}: sides are 1 voxel or more")
    if config.patches_per_image < 1:
        raise UserError(f"--data.patches-per-image {config.patches_per_image}: must be at least 1")
    if not 0 <= config.overlap < 1:
        raise UserError(f"--data.overlap {config.overlap}: must be at least 0 and below 1")
    return config.patch if len(config.patch) == config.dims else config.patch * config.dims


def _load_cases(
    config: VolumeData, colours: np.ndarray | None, needs: Needs
) -> tuple[dict[str, list[Case]], tuple[str, ...], str]:
    """Load the cases to train on, as `train`, and those to evaluate on, by the names of the sets.

    Args:
        colours: of the classes, if they have any.

    Returns:
        Also the names of the classes if they have any, and what the user should know of the choice of splits.
    """
    pairs_by_split: dict[str, list[Pair]]
    names: tuple[str, ...]
    if needs.skips_training_rows(config):
        cases, note = _to_evaluate(config, "--data.eval-path", config.eval_path, config.eval_masks, colours)
        return {"train": cases, "": cases, **_further_sets(config, colours, needs)}, (), note
    if config.path.startswith("builtin:"):
        if config.path != "builtin:grains":
            raise UserError(f"--data.path {config.path}: no such builtin data; there is builtin:grains")
        made = [Case(name, image[None], mask, measure(image[None], mask)) for name, image, mask in grains(config.dims)]
        pairs_by_split, splits, names, note = {"train": []}, {"train": made}, NAMES, ""
    else:
        (pairs_by_split, note), names = find_splits("--data.path", config.path, config.masks), ()
        if config.eval_path:
            pairs_by_split, note = {"train": pairs_by_split["train"]}, ""
        splits = {split: _of_dims(_decoded(pairs, colours), config.dims) for split, pairs in pairs_by_split.items()}
    trained = pairs_by_split["train"]
    if config.eval_path:
        flag, masks = "--data.eval-path", config.eval_masks
        splits["evaluation"], note = _to_evaluate(config, flag, config.eval_path, masks, colours, trained)
    if "evaluation" not in splits:
        splits = _held_out(splits["train"], config)
    further = _further_sets(config, colours, needs, trained)
    if only := needs.only_set:
        return {"train": splits["train"], "": further[only]}, names, ""
    return {"train": splits["train"], "": splits["evaluation"], **further}, names, note


def _further_sets(
    config: VolumeData, colours: np.ndarray | None, needs: Needs, trained: Sequence[Pair] = ()
) -> dict[str, list[Case]]:
    """Load the cases of --data.eval-sets, by the names of the sets."""
    sets, flag = named_sets(config.eval_sets), needs.set_flag
    if split := next((each.split for each in sets.values() if each.split), ""):
        raise UserError(f"{flag}: there is no split {split} of a folder: name the folder of its images")
    return {n: _to_evaluate(config, flag, each.path, "", colours, trained)[0] for n, each in sets.items()}


def _to_evaluate(
    config: VolumeData, flag: str, path: str, masks: str, colours: np.ndarray | None, trained: Sequence[Pair] = ()
) -> tuple[list[Case], str]:
    """Load the cases to evaluate on that a flag names, none of which is trained on."""
    other, note = find_splits(flag, path, masks)
    scored = other.get("evaluation", other["train"])
    files = {pair.image.resolve() for pair in trained}
    if same := [pair.image for pair in scored if pair.image.resolve() in files]:
        raise UserError(
            f"{flag} {path}: {same[0]} is trained on (--data.path {config.path}): give other images, or leave out the "
            "flag to have some held out"
        )
    return _of_dims(_decoded(scored, colours), config.dims), note


def _held_out(cases: list[Case], config: VolumeData) -> dict[str, list[Case]]:
    """Draw images to hold out: all slices of a volume, or single slices if there is only one volume."""
    if len(cases) < 2:
        raise UserError(f"--data.path {config.path} is one image: give images to evaluate on with --data.eval-path")
    volumes = list(dict.fromkeys(case.about["digest"] for case in cases))
    if len(volumes) == 1:
        volumes = cases
    out = drawn(len(volumes), config.holdout)
    chosen = {volume for volume, held in zip(volumes, out, strict=True) if held}
    key = (lambda case: case) if volumes is cases else (lambda case: case.about["digest"])
    return {
        "train": [case for case in cases if key(case) not in chosen],
        "evaluation": [case for case in cases if key(case) in chosen],
    }


def _of_dims(cases: list[Case], dims: int) -> list[Case]:
    """Cut volumes into slices if images of two dimensions are wanted."""
    for case in cases:
        if case.mask.ndim < dims:
            raise UserError(f"{case.name} is an image of two dimensions: use --data.dims 2")
    return [part for case in cases for part in (case.slices() if case.mask.ndim > dims else [case])]


def _decoded(pairs: list[Pair], colours: np.ndarray | None) -> list[Case]:
    """Decode files once: they are kept as memory-mapped arrays until they, or the colours of classes, change."""

    def decode(draft: Path) -> None:
        abouts = [_decode(pair, colours, draft / str(number)) for number, pair in enumerate(pairs)]
        (draft / "about.json").write_text(json.dumps(abouts))

    kind = f"volumes-{FORMAT}" if colours is None else f"volumes-{FORMAT}-{key_of(*colours.flatten())}"
    folder = made_once(cache_of([str(file) for pair in pairs for file in pair[1:]]) / kind, decode)
    cases = []
    for number, (pair, about) in enumerate(zip(pairs, json.loads((folder / "about.json").read_text()), strict=True)):
        image, mask = (np.load(folder / f"{number}-{kind}.npy", mmap_mode="r") for kind in ("image", "mask"))
        cases.append(Case(pair.name, image, mask, about))
    return cases


def _decode(pair: Pair, colours: np.ndarray | None, draft: Path) -> dict[str, Any]:
    (image, axis), mask = read_image(pair.image), read_mask(pair.mask, colours)
    check_sizes(pair, image.shape[1:], mask.shape)
    check_finite(image, pair.image)
    np.save(f"{draft}-image.npy", image)
    np.save(f"{draft}-mask.npy", mask)
    return {**measure(image, mask), "axis": axis}


def measure(image: np.ndarray, mask: np.ndarray) -> dict[str, Any]:
    """Return what must be known of a case before it is read: mean and deviation by channel, mask values, a hash."""
    channels = image.reshape(len(image), -1)
    deviation = channels.std(axis=1, dtype=np.float64)
    pieces = (piece for array in (image, mask) for piece in (f"{array.dtype} {array.shape}".encode(), array))
    return {
        "mean": channels.mean(axis=1, dtype=np.float64).tolist(),
        "deviation": np.where(deviation > 0, deviation, 1.0).tolist(),
        "values": np.unique(mask).tolist(),
        "digest": hash_of_bytes(pieces),
    }


def _check(train: list[Case], evaluation: list[Case], values: np.ndarray, config: VolumeData, channels: int) -> None:
    """Refuse images that one model cannot take together, and classes that it cannot learn."""
    first = train[0]
    for case in [*train, *evaluation]:
        if len(case.image) != len(first.image):
            raise UserError(
                f"{case.name} has {len(case.image)} channels, but {first.name} has {len(first.image)}: give all "
                "the same number"
            )
        if new := sorted(set(case.about["values"]) - {*values.tolist(), *config.ignore}):
            which = f"--data.classes {config.classes} has no line for" if config.classes else "no mask to train on has"
            which = f"is none of --data.values {' '.join(map(str, values))}" if config.values else which
            raise UserError(
                f"the mask of {case.name} has the value {new[0]}, which {which}; --data.ignore {new[0]} leaves its "
                "voxels out everywhere"
            )
    if channels and len(first.image) not in (1, channels):
        raise UserError(f"{first.name} has {len(first.image)} channels, and --model takes {channels}")
    if len(values) < 2:
        only = f"only the value {values[0]}" if len(values) else "no value"
        apart = f" apart from those of --data.ignore {' '.join(map(str, config.ignore))}" if config.ignore else ""
        raise UserError(f"all masks hold {only}{apart}: there is nothing to tell apart")
    if config.names and len(config.names) != len(values):
        raise UserError(
            f"--data.names {' '.join(config.names)}: the masks have {len(values)} values: {', '.join(map(str, values))}"
        )
