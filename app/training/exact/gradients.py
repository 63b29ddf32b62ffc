"""Exact mode: gradients with the same bits on every layout, because their sums do not depend on the order.

The gradient of each micro-batch is rounded to a grid and summed in float64, where sums of grid points are exact, within
a rank and across ranks. docs/exact.md explains why, what it costs, and where it ends.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from accelerate.utils import DistributedType
from torch import Tensor, nn

from app.distributed import regional_compilation
from app.distributed.accelerator import Accelerator
from app.distributed.fsdp_calls import ALL_LAYERS
from app.distributed.naming import local_gradient
from app.distributed.tensor_parallel.layers import row_weights
from app.errors import UserError
from app.sampling.batch_plan import Step
from app.training.exact import deterministic_settings, layer_inputs, nondeterministic_ops, reproducible_sums
from app.training.exact import rounding as grid_rounding
from app.training.exact.grid import GRID, Grid, ShardedRounding, Sums
from app.training.loop.gradients import Gradients
from app.training.optim.building import fills_vectors

_deterministic: Any = torch.utils.deterministic  # torch declares no type of its setting

# Whether this process first used the GPU in an exact run. Of the process, because CUDA's libraries choose their kernels
# once in it, and a later run must know whether an earlier one asked in time.
_asked_in_time = False

LIMIT = 2.0 ** (52 - GRID)  # gradient norms, and sums of gradients over micro-batches, are exact below it


class ExactGradients(Gradients):
    """Weight, round, accumulate, synchronise and clip gradients with sums that do not depend on the order."""

    def __init__(self, accelerator: Accelerator, seed: int, failed: Callable[[str], None] = lambda why: None):
        super().__init__(accelerator, seed, failed)
        _check(accelerator)
        self.sharded = accelerator.distributed_type == DistributedType.FSDP
        self.grid = Grid(accelerator)
        self.sums: dict[nn.Module, Sums] = {}
        self.shards: dict[nn.Module, ShardedRounding] = {}
        self.columns: dict[Tensor, int] = {}  # of weights whose rows are cut, how many slices are here
        self.current: Sequence[nn.Module] = ()  # the models of this turn
        self.last = False  # whether it is the last one of its loop
        self.largest_norm = torch.zeros((), dtype=torch.float64, device=accelerator.device)
        self.said: set[str] = set()
        if accelerator.device.type == "cuda":
            _deterministic.fill_uninitialized_memory = False
            torch.use_deterministic_algorithms(True)

    def prepare(self, model: nn.Module, optimizer: torch.optim.Optimizer, clip: float) -> tuple[nn.Module, Any]:
        """Place a model and its optimizer such that gradients are summed in float64."""
        _check_model(model)
        layer_inputs.add_within_layers(model)
        if self.accelerator.device.type == "cpu":
            for group in optimizer.param_groups:
                slices = self.accelerator.split.count if self.accelerator.split else 1
                filled = all(fills_vectors(parameter, slices) for parameter in group["params"])
                group["fused"] = bool(group.get("fused")) and filled
        if not self.sharded:
            model, optimizer = super().prepare(model, optimizer, clip)
            self.sums[model] = Sums(model, self.grid, self.accelerator.data_ranks == 1)
            self._find_slices(model)
            return model, optimizer
        policy = torch.distributed.fsdp.MixedPrecisionPolicy(reduce_dtype=torch.float64)
        self.accelerator.state.fsdp_plugin.mixed_precision_policy = policy
        model, optimizer = super().prepare(model, optimizer, clip)
        self.shards[model] = ShardedRounding(model, self.grid)
        self._find_slices(model)
        return model, optimizer

    def _find_slices(self, model: nn.Module) -> None:
        if self.accelerator.split is not None:
            self.columns |= dict.fromkeys(row_weights(model), self.accelerator.split.here)

    @contextmanager
    def turn(self, models: Sequence[nn.Module], last: bool) -> Iterator[None]:
        """Delay synchronisation to the last turn: FSDP reduces in its backward pass; else ranks are summed after it."""
        self.current, self.last = models, last
        if self.sharded:
            with super().turn(models, last):
                for model in models:
                    self.shards[model].begin()
                yield
            for model in models if last else ():
                self.shards[model].check()
            return
        with super().turn(models, last=False):
            yield
        if last:
            for model in models:
                self.sums[model].finish()

    def _pass_back(self, loss: Tensor, share: float) -> None:
        if self.sharded:
            with ExitStack() as stack:
                for model in self.current:
                    stack.enter_context(self.shards[model].backward(self.last))
                self.accelerator.backward(loss * share)
            return
        for model in self.current:
            self.sums[model].set_aside()
        self.accelerator.backward(loss * share)
        for model in self.current:
            self.sums[model].add()

    def clip(self, optimizer: torch.optim.Optimizer, largest: float) -> Tensor:
        """Scale gradients down to norm `largest` (0: never), on every rank; return the norm before, in float64."""
        self.accelerator.unscale_gradients(optimizer)
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        norm = reproducible_sums.norm(parameters, LIMIT, self.columns)
        # A norm that is not finite stops the run, skips the step, or lowers fp16's loss scale: it does not count here.
        self.largest_norm = torch.maximum(self.largest_norm, norm.nan_to_num(0.0, 0.0, 0.0))
        if largest and parameters:
            factor = (largest / (norm + 1e-6)).clamp(max=1.0).float()
            torch._foreach_mul_([local_gradient(parameter) for parameter in parameters], factor)
        return norm

    def arithmetic(self) -> dict[str, Any]:
        """Return the arithmetic settings of torch and CUDA's libraries, and what rounds the gradients."""
        return {**deterministic_settings.in_force(), "rounding": grid_rounding.how(self.accelerator.device)}

    def explained(self, error: BaseException | None) -> UserError | None:
        """Return advice for what torch has refused; None for other errors."""
        if self.sharded and isinstance(error, AssertionError) and "uniform gradient dtype" in str(error):
            return UserError(
                "--run.exact: a weight had its first gradient of a step in this rank's last micro-batch, which FSDP2 "
                f"cannot add to the others (torch {torch.__version__}). {ALL_LAYERS}"
            )
        return super().explained(error) or layer_inputs.explained(error) or nondeterministic_ops.explained(error)

    def begin(self, step: Step, closely: bool) -> None:
        """Begin a step; if `closely`, count the values that the grid loses, and how large sums get."""
        super().begin(step, closely)
        self.grid.watch(closely)

    def troubles(self) -> list[str]:
        """Warn, once each, of sums too large to be exact and of values too small for the grid. Every rank takes part.

        A sum is exact only if every partial sum, in any order, is below the limit. So the bound adds up absolute
        values, even if gradients cancel.
        """
        trouble_by_kind, large = {}, ""
        largest, (share, reach, name) = self.largest_norm.item(), self.grid.survey()
        if largest >= LIMIT:
            large = f"the gradient's norm has been {largest:.4g}"
        elif reach >= LIMIT:
            large = f"sums over some of a step's micro-batches may reach {reach:.4g} in the gradient of {name}"
        if large:
            trouble_by_kind["large"] = (
                f"{large}; sums are exact below {LIMIT:.0f}, so from here on other "
                "layouts may differ: lower --optim.lr, or scale the loss down"
            )
        if share > 0.01:
            trouble_by_kind["small"] = (
                f"{share:.0%} of the gradient's nonzero values are below half the grid's unit (2**-{GRID + 1}) and "
                "count as 0: scale the loss up"
            )
        new = [f"warning: --run.exact: {text}" for kind, text in trouble_by_kind.items() if kind not in self.said]
        self.said |= set(trouble_by_kind)
        return new


