"""Padding of micro-batches that are cut from a step as it comes, against those of a step that is sorted by length.

The lengths of streamed texts are not known before they are read, and each micro-batch has the rows of its own lane.
"""

from pathlib import Path

import numpy as np

from app.commands.output import table
from app.sampling.batch_plan import BatchPlan
from app.sampling.orders import ByChunks
from benchmarks.streams import shards

LONGEST, CHUNK, STEPS = 128, 128, 200


def run(folder: Path, rows: int, rounds: int) -> None:
    """Print a line for each global batch and micro-batch."""
    # Bytes stand for tokens: about five make one.
    lengths = np.array([min(len(text) // 5 + 2, LONGEST) for text in shards.texts(rows)["text"].to_pylist()])
    lines = []
    for batch, micro in ((32, 32), (64, 16), (128, 32), (256, 32), (256, 8)):
        plain = BatchPlan(rows, batch * STEPS, batch, micro)
        in_order = BatchPlan(rows, batch * STEPS, batch, micro, lengths=lengths)
        sizes = np.bincount(np.arange(rows) // CHUNK)
        streamed = plain.ordered(ByChunks(sizes, plain.micro_batches_per_step, 16, 0))
        costs = [padded(plan, lengths) for plan in (in_order, plain, streamed)]
        shares = [f"{1 - real / full:.1%}" for full, real in costs]
        lines.append([f"{batch} = {batch // micro} x {micro}", *shares, f"{costs[2][0] / costs[0][0]:.2f}"])
    head = ["global batch", "sorted over the step", "not sorted", "streamed, window 16", "tokens, to sorted"]
    print(f"share of padding in {STEPS} steps, texts cut at {LONGEST} tokens")
    print(table(head, lines, right=(1, 2, 3, 4)))


def padded(plan: BatchPlan, lengths: np.ndarray) -> tuple[int, int]:
    """Return the tokens of all micro-batches with their padding, and without."""
    full = real = 0
    for step in range(plan.steps):
        for ids, _ in plan.micro_batches(step):
            full += len(ids) * int(lengths[ids].max())
            real += int(lengths[ids].sum())
    return full, real
