"""A loop's body in a run that makes no steps: a command tries it, or has it evaluate."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from app.training.loop.opened import Opened
from app.training.loop.step import Batch, CurrentStep, before_first
from app.training.loop.updates import Around, Updates
from app.training.optim.building import Entry


class Trial:
    """Take the place of StepLoop where a command runs a recipe: nothing is due, and nothing is saved."""

    def __init__(self, opened: Opened):
        self._opened, self._updates = opened, Updates(opened)

    @property
    def steps_done(self) -> int:
        """Return 0; while a body runs, its step counts."""
        return self._opened.current.reached if self._opened.current is not None else 0

    @contextmanager
    def trying(self, step: CurrentStep) -> Iterator[None]:
        """Run a body on a step; its changes to the run are undone."""
        opened = self._opened
        before = opened.scores, opened.current
        opened.scores, opened.current = dict(opened.scores), step
        step.batch.gradients.begin(step.metrics.step, closely=False)
        try:
            yield
        finally:
            opened.services.logger.drop_pending()
            opened.scores, opened.current = before

    def only_evaluation(self) -> Iterator[Batch]:
        """Enter step 0 to evaluate: what the body logs is kept in the run's scores alone."""
        self._opened.current = step = before_first(self._opened.services.accelerator, self._opened.services.gradients)
        yield step.batch
        self._opened.services.logger.drop_pending()
        self._opened.current = None

    def due(self, every: int) -> bool:
        """Tell whether the body is to evaluate; nothing else is due."""
        step = self._opened.current
        return step is not None and step.number == 0 and every == self._opened.settings.eval_every

    def update(self, step: CurrentStep, optimizer: torch.optim.Optimizer, entry: Entry) -> None:
        """Update the weights as a step would; see Updates."""
        self._updates.make(step, optimizer, entry, Around())

    def save(self) -> None:
        """Refuse what a run would refuse; else do nothing."""
        self._opened.check_savable()
