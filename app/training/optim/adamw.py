"""AdamW: its arithmetic, and optimizers with state in eight bits, with weights in bfloat16, or both.

Their bits do not depend on how weights are cut.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from app.distributed import accelerate_patches
from app.distributed.naming import local_shard
from app.errors import UserError
from app.sampling.hashing import key_of
from app.sampling.seeding import seed_of
from app.training.optim import bf16, eight_bit, wholes

AT_ONCE = 2**18  # numbers that are updated together: the float32 copies of more would leave the cache


def update(weight: Tensor, gradient: Tensor, mean: Tensor, square: Tensor, group: dict[str, Any], count: float) -> None:
    """Update a weight and both averages in place (Loshchilov and Hutter, 2019).

    Each operation rounds once, so that bits do not depend on how a weight is cut into shards or pieces.

    Args:
        mean: the average of the gradient.
        square: the average of its square.
        group: the options lr, betas, eps and weight_decay.
        count: of this weight's updates, with this one.
    """
    slow, slower = group["betas"]
    mean.mul_(slow).add_(gradient * (1 - slow))
    square.mul_(slower).add_((gradient * gradient).mul_(1 - slower))
    size = (square / (1 - slower**count)).sqrt_().add_(group["eps"])
    weight.mul_(1 - group["lr"] * group["weight_decay"])
    weight.sub_((mean / size).mul_(group["lr"] / (1 - slow**count)))


class LeanAdamW(torch.optim.Optimizer):
    """AdamW whose weights may be bfloat16, each updated in float32 and then rounded."""

    eight_bit = False

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        updates: str = "plain",
    ):
        """Take parameters in groups.

        Args:
            updates: plain; or, for weights in bfloat16, stochastic, whose groups have a list `seeds`, one for each
                parameter; or kahan, which remembers what rounding has cut off.
        """
        options = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "updates": updates}
        super().__init__(params, options)
        self._places: dict[Tensor, tuple[Tensor, Tensor]] = {}

    def begin(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """Make the state of a parameter before its first update, cut as the parameter is."""
        state = {"step": torch.zeros(())}
        if self.eight_bit and eight_bit.is_worth(parameter.shape):
            for name in ("exp_avg", "exp_avg_root"):
                state[name] = torch.zeros_like(parameter, dtype=torch.uint8, requires_grad=False)
                state[f"{name}_scale"] = _scales(parameter)
        else:
            for name in ("exp_avg", "exp_avg_sq"):
                state[name] = torch.zeros_like(parameter, dtype=torch.float32, requires_grad=False)
        if self._is_kahan(parameter):
            state["compensation"] = torch.zeros_like(parameter, requires_grad=False)
        return state

    def check_split(self, cuts: dict[nn.Parameter, int], parts: int) -> None:
        """Refuse to have rows cut inside blocks.

        Args:
            cuts: the dimension along which each parameter is cut, which is whole yet.
            parts: into how many.

        Raises:
            UserError: they would be.
        """
        if parts == 1 or not self.eight_bit:
            return
        for group in self.param_groups:
            for parameter in group["params"]:
                row = parameter.shape[1:].numel()
                block = eight_bit.block_of(row)
                if cuts.get(parameter) == 1 and eight_bit.is_worth(parameter.shape) and row % (block * parts):
                    raise UserError(
                        f"--optim.name {type(self).__name__}: tp_size {parts} cuts rows of {row} numbers inside blocks "
                        f"of {block}, which share a scale: take a smaller tp_size, or AdamW"
                    )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]  # no loss to return
        """Update all parameters that have a gradient."""
        for group in self.param_groups:
            for index, parameter in enumerate(group["params"]):
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state.update(self.begin(parameter))
                state["step"] += 1
                count = state["step"].item()
                seed = seed_of(group["seeds"][index], int(count)) if group["updates"] == "stochastic" else None
                for piece in _pieces(parameter):
                    self._update(piece, parameter, group, state, seed)

    def _update(self, piece: slice, parameter: nn.Parameter, group: dict, state: dict, seed: int | None) -> None:
        """Update some of this rank's rows."""
        assert parameter.grad is not None
        weights, gradient = (_rows(each)[piece] for each in (parameter, parameter.grad))
        state_rows = {name: _rows(tensor)[piece] for name, tensor in state.items() if name != "step"}
        new = weights.flatten(1).float()
        if "compensation" in state_rows:
            new = new + state_rows["compensation"].flatten(1)
        block = eight_bit.block_of(parameter.shape[1:].numel()) if "exp_avg_root" in state_rows else 0
        if block:
            mean, root = (
                eight_bit.dequantize(
                    state_rows[name].flatten(1), state_rows[f"{name}_scale"], block, signed=name == "exp_avg"
                )
                for name in ("exp_avg", "exp_avg_root")
            )
            square = root.square_()
        else:
            mean, square = state_rows["exp_avg"].flatten(1), state_rows["exp_avg_sq"].flatten(1)
        update(new, gradient.flatten(1).float(), mean, square, group, state["step"].item())
        if block:
            # The root, because it is what updates are divided by, and spans half as many decades.
            for name, value in (("exp_avg", mean), ("exp_avg_root", square.sqrt_())):
                codes, kept_scales = eight_bit.quantize(value, block, signed=name == "exp_avg")
                _write(state_rows[name], codes)
                _write(state_rows[f"{name}_scale"], kept_scales)
        else:
            _write(state_rows["exp_avg"], mean)
            _write(state_rows["exp_avg_sq"], square)
        if weights.dtype != torch.bfloat16:
            _write(weights, new)
            return
        rounded = new.bfloat16()
        if seed is not None:
            rows, columns = self._places_of(parameter)
            rounded = bf16.stochastic(new, rows[piece], columns, seed)
        _write(weights, rounded)
        if "compensation" in state_rows:
            _write(state_rows["compensation"], new.sub_(rounded))

    def _places_of(self, parameter: nn.Parameter) -> tuple[Tensor, Tensor]:
        if parameter not in self._places:
            self._places[parameter] = wholes.places(parameter, local_shard(parameter).device)
        return self._places[parameter]

    def _is_kahan(self, parameter: nn.Parameter) -> bool:
        return self.param_groups[0]["updates"] == "kahan" and parameter.dtype == torch.bfloat16


