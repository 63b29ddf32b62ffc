"""One of the processes that evaluate: worker.py JOB RECIPE IMPORTS FLAGS. The main process writes the result."""

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from app.commands.recipe_file import play
from app.config.needs import Needs, NothingToTrainOn
from app.errors import UserError
from app.training.loop.purpose import Purpose

if TYPE_CHECKING:
    from app.training.scores.base import Metric


class Evaluation(Purpose):
    """Load a checkpoint's weights, and run the loop's body once to evaluate."""

    trains = False

    def __init__(self, state: str, averaged: bool, only: str = ""):
        """Describe what is evaluated.

        Args:
            state: the folder of a checkpoint's state; empty: the model that --model names is evaluated as it is.
            averaged: evaluate the average of the weights.
            only: the one of the recipe's sets to evaluate on; empty: all.
        """
        super().__init__(Needs(training_rows=bool(state), only_set=only, complete=not state))
        self.state, self.averaged = state, averaged
        self.of_main_set: Sequence[Metric] = ()
        """The metrics of the main evaluation set: the recipe's own, and what they add to look closer."""
        self.scores: dict[str, float] = {}
        self.meanings: dict[str, str] = {}
        self.faults: list[str] = []

    def at_loop(self, run: Any, plan: Any, *data: Any) -> Iterator[Any]:
        """Evaluate.

        Raises:
            UserError: one set is to be scored, and the recipe scores others.
        """
        from app.distributed.state import sharded

        if self.state:
            sharded.load_weights(run.accelerator, self.state, self.averaged)
        yield from run.trial.only_evaluation()
        self.scores = {name: value for name, value in run.scores.items() if isinstance(value, int | float)}
        self.meanings, self.faults = run.services.remarks.meanings, run.services.remarks.lines()
        if self.needs.only_set and any(name.startswith(f"eval-{self.needs.only_set}/") for name in self.scores):
            raise UserError(
                f"{run.name} scores other sets too: have the recipe hand run.needs to what loads its data, as in "
                "load_data(config, run.needs)"
            )

    def metrics(self, of_recipe: "Sequence[Metric]") -> "Sequence[Metric]":
        """Return a recipe's metrics with those that look closer, and remember those of the main evaluation set."""
        every = [*of_recipe, *(more for metric in of_recipe for more in metric.in_depth())]
        self.of_main_set = self.of_main_set or every  # the first ones are of that set
        return every

    def at_finish(self, run: Any, model: Any, parts: tuple, use: str) -> None:
        """Take the place of run.finish: nothing is written."""

    def result(self) -> dict[str, Any]:
        """Return the scores with what is to be said of them, and what the metrics report besides."""
        numbers: dict[str, Any] = {
            "scores": self.scores,
            "meanings": self.meanings,
            "warnings": self.faults,
        }
        for metric in self.of_main_set:
            if metric.total:  # it was computed
                numbers |= metric.report()
        return numbers


def evaluate(recipe: Path, flags: list[str], evaluation: Evaluation, import_folder: str = "") -> dict[str, Any]:
    """Run a recipe's file for an evaluation, and return its result.

    Args:
        import_folder: see `play`.

    Raises:
        UserError: the run would refuse to begin, or the recipe loads data to train on where there are none.
    """
    try:
        play(recipe, flags, evaluation, import_folder)
    except NothingToTrainOn as error:
        if not evaluation.needs.training_rows:  # the same error, because it knows which rank tells it
            error.args = (
                f"{recipe} asks for data to train on, and there are none where a finished model is evaluated: have it "
                "hand run.needs to what loads its data, as in load_data(config, run.needs)",
            )
        raise
    return evaluation.result()


def main() -> None:
    """Evaluate as the job says."""
    from app.distributed.environment import is_main_process, leave_with_launcher, report_user_errors
    from app.launching.dropped_output import outlive_readers

    outlive_readers()
    report_user_errors()
    leave_with_launcher()
    job = json.loads(Path(sys.argv[1]).read_text())
    evaluation = Evaluation(job["state"], job["averaged"], job["only"])
    result = evaluate(Path(sys.argv[2]), sys.argv[4:], evaluation, import_folder=sys.argv[3])
    if is_main_process():
        Path(job["result"]).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
