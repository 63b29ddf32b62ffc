"""NIfTI files: the one place that opens and writes them, and that knows where their voxels lie.

nibabel reads them, which is also what MONAI's LoadImage and Orientation use. Those give the same values, but uint16 as
int32, and need MONAI, whose import took 21 s where torch and nibabel took 7 s (two cores that did other work too).
"""

import gzip
import itertools
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from app.data.reading import reading
from app.errors import UserError, not_installed

if TYPE_CHECKING:
    from nibabel.nifti1 import Nifti1Image

ENDINGS = (".nii", ".nii.gz")
# Parts of a voxel by which an image and its mask may lie apart: headers are rounded.
APART = 0.1
AT_ONCE = 1 << 20
FIX = (
    "if the mask was drawn on the voxels of this image, save it with the image's header "
    "(nibabel.Nifti1Image(mask, image.affine, image.header)); otherwise resample it to the image"
)


def is_nifti(file: Path) -> bool:
    """Tell by its name whether a file is one of NIfTI."""
    return file.name.lower().endswith(ENDINGS)


def read_volume(file: Path) -> np.ndarray:
    """Read an image as [channels, *sides], turned to the closest canonical orientation (RAS+), and not resampled.

    Raises:
        UserError: it cannot be read, or is no image of numbers in two or three dimensions.
    """
    image = _opened(file, "image")
    array = _turned(image, _values(image, file, "image"))
    array = np.moveaxis(array, -1, 0) if array.ndim == 4 else array[None]
    flat = _flat_axis(image)
    array = array if flat is None else np.squeeze(array, 1 + flat)
    return array.astype(np.float32) if array.dtype.kind == "f" and array.dtype.itemsize > 4 else array


def read_numbers(file: Path) -> np.ndarray:
    """Read a mask as [*sides], turned as `read_volume` turns its image.

    Raises:
        UserError: it cannot be read, has several values for a voxel, or its header scales them.
    """
    image = _opened(file, "mask")
    slope, intercept = getattr(image.dataobj, "slope", 1), getattr(image.dataobj, "inter", 0)
    if (slope, intercept) != (1, 0):
        raise UserError(
            f"mask {file}: its header scales the values (by {slope:g}, and adds {intercept:g}), and classes are whole "
            "numbers: save it with an integer type and without scaling, for example mask.astype('uint8') with a header "
            "of that type"
        )
    values = _values(image, file, "mask")
    if values.ndim == 4:
        if values.shape[-1] != 1:
            raise UserError(f"mask {file} has {values.shape[-1]} values for each voxel: give it one, the voxel's class")
        values = values[..., 0]
    mask, flat = _turned(image, values), _flat_axis(image)
    return mask if flat is None else np.squeeze(mask, flat)


def as_stored(array: np.ndarray, image_file: Path) -> np.ndarray:
    """Turn an array [*sides] back to the axes of the file, which `read_volume` has turned."""
    from nibabel import orientations

    image = _opened(image_file, "image")
    flat = _flat_axis(image)
    whole = array if flat is None else np.expand_dims(array, flat)
    back = orientations.ornt_transform(orientations.axcodes2ornt(("R", "A", "S")), _orientation(image))
    stored = orientations.apply_orientation(whole, back)
    return stored[..., 0] if image.ndim == 2 else stored


def write_numbers(file: Path, mask: np.ndarray, image_file: Path) -> None:
    """Write a mask [*sides] that is turned as `read_volume` has turned its image, with the image's place in space."""
    import nibabel

    image = _opened(image_file, "image")
    smallest = np.uint8 if mask.min() >= 0 and mask.max() <= 255 else np.int32
    header: Any = image.header.copy()
    header.set_data_dtype(smallest)
    # These speak of the image's values.
    header.extensions.clear()
    header.set_intent("none")
    header["cal_min"] = header["cal_max"] = 0
    nibabel.save(type(image)(as_stored(mask, image_file).astype(smallest), image.affine, header), file)


class _Place(NamedTuple):
    """Where the voxels of a file lie in space."""

    stored: np.ndarray
    """From a voxel to millimetres, [4, 4], as it is stored; of the others, after the turn."""
    best: np.ndarray
    sform: np.ndarray | None
    qform: np.ndarray | None
    unit: str

    @property
    def is_known(self) -> bool:
        """Tell whether the header has an orientation."""
        return self.sform is not None or self.qform is not None

    def words(self) -> str:
        """Describe the place for a message."""
        import nibabel

        spacing = " x ".join(f"{side:.6g}" for side in nibabel.affines.voxel_sizes(self.stored))
        if not self.is_known:
            return f"has no orientation in its header (sform and qform codes are 0; spacing {spacing})"
        codes = "".join(nibabel.aff2axcodes(self.stored))
        origin = ", ".join(f"{value:.6g}" for value in self.stored[:3, 3] + 0.0)
        return f"is {codes}, spacing {spacing}, origin {origin}"


