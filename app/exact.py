"""Exact mode: gradients with the same bits on every layout, because their sums do not depend on the order.

The gradient of each micro-batch is rounded to a grid and added up in float64, where sums of grid points are exact:
within a rank, and across ranks. docs/exact.md has the argument, the costs and the limits.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from accelerate.utils import DistributedType, DynamoBackend
from torch import Tensor, nn

from app import ranks, sums
from app.accelerator import Accelerator
from app.errors import UserError
from app.gradients import Gradients

GRID = 40  # gradients are rounded to multiples of 2**-GRID
LIMIT = 2.0 ** (52 - GRID)  # norm of the gradient below which its sums are exact


class ExactGradients(Gradients):
    """Weigh, round, accumulate, synchronise and clip with order-free sums."""

    def __init__(self, accelerator: Accelerator, seed: int):
        super().__init__(accelerator, seed)
        _check(accelerator)
        self.sharded = accelerator.distributed_type == DistributedType.FSDP
        self.grid = _Grid(accelerator)
        self.sums: dict[nn.Module, _Sums] = {}
        self.current: Sequence[nn.Module] = ()
        self.largest_norm = torch.zeros((), dtype=torch.float64, device=accelerator.device)
        self.said: set[str] = set()
        if accelerator.device.type == "cuda":
            torch.utils.deterministic.fill_uninitialized_memory = False
            torch.use_deterministic_algorithms(True)

    def prepare(self, model: nn.Module, optimizer: torch.optim.Optimizer, clip: float) -> tuple[nn.Module, Any]:
        """Place a model and its optimizer, so that gradients are summed in float64."""
        _check_model(model)
        if self.accelerator.device.type == "cpu":
            for group in optimizer.param_groups:
                group["fused"] = bool(group.get("fused")) and all(map(_fills_vectors, group["params"]))
        if not self.sharded:
            model, optimizer = super().prepare(model, optimizer, clip)
            self.sums[model] = _Sums(model)
            return model, optimizer
        policy = torch.distributed.fsdp.MixedPrecisionPolicy(reduce_dtype=torch.float64)
        self.accelerator.state.fsdp_plugin.mixed_precision_policy = policy
        model, optimizer = super().prepare(model, optimizer, clip)
        self._round_in_shards(model)
        return model, optimizer

    def _round_in_shards(self, model: nn.Module) -> None:
        """Have FSDP2 round each whole gradient before it accumulates and reduces it, and add up where it would average.

        The whole parameters exist from the first forward pass on, behind FSDP's own hook.
        """
        seen = set()

        def hook_parameters(module, _):
            for parameter in module._parameters.values():
                if parameter is not None and parameter.requires_grad and parameter not in seen:
                    seen.add(parameter)
                    parameter.register_hook(self.grid.nearest)

        for module in model.modules():
            if hasattr(module, "set_gradient_divide_factor"):
                module.set_gradient_divide_factor(1.0)
            if module._parameters:
                module.register_forward_pre_hook(hook_parameters)

    @contextmanager
    def turn(self, models: Sequence[nn.Module], last: bool) -> Iterator[None]:
        """Hold back synchronisation, FSDP's own in every turn but the last; behind the last, sum over ranks."""
        if self.sharded:
            with super().turn(models, last):
                yield
            return
        with super().turn(models, last=False):
            self.current = models
            yield
        if last:
            for model in models:
                self.sums[model].finish(self.grid)

    def backward(self, loss: Tensor, share: float) -> None:
        """Add the rounded gradient of a micro-batch's mean loss, whose weight is `share` of the global batch's."""
        self.accelerator.backward(loss * share)
        if not self.sharded:
            for model in self.current:
                self.sums[model].add(self.grid)

    def clip(self, optimizer: torch.optim.Optimizer, largest: float) -> Tensor:
        """Scale the optimizer's gradients down to norm `largest` (0: leave them) and return their norm before that."""
        self.accelerator.unscale_gradients(optimizer)
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        norm = sums.norm(parameters, LIMIT)
        # One that is not finite ends the step, or the scale of fp16 is still being found.
        self.largest_norm = torch.maximum(self.largest_norm, norm.nan_to_num(0.0, 0.0, 0.0))
        if largest:
            factor = (largest / (norm + 1e-6)).clamp(max=1.0).float()
            for parameter in parameters:
                sums.local(parameter.grad).mul_(factor)
        return norm

    def watch(self, closely: bool) -> None:
        """Count, in the step that begins, gradients that the grid loses; it costs a pass over them."""
        self.grid.counting = closely

    def troubles(self) -> list[str]:
        """Say, once, what the grid did not fit: sums too large to be exact, and values too small to be kept."""
        found = {}
        largest, share = self.largest_norm.item(), self.grid.share_lost()
        if largest >= LIMIT:
            found["large"] = (
                f"the gradient's norm has been {largest:.4g}; sums are exact below {LIMIT:.0f}, so from here on other "
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


class _Grid:
    """Multiples of 2**-GRID, and under fp16 of that times the loss's scale."""

    def __init__(self, accelerator: Accelerator):
        self.scaler = accelerator.scaler
        self.counting = False
        self.counts = torch.zeros(2, dtype=torch.float64, device=accelerator.device)  # lost, not zero

    @property
    def points(self) -> Tensor | float:
        """How many grid points make a gradient of 1."""
        return 2.0**GRID if self.scaler is None else 2.0**GRID / self.scaler._scale

    def numbers(self, gradient: Tensor, in_place: bool = False) -> Tensor:
        """Return the number of the grid point nearest to each value."""
        present = gradient != 0 if self.counting else None
        found = (gradient.mul_(self.points) if in_place else gradient * self.points).round_()
        found.add_(0.0)  # -0 becomes 0: a sum keeps its sign or not by how many parts it has
        if present is not None:
            self.counts += torch.stack([(present & (found == 0)).sum(), present.sum()])
        return found

    def nearest(self, gradient: Tensor) -> Tensor:
        """Round each value to the grid."""
        return self.numbers(gradient).div_(self.points)

    def share_lost(self) -> float:
        """Return the share of values, since the last call, that were not 0 and were rounded to it."""
        lost, present = self.counts.tolist()
        self.counts.zero_()
        return lost / present if present else 0.0


class _Sums:
    """Float64 sums of one model's gradients, in grid points: 8 bytes a parameter, reduced as one tensor."""

    def __init__(self, model: nn.Module):
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        size = sum(p.numel() for p in self.parameters)
        # Behind the sums: how many ranks had a gradient for each parameter.
        self.flat = torch.zeros(size + len(self.parameters), dtype=torch.float64, device=self.parameters[0].device)
        pieces = self.flat[:size].split([p.numel() for p in self.parameters])
        self.sums = [piece.view(p.shape) for piece, p in zip(pieces, self.parameters, strict=True)]
        self.seen = [False] * len(self.parameters)

    def add(self, grid: _Grid) -> None:
        """Round the gradients at hand and add them."""
        for index, parameter in enumerate(self.parameters):
            if parameter.grad is not None:
                numbers = grid.numbers(parameter.grad, in_place=True)
                self.sums[index].add_(numbers) if self.seen[index] else self.sums[index].copy_(numbers)
                self.seen[index] = True
                parameter.grad = None

    def finish(self, grid: _Grid) -> None:
        """Sum over ranks and hand the parameters their gradients. Every rank takes part."""
        for sum_, seen in zip(self.sums, self.seen, strict=True):
            if not seen:
                sum_.zero_()
        if not ranks.alone():
            self.flat[-len(self.seen) :] = torch.tensor(self.seen, dtype=torch.float64)
            dist.all_reduce(self.flat)
        # One that no rank had a gradient for gets none, so that the optimizer leaves it alone on any layout.
        had = self.seen if all(self.seen) or ranks.alone() else self.flat[-len(self.seen) :].tolist()
        for parameter, sum_, some in zip(self.parameters, self.sums, had, strict=True):
            if some:
                parameter.grad = torch.div(sum_, grid.points, out=torch.empty_like(parameter))
        self.seen = [False] * len(self.seen)


def settle_environment() -> None:
    """Ask CUDA's libraries for kernels with the same bits each time; before they start.

    Raises:
        UserError: this process has used the GPU without asking.
    """
    if torch.cuda.is_initialized() and "CUBLAS_WORKSPACE_CONFIG" not in os.environ:
        raise UserError(
            "--run.exact: this process has used the GPU before, and its libraries have chosen their kernels: restart "
            "it (a notebook's kernel), or set CUBLAS_WORKSPACE_CONFIG=:4096:8 before it starts"
        )
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def leave_environment() -> None:
    """Let torch choose its kernels again, for what this process does after an exact run."""
    torch.use_deterministic_algorithms(False)


def _check(accelerator: Accelerator) -> None:
    zero = accelerator.distributed_type == DistributedType.DEEPSPEED
    compiled = accelerator.state.dynamo_plugin.backend != DynamoBackend.NO
    reason = refusal(zero, compiled, accelerator.data_ranks != accelerator.num_processes)
    if reason:
        raise UserError(f"--run.exact: {reason}")


def refusal(zero: bool, compiled: bool, tensor_parallel: bool) -> str:
    """Say why the bits of a layout cannot be those of the others; nothing where they can."""
    if zero:
        return "DeepSpeed sums gradients in its own order; use an fsdp or ddp profile"
    if compiled:
        return "compiled code differs between layouts; take dynamo_config out of the profile"
    return "tensor parallelism splits sums inside the model; set tp_size to 1" if tensor_parallel else ""


def _fills_vectors(parameter: nn.Parameter) -> bool:
    """Tell whether fused CPU kernels treat a tensor's elements alike, in the whole and in shards of whole rows.

    The last few that do not fill a vector (at most 16 numbers) are rounded in another way.
    """
    return parameter.ndim > 1 and parameter[0].numel() % 16 == 0


def _check_model(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            raise UserError(
                f"--run.exact: {name} is a {type(module).__name__}, which computes over the samples that a process "
                "happens to hold; use GroupNorm or LayerNorm, or --run.exact false"
            )
