"""Flags of the data, by kind of data. Importing this module loads none of the libraries that read data."""

import datetime
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from app.config import OnResume, setting
from app.errors import UserError


@dataclass
class TableData:
    """A table: where it comes from, and which of its rows are for evaluation."""

    # What a document is in txt files; only data that are texts to model have a flag for it. conll: they are CoNLL;
    # images: the data are images with classes; boxes: with boxes; parallel: files of one name and of other extensions
    # are columns of lines.
    txt = "file"
    # Only where there are scores, there is a flag for further sets.
    eval_sets = tuple[str, ...]()

    path: tuple[str, ...] = ("builtin:stdlib",)
    """Data to train on: builtin:NAME, the id of a data set on the Hub, a folder laid out like one, or csv, tsv, json,
    jsonl or parquet files. Files may be compressed (.csv.gz), and patterns such as 'part-*.csv' name several. In tsv
    files, quotes are read as in csv if they are balanced, otherwise as plain characters."""
    name: str = ""
    """Configuration of a data set that has several, such as sst2 of nyu-mll/glue. Default: the only one."""
    split: str = "train"
    """Split to train on, or a slice of one, such as train[:1000] or train[:10%]."""
    eval_split: str = ""
    """Split to evaluate on, or a slice of one. Default: the data's validation or test split, if it has one with the
    columns that is not trained on; else the rows that --data.holdout takes out of the training split."""
    eval_path: str = ""
    """Data to evaluate on: anything that --data.path takes. Default: --data.path, as --data.eval-split says."""
    columns: tuple[str, ...] = ()
    """Names of the columns of a csv or tsv file that has no header line, from left to right. Default: the header."""
    holdout: float = 0.1
    """Fraction of the training split that is held out for evaluation if the data has no split for it."""


@dataclass
class Streams:
    """Data that are read by chunks, from a disk or from elsewhere."""

    stream: Literal["auto", "true", "false"] = "auto"
    """Whether --data.path is read by chunks while training goes on, instead of being read as a whole before: shards of
    parquet, jsonl (also .gz and .zst) or tar files in the layout of WebDataset, by folder, pattern or URL (s3://,
    gs://, az://, https://, hf://). auto: URLs, tar files, and data that the disk of the cache has no room for."""
    window: int = setting(16, at_least=1)
    """Chunks, such as row groups of parquet files, whose rows are shuffled together for each micro-batch of a step when
    data are streamed. A larger window mixes rows better, and needs more cache."""
    sort_over: int = setting(1, at_least=1)
    """Number of micro-batches whose streamed texts are sorted by length together, to pad less. It must divide the
    micro-batches of a step. A process reads the rows of its whole group, so give at most what one machine computes in a
    step."""
    cache_gb: float = setting(16.0, on_resume=OnResume.ACCEPT)
    """GB of disk that chunks of streamed data may take on each machine."""
    # The file's name decides nothing. What it says is compared with the record of each checkpoint, by a rule of its own
    # (checkpoints/resume.py): other weights hold from there on, and sources that are gone or others are refused.
    mix: str = setting("", on_resume=OnResume.ACCEPT)
    """A YAML file that names several sources, with the weight of each in what is trained on, in place of --data.path.
    A run that is resumed may have another mix from there on."""
    # A run that a damaged chunk has ended may go on without it. No step before it would have been another one: each
    # sample has the weight that it had, and one that is missing counts from the step on that misses it.
    bad: Literal["stop", "skip"] = setting("stop", on_resume=OnResume.ACCEPT)
    """What to do with a chunk of streamed data that is still damaged when it is fetched again. stop: end the run. skip:
    leave out its rows, the same on every layout, and count them."""

    @property
    def skips(self) -> bool:
        """Tell whether rows of chunks that stay damaged are left out."""
        return self.bad == "skip"

    def streams(self, must: Callable[[], bool]) -> bool:
        """Tell whether --data.stream asks for data by chunks; `must` tells whether they can be read in no other way."""
        return self.stream == "true" or (self.stream == "auto" and must())


