"""One healthy set of data in each format that any recipe reads, with the file of it that tests damage."""

import contextlib
import gzip
import json
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import nibabel
import numpy as np
import yaml
from PIL import Image

from app.config import points
from app.config.needs import EVERYTHING
from app.data.config import CorpusData
from app.data.corpus import token_sets
from app.data.graphs import readers as graphs
from app.data.graphs.store import ARRAYS
from app.data.images.formats import ENDINGS, EXACT, LOSSY
from app.data.images.image_column import ImageColumn
from app.data.loading import open_source
from app.data.streams.chunk_cache import ChunkCache, folder_of
from app.data.streams.index import index_of
from app.data.streams.rows import StreamedRows
from app.data.streams.shards import find_shards
from app.data.tables.files import READERS
from app.data.volumes.class_file import read_classes
from app.data.volumes.nifti import ENDINGS as NIFTI
from app.data.volumes.pairs import read_image, read_mask
from app.launching.flags import read_yaml
from app.tasks.pretrained import load_model, load_processor, load_tokenizer
from app.tasks.segmentation.networks import read_card
from support.stream_shards import ROWS, WRITERS
from support.token_shards import write_tokens

HARMS = ("cut", "flipped", "empty", "folder", "denied")
LINES = [("red", "the first text"), ("green", "the second one"), ("red", "a third one"), ("blue", "the last text")]


@dataclass
class Format:
    """How to write data in a format, and how a recipe reads them."""

    write: Callable[[Path], Path]
    """Write into a folder; return the file to damage."""
    read: Callable[[Path, Path], Any]
    """Read, given that file and the folder; return what can be compared."""
    text: bool = False
    """It is a text of which a byte order mark must be no part."""
    unseen: frozenset[str] = frozenset()
    """Harms after which it may be right data of another content, or none, which nobody can know."""
    other_encodings: bool = False
    """The format itself says in which encoding it is."""


def _plain(table: Any) -> dict:
    return table.remove_columns([name for name in ("file", "lines") if name in table.column_names]).to_dict()


def _table(file: Path, folder: Path) -> Any:
    return _plain(open_source("--data.path", [str(file)]).tables["train"])


def _written(kind: str) -> bytes:
    rows = [{"label": label, "text": text} for label, text in LINES]
    comma = "\t" if kind == "tsv" else ","
    texts = {
        "csv": "\n".join(comma.join(row) for row in [("label", "text"), *LINES]) + "\n",
        "json": json.dumps(rows, indent=1),
        "jsonl": "".join(json.dumps(row) + "\n" for row in rows),
        "txt": "".join(f"{text}\n" for _, text in LINES),
        "conllu": "".join("\t".join([str(n), w, w, "X", *["_"] * 6]) + "\n" for n, w in enumerate("ab", 1)) + "\n",
    }
    texts |= {"tsv": texts["csv"]}
    texts |= dict.fromkeys(("conll", "iob", "bio"), "".join("one B-x\ntwo I-x\nthree O\n\n" for _ in range(9)))
    return texts[kind].encode()


def _of_table(kind: str, zipped: bool) -> Format:
    def write(folder: Path) -> Path:
        file = folder / f"rows.{kind}{'.gz' * zipped}"
        if kind == "parquet":
            datasets.Dataset.from_list([{"label": label, "text": text} for label, text in LINES]).to_parquet(file)
        else:
            file.write_bytes(gzip.compress(_written(kind)) if zipped else _written(kind))
        return file

    # A part of a file of lines, or one without compression that has other letters, may be right too.
    lines = {"csv", "tsv", "txt", "conll", "conllu", "iob", "bio"}
    unseen = {"cut"} if kind in lines and not zipped else {"flipped"} if kind == "parquet" else set()
    return Format(write, _table, kind != "parquet", frozenset(unseen))


