"""Measure the time and memory of a run's first batch: resumed at step 10^5, and from the start.

    python -m benchmarks.resume

Each case is a separate process: our plan on a map-style set of 10^9 synthetic samples, and accelerate's
`skip_first_batches` with a prepared, shuffling DataLoader, on sets that are small enough for it.
"""

import argparse
import json
import resource
import subprocess
import sys
import time

SAMPLES, STEP, BATCH, SMALLER = 10**9, 10**5, 64, (10**6, 10**7)


class Synthetic:
    """A data set whose samples are their own ids."""

    def __init__(self, samples: int):
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> int:
        return index


def ours(samples: int, step: int) -> None:
    """Load the first batch from a step on."""
    import torch

    from app.sampling.batch_plan import BatchPlan
    from app.training.feeding.loader import load

    plan = BatchPlan(samples, 10**7, BATCH, BATCH)
    next(load(plan, range(step, plan.steps), Synthetic(samples), torch.tensor, 0, 1, torch.device("cpu")))


def accelerates(samples: int, step: int) -> None:
    """Load the first batch from a step on."""
    from accelerate import Accelerator, skip_first_batches
    from torch.utils.data import DataLoader

    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(DataLoader(Synthetic(samples), batch_size=BATCH, shuffle=True))
    next(iter(skip_first_batches(loader, step) if step else loader))


def child(who: str, samples: int, step: int) -> None:
    """Print the seconds and bytes of a first batch, without the imports before it."""
    import accelerate  # noqa: F401

    from app.training.feeding import loader  # noqa: F401

    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter()
    {"samestep": ours, "accelerate": accelerates}[who](samples, step)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(json.dumps({"seconds": time.perf_counter() - start, "bytes": (peak - before) * 1024}))


def main() -> None:
    """Print a line for each case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--child", nargs=3)
    options = parser.parse_args()
    if options.child:
        who, *numbers = options.child
        return child(who, *map(int, numbers))
    cases = [("samestep", SAMPLES, step) for step in (0, STEP)]
    cases += [("accelerate", samples, min(STEP, samples // BATCH // 2)) for samples in SMALLER]
    for case in cases:
        words = [sys.executable, "-m", "benchmarks.resume", "--child", *map(str, case)]
        measured = json.loads(subprocess.run(words, capture_output=True, text=True, check=True).stdout)
        who, samples, step = case
        print(f"{who:<10} {samples:>13,} samples, step {step:>7,}: ", end="")
        print(f"{measured['seconds']:.3f} s to the first batch, {measured['bytes'] / 1e6:.1f} MB more", flush=True)


if __name__ == "__main__":
    main()
