"""Weights of samples that are known only when they are read: ranks tell each other those of their micro-batches."""

import zlib
from collections.abc import Iterator
from typing import Any

import torch

from app.distributed import collectives
from app.distributed.accelerator import Accelerator
from app.errors import UserError
from app.sampling.batch_plan import Step


def one(sample: Any) -> float:
    """Weigh every sample alike."""
    return 1.0


def agreed(steps: Iterator[Step], accelerator: Accelerator, sort_over: int = 1) -> Iterator[Step]:
    """Yield steps with the weight of their whole global batch, and the number of what is missing in it.

    Every rank takes part, once a step.

    Args:
        steps: whose turns have the weights of what this rank has read, and the number of what could not be read.
        sort_over: micro-batches that are sorted together, perhaps by several ranks.

    Raises:
        UserError: ranks that compute one micro-batch together, or parts of what is sorted together, have read other
            samples.
    """
    together = accelerator.ranks_per_data_rank
    for step in steps:
        # One row for each rank of a data rank: weights, what is missing, and which samples were read. For each group
        # that is sorted together: the number of ranks that did so, and the sums of their hashes and of these squared.
        groups = -(-step.micro_count // sort_over) if sort_over > 1 else 0
        width = step.micro_count + 2
        told = torch.zeros(together, width + 3 * groups, dtype=torch.float64, device=accelerator.device)
        of_this_rank = told[accelerator.process_index % together, :width]
        for group, found in {turn.sorted_as for turn in step.turns if turn.sorted_as}:
            here = told[accelerator.process_index % together, width + 3 * group : width + 3 * group + 3]
            here += torch.tensor([1, found, found**2])
        for turn in step.turns:
            if not turn.idle:
                of_this_rank[turn.index] = turn.weight
                of_this_rank[-1] += zlib.crc32(turn.ids.tobytes())
            of_this_rank[-2] += turn.missing
        if not collectives.alone():
            torch.distributed.all_reduce(told)
        first, *others = told.tolist()
        if any(other != first for other in others):
            raise UserError(
                f"step {step.index + 1}: ranks that compute a micro-batch together have read other samples of it: some "
                "can read data that others cannot, as the warnings above say; give all of them the same data"
            )
        sums = [first[at : at + 3] for at in range(width, len(first), 3)]
        # Numbers are all equal where their mean square is the square of their mean.
        if any(count * squares != total**2 for count, total, squares in sums):
            raise UserError(
                f"step {step.index + 1}: ranks that sort micro-batches together (--data.sort-over) have read other "
                "samples of them: some can read data that others cannot, as the warnings above say; give all of them "
                "the same data"
            )
        *weights, missing, _ = first[:width]
        yield step._replace(weight=sum(weights), missing=int(missing))
