"""Have the thread that saves go on in torch's code for a while after its result is there; else as toy.py."""

import time
from concurrent.futures import Future

import torch
import toy

from app import parse
from app.checkpoints import background


class Lingering(Future):
    """A result whose thread is still at work when somebody takes it."""

    def set_result(self, result):
        """Give the result, and compute for a second more."""
        super().set_result(result)
        end = time.monotonic() + 1
        while time.monotonic() < end:
            torch.ones(1 << 16).sum()  # lets the interpreter go while it computes, and takes it back in C++


if __name__ == "__main__":
    background.Future = Lingering
    toy.train(parse(toy.Config))
