"""Weights of samples that are known only when they are read: ranks tell each other those of their micro-batches."""

from collections.abc import Callable, Iterator
from typing import Any

import torch

from app.distributed import collectives
from app.distributed.accelerator import Accelerator
from app.sampling.batch_plan import Step

Weigh = Callable[[Any], float]
"""Returns the weight of a sample in the loss, as it is read."""


def one(sample: Any) -> float:
    """Weigh every sample alike."""
    return 1.0


def agreed(steps: Iterator[Step], accelerator: Accelerator, missing: Callable[[int], None]) -> Iterator[Step]:
    """Yield steps with the weight of their whole global batch. Every rank takes part, once a step.

    Args:
        steps: whose turns have the weights of what this rank has read, and the number of what could not be read.
        missing: told of that number, over all ranks, where it is not 0.
    """
    for step in steps:
        told = torch.zeros(step.micro_count + 1, dtype=torch.float64, device=accelerator.device)
        for turn in step.turns:
            if not turn.idle:
                told[turn.index] = turn.weight
            told[-1] += turn.missing
        if not collectives.alone():
            torch.distributed.all_reduce(told)
            told /= accelerator.ranks_per_data_rank  # ranks that compute one micro-batch together have read the same
        *weights, lost = told.tolist()
        if lost:
            missing(int(lost))
        yield step._replace(weight=sum(weights))