@dataclass
class EvalSets:
    """Further sets to evaluate on."""

    eval_sets: tuple[str, ...] = ()
    """Further data to evaluate on, each as NAME=PATH: the scores of hard=hard.csv are named eval-hard/accuracy and so
    on. Of data with several splits, the validation or test split is taken, or the one that NAME=PATH::SPLIT names."""


def today() -> str:
    """Return today's date, as --data.date takes it."""
    return datetime.date.today().isoformat()


@dataclass
class RunDate:
    """The date of a run."""

    date: str = setting("", on_resume=OnResume.ACCEPT, when_begun=today)
    """Date that a chat template writes where it asks for today's, as 2026-11-25. Default: the day on which the run
    begins, also when it is resumed or evaluated later."""


def in_words(date: str) -> str:
    """Say that a chat template writes a date, for the first lines of a run."""
    return f"the chat template writes a date: {date} (--data.date)"


def check_date(date: str) -> None:
    """Raise a UserError if --data.date is no date."""
    try:
        datetime.date.fromisoformat(date or today())
    except ValueError:
        raise UserError(f"--data.date {date}: give a date as year-month-day, such as {today()}") from None


@dataclass
class Classes:
    """The classes of labels."""

    classes: tuple[str, ...] = ()
    """Classes, in the order of the model's outputs. Default: those of the training data, in the order of its ClassLabel
    or sorted."""


@dataclass
class TextData(Streams, Classes, EvalSets, TableData):
    """Texts and their labels: where they come from, and which columns hold them."""

    path: tuple[str, ...] = ("builtin:stdlib",)
    """Data to train on: builtin:NAME, the id of a data set on the Hub, a folder laid out like one, or csv, tsv, json,
    jsonl or parquet files. Files may be compressed (.csv.gz), and patterns such as 'part-*.csv' name several. In tsv
    files, quotes are read as in csv if they are balanced, otherwise as plain characters. Shards, also at a URL, can be
    streamed (--data.stream)."""
    text: tuple[str, ...] = ("text",)
    """Column of the text, or the two columns of a pair of texts."""
    label: tuple[str, ...] = ("label",)
    """Column of the label: integers or strings (one class for each row), lists of them (any number of classes for each
    row) or floats (regression; or classes, if they are few whole numbers). Or several columns of 0 and 1, one for each
    class."""
    problem: Literal["auto", "single_label_classification", "multi_label_classification", "regression"] = "auto"
    """Kind of problem, by its name in transformers. auto: decided by the type of the labels."""
    txt: Literal["file", "table"] = "file"
    """How txt files are read. file: as plain text, which has no labels; table: as csv, or as tsv if tabs part the
    values of the first line."""
    max_length: int = setting(128, at_least=0)
    """Tokens of the longest text. Longer texts are cut there, and the first line of output says how many."""
    pad_to_multiple_of: int = setting(1, at_least=0)
    """Texts of a micro-batch are padded to a multiple of this number of tokens, so that a compiled model sees few
    shapes."""


@dataclass
class TagData(Classes, EvalSets, TableData):
    """Sentences as lists of tokens, and a tag for each token."""

    txt = "conll"

    path: tuple[str, ...] = ("builtin:names",)
    """Data to train on: builtin:NAME, the id of a data set on the Hub, a folder laid out like one, json, jsonl or
    parquet files whose rows have a list of tokens and a list of tags, or CoNLL files (.conll, .conllu, .iob, .bio,
    .txt or without an extension) with a token and its tags in each line and an empty line after each sentence; or a
    folder with such files named train, dev and test. Files may be compressed (.conll.gz), and patterns such as
    'part-*.conll' name several."""
    columns: tuple[str, ...] = ()
    """Names of the columns of a CoNLL file, from left to right. Default: tokens for the first, tags for the last."""
    tokens: str = "tokens"
    """Column of the tokens."""
    tags: str = "tags"
    """Column of the tags: strings or integers, one for each token."""
    scheme: Literal["auto", "iob2", "iob1", "bioes", "plain"] = "auto"
    """iob2: B-name begins an entity, I-name goes on with it, and O is outside. iob1: I-name begins it too, and B-name
    only one right after another of that name, as in the first CoNLL files; becomes iob2. bioes: E-name ends it too, and
    S-name is one of a single token. plain: each token has a tag of its own, as parts of speech. auto: bioes, iob2 or
    iob1 if all tags are."""
    max_length: int = setting(256, at_least=0)
    """Sub-words of the longest sentence. Longer ones are cut there, and the first line of output says how many."""
    pad_to_multiple_of: int = setting(1, at_least=0)
    """Sentences of a micro-batch are padded to a multiple of this number of sub-words, so that a compiled model sees
    few shapes."""


