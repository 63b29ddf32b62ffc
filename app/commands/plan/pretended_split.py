"""Models as one of several tensor-parallel processes has them, none of which is there."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from torch import nn

from app.commands.plan.meta_tensors import Cut
from app.distributed.tensor_parallel.layers import cuts, split_model
from app.distributed.tensor_parallel.plan import plan_of
from app.distributed.tensor_parallel.split import Split


def cuts_of(models: list[nn.Module], parts: int, slices: int) -> Cut:
    """Return the weights that each process has one of `parts` parts of, with the dimension that is cut.

    Args:
        slices: into how many layers are cut, which a vocabulary must be divisible by too; 0: into `parts`.

    Raises:
        UserError: a model cannot be split.
    """
    if parts == 1:
        return {}
    plans = [(model, plan_of(model, max(parts, slices))) for model in models]
    return {parameter: (dim, parts) for model, plan in plans for parameter, dim in cuts(model, plan).items()}


@contextmanager
def split_over(models: list[nn.Module], parts: int, split: Split | None) -> Iterator[None]:
    """Have the layers of models compute, inside the block, what one of `parts` processes would.

    Args:
        split: how they are split already, into slices on one process.
    """
    with ExitStack() as stack:
        if split is None and parts > 1:
            split = Split(None)
            for model in models:
                for module in model.modules():
                    stack.callback(partial(_restore, module, vars(module).get("forward")))
                split_model(model, plan_of(model, parts), split)
        if split is not None:
            stack.enter_context(split.pretending(parts))
        yield


def _restore(module: nn.Module, forward: Any) -> None:
    vars(module).pop("forward", None)
    if forward is not None:
        module.forward = forward