@contextmanager
def settings() -> Iterator[None]:
    """Make torch and CUDA's libraries use kernels with the same bits each time; restore the settings after the block.

    Raises:
        UserError: this process has already used the GPU without these settings.
    """
    global _asked_in_time
    name = "CUBLAS_WORKSPACE_CONFIG"
    before = os.environ.get(name)
    asked = before is not None or _asked_in_time or not torch.cuda.is_initialized()
    if not asked:
        raise UserError(
            "--run.exact: this process has used the GPU before, so CUDA's libraries have chosen their kernels: restart "
            f"it (a notebook's kernel), or set {name}=:4096:8 before it starts"
        )
    kernels, warn_only = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    fill = _deterministic.fill_uninitialized_memory
    os.environ.setdefault(name, ":4096:8")
    try:
        with deterministic_settings.fixed():
            yield
    finally:
        _asked_in_time = asked and torch.cuda.is_initialized()
        if before is None:
            os.environ.pop(name, None)
        torch.use_deterministic_algorithms(kernels, warn_only=warn_only)
        _deterministic.fill_uninitialized_memory = fill


def _check(accelerator: Accelerator) -> None:
    zero = accelerator.distributed_type == DistributedType.DEEPSPEED
    by_region = regional_compilation.is_asked_for(accelerator.state.dynamo_plugin)
    unsliced = accelerator.ranks_per_data_rank if accelerator.split and not accelerator.split.fixed_tree else 0
    reason = refusal(zero, accelerator.compiles and not by_region, unsliced)
    if reason:
        raise UserError(f"--run.exact: {reason}")


def refusal(zero: bool, whole: bool, unsliced: int = 0) -> str:
    """Say why exact mode cannot work under a profile; empty if it can.

    Args:
        zero: it uses DeepSpeed.
        whole: it compiles a model as one.
        unsliced: over how many processes it splits layers without slices that all layouts compute; 0: none.
    """
    if unsliced:
        return (
            f"tp_size {unsliced} splits layers, whose sums then have other bits: give --run.slices {unsliced}, or "
            "more, on every layout that is to agree"
        )
    if zero:
        return "DeepSpeed sums gradients in its own order; use an fsdp or ddp profile"
    if whole:
        return (
            "compiled as a whole, a model has other graphs on each layout: add dynamo_use_regional_compilation: true "
            "to the profile's dynamo_config, or take dynamo_config out"
        )
    return ""


def _check_model(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(module, nn.SyncBatchNorm):
            raise UserError(
                f"--run.exact: {name} is a SyncBatchNorm, which normalises over the micro-batches that processes "
                "compute at the same time; use BatchNorm (--run.sync-bn false), GroupNorm or LayerNorm"
            )
