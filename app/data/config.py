"""Flags of the data, by kind of data; importing them loads none of the libraries that read it."""

from dataclasses import dataclass
from typing import Literal


@dataclass
class TableData:
    """A table: where it comes from, and which of its rows are for evaluation."""

    path: tuple[str, ...] = ("builtin:stdlib",)
    """builtin:NAME, a data set id of the Hub, a folder laid out like one, or csv, tsv, json, jsonl or parquet files (a
    .gz behind the name is fine, and so are patterns such as 'part-*.csv'). Quotes in tsv count as in csv where all of
    them balance, and are plain characters where they do not."""
    name: str = ""
    """Configuration of a data set that has several, such as sst2 of nyu-mll/glue."""
    split: str = "train"
    """Split to train on; a slice such as train[:1000] or train[:10%] is one too, except of builtin data."""
    eval_split: str = ""
    """Split to evaluate on, or a slice of one. Default: validation or test where there is one that is not trained on,
    else --data.holdout."""
    eval_path: str = ""
    """Data to evaluate on that lies elsewhere than --data.path: anything that --data.path takes."""
    columns: tuple[str, ...] = ()
    """Column names of a csv or tsv file without a header line, from left to right."""
    holdout: float = 0.1
    """Fraction of the training split that is held out for evaluation where the data has no split for it."""


@dataclass
class TextData(TableData):
    """Texts and their labels: where they come from and which columns hold them."""

    text: tuple[str, ...] = ("text",)
    """Column of the text, or the two columns of a pair of texts."""
    label: tuple[str, ...] = ("label",)
    """Column of the label: integers or strings (one class each), lists of them (any number of classes each) or floats
    (regression; classes where they are few whole numbers). Or several columns of 0 and 1, one for each class."""
    problem: Literal["auto", "single_label_classification", "multi_label_classification", "regression"] = "auto"
    """What the labels are for, as transformers calls it. auto: what the label's type says."""
    max_length: int = 128
    """Longest text in tokens; what is longer is cut there, and counted."""


@dataclass
class VolumeData:
    """Images with masks, in two or three dimensions: where they lie, and the patches that are cut from them."""

    path: str = "builtin:grains"
    """builtin:grains; a folder with the folders image and label (or images and masks, imagesTr and labelsTr); or a
    folder of images, or one image, whose masks --data.masks names. PNG, TIFF (one of several pages is a volume) and
    NIfTI are read. A mask has its image's name, whatever the extension. Folders train and val inside are two splits."""
    masks: str = ""
    """Folder of the masks, or one mask, where they do not lie beside the images."""
    eval_path: str = ""
    """Images to evaluate on: anything that --data.path takes."""
    eval_masks: str = ""
    """Their masks, where they do not lie beside them."""
    holdout: float = 0.2
    """Fraction of the images that is held out for evaluation where no others are given."""
    dims: Literal[2, 3] = 2
    """2: images, and volumes slice by slice (pages of a TIFF, the last axis of a NIfTI file). 3: volumes."""
    patch: tuple[int, ...] = (64,)
    """Sides of the patches that the model sees, in voxels: one number for all, or one for each dimension."""
    patches_per_image: int = 4
    """Patches cut from each image in an epoch, each elsewhere: a sample is a patch."""
    overlap: float = 0.25
    """Evaluation slides a window of the patches' size over whole images: the share of its sides by which it overlaps
    the next one."""
    augment: tuple[Literal["flip", "rotate", "intensity"], ...] = ("flip", "rotate", "intensity")
    """What else changes a patch: mirroring, turns by 90 degrees in planes whose sides are equal, brightness and
    contrast. Nothing after the flag: nothing."""
    names: tuple[str, ...] = ()
    """Names of the classes, in the order of their values in the masks. Default: the values."""