@dataclass
class PreferenceData(Streams, RunDate, EvalSets, TableData):
    """Prompts with two answers each, of which one is preferred."""

    path: tuple[str, ...] = ("builtin:slips",)
    """Data to train on: builtin:NAME, the id of a data set on the Hub, a folder laid out like one, or csv, tsv, json,
    jsonl or parquet files. Files may be compressed (.csv.gz), and patterns such as 'part-*.csv' name several. Shards,
    also at a URL, can be streamed (--data.stream)."""
    prompt: str = "prompt"
    """Column of the prompt: a text, or a list of messages with role and content. Data without such a column, or with
    prompts that are texts next to conversations, have it in both answers: it is what these begin with alike."""
    chosen: str = "chosen"
    """Column of the preferred answer: a text, or a list of messages, which the tokenizer's chat template writes out."""
    rejected: str = "rejected"
    """Column of the other answer."""
    txt: Literal["file", "table"] = "file"
    """How txt files are read. file: as plain text, which has no answers; table: as csv, or as tsv if tabs part the
    values of the first line."""
    max_length: int = setting(512, at_least=0)
    """Tokens of the longest prompt and answer together. Longer prompts lose their beginning, until the longer answer
    fits. Pairs with an answer that leaves no room for a prompt are left out. A line at the start counts both; of pairs
    that are streamed, `missing_samples` in metrics.jsonl counts what a launch has left out."""
    pad_to_multiple_of: int = setting(1, at_least=0)
    """Answers of a micro-batch are padded to a multiple of this number of tokens, so that a compiled model sees few
    shapes."""


@dataclass
class PairData(Streams, EvalSets, TableData):
    """Texts, and what a model is to write for each."""

    txt = "parallel"

    path: tuple[str, ...] = ("builtin:signs",)
    """Data to train on: builtin:NAME, the id of a data set on the Hub, a folder laid out like one, csv, tsv, json,
    jsonl or parquet files, or parallel files: train.de and train.en, whose lines belong together and whose extensions
    name the columns. Of these, one file is enough, or the name without extension, or a folder with train, val and
    test. Files may be compressed (.csv.gz), and patterns such as 'part-*.csv' name several. Shards, also at a URL, can
    be streamed (--data.stream)."""
    source: str = "source"
    """Column of the text that the model reads. Languages of a column `translation` count as columns."""
    target: str = "target"
    """Column of the text that the model learns to write."""
    prefix: str = ""
    """Text before each source, as T5 was trained with: 'translate English to German: '."""
    max_source: int = setting(96, at_least=0)
    """Tokens of the longest source. Longer ones are cut there, and the first line of output says how many."""
    max_target: int = setting(32, at_least=0)
    """Tokens of the longest target. Longer ones are cut there."""
    pad_to_multiple_of: int = setting(1, at_least=0)
    """Sources and targets of a micro-batch are padded to a multiple of this number of tokens, so that a compiled model
    sees few shapes."""


