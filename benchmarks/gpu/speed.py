"""Compare speed on a GPU: our run with a bare loop and Trainer on the same job, or exact mode with ordinary mode.

    python -m benchmarks.gpu.speed lm        # or cls, resnet, vit
    python -m benchmarks.gpu.speed exact-lm exact-cls --small

Each contestant has its own process, because exact mode fixes kernels for a whole process. A contestant's numbers are
printed as JSON when it has ended, and the comparison after the last one.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.rows import WARM_UP, about, against
from benchmarks.turns import take_turns
from benchmarks.works import ORDINARY, QUIET, Work

LM = (
    "--scratch.tokenizer byte --scratch.kv-heads {kv} --scratch.layers {layers} --scratch.width {width} "
    "--scratch.heads {heads} --data.block {block} --data.packing concat --run.global-batch 8 --run.micro-batch 2 "
    f"--sample-length 0 --optim.lr 3e-4 --optim.warmup 20 {QUIET} "
)
# Each contestant scores the held-out set at its end: a small one is enough.
LM_DATA = {False: "--data.holdout 0.02", True: "--data.split train[:60] --data.eval-split train[60:64]"}
LM_SIZES = {
    False: {"layers": 24, "width": 2048, "heads": 16, "kv": 8, "block": 4096},  # 1.1 billion weights
    True: {"layers": 2, "width": 64, "heads": 4, "kv": 2, "block": 64},
}
PEERS = {"bare": 0.98, "trainer": 1.0}
SMALL_SEG = " --data.patch 32 --data.patches-per-image 1 --data.holdout 0.05"
EXACT = {ORDINARY: 0.9}  # at most a tenth slower
NAMES = ("lm", "cls", "resnet", "vit", *(f"exact-{recipe}" for recipe in ("lm", "cls", "img", "gan", "seg")))


def main() -> None:
    """Measure rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="+", choices=NAMES)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--small", action="store_true")
    options = parser.parse_args()
    failed: list[str] = []
    for name in options.names:
        with tempfile.TemporaryDirectory() as folder:
            work = work_of(name, options.small, Path(folder))
            per_item = {}
            if name == "lm":
                product = matmul_flops(512 if options.small else 8192)
                torch.cuda.empty_cache()  # for the next contestants; no effect on a CPU
                say(row="lm", matmul_tflops=product / 1e12)
                per_item = {"flops": flops_per_token(LM_SIZES[options.small]), "most": product}
            failed += measure(work, options.rounds, Path(folder), **per_item)
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


def measure(work: Work, rounds: int, folder: Path, flops: float = 0.0, most: float = 0.0) -> list[str]:
    """Train all contestants of a row, and print their numbers; return the names of those that failed.

    Args:
        flops: of one item, forward and backward, for the utilisation of `most`.
    """
    contestants = work.contestants(folder / "run", WARM_UP + rounds * work.steps + 1)
    failed: list[str] = []
    for group in [[contestant] for contestant in contestants] if work.alone else [contestants]:
        start = time.monotonic()
        try:
            take_turns(group, rounds, work.steps, WARM_UP)
        except SystemExit as error:  # the error names one of them, and has its output
            print(error, flush=True)
            failed += [contestant.name for contestant in group]
        for contestant in group:
            if len(contestant.turns) == rounds:
                numbers = about(contestant)
                used = {"mfu": numbers["items_per_second"] * flops / most} if most else {}
                say(row=work.name, contestant=contestant.name, **numbers, **used, seconds=time.monotonic() - start)
    ours, *peers = contestants
    for peer in peers:
        if len(ours.turns) == len(peer.turns) == rounds:
            compared, target = against(ours, peer), work.targets[peer.name]
            say(row=work.name, peer=peer.name, **compared, target=target, reached=compared["ratio"] >= target)
    return failed


def say(**result) -> None:
    """Print a result as JSON."""
    print(json.dumps(result), flush=True)