def _in_folder(name: str, kind: str, txt: str = "file", named: bool = False) -> Format:
    def write(folder: Path) -> Path:
        (folder / name).write_bytes(_written(kind))
        return folder / name

    def read(file: Path, folder: Path) -> Any:
        return _plain(open_source("--data.path", [str(file if named else folder)], txt=txt).tables["train"])

    return Format(write, read, True, frozenset({"cut", "folder", "empty"}))  # a folder without a row is named itself


def _saved(name: str) -> Format:
    def write(folder: Path) -> Path:
        rows = [{"label": label, "text": text} for label, text in LINES]
        datasets.Dataset.from_list(rows).save_to_disk(folder / "saved")
        return folder / "saved" / name

    def read(file: Path, folder: Path) -> Any:
        return _plain(open_source("--data.path", [str(folder / "saved")]).tables["train"])

    # datasets reads the rows alone: what the two other files say is not used.
    unseen = {"flipped", "folder"} if name.endswith(".arrow") else set(HARMS)
    return Format(write, read, unseen=frozenset(unseen))


def _parallel() -> Format:
    def write(folder: Path) -> Path:
        for kind, column in zip(("de", "en"), zip(*LINES, strict=True), strict=True):
            (folder / f"rows.{kind}").write_text("".join(f"{line}\n" for line in column))
        return folder / "rows.en"

    def read(file: Path, folder: Path) -> Any:
        source = open_source("--data.path", [str(folder / "rows")], txt="parallel", used=("de", "en"))
        return source["train"].to_dict()

    return Format(write, read, True, frozenset({"folder"}))  # a folder is no file of a column, and the other is alone


def _picture(file: Path, mode: str = "RGB") -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (24, 32, 3)).astype(np.uint8)
    Image.fromarray(pixels).convert(mode).save(file)


def _sun_raster(file: Path) -> None:
    """Write what Pillow only reads: eight numbers of four bytes (32 x 24, 24 bits a pixel), and the pixels."""
    pixels = np.random.default_rng(0).integers(0, 256, 24 * 32 * 3).astype(np.uint8).tobytes()
    file.write_bytes(struct.pack(">8I", 0x59A66A95, 32, 24, 24, len(pixels), 1, 0, 0) + pixels)


def _photoshop(file: Path) -> None:
    """Write what Pillow only reads: a header (RGB of 8 bits), three empty sections, and plane after plane."""
    planes = np.random.default_rng(0).integers(0, 256, 3 * 24 * 32).astype(np.uint8).tobytes()
    header = struct.pack(">4sH6xHIIHH", b"8BPS", 1, 3, 24, 32, 8, 3)
    file.write_bytes(header + struct.pack(">3IH", 0, 0, 0, 0) + planes)


_WRITERS: dict[str, Callable[[Path], None]] = {
    ".ras": _sun_raster,
    ".psd": _photoshop,
    ".xbm": lambda file: _picture(file, "1"),
}


def _image(ending: str) -> Format:
    def write(folder: Path) -> Path:
        _WRITERS.get(ending, _picture)(folder / f"a{ending}")
        return folder / f"a{ending}"

    def read(file: Path, folder: Path) -> Any:
        table = datasets.Dataset.from_dict({"image": [str(file)]})
        return np.asarray(ImageColumn(table, "image").read(0)).tolist()

    return Format(write, read, unseen=frozenset() if ending == ".png" else frozenset({"flipped"}))


def _volume(ending: str, mask: bool = False) -> Format:
    def write(folder: Path) -> Path:
        file = folder / f"a{ending}"
        if ending in NIFTI:
            values = np.random.default_rng(0).integers(0, 3 if mask else 999, (24, 24, 16)).astype(np.int16)
            nibabel.save(nibabel.Nifti1Image(values, np.eye(4)), file)
        else:
            _picture(file, "L" if mask else "RGB")
        return file

    def read(file: Path, folder: Path) -> Any:
        return read_mask(file).tolist() if mask else read_image(file)[0].tolist()

    return Format(write, read, unseen=frozenset() if ending in (".nii.gz", ".png") else frozenset({"flipped"}))