@dataclass
class CorpusData(Streams, RunDate, EvalSets, TableData):
    """Texts to model: where they come from, which part of them is learnt, and how they become blocks of tokens."""

    path: tuple[str, ...] = ("builtin:stdlib-files",)
    """Data to train on: builtin:NAME, the id of a data set on the Hub, a folder laid out like one, or txt, csv, tsv,
    json, jsonl or parquet files. Files may be compressed (.txt.gz), and patterns such as 'part-*.txt' name several. If
    nothing else is given to evaluate on, the end of txt files is held out, and of other data rows drawn at random."""
    text: str = "text"
    """Column of the text."""
    prompt: str = ""
    """Column of the prompt, which the model reads but does not learn; needs --data.completion."""
    completion: str = ""
    """Column of what the model learns to write after the prompt."""
    messages: str = ""
    """Column of conversations: lists of messages with role and content, or from and value as in ShareGPT, which the
    tokenizer's chat template writes out. The model learns the assistant's messages."""
    txt: Literal["file", "blank-lines", "line", "table"] = "file"
    """What a document is in txt files. file: the whole file; blank-lines: the text between two blank lines; line: each
    line; table: each row of a table, which is read as csv, or as tsv if tabs part the values of the first line."""
    packing: Literal["documents", "concat"] = "documents"
    """How documents share a block. documents: attention stays inside a document, and positions restart at each.
    concat: they form one stream, in which the end-of-text token ends each document."""
    block: int = setting(256, at_least=0)
    """Tokens of a block. A block is one sample: all that the model sees at a time."""
    block_ramp: tuple[str, ...] = ()
    """Shorter sequences at the beginning, as STEP:TOKENS: 100:64 200:128 cuts each block into rows of 64 tokens until
    step 100, of 128 until step 200, and into none from then on. Every token is still learnt once an epoch."""


@dataclass
class Masking:
    """Masked language modelling: which tokens the model has to find from the tokens on both sides of them."""

    rate: float = 0.0
    """Share of the tokens of a block that are masked; 0.15 is usual. 0: none, the model predicts the next token."""
    span: float = 1.0
    """Mean length of what is masked at a piece, in tokens. 1: single tokens. Otherwise lengths are geometric, up to 10,
    and their mean is at most 5; 3.8 is SpanBERT's."""
    keep: float = 0.1
    """Share of the masked pieces whose tokens stay as they are; the model has to confirm them."""
    random: float = 0.1
    """Share of the masked pieces whose tokens are replaced by random ones. The others become the mask token."""


@dataclass
class ImageData(TableData):
    """Images: where they come from, and the size that they are brought to."""

    path: tuple[str, ...] = ("builtin:digits",)
    """Images to train on: builtin:digits; a folder with a subfolder of images for each class, or with a folder for each
    split that has those inside; the id of a data set on the Hub; a folder laid out like one; or parquet files."""
    image: str = "image"
    """Column of the image: the bytes of an image file, or its path."""
    size: int = setting(0, at_least=0)
    """Height and width that images are brought to, in pixels. 0: the size that the pretrained model takes; from
    scratch, the longer side of the first image, but at least 32 and at most 224."""
    cache_gb: float = 16.0
    """Decoded images are kept on disk and memory-mapped if they take at most this many GB; otherwise they are decoded
    each time they are used."""


@dataclass
class ClassData(Streams, Classes, EvalSets, ImageData):
    """Images and their classes."""

    txt = "images"

    path: tuple[str, ...] = ("builtin:digits",)
    """Images to train on: builtin:digits; a folder with a subfolder of images for each class, or with a folder for each
    split that has those inside; the id of a data set on the Hub; a folder laid out like one; or parquet files. These,
    and tar files in the layout of WebDataset, can be streamed, also from a URL (--data.stream); columns of tar files
    are the endings of the files in them, such as --data.image jpg --data.label cls."""
    label: str = "label"
    """Column of the class: integers or strings."""
    cache_gb: float = setting(16.0, on_resume=OnResume.ACCEPT)
    """Decoded images are kept on disk and memory-mapped if they take at most this many GB; otherwise they are decoded
    each time they are used. Of streamed data, chunks on each machine's disk may take this many GB."""


