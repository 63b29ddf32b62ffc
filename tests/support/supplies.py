"""What the documents' commands name, in small: models, texts, images and volumes, by the names that stand there."""

import json
from pathlib import Path

import datasets
import nibabel
import numpy as np
from PIL import Image

from support.streamed_data import pictures

# Of a box in Pascal VOC's files.
SIDES = ("xmin", "ymin", "xmax", "ymax")
# Writes a conversation as the model learns it: each turn closed by the end-of-text token.
CHAT = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}{{ eos_token }}{% endfor %}"


def lay_out(folder: Path) -> None:
    """Write all of it into a folder."""
    _write_models(folder)
    _write_texts(folder)
    _write_images(folder)
    pictures(folder / "shards", "tar")
    _write_sources(folder)
    _write_graphs(folder)


def _write_models(folder: Path) -> None:
    from transformers import (
        BertConfig,
        BertForMaskedLM,
        LlamaConfig,
        LlamaForCausalLM,
        ResNetConfig,
        ResNetForImageClassification,
        SegformerConfig,
        SegformerForSemanticSegmentation,
        T5Config,
        T5ForConditionalGeneration,
        ViTImageProcessorPil,
        YolosConfig,
        YolosForObjectDetection,
        YolosImageProcessorPil,
    )

    from app.data.text.tokenizer import byte_tokenizer, train_pair_tokenizer, train_tokenizer

    tokenizer = train_tokenizer(["some words", "more words"], 270, 128)
    size = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
    bert = BertForMaskedLM(BertConfig(vocab_size=len(tokenizer), max_position_embeddings=128, **size))
    spoken = byte_tokenizer(1024)
    spoken.chat_template = CHAT
    llama = LlamaForCausalLM(LlamaConfig(vocab_size=len(spoken), max_position_embeddings=1024, **size))
    resnet = ResNetForImageClassification(ResNetConfig(embedding_size=8, hidden_sizes=[8, 8], depths=[1, 1]))
    pieces = {"bert-base-cased": (bert, tokenizer), "FOLDER": (llama, spoken)}
    shape = {"hidden_sizes": [8] * 4, "depths": [1] * 4, "num_attention_heads": [1] * 4, "decoder_hidden_size": 8}
    segformer = SegformerForSemanticSegmentation(SegformerConfig(**shape, num_labels=19))
    pieces["nvidia/segformer-b0-finetuned-ade-512-512"] = (segformer,)
    pieces["microsoft/resnet-18"] = (resnet, ViTImageProcessorPil(size={"height": 16, "width": 16}))
    boxes = {"image_size": [32, 32], "patch_size": 16, "num_detection_tokens": 4}
    yolos = YolosForObjectDetection(YolosConfig(**size, **boxes))
    pieces["hustvl/yolos-tiny"] = (yolos, YolosImageProcessorPil(size={"height": 32, "width": 32}))
    read = train_pair_tokenizer(["some words", "more words"], 270, 128)
    t5 = T5Config(vocab_size=len(read), d_model=8, d_kv=8, d_ff=8, num_layers=1, num_heads=1, decoder_start_token_id=0)
    pieces["google-t5/t5-small"] = (T5ForConditionalGeneration(t5), read)
    for name, parts in pieces.items():
        for part in parts:
            part.save_pretrained(folder / name)