def _boxes(layout: str, name: str, unseen: frozenset[str], **more: bool) -> Format:
    def write(folder: Path) -> Path:
        LAYOUTS[layout](folder)
        return folder / name

    def read(file: Path, folder: Path) -> Any:
        tables = open_source("--data.path", [str(folder)], txt="boxes").tables
        return {
            split: (table.remove_columns(["image", "file"]).to_dict(), table.features["classes"].feature)
            for split, table in tables.items()
        }

    return Format(write, read, True, unseen, **more)


def _coco(folder: Path) -> None:
    _picture(folder / "a.png")
    (folder / "train.json").write_text(
        json.dumps(
            {
                "images": [{"id": 1, "file_name": "a.png", "width": 32, "height": 24}],
                "categories": [{"id": 3, "name": "cat"}],
                "annotations": [{"id": 1, "image_id": 1, "category_id": 3, "bbox": [1, 2, 10, 12]}],
            }
        )
    )


def _yolo(folder: Path, described: bool = True) -> None:
    for inner in ("images/train", "labels/train"):
        (folder / inner).mkdir(parents=True)
    _picture(folder / "images/train/a.png")
    (folder / "labels/train/a.txt").write_text("0 0.5 0.5 0.25 0.25\n1 0.25 0.25 0.25 0.25\n")
    if described:
        (folder / "list.txt").write_text("images/train/a.png\n")
        (folder / "data.yaml").write_text(yaml.safe_dump({"train": "list.txt", "names": ["cat", "dog"]}))


def _yolo_with_names(folder: Path, name: str = "classes.txt") -> None:
    _yolo(folder, described=False)
    (folder / name).write_text("cat\ndog\n")


def _voc(folder: Path) -> None:
    for inner in ("Annotations", "JPEGImages", "ImageSets/Main"):
        (folder / inner).mkdir(parents=True)
    _picture(folder / "JPEGImages/a.png")
    box = "".join(
        f"<{side}>{number}</{side}>"
        for side, number in zip(("xmin", "ymin", "xmax", "ymax"), (1, 2, 11, 9), strict=True)
    )
    size = "<size><width>32</width><height>24</height><depth>3</depth></size>"
    text = f"<annotation><filename>a.png</filename>{size}<object><name>cat</name><bndbox>{box}</bndbox></object>"
    (folder / "Annotations/a.xml").write_text(f"{text}</annotation>\n")
    _picture(folder / "JPEGImages/b.png")
    (folder / "Annotations/b.xml").write_text(f"{text.replace('a.png', 'b.png')}</annotation>\n")
    (folder / "ImageSets/Main/train.txt").write_text("a\nb\n")


LAYOUTS: dict[str, Callable[[Path], None]] = {
    "coco": _coco,
    "yolo": _yolo,
    "yolo with classes.txt": _yolo_with_names,
    "yolo with obj.names": lambda folder: _yolo_with_names(folder, "obj.names"),
    "voc": _voc,
}


def _arrays(folder: Path) -> None:
    np.save(folder / "indptr.npy", np.array([0, 1, 3, 4, 4]))
    np.save(folder / "indices.npy", np.array([1, 0, 2, 1]))
    np.save(folder / "features.npy", np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32))
    np.save(folder / "labels.npy", np.array([0, 1, 0, 1]))
    np.save(folder / "train.npy", np.array([0, 1]))
    (folder / "classes.txt").write_text("cat\ndog\n")


def _graph_file(name: str) -> Format:
    def write(folder: Path) -> Path:
        _arrays(folder)
        return folder / name

    unseen = {"flipped"} | ({"cut", "empty", "folder"} if name == "classes.txt" else set())
    if name == "train.npy":
        unseen |= {"folder"}
    return Format(
        write,
        lambda file, folder: _of_graph(graphs.read("--data.path", str(folder), "", True)),
        name == "classes.txt",
        frozenset(unseen),
    )


def _of_graph(graph: Any) -> tuple:
    splits = {name: nodes.tolist() for name, nodes in graph.splits.items()}
    return graph.names, splits, *(np.asarray(getattr(graph, name)).tolist() for name in ARRAYS)


