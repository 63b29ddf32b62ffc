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
        super().__init__(to_end=True, on_cpu=False, evaluates_model=not state)
        self.state, self.averaged, self.only = state, averaged, only
        self.metrics: list[Any] = []
        """The recipe's own metrics of its main evaluation set."""
        self.calibrations: list[Any] = []
        self.scores: dict[str, float] = {}
        self.names: list[str] = []

    def at_loop(self, run: Any, plan: Any, *data: Any) -> Iterator[Any]:
        """Take the place of run.batches."""
        from app.checkpoints import sharded

        if self.state:
            sharded.load_weights(run.accelerator, self.state, self.averaged)
        run.scores_of = self._watching(run.scores_of)
        yield from run.only_evaluation()
        self.scores = {name: value for name, value in run.scores.items() if isinstance(value, int | float)}

    def chosen_sets(self, sets: dict[str, Any]) -> dict[str, Any]:
        """Return those of a recipe's evaluation sets that are scored."""
        return {"": sets[self.only]} if self.only else sets

    def _watching(self, scores_of: Any) -> Any:
        """Return a `scores_of` that remembers metrics, and measures calibration where there are classes."""
        from app.training.metrics import Calibration, Classification

        def watched(*own: Any, **metrics: Any) -> Any:
            more = [Calibration() for metric in own if isinstance(metric, Classification)]
            if not self.metrics:  # the first ones are of the main evaluation set
                self.metrics, self.calibrations = list(own), more
            return scores_of(*own, *more, **metrics)

        return watched

    def at_finish(self, run: Any, model: Any, parts: tuple, use: str) -> None:
        """Take the place of run.finish."""
        plain = run.accelerator.unwrap_model(model)
        # A model without a config of transformers is saved with a part that says it.
        known = (getattr(part, "id2label", None) for part in (getattr(plain, "config", None), *parts))
        names: dict[int, Any] = next(filter(None, known), {})
        self.names = [str(name) for _, name in sorted(names.items())]

    def result(self) -> dict[str, Any]:
        """Return the scores, and what there is to say of classes."""
        from app.training.metrics import Classification

        found: dict[str, Any] = {"scores": self.scores}
        counts = next((metric for metric in self.metrics if isinstance(metric, Classification)), None)
        if counts is None or not counts.total:
            return found
        matrix = counts.matrix()
        names = self.names if len(self.names) == len(matrix) else [str(i) for i in range(len(matrix))]
        found["classes"] = {name: by_class(matrix, index) for index, name in enumerate(names)}
        found["confusion"] = matrix.tolist()
        if self.calibrations:
            found["calibration"] = self.calibrations[0].report()
        return found


def by_class(matrix: Any, index: int) -> dict[str, float | int | None]:
    """Return one class's scores from a confusion matrix [target, predicted]; None where there is nothing to divide."""
    right, there, taken = (float(x) for x in (matrix[index, index], matrix[index].sum(), matrix[:, index].sum()))
    return {
        "precision": right / taken if taken else None,
        "recall": right / there if there else None,
        "f1": 2 * right / (there + taken) if there + taken else None,
        "samples": int(there),
    }


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
