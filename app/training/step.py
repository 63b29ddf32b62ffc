"""The step that a run is in: its batch, what it measures, and how far its body has come."""

from collections.abc import Callable, Iterator, Sequence

from torch import nn

from app.sampling.batch_plan import Step, Turn
from app.sampling.seeding import seed_all
from app.training.gradients import Gradients
from app.training.step_metrics import StepMetrics


class Batch:
    """The global batch of one step: this data rank's part of it."""

    def __init__(self, gradients: Gradients, step: Step):
        self._gradients, self._step, self._loops = gradients, step, 0
        self.begun = False
        """Whether a forward pass has been made, which may have changed buffers."""

    def micros(self, *models: nn.Module, frozen: Sequence[nn.Module] = ()) -> Iterator[Turn]:
        """Go through this rank's micro-batches, each with its own randomness; gradients synchronise on the last.

        A second loop over the same batch has randomness of its own. What is drawn after one is the same on all ranks.

        Args:
            models: those that get gradients.
            frozen: those that gradients only flow through, such as the discriminator while the generator learns.
        """
        for position, turn in enumerate(self._step.turns):
            seed_all(self._gradients.seed, self._step.index, turn.index, self._loops)
            last, self.begun = position == len(self._step.turns) - 1, True
            with self._gradients.frozen(frozen), self._gradients.turn(models, last):
                yield turn
        seed_all(self._gradients.seed, self._step.index, -1, self._loops)
        self._loops += 1


class CurrentStep:
    """One step of a run, from the first line of its body to what is due after it.

    A step that was left during its evaluation comes again when the run goes on: its body runs once more, so that it
    is evaluated, and its update stays as it was.
    """

    def __init__(self, number: int, metrics: StepMetrics, batch: Batch, undo: Callable[[], None] | None = None):
        """Enter the body.

        Args:
            number: of the step, counted from 1.
            undo: puts buffers back as they were before the body; given for a step that comes again.
        """
        self.number, self.metrics, self.batch, self.undo = number, metrics, batch, undo
        self.open = True
        """Whether its body is running."""
        self.updated = False
        """Whether the body has called run.step."""
        self.scores: dict[str, float] = {}
        """What the body has logged; run.save chooses the best checkpoint by it."""

    @property
    def again(self) -> bool:
        """Tell whether its update was made before."""
        return self.undo is not None

    @property
    def halfway(self) -> bool:
        """Tell whether it is between its first forward pass and its update, when buffers are of neither step."""
        return self.open and not self.updated and self.batch.begun

    @property
    def done(self) -> int:
        """Count the steps whose update was made, this one included once its own was."""
        return self.number if self.updated or self.again else self.number - 1