def _npz() -> Format:
    def write(folder: Path) -> Path:
        numbers = np.random.default_rng(0)
        features, edges = numbers.normal(size=(90, 9)), numbers.integers(0, 90, (2, 20))  # the middle is a feature
        np.savez(folder / "graph.npz", x=features, y=numbers.integers(0, 2, 90), edge_index=edges)
        return folder / "graph.npz"

    return Format(write, lambda file, folder: _of_graph(graphs.read("--data.path", str(file), "", True)))


def _graph_table(name: str) -> Format:
    def write(folder: Path) -> Path:
        (folder / "edges.csv").write_text("source,target\n" + "n1,n2\nn2,n3\nn3,n1\n" * 9)
        rows = [f"n{i},{'cat' if i % 2 else 'dog'},{i / 10}\n" for i in range(1, 9)]
        (folder / "nodes.csv").write_text("id,label,x\n" + "".join(rows))
        return folder / name

    def read(file: Path, folder: Path) -> Any:
        return _of_graph(graphs.read("--data.path", str(folder / "edges.csv"), str(folder / "nodes.csv"), True))

    return Format(write, read, True, frozenset({"cut"}))


def _lines(name: str, text: str, read: Callable[[Path, Path], Any], unseen: frozenset[str]) -> Format:
    def write(folder: Path) -> Path:
        (folder / name).write_text(text)
        return folder / name

    return Format(write, read, True, unseen)


def _model(name: str, part: str, unseen: frozenset[str] = frozenset({"flipped"})) -> Format:
    def write(folder: Path) -> Path:
        _save_model(folder, part)
        return folder / name

    return Format(write, lambda file, folder: _MODELS[part](str(folder)), unseen=unseen)


def _save_model(folder: Path, part: str) -> None:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import BertConfig, BertForSequenceClassification, PreTrainedTokenizerFast, ViTImageProcessorPil

    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
    BertForSequenceClassification(BertConfig(vocab_size=9, **sizes)).save_pretrained(folder)
    words = Tokenizer(WordLevel({"[PAD]": 0, "[UNK]": 1, "a": 2, "b": 3, "c": 4}, unk_token="[UNK]"))
    PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]", unk_token="[UNK]").save_pretrained(folder)
    ViTImageProcessorPil(size={"height": 8, "width": 8}).save_pretrained(folder)
    if part == "seg":
        (folder / "network.json").write_text(json.dumps({"classes": ["a", "b"]}))


def _weights(folder: str) -> Any:
    from transformers import AutoModelForSequenceClassification

    model = load_model(AutoModelForSequenceClassification, folder)
    return {name: value.tolist() for name, value in model.state_dict().items()}


_MODELS: dict[str, Callable[[str], Any]] = {
    "weights": _weights,
    "tokenizer": lambda folder: load_tokenizer(folder, 8)("a a")["input_ids"],
    "processor": lambda folder: load_processor(folder).to_dict(),
    "seg": read_card,
}


def _stream(kind: str) -> Format:
    def write(folder: Path) -> Path:
        file = folder / f"a.{kind}"
        WRITERS[kind](file, ROWS)
        return file

    def read(file: Path, folder: Path) -> Any:
        index = index_of("--data.path", str(file), find_shards("--data.path", str(file)))
        with contextlib.closing(ChunkCache("--data.path", index, folder_of(index), 1 << 30)) as chunks:
            rows = StreamedRows(index, chunks, window=1)
            return rows.__getitems__(range(len(rows)))

    unseen = frozenset({"flipped"}) if kind in ("parquet", "tar") else frozenset()
    return Format(write, read, text=kind == "jsonl", unseen=unseen)


