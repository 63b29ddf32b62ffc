"""Train recipes on a GPU; in silent steps, torch raises when the host waits for the device.

waiting.py FILE: FILE is a JSON list with, for each run, the recipe's file, its flags, and the file for the number of
silent steps.
"""

import json
import sys
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import torch

from app import Run, parse

FIRST, LAST = 3, 5  # silent steps: step 1 is logged, and in step 2 torch still compiles and allocates


@contextmanager
def waiting():
    """Raise when the host waits in a silent step, or from its end until the next step begins."""
    original = Run.batches
    done: list[int] = []

    def batches(run, *args, **kwargs):
        steps = original(run, *args, **kwargs)
        while True:
            silent = FIRST <= run.steps_done + 1 <= LAST
            torch.cuda.set_sync_debug_mode("error" if silent else "default")
            batch = next(steps, None)
            if batch is None:
                return
            yield batch
            done.extend([run.steps_done] if silent else [])

    try:
        with patch.object(Run, "batches", batches):
            yield done
    finally:
        torch.cuda.set_sync_debug_mode("default")


def main(commands: list) -> None:
    """Train each recipe with its flags."""
    from laws.many import load

    for path, flags, out in commands:
        recipe = load(path)
        with waiting() as done:
            recipe.main(parse(recipe.Config, flags))
        Path(out).write_text(json.dumps(done))


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent.parent))
    main(json.loads(Path(sys.argv[1]).read_text()))
