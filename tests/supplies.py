"""What the documents' commands name, in small: models, texts, images and volumes, by the names that stand there."""

import json
from pathlib import Path

import datasets
import nibabel
import numpy as np
from PIL import Image

# Writes a conversation as the model learns it: each turn closed by the end-of-text token.
CHAT = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}{{ eos_token }}{% endfor %}"


def lay_out(folder: Path) -> None:
    """Write all of it into a folder."""
    _write_models(folder)
    _write_texts(folder)
    _write_images(folder)


def _write_models(folder: Path) -> None:
    from transformers import (
        BertConfig,
        BertForMaskedLM,
        LlamaConfig,
        LlamaForCausalLM,
        ResNetConfig,
        ResNetForImageClassification,
        T5Config,
        T5ForConditionalGeneration,
        ViTImageProcessorPil,
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
    pieces["microsoft/resnet-18"] = (resnet, ViTImageProcessorPil(size={"height": 16, "width": 16}))
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
    (folder / "classes.txt").write_text("".join(f"{i} 0 {255 - i} class {i}\n" for i in range(12)))
    for split in ("train", "val"):
        for index in range(2):
            mask = random.integers(0, 12, (96, 128), dtype=np.uint8)
            for kind, array in {split: 20 * mask, f"{split}annot": mask}.items():
                (folder / "camvid" / kind).mkdir(parents=True, exist_ok=True)
                Image.fromarray(array).save(folder / "camvid" / kind / f"{index}.png")
    for index in range(3):
        mask = (random.random((64, 96, 96)) > 0.5).astype(np.uint8)
        for kind, array in {"image": 100 * mask, "label": mask}.items():
            file = folder / "volumes" / kind / f"{index}.nii.gz"
            file.parent.mkdir(parents=True, exist_ok=True)
            nibabel.save(nibabel.Nifti1Image(array, np.eye(4)), file)
