"""Measure on one NVIDIA GPU, without a network: speed beside bare loops and Trainer, saving, copying, and the laws.

    make bench-gpu
    python -m benchmarks.gpu [--only lm laws] [--rounds 8] [--out benchmarks/results]
    python -m benchmarks.gpu --small        # small shapes, on a CPU too: to see that all of it runs, not to measure

Of each part that is run, benchmarks/results/GPU.json gets the numbers, and GPU-*.txt what its command printed.
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from app.launcher import kill_tree
from app.machine import processor
from benchmarks.results import as_table, machine, slug
from benchmarks.rows import run_rows
from benchmarks.turns import ROOT, search_path
from benchmarks.works import QUIET, Work

LM = (
    "--scratch.tokenizer byte --scratch.kv-heads {kv} --scratch.layers {layers} --scratch.width {width} "
    "--scratch.heads {heads} --data.block {block} --data.packing concat --run.global-batch 8 --run.micro-batch 2 "
    f"--sample-length 0 --optim.lr 3e-4 --optim.warmup 20 {QUIET}"
)
LM_SIZES = {
    False: {"layers": 24, "width": 2048, "heads": 16, "kv": 8, "block": 4096},  # 1.1 billion weights
    True: {"layers": 2, "width": 64, "heads": 4, "kv": 2, "block": 64},
}
COMMANDS = {
    "saving": ["-m", "benchmarks.saving"],
    "copies": ["-m", "benchmarks.copies"],
    "laws": ["-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", "tests/laws/test_cuda.py"],
}
PEERS = {"bare": 0.98, "trainer": 1.0}
LIMIT = 900


def main() -> None:
    """Run what is asked for, and write what was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[], help="parts whose names contain one of these")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    if not on_gpu and not options.small:
        sys.exit("there is no GPU that torch can use: --small runs all of it on a CPU")
    device = torch.cuda.get_device_name() if on_gpu else processor()
    file = options.out / f"{slug(device)}{'-small' if options.small else ''}.json"

    def asked(name: str) -> bool:
        return not options.only or any(part in name for part in options.only)

    failed = [name for name in COMMANDS if asked(name) and not run_command(name, file, on_gpu)]
    with tempfile.TemporaryDirectory() as folder:
        chosen = [work for work in works(options.small, Path(folder)) if asked(work.name)]
        known = run_rows(chosen, options.rounds, file, machine())
    if on_gpu and asked("lm bf16"):
        add_utilisation(known["rows"]["lm bf16"], LM_SIZES[options.small])
        file.write_text(json.dumps(known, indent=1) + "\n")
        print(json.dumps({key: known["rows"]["lm bf16"][key] for key in ("matmul_flops", "mfu")}))
    print(as_table(known["rows"]))
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


def works(small: bool, folder: Path) -> list[Work]:
    """List the rows; pretrained shapes are saved with random weights into a folder."""
    shapes = save_shapes(folder, small)
    lm = LM.format(**LM_SIZES[small])
    bert = "--scratch.layers {} --scratch.width {} --scratch.heads {}".format(*((2, 64, 2) if small else (12, 768, 12)))
    size, batch = (32, 8) if small else (224, 128)
    cls = f"{bert} --run.global-batch {batch} --run.micro-batch {batch} --optim.lr 1e-4 --optim.warmup 20 {QUIET}"
    image = f"--data.size {size} --run.global-batch {batch} --run.micro-batch {batch} --optim.warmup 20 {QUIET}"
    kind = {"bf16": True, "gpu": True, "sessions": 1}
    compiled = torch.cuda.is_available()  # on a CPU that takes minutes, each time
    return [
        Work("lm bf16", "lm", lm, PEERS, 2, **kind, compiled=compiled),
        Work("cls BERT-base bf16", "cls", cls, PEERS, 10, **kind),
        *(
            Work(f"img {name} bf16", "img", f"{image} --model {path}", PEERS, 10, **kind)
            for name, path in shapes.items()
        ),
    ]


def save_shapes(folder: Path, small: bool) -> dict[str, Path]:
    """Save ResNet-50's and ViT-B's shapes as folders that --model takes; return them by name."""
    from transformers import (
        ResNetConfig,
        ResNetForImageClassification,
        ViTConfig,
        ViTForImageClassification,
        ViTImageProcessor,
    )
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()  # it would say that torchvision is not installed

    resnet = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1]} if small else {}
    vit = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    vit = {**vit, "image_size": 32, "patch_size": 8} if small else {}
    size = 32 if small else 224
    found = {}
    for name, model in {
        "ResNet-50": ResNetForImageClassification(ResNetConfig(**resnet)),
        "ViT-B": ViTForImageClassification(ViTConfig(**vit)),
    }.items():
        found[name] = folder / name
        model.save_pretrained(found[name])
        ViTImageProcessor(size={"height": size, "width": size}).save_pretrained(found[name])
    return found


def run_command(name: str, file: Path, on_gpu: bool) -> bool:
    """Run one of the other parts, show and keep what it prints, and tell whether it succeeded."""
    start = time.monotonic()
    environment = {**os.environ, "PYTHONPATH": search_path(), "HF_HUB_OFFLINE": "1", "CUDA_PARTS_ON_CPU": "1"}
    words = [sys.executable, *COMMANDS[name]]
    process = subprocess.Popen(
        words, cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    try:
        printed, _ = process.communicate(timeout=LIMIT)
    except subprocess.TimeoutExpired:
        kill_tree(process.pid)
        printed = f"{process.communicate()[0]}not ended after {LIMIT} s\n"
    text = f"$ python {' '.join(COMMANDS[name])}\n{printed}"
    print(f"{text}({time.monotonic() - start:.0f} s)\n", flush=True)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.with_name(f"{file.stem}-{name}.txt").write_text(text)
    return process.returncode == 0


def add_utilisation(row: dict, size: dict) -> None:
    """Say which share of the fastest matrix product on this device a language model's arithmetic reaches."""
    from transformers import LlamaForCausalLM

    from app.data.tokenizer import byte_tokenizer
    from app.scratch import DecoderScratch, decoder
    from app.speed import Cost

    shape = DecoderScratch(
        layers=size["layers"], width=size["width"], heads=size["heads"], kv_heads=size["kv"], tokenizer="byte"
    )
    with torch.device("meta"):
        model: LlamaForCausalLM = decoder(shape, byte_tokenizer(size["block"]), size["block"])
    per_token = Cost.of(model, size["block"]).flops / size["block"]
    row["matmul_flops"] = matmul_flops()
    row["mfu"] = {
        name: about["items_per_second"] * per_token / row["matmul_flops"]
        for name, about in {"samestep": row["samestep"], **row["peers"]}.items()
    }


def matmul_flops(side: int = 8192, repeats: int = 20) -> float:
    """Return the floating-point operations a second of a large bf16 matrix product, the median of `repeats`."""
    a, b = (torch.randn(side, side, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    times = []
    for _ in range(repeats + 3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        a @ b
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1000)
    return 2 * side**3 / sorted(times[3:])[repeats // 2]


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
