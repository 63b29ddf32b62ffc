"""The current step of a run: its batch, its losses and norms, and how far its body has come."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor, nn

from app.distributed.accelerator import Accelerator
from app.distributed.running_statistics import RunningStatistics
from app.errors import UserError
from app.sampling.batch_plan import NO_STEP, Step, Turn
from app.sampling.seeding import seed_all
from app.training.loop.before_step import BeforeStep
from app.training.loop.gradients import Gradients
from app.training.loop.step_metrics import StepMetrics


class Batch:
    """This data rank's part of one step's global batch."""

    def __init__(self, gradients: Gradients, step: Step, statistics: RunningStatistics | None = None):
        """Hold one step's turns.

        Args:
            statistics: of the models' norms; None in a dry run.
        """
        self.gradients, self._step, self._loops, self._statistics = gradients, step, 0, statistics
        self._open = False  # whether a loop over the turns has begun and not ended
        self.begun = False
        """Whether a forward pass has begun, which may change buffers."""

    def micros(self, *models: nn.Module, frozen: Sequence[nn.Module] = ()) -> Iterator[Turn]:
        """Yield this data rank's micro-batches, each with its own random seed; gradients synchronise in the last one.

        A second loop over the same batch has other seeds. After a loop, all ranks draw the same numbers.

        Args:
            models: the models that get gradients.
            frozen: models that gradients only flow through, such as the discriminator while the generator learns.
        """
        self.check_complete()
        self._open = True
        if self._statistics:
            self._statistics.loop(self._step.micro_count)
        for position, turn in enumerate(self._step.turns):
            seed_all(self.gradients.seed, self._step.index, turn.index, self._loops)
            last, self.begun = position == len(self._step.turns) - 1, True
            statistics_of_turn = self._statistics.turn(turn.index, turn.idle) if self._statistics else nullcontext()
            with statistics_of_turn, self.gradients.frozen(frozen), self.gradients.turn(models, last):
                yield turn
        seed_all(self.gradients.seed, self._step.index, -1, self._loops)
        self._loops += 1
        self._open = False

    def check_complete(self) -> None:
        """Refuse to go on after a loop over `micros` that was left early, or inside of one.

        Raises:
            UserError: there is one.
        """
        if self._open:
            raise UserError(
                "a loop over batch.micros has not come to its last micro-batch, in which gradients synchronise: go "
                "through all of them, one loop after the other; `continue` leaves out the rest of a micro-batch"
            )


class CurrentStep:
    """One step of a run, from the first line of its body to the log line and checkpoint after it.

    A run may stop during the evaluation of a step. When it resumes, the body of that step runs again to evaluate it;
    its update is not made twice.
    """

    def __init__(
        self,
        number: int,
        metrics: StepMetrics,
        batch: Batch,
        before: BeforeStep | None = None,
        again: bool = False,
    ):
        """Enter the body.

        Args:
            number: of the step, counted from 1.
            before: what the body may change; only given for a step that may be left out or that runs again.
            again: this step runs again, its update made already.
        """
        self.number, self.metrics, self.batch, self.before, self.again = number, metrics, batch, before, again
        self.open = True
        """Whether its body is running."""
        self.skipped = False
        """Whether the step is left out, because a gradient was not finite, or no sample could be read."""
        self.made: list[torch.optim.Optimizer] = []
        """The optimizers that have updated weights."""
        self.updated = False
        """Whether the body has called run.step."""
        self.scores: dict[str, float] = {}
        """Scores that the body has logged; they decide which checkpoint is the best."""

    @property
    def losses(self) -> list[tuple[str, Turn, Tensor]]:
        """Return the losses that count in means over several steps; none of a step that was left out."""
        return [] if self.skipped else self.metrics.losses

    @property
    def took_effect(self) -> bool:
        """Tell whether weights have been updated, in this very step."""
        return bool(self.made) and not self.skipped

    def backward(self, parts: dict[str, Tensor], loss: Tensor, micro: Turn) -> None:
        """Add a micro-batch's gradient.

        Args:
            parts: of the loss, by name for the log; scalars.
            loss: the sum of the parts, a scalar.
        """
        for name, value in parts.items():
            self.metrics.add(name, value, micro)
        self.batch.gradients.backward(loss, micro)

    def observe(self, values: dict[str, Tensor], micro: Turn) -> None:
        """Keep means over a micro-batch, by name for the log; scalars."""
        for name, value in values.items():
            self.metrics.add(name, value, micro, trained=False)

    def observe_rows(self, losses: Callable[[], Tensor | tuple[Tensor, Tensor]], micro: Turn) -> None:
        """Keep the losses of a micro-batch's rows, by source."""
        self.metrics.by_source.add(losses, micro)

    def put_back(self) -> None:
        """Put back what the body has changed so far."""
        if self.before is not None:
            self.before.put_back()

    @property
    def halfway(self) -> bool:
        """Tell whether it is between its first forward pass and its update, when buffers belong to neither step."""
        return self.open and not self.updated and self.batch.begun

    @property
    def done(self) -> int:
        """Return the number of steps whose update is made."""
        return self.number if self.updated or self.again else self.number - 1

    @property
    def reached(self) -> int:
        """Return the number of steps made; while the body runs, this one counts too."""
        return self.number if self.open else self.done


def before_first(accelerator: Accelerator, gradients: Gradients) -> CurrentStep:
    """Enter step 0, which has no micro-batches and no update: only the evaluation in its body does something."""
    return CurrentStep(0, StepMetrics(accelerator, NO_STEP), Batch(gradients, NO_STEP), again=True)