def _write_texts(folder: Path) -> None:
    words = [f"{'buy' if i % 2 else 'see'} you at {i}" for i in range(40)]
    (folder / "spam.tsv").write_text("".join(f"{'spam' if i % 2 else 'ham'}\t{w}\n" for i, w in enumerate(words)))
    for name in ("book.txt", "text.txt"):
        (folder / name).write_text("".join(f"Chapter {w}.\n" for w in words) * 20)
    tasks = [{"question": f"{i} and 1?", "answer": f"{i + 1}"} for i in range(40)]
    chats = [{"messages": [{"role": "user", "content": w}, {"role": "assistant", "content": w.upper()}]} for w in words]
    for name, rows in {"tasks.jsonl": tasks, "chats.jsonl": chats}.items():
        (folder / name).write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    pairs = [{"prompt": w, "chosen": w.upper(), "rejected": f"{w}?"} for w in words]
    (folder / "pairs.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in pairs))
    tagged = ["".join(f"{w} X Y {'B-number' if w.isdigit() else 'O'}\n" for w in text.split()) for text in words]
    (folder / "entities").mkdir()
    for name in ("train.conll", "dev.conll", "entities/train", "entities/dev"):
        (folder / name).write_text("\n".join(tagged))
    (folder / "multi30k").mkdir()
    for name in (
        "train.de",
        "train.en",
        "multi30k/train.de",
        "multi30k/train.en",
        "multi30k/val.de",
        "multi30k/val.en",
    ):
        (folder / name).write_text("".join(f"{w}\n" for w in words))
    (folder / "SST-2").mkdir()
    rows = "".join(f"{word}\t{i % 2}\n" for i, word in enumerate(words))
    for split in ("train", "dev"):
        (folder / "SST-2" / f"{split}.tsv").write_text(f"sentence\tlabel\n{rows}")
    (folder / "SST-2" / "test.tsv").write_text("index\tsentence\n0\tsee you\n")
    pairs = datasets.Dataset.from_dict({"sentence1": words, "sentence2": words[::-1], "label": [0, 1] * 20})
    for split in ("train", "validation"):
        pairs.to_parquet(folder / f"nyu-mll/glue/mrpc/{split}-00000-of-00001.parquet")
    card = "---\nconfigs:\n- config_name: mrpc\n  data_files:\n"
    card += "".join(f"  - split: {split}\n    path: mrpc/{split}-*\n" for split in ("train", "validation"))
    (folder / "nyu-mll/glue/README.md").write_text(f"{card}---\n")


def _write_sources(folder: Path) -> None:
    """Write texts as shards, others as lines, a mix of both, and some to evaluate on; their classes are 0 to 2."""
    rows = [{"text": f"some words, {i}", "label": i % 3} for i in range(60)]
    for number in range(2):
        part = datasets.Dataset.from_list(rows[30 * number : 30 * number + 30])
        part.to_parquet(folder / "web" / f"part-{number}.parquet", batch_size=10)
    code = [{"title": "code", "content": row["text"], "label": row["label"]} for row in rows[:20]]
    for name, lines in (("code.jsonl", code), ("dev.jsonl", rows[:6])):
        (folder / name).write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    web = "{name: web, path: web, weight: 7, stream: true}"
    lines = '{name: code, path: code.jsonl, weight: 3, template: "{title}: {content}"}'
    (folder / "mix.yaml").write_text(f"sources:\n  - {web}\n  - {lines}\n")


def _write_images(folder: Path) -> None:
    random = np.random.default_rng(0)
    for index in range(40):
        file = folder / "photos" / ("cat" if index % 2 else "dog") / f"{index}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(random.integers(0, 256, (20, 20, 3), dtype=np.uint8)).save(file)
    for name in ("folder", "membrane/train", "membrane/val"):
        for index in range(4):
            mask = (random.random((96, 96)) > 0.5).astype(np.uint8)
            for kind, array in {"image": 100 * mask, "label": mask}.items():
                file = folder / name / kind / f"{index}.png"
                file.parent.mkdir(parents=True, exist_ok=True)
                Image.fromarray(array).save(file)
    for index in range(20):
        for kind in ("JPEGImages", "Annotations"):
            (folder / "voc" / kind).mkdir(parents=True, exist_ok=True)
        Image.fromarray(random.integers(0, 256, (40, 40, 3), dtype=np.uint8)).save(
            folder / f"voc/JPEGImages/{index}.png"
        )
        sides = "".join(f"<{side}>{value}</{side}>" for side, value in zip(SIDES, (2, 3, 20, 30), strict=True))
        thing = f"<object><name>{'cat' if index % 2 else 'dog'}</name><bndbox>{sides}</bndbox></object>"
        (folder / f"voc/Annotations/{index}.xml").write_text(f"<annotation>{thing}</annotation>")
    (folder / "classes.txt").write_text("".join(f"{i} 0 {255 - i} class {i}\n" for i in range(12)))
    for split in ("train", "val"):
        for index in range(2):
            mask = random.integers(0, 12, (96, 128), dtype=np.uint8)
            for kind, array in {split: 20 * mask, f"{split}annot": mask}.items():
                (folder / "camvid" / kind).mkdir(parents=True, exist_ok=True)
                Image.fromarray(array).save(folder / "camvid" / kind / f"{index}.png")
    for split in ("train", "val"):
        mask = np.array([1, 7, 23], np.uint8)[random.integers(0, 3, (48, 96))]
        for kind, end, array in (("leftImg8bit", "leftImg8bit", mask * 9), ("gtFine", "gtFine_labelIds", mask)):
            (folder / "cityscapes" / kind / split / "aachen").mkdir(parents=True)
            picture = Image.fromarray(array).convert("RGB" if kind == "leftImg8bit" else "L")
            picture.save(folder / "cityscapes" / kind / split / "aachen" / f"aachen_0_{end}.png")
    for index in range(3):
        mask = (random.random((64, 96, 96)) > 0.5).astype(np.uint8)
        for kind, array in {"image": 100 * mask, "label": mask}.items():
            file = folder / "volumes" / kind / f"{index}.nii.gz"
            file.parent.mkdir(parents=True, exist_ok=True)
            nibabel.save(nibabel.Nifti1Image(array, np.eye(4)), file)


def _write_graphs(folder: Path) -> None:
    edges = np.random.default_rng(0).integers(0, 40, (2, 120))
    features, labels = np.eye(40, 4, dtype=np.float32), np.arange(40) % 2
    splits = {"train": np.arange(30), "val": np.arange(30, 35), "test": np.arange(35, 40)}
    np.savez(folder / "cora.npz", edges=edges, x=features, labels=labels, **splits)
    (folder / "edges.csv").write_text("source,target\n" + "".join(f"{a},{b}\n" for a, b in edges.T))
    lines = "".join(f"{i % 2},{i},{i * i}\n" for i in range(40))
    (folder / "nodes.csv").write_text(f"label,a,b\n{lines}")
    (folder / "graph").mkdir()
    arrays = {"indptr": np.arange(41), "indices": np.arange(40)[::-1], "features": features, "labels": labels}
    for name, array in arrays.items():
        np.save(folder / "graph" / f"{name}.npy", array)