@dataclass
class Augment:
    """Random changes of training images. They depend on the sample and the epoch, and not on the layout."""

    flip: float = 0.0
    """Probability of mirroring an image left to right: 0.5 for photographs, 0 for digits."""
    shift: float = 0.1
    """Largest shift in each direction, as a fraction of the image's size. The uncovered part is black."""
    zoom: float = 0.1
    """Largest change of scale: 0.1 draws scales from 0.9 to 1.1."""
    rotate: float = 10.0
    """Largest rotation in each direction, in degrees."""
    erase: float = 0.0
    """Probability of blanking a rectangle whose sides are a quarter to a half of the image's."""
    operations: int = setting(0, at_least=0)
    """RandAugment: how many of fourteen operations (contrast, sharpness, shear and so on) are applied to an image. 2 is
    usual; then give --augment.shift, --augment.zoom and --augment.rotate 0, which it has too."""
    magnitude: float = 9.0
    """RandAugment: how strong the operations are, from 0 to 30."""
    mixup: float = 0.0
    """Mix each image and its label with another one: both parameters of the beta distribution of the share. 0.2 is
    usual. 0: none. With --augment.cutmix too, each sample has one of the two."""
    cutmix: float = 0.0
    """Paste a piece of another image into each image, and mix the labels by its area; as --augment.mixup. 1 is
    usual."""


@dataclass
class BoxData(Classes, EvalSets, ImageData):
    """Images, and boxes around the objects in them."""

    txt = "boxes"

    path: tuple[str, ...] = ("builtin:scenes",)
    """Images to train on: builtin:scenes; a json file of COCO, or a folder with such files for each split; YOLO's
    data.yaml, or a folder with one or with the folders images and labels; a folder of Pascal VOC's xml files and their
    images; the id of a data set on the Hub; or json or parquet files with columns of images, boxes and classes."""
    boxes: str = "boxes"
    """Column of the boxes of an image, a list of lists, such as objects.bbox. Only for tables and Hub data sets."""
    label: str = "classes"
    """Column of the classes of an image's boxes: a list of integers or strings, such as objects.category. As
    --data.boxes."""
    box_format: Literal["corners", "size"] = "corners"
    """Numbers of a box, in pixels. corners: left, top, right, bottom. size: left, top, width, height. As
    --data.boxes."""
    bad_boxes: Literal["refuse", "mend"] = "refuse"
    """What happens to boxes that end outside their image, or have no area. refuse: the first one is named, and nothing
    is trained. mend: they are cut off at the image's edges, and those without an area are left out; numbers
    that are not finite are refused."""
    size: int = setting(0, at_least=0)
    """Height and width that images are brought to, in pixels, whatever their shape; a multiple of 32. 0: from scratch,
    the longer side of the first image, at most 640; for a pretrained model, its own, or 640 if it takes any."""


@dataclass
class BoxAugment:
    """Random changes of training images and their boxes. They depend on the sample and the epoch, and not on the
    layout. A box of which less than a quarter stays in the image is left out."""

    flip: float = 0.0
    """Probability of mirroring an image left to right: 0.5 for photographs, 0 for digits."""
    shift: float = 0.1
    """Largest shift in each direction, as a fraction of the image's size. The uncovered part is black."""
    zoom: float = 0.2
    """Largest change of scale: 0.2 draws scales from 0.8 to 1.2, and so crops, or shrinks."""
    rotate: float = 0.0
    """Largest rotation in each direction, in degrees. A box becomes the one around its turned corners."""
    erase: float = 0.0
    """Probability of blanking a rectangle whose sides are a quarter to a half of the image's."""
    colour: float = 0.2
    """Largest change of brightness and of contrast, as a fraction."""


