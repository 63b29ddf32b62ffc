"""Muon for matrices, AdamW for everything else, in one optimizer.

Muon makes the momentum of a matrix orthogonal before it is added (Jordan et al., 2024), so it needs the whole matrix:
shards of FSDP2 are gathered for it, one matrix after the other, and every rank computes the same bits. The update is
scaled to the size of AdamW's (Liu et al., *Muon is Scalable for LLM Training*, 2025), so one learning rate suits both.
"""

import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from app.distributed.naming import local_gradient, local_shard
from app.training.optim import adamw, wholes

MOMENTUM = 0.95
# Of the polynomial that is applied to the singular values, and how often.
_FACTORS, _TIMES = (3.4445, -4.7750, 2.0315), 5
# Names of layers that turn features into predictions, in models of transformers and timm.
_HEADS = ("head", "lm_head", "classifier", "score", "fc", "out")


class Muon(torch.optim.Optimizer):
    """Update matrices by Muon, and the other parameters by AdamW."""

    gathers = True
    """Whether it gathers shards."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
    ):
        """Take parameters in groups; those with `"muon": True` are matrices that Muon updates."""
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "muon": False})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]  # no loss to return
        """Update all parameters that have a gradient."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    (self._by_muon if group["muon"] else self._by_adamw)(parameter, group)

    def _by_muon(self, parameter: nn.Parameter, group: dict[str, Any]) -> None:
        gradient, state = local_gradient(parameter), self.state[parameter]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        momentum = state["momentum_buffer"]
        # Each operation rounds once, so that bits do not depend on how a matrix is cut into shards.
        local_shard(momentum).mul_(MOMENTUM).add_(gradient)
        ahead = gradient + local_shard(momentum) * MOMENTUM  # Nesterov's
        whole = wholes.whole(ahead, parameter)
        scale = 0.2 * max(whole.shape[0], whole.shape[1:].numel()) ** 0.5
        update = wholes.part(orthogonal(whole.flatten(1)).view_as(whole) * scale, parameter)
        shard = local_shard(parameter)
        shard.mul_(1 - group["lr"] * group["weight_decay"])
        shard.sub_(update.to(shard.dtype) * group["lr"])

    def _by_adamw(self, parameter: nn.Parameter, group: dict[str, Any]) -> None:
        state, gradient, shard = self.state[parameter], local_gradient(parameter), local_shard(parameter)
        if not state:
            state["step"] = torch.zeros(())
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
        state["step"] += 1
        mean, square = local_shard(state["exp_avg"]), local_shard(state["exp_avg_sq"])
        adamw.update(shard, gradient, mean, square, group, state["step"].item())


def is_for_muon(model: nn.Module, name: str, parameter: nn.Parameter) -> bool:
    """Tell whether Muon updates a parameter: a matrix of a hidden layer, not of embeddings nor of the last layer."""
    owner, _, _ = name.rpartition(".")
    kinds: list[type] = [nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d]
    if "transformers.pytorch_utils" in sys.modules:  # GPT-2's linear layers
        kinds.append(sys.modules["transformers.pytorch_utils"].Conv1D)
    is_matrix = parameter.ndim >= 2 and isinstance(model.get_submodule(owner), tuple(kinds))
    return is_matrix and "embed" not in owner and owner.rpartition(".")[2] not in _HEADS


def orthogonal(matrix: Tensor) -> Tensor:
    """Return a matrix with about the same singular vectors, and singular values near 1."""
    a, b, c = _FACTORS
    tall = matrix.shape[0] > matrix.shape[1]
    wide = (matrix.mT if tall else matrix).float()
    wide = wide / (wide.norm() + 1e-7)
    for _ in range(_TIMES):
        square = wide @ wide.mT
        wide = a * wide + (b * square + c * square @ square) @ wide
    return wide.mT if tall else wide
