"""Compare a recipe's loop with a bare loop in one process, where memory and caches are the same for both.

    python -m benchmarks.inside lm [--turns 60] [--steps 4] [--fold] [--flags "--scratch.norm batch"]

--flags are the recipe's, for both loops. With --fold, ours treats running statistics of BatchNorm as on several ranks;
on one process it leaves them to torch.

Two processes of one program differ by several percent for as long as they live; in one process, the cost of the loop
itself shows. Both train the same model on the same rows, a few steps each in turn.
"""

import argparse
import importlib
import os
import statistics
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator

from app import Run, parse
from app.distributed.running_statistics import RunningStatistics
from benchmarks.jobs import job_of
from benchmarks.peers import bare
from benchmarks.works import works

WARM_UP = 5  # turns
ROWS = {"cls": "cls builtin fp32", "lm": "lm blocks", "img": "img", "seg": "seg"}


class Turn:
    """Let two threads take turns of some steps, and time each turn."""

    def __init__(self, steps: int):
        self.steps, self.seconds = steps, {"ours": [], "theirs": []}
        self._go = {"ours": threading.Semaphore(), "theirs": threading.Semaphore(0)}
        self._left = self._start = 0

    def begin(self, who: str) -> None:
        """Wait for the first turn."""
        self._go[who].acquire()
        self._left, self._start = self.steps, (time.perf_counter(), time.process_time())

    def step(self, who: str) -> None:
        """Count a step; after the last one of a turn, let the other thread go on, and wait."""
        self._left -= 1
        if not self._left:
            wall, used = self._start
            self.seconds[who].append((time.perf_counter() - wall, time.process_time() - used))
            self._go["theirs" if who == "ours" else "ours"].release()
            self.begin(who)


class Theirs:
    """The gate that the bare loop calls between its steps."""

    def __init__(self, turn: Turn):
        self.turn = turn

    def begin(self) -> None:
        """Wait for the first turn."""
        self.turn.begin("theirs")

    def __call__(self, items: float) -> None:
        self.turn.step("theirs")


def main() -> None:
    """Let both train; print the ratio of our speed to theirs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", choices=ROWS)
    parser.add_argument("--turns", type=int, default=60)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--fold", action="store_true")
    parser.add_argument("--flags", default="")
    options = parser.parse_args()
    if options.fold:
        make = RunningStatistics.__init__
        RunningStatistics.__init__ = lambda self, accelerator, exact: make(self, accelerator, True)
    (work,) = [work for work in works({}) if work.name == ROWS[options.recipe]]
    turn = Turn(options.steps)
    with tempfile.TemporaryDirectory() as folder:
        total = (options.turns + WARM_UP) * options.steps
        # One step more, so that neither ends during the other's turn.
        flags = [*work.flags.split(), *options.flags.split(), "--run.steps", str(total + 1), "--run.quiet", "true"]
        job = job_of(options.recipe, flags, False)
        threading.Thread(target=_train, args=(job, turn), daemon=True).start()
        recipe = importlib.import_module(f"recipes.{options.recipe}")
        Run.batches = _in_turns(Run.batches, turn, total)
        recipe.main(parse(recipe.Config, [*flags, "--run.dir", folder]))
    pairs = list(zip(*turn.seconds.values(), strict=True))[WARM_UP:]
    for place, clock in enumerate(("time", "processor time")):
        low, middle, high = statistics.quantiles((theirs[place] / ours[place] for ours, theirs in pairs), n=4)
        print(f"{options.recipe}, by {clock}: {middle:.3f} ({low:.3f}-{high:.3f}) of a bare loop's speed")


def _train(job, turn: Turn) -> None:
    try:
        bare.train(job, Theirs(turn))
    except BaseException:
        traceback.print_exc()
        os._exit(1)  # or ours would wait for its turn for ever


def _in_turns(batches, turn: Turn, total: int):
    def gated(run: Run, *arguments, **named) -> Iterator:
        steps = batches(run, *arguments, **named)
        turn.begin("ours")
        for number, batch in enumerate(steps):
            if number == total:
                return
            yield batch
            turn.step("ours")

    return gated


if __name__ == "__main__":
    main()