class AdamW8bit(LeanAdamW):
    """AdamW whose averages have eight bits for each number; those of vectors and of small weights have 32."""

    eight_bit = True


def give_seeds(groups: list[dict[str, Any]], model: nn.Module, seed: int) -> None:
    """Give each parameter of groups a seed of its own, for numbers drawn in its updates: by its name, and the run's."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    for group in groups:
        group["seeds"] = [seed_of(seed, int(key_of(names[p]), 16)) for p in group["params"]]


def _rows(tensor: Tensor) -> Tensor:
    """Return this rank's rows of a tensor, [rows, ..]; a vector is a column."""
    shard = local_shard(tensor.detach())
    return shard if shard.ndim > 1 else shard.view(-1, 1)


def _write(target: Tensor, value: Tensor) -> None:
    """Write numbers into a tensor, unless they were computed in it."""
    if value.data_ptr() != target.data_ptr() or target.is_meta:
        target.copy_(value.view_as(target))


def _pieces(parameter: Tensor) -> Iterator[slice]:
    """Cut this rank's rows into pieces."""
    rows = _rows(parameter)
    most = max(1, AT_ONCE // max(1, rows.shape[1:].numel()))
    yield from (slice(start, start + most) for start in range(0, len(rows), most))


def _scales(parameter: nn.Parameter) -> Tensor:
    """Make a scale for each block of a parameter, [rows, blocks], cut as the parameter is."""
    row = parameter.shape[1:].numel()
    block, shard = eight_bit.block_of(row), local_shard(parameter.detach())
    shape = torch.Size((parameter.shape[0], eight_bit.count(row, block)))
    local_scales = torch.zeros(len(shard), eight_bit.count(shard.shape[1:].numel(), block), device=shard.device)
    return (
        accelerate_patches.sharded_like(parameter, local_scales, shape)
        if isinstance(parameter, DTensor)
        else local_scales
    )
