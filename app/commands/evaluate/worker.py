"""One of the processes that evaluate: worker.py JOB RECIPE IMPORTS FLAGS. The main process writes the result."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from app.launching.dry_run import DryRun, play


class Evaluation(DryRun):
    """Take the place of training in a Run: load a checkpoint's weights, and run the loop's body once to evaluate."""

    def __init__(self, state: str, averaged: bool, only: str = ""):
        """Describe what is evaluated.

        Args:
            state: the folder of a checkpoint's state; empty: the model that --model names is evaluated as it is.
            averaged: evaluate the average of the weights.
            only: the one of the recipe's sets to evaluate on; empty: all.
        """
        super().__init__(to_end=True, on_cpu=False, evaluates_model=not state, scored_set=only)
        self.state, self.averaged = state, averaged
        self.metrics: list[Any] = []
        """The metrics of the main evaluation set: the recipe's own, and what they add to look closer."""
        self.scores: dict[str, float] = {}
        self.meanings: dict[str, str] = {}
        self.faults: list[str] = []

    def at_loop(self, run: Any, plan: Any, *data: Any) -> Iterator[Any]:
        """Take the place of run.batches."""
        from app.checkpoints import sharded

        if self.state:
            sharded.load_weights(run.accelerator, self.state, self.averaged)
        run.scores_of = self._watching(run.scores_of)
        yield from run.only_evaluation()
        self.scores = {name: value for name, value in run.scores.items() if isinstance(value, int | float)}
        self.meanings, self.faults = run.services.remarks.meanings, run.services.remarks.lines()

    def _watching(self, scores_of: Any) -> Any:
        """Return a `scores_of` that remembers metrics, and adds those that look closer."""

        def watched(*own: Any, **metrics: Any) -> Any:
            every = [*own, *(more for metric in own for more in metric.in_depth())]
            self.metrics = self.metrics or every  # the first ones are of the main evaluation set
            return scores_of(*every, **metrics)

        return watched

    def at_finish(self, run: Any, model: Any, parts: tuple, use: str) -> None:
        """Take the place of run.finish: nothing is written."""

    def result(self) -> dict[str, Any]:
        """Return the scores with what is to be said of them, and what the metrics report besides."""
        found: dict[str, Any] = {
            "scores": self.scores,
            "meanings": self.meanings,
            "warnings": self.faults,
        }
        for metric in self.metrics:
            if metric.total:  # it was computed
                found |= metric.report()
        return found


def main() -> None:
    """Evaluate as the job says."""
    from app.distributed.environment import is_main_process, leave_with_launcher, report_user_errors
    from app.launching.dropped_output import outlive_readers

    outlive_readers()
    report_user_errors()
    leave_with_launcher()
    job = json.loads(Path(sys.argv[1]).read_text())
    evaluation = Evaluation(job["state"], job["averaged"], job["only"])
    play(Path(sys.argv[2]), sys.argv[4:], evaluation, import_folder=sys.argv[3])
    if is_main_process():
        Path(job["result"]).write_text(json.dumps(evaluation.result()))


if __name__ == "__main__":
    main()
