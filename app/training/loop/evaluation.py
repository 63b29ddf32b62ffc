"""One pass over an evaluation set: each sample once, on any number of ranks."""

from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from app.data.rows import Rows
from app.sampling.batch_plan import EvaluationPlan, Turn
from app.sampling.seeding import EVALUATION, aside, seed_all
from app.training.feeding.fetching import Fetch
from app.training.loop.services import Services
from app.training.scores.collecting import evaluating


def turns(
    services: Services,
    model: nn.Module,
    plan: EvaluationPlan,
    data: Rows,
    collate: Callable[[list], Any],
    may_stop: bool,
    fetch: Fetch = (),
) -> Iterator[Turn]:
    """Yield this rank's turns, with the model in evaluation mode and without gradients. Every rank takes part.

    Args:
        may_stop: whether a rank that is asked to stop leaves here; if not, the whole pass is made.
        fetch: stages after collate, see app/training/feeding/fetching.py.

    Raises:
        StoppedInEvaluation: a rank was asked to stop, and `may_stop`. Raised on all ranks.
    """
    accelerator = services.accelerator
    indices = range(plan.steps(accelerator.data_ranks))
    services.buffers.find_changes()
    scored = services.averages.in_place(average=False)  # inside of run.evaluate they are in place already
    with services.logger.time_aside("evaluating"), aside(accelerator.device), scored, evaluating(model):
        allowed = services.preemption.turns(len(indices), accelerator.is_fsdp2) if may_stop else indices
        for _, step in zip(allowed, services.load(plan, indices, data, collate, fetch=fetch), strict=True):
            services.watchdog.beat()
            (turn,) = step.turns
            seed_all(plan.seed, EVALUATION, turn.index)
            yield accelerator.counted_once(turn)
