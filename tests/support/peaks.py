"""Predict each recipe's peak on the CPU, then train it for three steps and measure: peaks.py OUT TEXTS."""

import json
import sys
import tempfile
import time
from pathlib import Path

from app import Run
from benchmarks import predicted
from benchmarks.works import QUIET
from laws.small import graph_file

ROOM = 1.3  # of what a micro-batch of 4 takes: another 4 have no room
FLAGS = {
    "cls": "--scratch.layers 2 --scratch.width 64 --data.path {texts} --run.micro-batch 8 --run.global-batch 32",
    "lm": "--scratch.layers 2 --scratch.width 64 --scratch.heads 2 --scratch.kv-heads 1 --scratch.vocab 1000 "
    "--data.split train[:300] --data.block 64 --run.micro-batch 4 --run.global-batch 16 --sample-length 0",
    "lm-chunked": "--scratch.layers 2 --scratch.width 64 --scratch.heads 2 --scratch.kv-heads 1 --scratch.vocab 1000 "
    "--data.split train[:300] --data.block 64 --run.micro-batch 4 --run.global-batch 16 --sample-length 0 "
    "--logits chunked",
    "tag": "--scratch.layers 2 --scratch.width 64 --data.max-length 128 --data.split train[:200] --run.micro-batch 8",
    "dpo": "--scratch.layers 2 --scratch.width 64 --scratch.heads 2 --scratch.vocab 1000 --data.split train[:200] "
    "--data.max-length 128 --run.micro-batch 4 --run.global-batch 16",
    "s2s": "--scratch.layers 2 --scratch.width 64 --scratch.vocab 1000 --data.split train[:200] --run.micro-batch 8 "
    "--generate.rows 0",
    "img": "--scratch.layers 1 --data.split train[:200] --run.micro-batch 8 --run.global-batch 16",
    "det": "--data.split train[:200] --run.micro-batch 8 --run.global-batch 16",
    "gan": "--data.split train[:200] --samples 32 --run.micro-batch 16 --run.global-batch 32",
    # Features that are few beside the activations: they are numpy's memory, which a plan counts and torch does not see.
    "graph": "--scratch.kind gat --scratch.width 128 --data.path {graph} --data.fanout -1 -1 --run.micro-batch 64 "
    "--run.global-batch 128",
    "seg": "--run.micro-batch 2 --run.global-batch 4",
}


def words_of(name: str, texts: str, folder: Path, micro_batch: int = 0) -> tuple[Path, list[str]]:
    """Return a recipe's file and its flags; more may follow the recipe's name."""
    graph = graph_file(folder / "graph.npz", nodes=600)
    flags = [*FLAGS[name].format(texts=texts, graph=graph).split(), *QUIET.split(), "--run.steps", "3"]
    flags += ["--run.save-async", "false", "--run.dir", str(folder / f"{name}-{time.monotonic_ns()}")]
    flags += ["--run.micro-batch", str(micro_batch)] if micro_batch else []
    return predicted.RECIPES / f"{name.partition('-')[0]}.py", flags


def predict(recipe: Path, flags: list[str], memory: float = 0.0) -> dict:
    """Return what a plan says of one recipe."""
    return predicted.predict(recipe, flags, "cpu", "fp32", memory)


def measure(recipe: Path, flags: list[str]) -> dict:
    """Return what training a recipe takes."""
    replaced = Run.batches, Run.due
    try:
        return predicted.measure(recipe, flags, "cpu", "fp32")
    finally:
        Run.batches, Run.due = replaced


def main(folder: Path, out: Path, texts: str) -> None:
    """Go through the recipes, and through what is suggested for one of them."""
    found = {}
    for name in FLAGS:
        words = words_of(name, texts, folder)
        found[name] = {**predict(*words), **measure(*words)}
    limit = ROOM * found["lm"]["peak"] / 1e9
    asked = predict(*words_of("lm", texts, folder), limit)
    for name in ("fits", "too_large"):
        micro_batch = asked[name][0]
        measured = measure(*words_of("lm", texts, folder, micro_batch))
        found[name] = {**measured, "micro_batch": micro_batch, "limit": limit * 1e9}
    out.write_text(json.dumps(found))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(Path(folder), Path(sys.argv[1]), sys.argv[2])
