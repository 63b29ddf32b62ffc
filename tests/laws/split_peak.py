"""Train a recipe on this launch's layout, and measure the peak of each process: split_peak.py OUT RECIPE FLAGS..."""

import json
import sys
from pathlib import Path

from accelerate.state import PartialState

from app import Run

sys.path.insert(1, str(Path(__file__).resolve().parents[2]))  # what is installed is app alone
from benchmarks import predicted


def main(out: Path, recipe: Path, flags: list[str]) -> None:
    """Write what each rank measured."""
    own = Run.batches, Run.due
    try:
        found = predicted.measure(recipe, flags, "cpu", "fp32")
    finally:
        Run.batches, Run.due = own
    (out / f"{PartialState().process_index}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