@dataclass
class VolumeData:
    """Images with masks, in two or three dimensions: where they are, and the patches that are cut from them."""

    path: str = "builtin:grains"
    """Images to train on: builtin:grains; a folder that holds the folders image and label (or images and masks, or
    imagesTr and labelsTr; or leftImg8bit and gtFine with a folder for each city, as Cityscapes, whose labelIds are
    read); or a folder of images or a single image, whose masks --data.masks gives. PNG, TIFF (several pages are a
    volume) and NIfTI files are read. A mask has the name of its image, with any extension. A folder that holds the
    folders train and val has two splits; masks may also be in trainannot and valannot."""
    masks: str = ""
    """Folder of the masks, or a single mask. Default: the folder next to the images, see --data.path."""
    eval_path: str = ""
    """Images to evaluate on: anything that --data.path takes. Default: the folder val, else see --data.holdout."""
    eval_masks: str = ""
    """Masks of the images to evaluate on, as --data.masks."""
    eval_sets: tuple[str, ...] = ()
    """Further folders to evaluate on, each as NAME=FOLDER with images and masks in it: the scores of hard=hard/ are
    named eval-hard/dice and so on."""
    holdout: float = 0.2
    """Fraction of the images that is held out for evaluation if no others are given."""
    dims: Literal[2, 3] = 2
    """2: images, and the slices of volumes (pages of a TIFF file, along the last axis of a NIfTI file). 3: volumes."""
    patch: tuple[int, ...] = (64,)
    """Sides of the patches that the model sees, in voxels: one number for all sides, or one for each dimension."""
    patches_per_image: int = setting(4, at_least=0)
    """Patches cut from each image in an epoch, at random places. Each patch is a sample."""
    overlap: float = 0.25
    """Evaluation slides a window of the patch's size over whole images. This is the fraction of its side by which a
    window overlaps the next one."""
    augment: tuple[Literal["flip", "rotate", "intensity", "mirror", "scale"], ...] = ("flip", "rotate", "intensity")
    """Random changes of patches. flip: mirror along each axis; rotate: turn by 90 degrees in planes whose sides are
    equal; intensity: change brightness and contrast; mirror: along the last axis alone, left to right; scale: bring
    pieces of half to twice the size of a patch to its size. The flag without a value: no changes."""
    values: tuple[int, ...] = ()
    """Values of the masks that are classes; the model's outputs are in their order, the smallest first. Default: all
    that occur in the masks to train on."""
    names: tuple[str, ...] = ()
    """Names of the classes, in the order of their values in the masks. Default: the values."""
    classes: str = ""
    """File with a class in each line: `R G B name`, or its name alone. Lines are numbered from 0. Masks hold these
    numbers, or the colours. Default: the values that occur in the masks are the classes."""
    ignore: tuple[int, ...] = ()
    """Values of the masks that are no class, such as 255. Their voxels count neither in losses nor in scores."""


@dataclass
class GraphData(EvalSets):
    """A graph whose nodes are classified: where it is, and how many neighbours of a node are drawn."""

    path: str = "builtin:calls"
    """Graph to train on: builtin:calls; a folder with indptr.npy, indices.npy, features.npy and labels.npy (node v
    receives from indices[indptr[v]:indptr[v + 1]]; label -1: none), and perhaps train.npy, val.npy and test.npy (masks
    or numbers of nodes) and classes.txt (a name in each line); an .npz file like Planetoid's; or a table of edges with
    the columns source and target, with --data.nodes."""
    nodes: str = ""
    """Table of the nodes, where --data.path is a table of edges: label, perhaps id (default: the number of the row,
    from 0) and split (train, val, test and so on, or empty), and features in all other columns."""
    eval_path: str = ""
    """Graph to evaluate on: a folder or an .npz file, as --data.path, with the same classes (by name, where both have
    names). Default: nodes of the same graph."""
    eval_split: str = ""
    """Split to evaluate on. Default: the first of validation, valid, val, dev and test that the data have, else the
    nodes that --data.holdout takes, or all nodes with a label of --data.eval-path."""
    classes: tuple[str, ...] = ()
    """Names of the classes, in the order of the model's outputs. Default: those of the data, or their numbers."""
    holdout: float = 0.2
    """Fraction of the labelled nodes that is held out for evaluation if the data have no splits."""
    undirected: bool = True
    """Whether edges that are given one by one (npz files, tables) also go the other way."""
    fanout: tuple[int, ...] = (10, 5)
    """Neighbours drawn for each node, one number for each hop, the first for the nodes that are classified; the model
    has as many layers. -1: all; 0: none, which leaves a model of the node's own features."""
    eval_fanout: tuple[int, ...] = ()
    """The same in evaluations, in which draws are always the same. Default: all neighbours, where training has any."""
