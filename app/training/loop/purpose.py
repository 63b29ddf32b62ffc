"""What a run is for: training, or what a command asks for in its place.

A command runs a recipe's file, which knows nothing of commands. So the command leaves its purpose in one slot, and the
Run that the recipe makes takes it from there, once. From then on it is an attribute of the Run, and is handed on.
"""

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from app.config.needs import EVERYTHING, Needs

if TYPE_CHECKING:
    from app.training.scores.base import Metric


class Purpose:
    """Training; what else a run may be for takes the place of its loop and of its end."""

    trains = True
    on_cpu = False
    """Whether it is one process on a CPU, whatever device the run itself is for."""

    def __init__(self, needs: Needs = EVERYTHING):
        """Say what is needed of data and model."""
        self.needs = needs

    def at_opening(self, run: Any) -> None:
        """Take note of a run whose settings have been checked and whose folder has not been looked at yet."""

    def at_loop(self, run: Any, plan: Any, *data: Any) -> Iterator[Any]:
        """Take the place of run.batches.

        Args:
            data: data, collate and augment of run.batches.
        """
        raise NotImplementedError

    def at_finish(self, run: Any, model: Any, parts: tuple, use: str) -> None:
        """Take the place of run.finish."""
        raise NotImplementedError

    def metrics(self, of_recipe: "Sequence[Metric]") -> "Sequence[Metric]":
        """Return the metrics that an evaluation updates."""
        return of_recipe


class Opening(BaseException):
    """Leave a recipe where its run would be opened; a BaseException, which its `except Exception` does not catch."""

    def __init__(self, run: Any):
        super().__init__("the run would be opened")
        self.run = run


class Reached(BaseException):
    """Leave a recipe where its loop would begin; a BaseException, which its `except Exception` does not catch."""

    def __init__(self, run: Any, plan: Any):
        super().__init__("the loop would begin")
        self.run, self.plan = run, plan


class Finished(BaseException):
    """Leave a recipe where it would write its finished model."""

    def __init__(self, run: Any, model: Any, parts: tuple, use: str):
        super().__init__("the model would be written")
        self.run, self.model, self.parts, self.use = run, model, parts, use


class Body:
    """The body of a recipe's loop, run on batches that are made for it; its error is remembered if it fails."""

    def __init__(self, batches: Callable[..., Generator[Any, None, None]]):
        """Describe the batches that the body gets.

        Args:
            batches: called with the Run, the BatchPlan, and data, collate and augment of run.batches; yields a Batch
                for each time that the body is to run.
        """
        self._batches, self.failed = batches, ""
        self.reached: Reached | None = None
        self._going: Generator[Any, None, None] | None = None

    def begin(self, run: Any, plan: Any, *data: Any) -> Iterator[Any]:
        """Return the batches for the body."""
        self.reached = Reached(run, plan)
        self._going = self._batches(run, plan, *data)
        return self._going

    def left_by(self, error: Exception) -> Reached:
        """Close the batches after the body has failed, and remember its error."""
        self.failed = f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:200]}"
        assert self._going is not None and self.reached is not None
        self._going.close()
        return self.reached


class Asking(Purpose):
    """Read a run's settings, and leave the recipe before anything is loaded or opened."""

    trains, on_cpu = False, True

    def at_opening(self, run: Any) -> None:
        """Leave the recipe with the run."""
        raise Opening(run)


class Planning(Purpose):
    """Go as far as the loop, on one process on the CPU, and leave the recipe there."""

    trains, on_cpu = False, True

    def __init__(self, body: Body | None = None):
        """Plan a run.

        Args:
            body: of the loop, which runs first, on a model without numbers. Without one, the body does not run.
        """
        super().__init__(Needs(weights=body is None))
        self.body = body

    def at_loop(self, run: Any, plan: Any, *data: Any) -> Iterator[Any]:
        """Run the body, then leave the recipe."""
        if self.body is not None:
            yield from self.body.begin(run, plan, *data)
        raise Reached(run, plan)


class Exporting(Purpose):
    """Leave out the loop, on one process on the CPU, and leave the recipe where it would write its finished model."""

    trains, on_cpu = False, True

    def __init__(self):
        super().__init__(Needs(computing=False))

    def at_loop(self, run: Any, plan: Any, *data: Any) -> Iterator[Any]:
        """Go on after the loop."""
        return iter(())

    def at_finish(self, run: Any, model: Any, parts: tuple, use: str) -> None:
        """Leave the recipe with its model."""
        raise Finished(run, model, parts, use)


_slot: Purpose | None = None  # for the Run of the recipe's file that a command runs


@contextmanager
def asking(purpose: Purpose) -> Iterator[None]:
    """Have the Run that is made inside this block take a purpose."""
    global _slot
    _slot = purpose
    try:
        yield
    finally:
        _slot = None


def asked() -> Purpose:
    """Return what a new Run is for. A Run asks once, when it is made."""
    return _slot or Purpose()
