"""Flags of the data, by kind of data; importing them loads none of the libraries that read it."""

from dataclasses import dataclass
from typing import Literal


@dataclass
class TableData:
    """A table: where it comes from, and which of its rows are for evaluation."""

    # What a document is in txt files; a flag where texts are read for their own sake.
    txt = "file"

    path: tuple[str, ...] = ("builtin:stdlib",)
    """builtin:NAME, a data set id of the Hub, a folder laid out like one, or csv, tsv, json, jsonl or parquet files (a
    .gz behind the name is fine, and so are patterns such as 'part-*.csv'). Quotes in tsv count as in csv where all of
    them balance, and are plain characters where they do not."""
    name: str = ""
    """Configuration of a data set that has several, such as sst2 of nyu-mll/glue."""
    split: str = "train"
    """Split to train on; a slice such as train[:1000] or train[:10%] is one too."""
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
class CorpusData(TableData):
    """Texts to model: where they come from, what of them is learnt, and how they become blocks of tokens."""

    path: tuple[str, ...] = ("builtin:stdlib-files",)
    """builtin:NAME, a data set id of the Hub, a folder laid out like one, or txt, csv, tsv, json, jsonl or parquet
    files (a .gz behind the name is fine, and so are patterns such as 'part-*.txt'). Of txt files the end is held
    out for evaluation, of all others rows here and there."""
    text: str = "text"
    """Column of the text."""
    prompt: str = ""
    """Column of what is given; with --data.completion. It is read, and not learnt."""
    completion: str = ""
    """Column of what is to be learnt after the prompt."""
    messages: str = ""
    """Column of conversations, lists of messages with role and content, written out by the tokenizer's chat template.
    What the assistant says is learnt."""
    txt: Literal["file", "blank-lines", "line"] = "file"
    """What a document is in txt files: all of a file, what stands between blank lines, or a line."""
    packing: Literal["documents", "concat"] = "documents"
    """How documents share a block. documents: attention does not cross from one to the next, and positions restart.
    concat: one stream, in which each ends with the end-of-text token."""
    block: int = 256
    """Tokens of a block, which is one sample: what the model sees at once."""


@dataclass
class ImageData(TableData):
    """Images: where they come from, and what they are brought to."""

    path: tuple[str, ...] = ("builtin:digits",)
    """builtin:digits, a folder of images with a subfolder for each class (or one for each split, with those inside), a
    data set id of the Hub, a folder laid out like one, or parquet files."""
    image: str = "image"
    """Column of the image: the bytes of a file, or its path."""
    size: int = 0
    """Height and width that images are brought to. 0: what the pretrained model takes; from scratch, the longer side of
    the first image, but at least 32 and at most 224."""
    cache_gb: float = 16.0
    """Decoded images are kept on disk, and mapped into memory, up to so many GB; more of them are decoded anew each
    time."""


@dataclass
class ClassData(ImageData):
    """Images and their classes."""

    label: str = "label"
    """Column of the class: integers or strings."""


@dataclass
class Augment:
    """Random changes of training images, the same for a sample in an epoch on any layout."""

    flip: float = 0.0
    """Probability of mirroring left and right. Photographs want 0.5, digits nothing."""
    shift: float = 0.1
    """Largest shift to each side, as a fraction of the size; what comes into view is black."""
    zoom: float = 0.1
    """Largest change of scale: 0.1 is from 0.9 to 1.1."""
    rotate: float = 10.0
    """Largest rotation to each side, in degrees."""
    erase: float = 0.0
    """Probability of blanking a rectangle, with sides of a quarter to a half of the image's."""


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
