"""Time exact mode against ordinary mode on a recipe's default job, in one process, in alternating blocks of steps.

    python -m benchmarks.exact [cls] [--threads 1] [--blocks 12] [--steps 10]
    python -m benchmarks.exact img --flags "--scratch.norm batch"
    python -m benchmarks.exact lm --blocks 0        # only count the launches of a step

Both runs are in this process and take turns, so that other work on the machine slows both alike. (On a GPU, exact mode
fixes kernels for the whole process; there, `benchmarks.gpu.speed exact-cls` uses a process for each mode.) First, the
launches of one silent step of each mode are counted (benchmarks/launches.py).
"""

import argparse
import importlib
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch

from app import Run, parse
from benchmarks.jobs import job_of
from benchmarks.launches import counted
from recipes import lm


def prepared(recipe: str, flags: list[str], run: Run) -> tuple:
    """Return a recipe's model, optimizer and batches, and its loss as a function of model and inputs."""
    if recipe != "lm":
        job = job_of(recipe, flags, False)
        model, optimizer = run.prepare(job.model, job.optim)
        rows = job.rows.rows
        lengths = getattr(rows, "lengths", None)
        return model, optimizer, run.batches(rows, job.collate, lengths, augment=job.rows.augment), job.loss
    from app.data.corpus.blocks import token_loss
    from app.tasks.language.attention import Attention

    config = parse(lm.Config, flags)
    blocks, _, tokenizer, _ = lm.load_data(config)
    plain = lm.build_model(config, tokenizer)
    collate = Attention.of(plain, config.attention, config.data.packing, run).collate
    model, optimizer = run.prepare(plain, config.optim)
    loss_of = partial(lm.loss_of, criterion=run.compiled(token_loss))
    return model, optimizer, run.batches(blocks, collate, weights=blocks.weights), loss_of


def steps(recipe: str, flags: list[str], exact: bool, threads: int, folder: Path) -> Iterator[None]:
    """Train the default job, pausing after every step."""
    config = parse(importlib.import_module(f"recipes.{recipe}").Config, flags)
    run = config.run
    run.dir, run.exact, run.threads, run.trackers = str(folder / str(exact)), exact, threads, ()
    run.epochs, run.save_every, run.eval_every, run.log_every = 100, 10**9, 10**9, 10
    with Run(config) as run:
        model, optimizer, batches, loss_of = prepared(recipe, flags, run)
        for batch in batches:
            for micro in batch.micros(model):
                run.backward(loss_of(model, micro.inputs), micro)
            run.step(optimizer)
            yield


def count(runs: dict[bool, Iterator[None]]) -> None:
    """Print the launches of a silent step, the third, in each mode."""
    totals = {}
    for exact, run in runs.items():
        next(run)
        next(run)
        with counted() as launches:
            next(run)
        totals[exact] = sum(launches.values())
    print(f"launches {totals[False]} a step, exact {totals[True]}: ratio {totals[True] / totals[False]:.3f}")


def main() -> None:
    """Print launches, seconds a step in each mode, and the median ratio of neighbouring blocks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", nargs="?", default="cls", choices=["cls", "lm", "img", "seg"])
    parser.add_argument("--flags", default="", help="of the recipe, in one text")
    parser.add_argument("--compile", action="store_true", help="both runs, by region, with inductor")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--blocks", type=int, default=12)
    parser.add_argument("--steps", type=int, default=10)
    options = parser.parse_args()
    if options.blocks and torch.cuda.is_available():
        sys.exit("on a GPU this only counts, with --blocks 0; time it with python -m benchmarks.gpu.speed exact-cls")
    if options.compile:
        os.environ |= {"ACCELERATE_DYNAMO_BACKEND": "INDUCTOR", "ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION": "true"}
    flags, modes = options.flags.split(), (False, True)
    with tempfile.TemporaryDirectory() as folder:
        runs = {exact: steps(options.recipe, flags, exact, options.threads, Path(folder)) for exact in modes}
        count(runs)
        seconds = {False: [], True: []}
        for block in range(options.blocks + 1 if options.blocks else 0):
            for exact in (False, True) if block % 2 else (True, False):
                start = time.perf_counter()
                for _ in range(options.steps):
                    next(runs[exact])
                if block:  # warm-up
                    seconds[exact].append((time.perf_counter() - start) / options.steps)
        for run in reversed(runs.values()):  # in reverse: each restores the settings that it found
            run.close()
    if options.blocks:
        show(seconds)


def show(seconds: dict[bool, list[float]]) -> None:
    """Print the seconds a step in each mode, and their ratios."""
    ratios = [on / off for on, off in zip(seconds[True], seconds[False], strict=True)]
    print(f"ordinary {statistics.median(seconds[False]) * 1e3:.1f} ms a step")
    print(f"exact    {statistics.median(seconds[True]) * 1e3:.1f} ms a step")
    spread = f"{len(ratios)} blocks, {min(ratios):.3f} to {max(ratios):.3f}"
    print(f"ratio    {statistics.median(ratios):.3f} ({spread})")


if __name__ == "__main__":
    main()
