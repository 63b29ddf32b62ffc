"""Train the toy recipe, in one run after another: stopped.py FOLDER RUN[@SECONDS][:FLAG:VALUE ...] ...

Every step takes SECONDS more. A run whose name begins with "hang" hangs in its fifth step on the last rank. In a run
whose name begins with "slow", the first evaluation takes three seconds for each micro-batch.
"""

import os
import sys
import time
from pathlib import Path

from toy import Config, train

from app import Run, parse


def hang(run: Run) -> None:
    """Hang in the fifth step on the last rank."""
    while run.steps_done == 5 and run.accelerator.is_last_process:
        time.sleep(1)


def slowly(evaluation, mark: Path):
    """Make an evaluation slow until the file `mark` exists; write it when the evaluation begins."""

    def evaluate(*args, **options):
        slow = not mark.exists()
        for turn in evaluation(*args, **options):
            mark.touch()
            time.sleep(3 if slow else 0)
            yield turn

    return evaluate


EVALUATION = Run.evaluation

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    (folder / f"pid-{os.environ.get('RANK', '0')}").write_text(str(os.getpid()))
    for word in sys.argv[2:]:
        head, *flags = word.split(":")
        name, _, os.environ["PAUSE"] = (head if "@" in head else f"{head}@0").partition("@")
        config = parse(Config, ["--run.dir", str(folder / name), *flags])
        Run.evaluation = slowly(EVALUATION, folder / f"{name}-evaluates") if name.startswith("slow") else EVALUATION
        train(config, hang) if name.startswith("hang") else train(config)
