"""Padding of micro-batches that are cut from a step as it comes, against those of a step that is sorted by length.

The lengths of streamed texts are not known before they are read, and each micro-batch has the rows of its own lane.
"""

from pathlib import Path

import numpy as np

from app.commands.output import table
from app.sampling.batch_plan import BatchPlan
from app.sampling.orders import ByChunks
from benchmarks.streams import shards

LONGEST, CHUNK, STEPS, OVER = 128, 128, 200, 4


def run(folder: Path, rows: int, rounds: int) -> None:
    """Print a line for each global batch and micro-batch."""
    # Bytes stand for tokens: about five make one.
    lengths = np.array([min(len(text) // 5 + 2, LONGEST) for text in shards.texts(rows)["text"].to_pylist()])
    sizes = np.bincount(np.arange(rows) // CHUNK)
    lines = []
    for batch, micro in ((64, 16), (128, 32), (256, 32), (256, 8)):
        plain = BatchPlan(rows, batch * STEPS, batch, micro)
        in_order = BatchPlan(rows, batch * STEPS, batch, micro, lengths=lengths)
        count = plain.micro_batches_per_step
        streamed = plain.ordered(ByChunks(sizes, count, 16, 0))
        shared = plain.ordered(ByChunks(sizes, count // OVER, 16 * OVER, 0, OVER))
        costs = [padded(plan, lengths) for plan in (in_order, plain, streamed, shared)]
        shares = [f"{1 - real / full:.1%}" for full, real in costs]
        tokens = [f"{costs[number][0] / costs[0][0]:.2f}" for number in (2, 3)]
        lines.append([f"{batch} = {batch // micro} x {micro}", *shares, *tokens])
    head = ["global batch", "sorted over the step", "not sorted", "streamed", f"--data.sort-over {OVER}"]
    print(f"share of padding in {STEPS} steps, texts cut at {LONGEST} tokens, window 16; and tokens, to a sorted step")
    print(table([*head, "tokens, streamed", "tokens, sorted over"], lines, right=tuple(range(1, 7))))


def padded(plan: BatchPlan, lengths: np.ndarray) -> tuple[int, int]:
    """Return the tokens of all micro-batches with their padding, and without; those that share a lane are sorted."""
    full = real = 0
    for step in range(plan.steps):
        micros = [lengths[ids] for ids, _ in plan.micro_batches(step)]
        together = [plan.sorted_with(first, len(micros)) for first in range(0, len(micros), plan.order.sort_over)]
        for own in together if plan.order.sort_over > 1 else ():
            in_order = np.sort(np.concatenate([micros[index] for index in own]))[::-1]
            cuts = np.cumsum([len(micros[index]) for index in own])[:-1]
            micros[own.start : own.stop] = np.split(in_order, cuts)
        full += sum(len(each) * int(each.max()) for each in micros)
        real += sum(int(each.sum()) for each in micros)
    return full, real
