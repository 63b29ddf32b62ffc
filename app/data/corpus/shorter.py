"""Shorter sequences in the first steps of a run: blocks are cut into several rows, so that no token is left out."""

import functools
from collections.abc import Callable, Sequence

import numpy as np
from torch import Tensor

from app.data.config import CorpusData
from app.errors import UserError
from app.sampling.ramp import Ramp

Rows = Sequence[dict[str, np.ndarray]]


def block_sizes(config: CorpusData) -> Ramp:
    """Return the length of a row as a function of the step.

    Raises:
        UserError: --data.block-ramp is no ramp, or a length in it does not divide --data.block.
    """
    sizes = Ramp.parse(config.block_ramp, config.block, "--data.block-ramp", "--data.block", "tokens")
    for end, size in sizes.parts:
        if config.block % size:
            raise UserError(
                f"--data.block-ramp {end}:{size}: {size} does not divide --data.block {config.block}, which is cut "
                "into rows of this length: give a length that does"
            )
    return sizes


class RampedCollate:
    """A collate function of blocks that cuts them first, in the steps of --data.block-ramp. Evaluations see them whole.

    Every token is still predicted once an epoch, from fewer tokens before it, so samples weigh what they do uncut.
    """

    def __init__(self, collate: Callable[[Rows], dict[str, Tensor]], config: CorpusData):
        """Wrap a collate function."""
        self._collate, self._sizes = collate, block_sizes(config)

    def __call__(self, rows: Rows) -> dict[str, Tensor]:
        """Collate whole blocks."""
        return self._collate(rows)

    def at(self, step: int) -> Callable[[Rows], dict[str, Tensor]]:
        """Return the collate function of a step, counted from 0."""
        size = self._sizes.at(step)
        return self._collate if size == self._sizes.final else functools.partial(self._of_parts, size)

    def _of_parts(self, size: int, rows: Rows) -> dict[str, Tensor]:
        return self._collate([part for row in rows for part in cut(row, size)])


def cut(row: dict[str, np.ndarray], size: int) -> list[dict[str, np.ndarray]]:
    """Cut a block into rows of `size` tokens. A document that goes on in the next row begins there at position 0."""
    parts = []
    for start in range(0, len(row["input_ids"]), size):
        part = {name: values[start : start + size] for name, values in row.items()}
        if "position_ids" in part:
            places = part["position_ids"]
            going_on = np.minimum.accumulate(places > 0)  # up to the first document that begins in this row
            part["position_ids"] = np.where(going_on, places - places[0], places)
        parts.append(part)
    return parts
