"""Exact mode: gradients with the same bits on every layout, because their sums do not depend on the order.

The gradient of each micro-batch is rounded to a grid and added up in float64, where sums of grid points are exact:
within a rank, and across ranks. docs/exact.md has the argument, the costs and the limits.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from accelerate.utils import DistributedType, DynamoBackend
from torch import Tensor, nn

from app.distributed.accelerator import Accelerator
from app.distributed.batch_norm import is_batch_norm
from app.distributed.naming import local_shard
from app.errors import UserError
from app.sampling.batch_plan import Step
from app.training import deterministic_settings, grid_rounding, nondeterministic_ops, reproducible_sums
from app.training.gradient_grid import GRID, Grid, Shards, Sums
from app.training.gradients import Gradients

_deterministic: Any = torch.utils.deterministic  # torch declares no type of its setting

_asked_in_time = False  # this process first used the GPU in an exact run

LIMIT = 2.0 ** (52 - GRID)  # of the gradient's norm, and of its sums over micro-batches: exact below


class ExactGradients(Gradients):
    """Weigh, round, accumulate, synchronise and clip with order-free sums."""

    def __init__(self, accelerator: Accelerator, seed: int):
        super().__init__(accelerator, seed)
        _check(accelerator)
        self.sharded = accelerator.distributed_type == DistributedType.FSDP
        self.grid = Grid(accelerator)
        self.sums: dict[nn.Module, Sums] = {}
        self.shards: dict[nn.Module, Shards] = {}
        self.current: Sequence[nn.Module] = ()
        self.largest_norm = torch.zeros((), dtype=torch.float64, device=accelerator.device)
        self.said: set[str] = set()
        if accelerator.device.type == "cuda":
            _deterministic.fill_uninitialized_memory = False
            torch.use_deterministic_algorithms(True)

    def prepare(self, model: nn.Module, optimizer: torch.optim.Optimizer, clip: float) -> tuple[nn.Module, Any]:
        """Place a model and its optimizer, so that gradients are summed in float64."""
        _check_model(model)
        if self.accelerator.device.type == "cpu":
            for group in optimizer.param_groups:
                group["fused"] = bool(group.get("fused")) and all(map(_fills_vectors, group["params"]))
        if not self.sharded:
            model, optimizer = super().prepare(model, optimizer, clip)
            self.sums[model] = Sums(model, self.grid)
            return model, optimizer
        policy = torch.distributed.fsdp.MixedPrecisionPolicy(reduce_dtype=torch.float64)
        self.accelerator.state.fsdp_plugin.mixed_precision_policy = policy
        model, optimizer = super().prepare(model, optimizer, clip)
        self.shards[model] = Shards(model, self.grid)
        return model, optimizer

    @contextmanager
    def turn(self, models: Sequence[nn.Module], last: bool) -> Iterator[None]:
        """Hold back synchronisation, FSDP's own in every turn but the last; behind the last, sum over ranks."""
        if self.sharded:
            with super().turn(models, last):
                yield
            for model in models if last else ():
                self.shards[model].check()
            return
        with super().turn(models, last=False):
            self.current = models
            yield
        if last:
            for model in models:
                self.sums[model].finish()

    def _pass_back(self, loss: Tensor, share: float) -> None:
        models = () if self.sharded else self.current
        for model in models:
            self.sums[model].set_aside()
        self.accelerator.backward(loss * share)
        for model in models:
            self.sums[model].add()

    def clip(self, optimizer: torch.optim.Optimizer, largest: float) -> Tensor:
        """Scale the optimizer's gradients down to norm `largest` (0: leave them) and return their norm before that."""
        self.accelerator.unscale_gradients(optimizer)
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        norm = reproducible_sums.norm(parameters, LIMIT)
        # One that is not finite ends the step, or the scale of fp16 is still being found.
        self.largest_norm = torch.maximum(self.largest_norm, norm.nan_to_num(0.0, 0.0, 0.0))
        if largest and parameters:
            factor = (largest / (norm + 1e-6)).clamp(max=1.0).float()
            torch._foreach_mul_([local_shard(parameter.grad) for parameter in parameters], factor)
        return norm

    def arithmetic(self) -> dict[str, Any]:
        """Say which arithmetic torch and CUDA's libraries were left with, and what rounds the gradients."""
        return {**deterministic_settings.in_force(), "rounding": grid_rounding.how(self.accelerator.device)}

    def explained(self, error: BaseException | None) -> UserError | None:
        """Say what to use in place of an operation that torch has refused."""
        return nondeterministic_ops.explained(error)

    def begin(self, step: Step, closely: bool) -> None:
        """Begin a step; in one that is measured, count what the grid loses, and how far sums reach."""
        super().begin(step, closely)
        self.grid.watch(closely)

    def troubles(self) -> list[str]:
        """Say, once, what the grid did not fit: sums too large to be exact, and values too small to be kept.

        A sum is exact where every partial sum is, in any order: micro-batches whose gradients cancel count in full.
        """
        found, large = {}, ""
        largest, (share, reach, name) = self.largest_norm.item(), self.grid.survey()
        if largest >= LIMIT:
            large = f"the gradient's norm has been {largest:.4g}"
        elif reach >= LIMIT:
            large = f"sums over some of a step's micro-batches may reach {reach:.4g} in the gradient of {name}"
        if large:
            found["large"] = (
                f"{large}; sums are exact below {LIMIT:.0f}, so from here on other "
                "layouts may differ: lower --optim.lr, or scale the loss down"
            )
        if share > 0.01:
            found["small"] = (
                f"{share:.0%} of the gradient's values that are not 0 lie under the grid (2**-{GRID + 1}) and count as "
                "0: scale the loss up"
            )
        new = [f"warning: --run.exact: {text}" for kind, text in found.items() if kind not in self.said]
        self.said |= set(found)
        return new


