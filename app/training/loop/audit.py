"""The audit: hashes, norms and sketches of each step's inputs, gradients and weights, to compare two runs."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from app.distributed import collectives, deepspeed, naming
from app.distributed.accelerator import Accelerator
from app.distributed.state import state_dict
from app.rundir.logs import Logs
from app.rundir.metrics_file import MetricsFile
from app.sampling.hashing import hash_of
from app.training.loop.step_metrics import StepMetrics

FILE = "audit.jsonl"
SKETCH = 16  # numbers in the sketch of a tensor


class Audit:
    """Write one line for each step to audit.jsonl, next to metrics.jsonl, and one before the first step.

    A line has `inputs`: a hash for each micro-batch; `losses`: by name, one for each micro-batch; `gradients`, as the
    optimizer gets them, and `weights`: by name, each with `hash`, `norm` and `sketch`. The first line lists the names
    of `buffers`, which are among the weights. Every rank takes part; of replicated tensors, the main process's copy
    is described.
    """

    def __init__(self, accelerator: Accelerator, folder: Path, done: int, warn: Callable[[str], Any], logs: Logs):
        """Begin after step `done`; `logs`: the growing files of the run.

        Raises:
            UserError: under DeepSpeed, whose engine hides the weights.
        """
        deepspeed.refuse("--run.audit", accelerator.distributed_type)
        self.accelerator = accelerator
        self.file = MetricsFile(folder / FILE, done, warn, logs=logs) if accelerator.is_main_process else None
        self._signs = torch.empty(0, dtype=torch.int8)
        self._gradients: dict[str, dict] = {}
        if not done:
            self._write(0, {"buffers": sorted(naming.buffer_names(accelerator.models))})

    def gradients(self, optimizer: torch.optim.Optimizer) -> None:
        """Describe the gradients that an optimizer is about to use. Every rank takes part."""
        names = naming.parameter_names(self.accelerator.models)
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            if parameter.grad is not None and parameter in names:
                self._gradients[names[parameter]] = self._describe(parameter.grad)

    def step(self, done: int, log: StepMetrics) -> None:
        """Write the line of step `done`, counted from 1. Every rank takes part."""
        inputs = {turn.index: hash_of(turn.inputs) for turn in log.step.turns if not turn.idle}
        losses: dict[str, dict[int, float]] = {}
        for name, turn, loss in log.losses:
            if turn.weight:
                of_name = losses.setdefault(name, {})
                of_name[turn.index] = of_name.get(turn.index, 0.0) + loss.item()
        everywhere = collectives.gather((inputs, losses))
        all_inputs = {index: input_hash for inputs, _ in everywhere for index, input_hash in inputs.items()}
        names = sorted({name for _, losses in everywhere for name in losses})
        all_losses = {n: {i: v for _, losses in everywhere for i, v in losses.get(n, {}).items()} for n in names}
        self._write(done, {"inputs": all_inputs, "losses": all_losses, "gradients": self._gradients})
        self._gradients = {}

    def _write(self, done: int, fields: dict[str, Any]) -> None:
        tensors, _ = state_dict.model_tensors(self.accelerator.models)
        weights = {name: self._describe(tensor) for name, tensor in tensors.items()}
        if self.file:
            self.file.write(done, {**fields, "weights": weights})

    def _describe(self, tensor: Tensor) -> dict[str, Any]:
        """Gather a tensor if it is sharded, and describe it on the main process; empty on other ranks."""
        if isinstance(tensor, DTensor):
            tensor = tensor.full_tensor()
        if not self.file:
            return {}
        values = tensor.detach().reshape(-1).cpu().double()
        if len(self._signs) < len(values):
            draw = torch.Generator().manual_seed(0)
            self._signs = torch.randint(0, 2, (len(values),), generator=draw, dtype=torch.int8) * 2 - 1
        return {
            "hash": hash_of(tensor),
            "norm": values.norm().item(),
            "sketch": sketch(values, self._signs).tolist(),
        }


def sketch(values: Tensor, signs: Tensor) -> Tensor:
    """Project a tensor [n] to SKETCH numbers (float64) that approximately keep distances.

    The norm of the difference of two sketches is close to the norm of the difference of the tensors, nearly always
    within a factor of two (a count sketch: a random projection after Johnson and Lindenstrauss).

    Args:
        signs: random 1 or -1 for each value; the same for all tensors that are compared.
    """
    padded = torch.zeros(-(-len(values) // SKETCH) * SKETCH, dtype=torch.float64)
    padded[: len(values)] = values * signs[: len(values)]
    return padded.view(-1, SKETCH).sum(0)