def work_of(name: str, small: bool, folder: Path) -> Work:
    """Return a row; for pretrained image models, save their shape with random weights into a folder."""
    kind = {"bf16": True, "gpu": True, "sessions": 1}
    if name.startswith("exact-"):
        return exact_of(name.removeprefix("exact-"), small, folder)
    if name == "lm":
        # Three at once would take most of a GPU's memory. On a CPU, each compilation takes minutes.
        kind |= {"compiled": torch.cuda.is_available(), "alone": True}
        return Work(
            f"lm{'' if small else ' 1.1B'} bf16", "lm", LM.format(**LM_SIZES[small]) + LM_DATA[small], PEERS, 2, **kind
        )
    size, batch = (32, 8) if small else (224, 128)
    common = f"--run.global-batch {batch} --run.micro-batch {batch} --optim.warmup 20 {QUIET}"
    if name == "cls":
        layers, width, heads = (2, 64, 2) if small else (12, 768, 12)
        bert = f"--scratch.layers {layers} --scratch.width {width} --scratch.heads {heads} --optim.lr 1e-4"
        return Work(f"cls {'small' if small else 'BERT-base'} bf16", "cls", f"{bert} {common}", PEERS, 10, **kind)
    path = save_shape(name, folder / name, small, size)
    title = f"small {name}" if small else {"resnet": "ResNet-50", "vit": "ViT-B"}[name]
    return Work(f"img {title} bf16", "img", f"--data.size {size} {common} --model {path}", PEERS, 10, **kind)


def exact_of(recipe: str, small: bool, folder: Path) -> Work:
    """Return the row of what exact mode costs a recipe: as large as its other row, if any, or else its default size."""
    kind = {"bf16": True, "gpu": True, "sessions": 1}
    if recipe in ("cls", "img"):
        flags = work_of("cls" if recipe == "cls" else "vit", small, folder).flags
    elif recipe == "lm":
        flags = LM.format(**LM_SIZES[small]) + LM_DATA[small]
        kind["alone"] = True
    else:
        flags = f"--run.global-batch 8 --run.micro-batch 4 {QUIET}" if small else QUIET
        flags += SMALL_SEG if small and recipe == "seg" else ""
    return Work(f"{recipe} exact", recipe, f"{flags} --run.exact true", EXACT, 2 if recipe == "lm" else 10, **kind)


def save_shape(name: str, folder: Path, small: bool, size: int) -> Path:
    """Save the shape of ResNet-50 or ViT-B as a folder that --model takes."""
    from transformers import (
        ResNetConfig,
        ResNetForImageClassification,
        ViTConfig,
        ViTForImageClassification,
        ViTImageProcessorPil,
    )
    from transformers.utils import logging

    logging.disable_progress_bar()

    resnet = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1]} if small else {}
    vit = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    vit = {**vit, "image_size": 32, "patch_size": 8} if small else {}
    made = {
        "resnet": lambda: ResNetForImageClassification(ResNetConfig(**resnet)),
        "vit": lambda: ViTForImageClassification(ViTConfig(**vit)),
    }
    made[name]().save_pretrained(folder)
    ViTImageProcessorPil(size={"height": size, "width": size}).save_pretrained(folder)
    return folder


def flops_per_token(size: dict) -> float:
    """Return a language model's floating-point operations for one token, forward and backward."""
    from app.data.text.tokenizer import byte_tokenizer
    from app.rundir.throughput import Cost
    from app.tasks.from_scratch import LanguageScratch, decoder

    shape = LanguageScratch(
        layers=size["layers"], width=size["width"], heads=size["heads"], kv_heads=size["kv"], tokenizer="byte"
    )
    with torch.device("meta"):
        model = decoder(shape, byte_tokenizer(size["block"]), size["block"])
    return Cost.of(model, size["block"]).flops / size["block"]


def matmul_flops(side: int, repeats: int = 20) -> float:
    """Return the floating-point operations a second of a large bf16 matrix product: the median of `repeats`."""
    on_gpu = torch.cuda.is_available()
    timed, device = (_timed_on_gpu, "cuda") if on_gpu else (_timed_on_cpu, "cpu")
    a, b = (torch.randn(side, side, device=device, dtype=torch.bfloat16) for _ in range(2))
    times = [timed(lambda: a @ b) for _ in range(repeats + 3)]
    return 2 * side**3 / sorted(times[3:])[repeats // 2]


def _timed_on_gpu(call: Callable[[], object]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1000


def _timed_on_cpu(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