def check_place(image_file: Path, mask_file: Path, sides: tuple[int, ...]) -> None:
    """Refuse a mask whose voxels lie elsewhere than those of its image: orientation, spacing and origin must agree.

    Args:
        sides: of both, after their turn.

    Raises:
        UserError: they lie more than a tenth of a voxel apart, or only one of the files says where.
    """
    with_place = [is_nifti(file) for file in (image_file, mask_file)]
    if not any(with_place):
        return
    if not all(with_place):
        raise UserError(
            f"image {image_file} and its mask {mask_file}: one is NIfTI, which says where voxels lie, and the other a "
            "picture, whose rows and columns are other axes; save both as NIfTI with one header, or both as pictures"
        )
    image, mask = (_place(_opened(file, what)) for file, what in ((image_file, "image"), (mask_file, "mask")))
    told = f"image {image_file} {image.words()}; its mask {mask_file} {mask.words()}"
    if image.is_known != mask.is_known:
        raise UserError(f"{told}: {FIX}")
    if "unknown" not in (image.unit, mask.unit) and image.unit != mask.unit:
        raise UserError(f"{told}; the image's lengths are in {image.unit}, the mask's in {mask.unit}: {FIX}")
    both = [("sform", image.sform, mask.sform), ("qform", image.qform, mask.qform)]
    forms = [(name, one, other) for name, one, other in both if one is not None and other is not None]
    for name, one, other in forms or [("header", image.best, mask.best)]:
        if (apart := _apart(one, other, sides)) > APART:
            raise UserError(f"{told}. By the {name} of each, voxels lie up to {apart:.3g} voxels apart: {FIX}")


def _apart(one: np.ndarray, other: np.ndarray, sides: tuple[int, ...]) -> float:
    """Return by how many voxels the corners of two grids lie apart."""
    ends = [(0, max(side - 1, 1)) for side in (*sides, 1)[:3]]
    corners = np.array([(*corner, 1) for corner in itertools.product(*ends)], np.float64).T
    return float(np.abs(np.linalg.solve(one, other @ corners) - corners).max())


def _opened(file: Path, what: str) -> "Nifti1Image":
    """Open a file, whose values are still to be read."""
    try:
        import nibabel
    except ModuleNotFoundError:
        raise UserError(f"{file}: NIfTI files are read by nibabel; {not_installed('nibabel')}") from None
    with reading(what, file, Exception):  # nibabel has many of its own, and a damaged header raises anything
        image: Any = nibabel.load(file)
        affine: Any = getattr(image, "affine", None)
        sides = image.shape
    if not isinstance(image, nibabel.Nifti1Image):  # NIfTI-2 is one too
        raise UserError(f"{what} {file} is a {type(image).__name__}, and no NIfTI image")
    if len(sides) not in (2, 3, 4) or 0 in sides:
        size = " x ".join(map(str, sides))
        raise UserError(
            f"{what} {file} has the sides {size}: an image has 2 or 3 dimensions, and one more for its channels"
        )
    if not np.isfinite(affine).all() or not np.isfinite(_orientation(image)).all() or not np.linalg.det(affine):
        raise UserError(f"{what} {file}: its header gives voxels no place in space (affine {affine[:3].tolist()})")
    return image


def _values(image: "Nifti1Image", file: Path, what: str) -> np.ndarray:
    """Read all values: [x, y, z], and channels if there are any."""
    with reading(what, file, Exception):
        values = np.asanyarray(image.dataobj)
        if file.name.lower().endswith(".gz"):  # its checksum stands at its end, which nibabel leaves unread
            with gzip.open(file) as stream:
                while stream.read(AT_ONCE):
                    pass
    if values.dtype.kind not in "iuf":
        raise UserError(f"{what} {file} has values of type {values.dtype}: give one real number for each voxel")
    return values[..., None] if values.ndim == 2 else values


def _orientation(image: "Nifti1Image") -> np.ndarray:
    """Return for each stored axis the canonical one, and whether it is mirrored: [3, 2]."""
    from nibabel import orientations

    return orientations.io_orientation(image.affine)


def _turned(image: "Nifti1Image", values: np.ndarray) -> np.ndarray:
    from nibabel import orientations

    return orientations.apply_orientation(values, _orientation(image))


def _flat_axis(image: "Nifti1Image") -> int | None:
    """Return the axis across the only slice of an image of two dimensions, after the turn; None of a volume."""
    sides = (*image.shape, 1)[:3]
    single = next((axis for axis in (2, 1, 0) if sides[axis] == 1), None)
    return None if single is None else int(_orientation(image)[single, 0])


def _place(image: "Nifti1Image") -> _Place:
    from nibabel import orientations

    stored_sides = (*image.shape, 1)[:3]
    turn = orientations.inv_ornt_aff(_orientation(image), stored_sides)
    sform, qform = image.get_sform(coded=True)[0], image.get_qform(coded=True)[0]
    return _Place(
        image.affine,
        image.affine @ turn,
        None if sform is None else sform @ turn,
        None if qform is None else qform @ turn,
        image.header.get_xyzt_units()[0],
    )
