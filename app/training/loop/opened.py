"""What an open run has, from its first line to its last: before the loop over its steps begins, in it, and after it."""

from accelerate.utils import DistributedType

from app.config import RunConfig
from app.errors import UserError
from app.training.loop.recompiles import Recompiles
from app.training.loop.services import Services
from app.training.loop.step import CurrentStep
from app.training.optim.building import Optimizers


class Opened:
    """The services of a run, its optimizers, its scores, and the step whose body is running."""

    def __init__(self, settings: RunConfig, services: Services):
        self.settings, self.services = settings, services
        self.optimizers, self.recompiles = Optimizers(), Recompiles()
        self.scores: dict[str, float] = {}
        """The last logged value of each score."""
        self.current: CurrentStep | None = None
        """The step whose body was entered last."""
        self._scores_outside: dict[str, float] = {}  # logged in this launch while no step was entered

    def inside(self, call: str) -> CurrentStep:
        """Return the step whose body is running.

        Raises:
            UserError: no body is running.
        """
        if self.current is None or not self.current.open:
            raise UserError(f"{call} outside a step: call it in the body of the loop over run.batches")
        return self.current

    def log(self, values: dict[str, float], of_body: bool = True) -> None:
        """Keep plain numbers, which are written after the step's own line; for `of_body`, see RunLogger.keep."""
        self.services.logger.keep(values, of_body)
        self.scores |= values
        self.scores_here.update(values)

    @property
    def scores_here(self) -> dict[str, float]:
        """Return what was logged at the last step, or before the first one."""
        return self._scores_outside if self.current is None else self.current.scores

    def check_savable(self) -> None:
        """Refuse to save in the middle of an evaluation, or of a step.

        Raises:
            UserError: run.save was called there.
        """
        if self.services.averages.applied:
            raise UserError(
                "run.save inside an evaluation, where the model has an average of its weights: call it after"
            )
        step = self.current
        if step is not None and step.open and not step.updated:
            raise UserError(f"run.save in step {step.number} before run.step(optimizer): call it after the update")

    def may_stop_in_evaluation(self) -> bool:
        """Tell whether the run may stop during an evaluation now; if not, the step is finished first.

        DeepSpeed's steps cannot be repeated. Between a step's first forward pass and its update, buffers belong to
        neither step.
        """
        repeats = self.services.accelerator.distributed_type != DistributedType.DEEPSPEED
        return repeats and (self.current is None or not self.current.halfway)
