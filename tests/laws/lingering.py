"""Run toy.py with a saving thread that stays in torch's code for a while after its result is ready.

It prints whether the interpreter shuts down by itself in the end.
"""

import time
from concurrent.futures import Future

import torch
import toy
from ending import Late

from app import parse
from app.checkpoints import background


class Lingering(Future):
    """A result whose thread still runs when the result is taken."""

    def set_result(self, result):
        """Return the result, and compute for one more second."""
        super().set_result(result)
        end = time.monotonic() + 1
        while time.monotonic() < end:
            torch.ones(1 << 16).sum()  # releases the GIL while it computes, and takes it again in C++


if __name__ == "__main__":
    background.Future, late = Lingering, Late()
    toy.train(parse(toy.Config))
