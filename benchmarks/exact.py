"""Time exact mode against the ordinary mode on recipes/cls.py's default job: one process, blocks of steps in turn.

    python -m benchmarks.exact [--threads 1] [--blocks 12] [--steps 10]

Both runs live in this process and take turns, so that what else the machine does meets both alike.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from app import Run
from recipes import cls


def steps(exact: bool, threads: int, folder: Path) -> Iterator[None]:
    """Train the default job, pausing after every step."""
    from app.data.text import PadCollate

    config = cls.Config()
    run = config.run
    run.dir, run.exact, run.threads, run.trackers = str(folder / str(exact)), exact, threads, ()
    run.epochs, run.save_every, run.eval_every = 100, 10**9, 10**9
    with Run(config) as run:
        rows, _, labels, tokenizer, _ = cls.load_data(config)
        model, optimizer = run.prepare(cls.build_model(config, labels, tokenizer), config.optim)
        for batch in run.batches(rows, PadCollate.of(tokenizer), rows.lengths):
            for micro in batch.micros(model):
                run.backward(model(**micro.inputs).loss, micro)
            run.step(optimizer)
            yield


def main() -> None:
    """Print the seconds of a step in each mode, and the median of the ratios of neighbouring blocks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--blocks", type=int, default=12)
    parser.add_argument("--steps", type=int, default=10)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        runs = {exact: steps(exact, options.threads, Path(folder)) for exact in (False, True)}
        seconds = {False: [], True: []}
        for block in range(options.blocks + 1):
            for exact in (False, True) if block % 2 else (True, False):
                start = time.perf_counter()
                for _ in range(options.steps):
                    next(runs[exact])
                if block:  # the first one warms up
                    seconds[exact].append((time.perf_counter() - start) / options.steps)
        for run in runs.values():
            run.close()
    ratios = [on / off for on, off in zip(seconds[True], seconds[False], strict=True)]
    print(f"ordinary {statistics.median(seconds[False]) * 1e3:.1f} ms a step")
    print(f"exact    {statistics.median(seconds[True]) * 1e3:.1f} ms a step")
    spread = f"{len(ratios)} blocks, {min(ratios):.3f} to {max(ratios):.3f}"
    print(f"ratio    {statistics.median(ratios):.3f} ({spread})")


if __name__ == "__main__":
    main()