@contextmanager
def settings() -> Iterator[None]:
    """Ask torch and CUDA's libraries for kernels with the same bits each time; afterwards, give back what was set.

    Raises:
        UserError: this process has used the GPU without asking.
    """
    global _asked_in_time
    name = "CUBLAS_WORKSPACE_CONFIG"
    before = os.environ.get(name)
    asked = before is not None or _asked_in_time or not torch.cuda.is_initialized()
    if not asked:
        raise UserError(
            "--run.exact: this process has used the GPU before, and its libraries have chosen their kernels: restart "
            f"it (a notebook's kernel), or set {name}=:4096:8 before it starts"
        )
    kernels, warn_only = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    fill = _deterministic.fill_uninitialized_memory
    os.environ.setdefault(name, ":4096:8")
    try:
        with deterministic_settings.settled():
            yield
    finally:
        _asked_in_time = asked and torch.cuda.is_initialized()
        if before is None:
            os.environ.pop(name, None)
        torch.use_deterministic_algorithms(kernels, warn_only=warn_only)
        _deterministic.fill_uninitialized_memory = fill


def _check(accelerator: Accelerator) -> None:
    zero = accelerator.distributed_type == DistributedType.DEEPSPEED
    compiled = accelerator.state.dynamo_plugin.backend != DynamoBackend.NO
    reason = refusal(zero, compiled)
    if reason:
        raise UserError(f"--run.exact: {reason}")


def refusal(zero: bool, compiled: bool) -> str:
    """Say why the bits of a layout cannot be those of the others; nothing where they can."""
    if zero:
        return "DeepSpeed sums gradients in its own order; use an fsdp or ddp profile"
    return "compiled code differs between layouts; take dynamo_config out of the profile" if compiled else ""


def _fills_vectors(parameter: nn.Parameter) -> bool:
    """Tell whether fused CPU kernels treat a tensor's elements alike, in the whole and in shards of whole rows.

    The last few that do not fill a vector (at most 16 numbers) are rounded in another way.
    """
    return parameter.ndim > 1 and parameter[0].numel() % 16 == 0


def _check_model(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if is_batch_norm(module):
            raise UserError(
                f"--run.exact: {name} is a {type(module).__name__}, which computes over the samples that a process "
                "happens to hold; use GroupNorm or LayerNorm, or --run.exact false"
            )
