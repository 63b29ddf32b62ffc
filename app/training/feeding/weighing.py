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


def agreed(steps: Iterator[Step], accelerator: Accelerator) -> Iterator[Step]:
    """Yield steps with the weight of their whole global batch, and the number of what is missing in it.

    Every rank takes part, once a step.

    Args:
        steps: whose turns have the weights of what this rank has read, and the number of what could not be read.

    Raises:
        UserError: ranks that compute one micro-batch together have read other samples of it.
    """
    together = accelerator.ranks_per_data_rank
    for step in steps:
        # One row for each rank of a data rank: weights, what is missing, and which samples were read.
        told = torch.zeros(together, step.micro_count + 2, dtype=torch.float64, device=accelerator.device)
        of_this_rank = told[accelerator.process_index % together]
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
        *weights, missing, _ = first
        yield step._replace(weight=sum(weights), missing=int(missing))