def _tokens(name: str) -> Format:
    def write(folder: Path) -> Path:
        write_tokens(folder, [text for _, text in LINES] * 9)
        return folder / name

    def read(file: Path, folder: Path) -> Any:
        config = CorpusData(path=(str(folder),), block=8)
        tables = token_sets.load(config, ["text"], EVERYTHING)
        rows = [table[i]["targets"].tolist() for table in tables.sets.values() for i in range(len(table))]
        return rows, len(token_sets.own_tokenizer(tables.train, "bpe", 8))

    return Format(write, read)


NO_LABELS = frozenset({"cut", "empty", "folder"})
"""YOLO: an image without labels has no boxes."""

FORMATS: dict[str, Format] = {
    **{f"table{ending}": _of_table(ending[1:], False) for ending in READERS},
    **{f"table{ending}.gz": _of_table(ending[1:], True) for ending in READERS if ending != ".parquet"},
    **{f"folder of {kind}": _in_folder(f"train.{kind}", kind) for kind in ("csv", "tsv", "json", "jsonl", "txt")},
    "folder of conll": _in_folder("train.conll", "conll", "conll"),
    "conll without extension": _in_folder("train", "conll", "conll", named=True),
    **{f"saved {name}": _saved(name) for name in ("data-00000-of-00001.arrow", "state.json", "dataset_info.json")},
    "parallel": _parallel(),
    **{f"image{ending}": _image(ending) for ending in sorted(ENDINGS)},
    **{f"volume{ending}": _volume(ending) for ending in (*NIFTI, *EXACT, *LOSSY)},
    **{f"mask{ending}": _volume(ending, mask=True) for ending in (*NIFTI, *EXACT)},
    **{f"stream {kind}": _stream(kind) for kind in WRITERS},
    **{f"tokens {name}": _tokens(name) for name in ("train-00000.parquet", "tokens.json", "tokenizer/tokenizer.json")},
    "coco": _boxes("coco", "train.json", frozenset({"empty", "folder"})),
    "yolo data.yaml": _boxes("yolo", "data.yaml", frozenset({"cut", "empty", "folder"}), other_encodings=True),
    "yolo list": _boxes("yolo", "list.txt", frozenset({"cut", "folder", "empty"})),
    "yolo labels": _boxes("yolo", "labels/train/a.txt", NO_LABELS),
    "yolo classes.txt": _boxes("yolo with classes.txt", "classes.txt", NO_LABELS),
    "yolo obj.names": _boxes("yolo with obj.names", "obj.names", NO_LABELS),
    "voc xml": _boxes("voc", "Annotations/a.xml", frozenset(), other_encodings=True),
    "voc split": _boxes("voc", "ImageSets/Main/train.txt", frozenset({"cut", "empty"})),
    **{f"graph {name}.npy": _graph_file(f"{name}.npy") for name in (*ARRAYS, "train")},
    "graph classes.txt": _graph_file("classes.txt"),
    "graph npz": _npz(),
    **{f"graph {name}": _graph_table(name) for name in ("edges.csv", "nodes.csv")},
    "classes of masks": _lines(
        "classes.txt",
        "0 0 0 nothing\n255 0 0 iron\n0 255 0 rust\n",
        lambda file, folder: [getattr(part, "tolist", lambda p=part: p)() for part in read_classes(str(file))],
        frozenset({"cut"}),
    ),
    "config": _lines(
        "c.yaml", "run:\n  seed: 1\noptim:\n  lr: 0.1\n", lambda file, _: read_yaml("--config", str(file)), NO_LABELS
    ),
    "points": _lines(
        "points.txt", "0:0\n10%:1\n100%:0\n", lambda file, _: points.read((str(file),)), frozenset({"cut", "empty"})
    ),
    "model config.json": _model("config.json", "weights"),
    "model weights": _model("model.safetensors", "weights"),
    "model tokenizer.json": _model("tokenizer.json", "tokenizer"),
    "model tokenizer_config.json": _model("tokenizer_config.json", "tokenizer", frozenset({"flipped", "folder"})),
    "model preprocessor_config.json": _model("preprocessor_config.json", "processor"),
    "model network.json": _model("network.json", "seg", frozenset({"flipped", "folder"})),
}
