"""Measure the peak memory of each process that trains recipes/lm.py with copies (DDP) and with shards (FSDP2).

    python -m benchmarks.memory [--width 768] [--layers 12]

Each layout trains a few steps of a Llama in two processes on the CPU, without a save. The table shows the largest
resident set of a process, and its resident set after the third step. glibc keeps much of the memory that is freed, so
each layout also runs with an environment variable that makes it return blocks above one megabyte.
"""

import argparse
import itertools
import json
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil

from app import Run, parse
from app.data.corpus.blocks import token_loss
from recipes import lm

ROOT = Path(__file__).parent.parent

FLAGS = (
    "--scratch.tokenizer byte --data.block 128 --run.global-batch 2 --run.micro-batch 1 --run.steps 4 "
    "--run.save-every 1000 --run.trackers"
)


def train(words: list[str]) -> None:
    """Train in one of the processes, and print its peak in MB on a separate line."""
    from app.data.rows import stack

    config = parse(lm.Config, words)
    with Run(config) as run:
        blocks, _, tokenizer, _ = lm.load_data(config)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        model, optimizer = run.prepare(lm.build_model(config, tokenizer), config.optim)
        parameters = sum(p.numel() for p in model.parameters())
        for batch in run.batches(blocks, stack, weights=blocks.weights):
            for micro in batch.micros(model):
                run.backward(lm.loss_of(model, micro.inputs, token_loss), micro)
            run.step(optimizer)
            if run.steps_done == 3:
                peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
                held = psutil.Process().memory_info().rss / 1024
                numbers = {"before": before / 1024, "held": held / 1024, "peak": peak / 1024, "parameters": parameters}
                print(f"\n{json.dumps(numbers)}", flush=True)


RETURNING = {"MALLOC_MMAP_THRESHOLD_": "1000000"}


def launch(profile: str, words: list[str], environment: dict[str, str]) -> list[dict]:
    """Train under a profile, and return what each process printed."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file"]
        command += [str(ROOT / "accelerate_configs" / f"{profile}.yaml"), "-m", "benchmarks.memory", "child", *words]
        done = subprocess.run(
            [*command, "--run.dir", folder + "/run"],
            env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
            capture_output=True,
            text=True,
        )
    printed = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"before"')]
    if done.returncode or not printed:
        sys.exit(done.stdout + done.stderr)
    return printed


def main() -> None:
    """Print a line for each layout."""
    if sys.argv[1:2] == ["child"]:
        return train(sys.argv[2:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--layers", type=int, default=12)
    options = parser.parse_args()
    shape = f"--scratch.width {options.width} --scratch.layers {options.layers} --scratch.heads 12"
    lm.load_data(parse(lm.Config, FLAGS.split()))  # tokenize once, for all layouts
    for profile, environment in itertools.product(("ddp_cpu", "fsdp_cpu"), ({}, RETURNING)):
        processes = launch(profile, [*FLAGS.split(), *shape.split()], environment)
        peak, held, before = (max(process[name] for process in processes) for name in ("peak", "held", "before"))
        count = processes[0]["parameters"]
        allocator = "giving back" if environment else "as it is"
        print(f"{profile:<9} {count:,} parameters, {len(processes)} processes, allocator {allocator}: at most", end=" ")
        print(f"{peak:,.0f} MB each, {held:,.0f} MB after the third step, {before:,.0f} MB before there was a model")


if __name__ == "__main__":
    main()
