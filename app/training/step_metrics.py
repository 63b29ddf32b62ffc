"""One step's losses, gradient norms and ledger; one collective, and only if the step is logged, saved or checked."""

import hashlib
import math
from typing import Any

import torch
from torch import Tensor

from app.distributed import collectives
from app.distributed.accelerator import Accelerator
from app.distributed.buffers import Buffers
from app.distributed.desync import DesyncCheck
from app.errors import UserError
from app.sampling.batch_plan import Step, Turn
from app.training.loss_means import LossMeans
from app.training.nonfinite import FirstNonfinite, Report, place, report


class StepMetrics:
    """Keep losses and gradient norms of one step on the device until they are read."""

    def __init__(self, accelerator: Accelerator, step: Step, faults: FirstNonfinite, skips: bool = False):
        """Begin a step.

        Args:
            faults: checks the losses and norms of steps that are not logged.
            skips: whether a number that is not finite skips the update instead of stopping the run.
        """
        self.accelerator, self.step, self.faults, self.skips = accelerator, step, faults, skips
        self.losses: list[tuple[str, Turn, Tensor]] = []
        self.norms: dict[int, Tensor] = {}

    def add(self, name: str, loss: Tensor, micro: Turn) -> None:
        """Keep a micro-batch's mean loss, a scalar on the device."""
        self.losses.append((name, micro, loss.detach()))

    def add_norm(self, norm: Tensor, index: int) -> bool:
        """Keep the norm of optimizer `index`'s gradient, unless it is known not to be finite.

        The host does not wait for a GPU, unless the run skips such steps: the next step that is logged or saved checks
        all norms since the last one.

        Returns:
            False if the norm is known not to be finite; the same on every rank.
        """
        self.norms[index] = norm
        waits = norm.device.type == "cpu" or self.skips
        if not waits or self.accelerator.scaler is not None or math.isfinite(norm.item()):
            return True
        del self.norms[index]
        return False

    def explain(self, norm: Tensor) -> Report:
        """Say what was not finite first, in an earlier step or in this step's gradient. Every rank takes part."""
        return self._earlier() or self._not_finite("gradient", norm.item())

    def note(self) -> None:
        """Check losses and norms on the device, in a step that is not logged; the host does not wait."""
        if self.losses and not self.skips and self.accelerator.scaler is None:  # the scaler skips such steps itself
            self.faults.note(self.step.index, self.losses, [*self.norms.values()])

    def collect(
        self, buffers: Buffers, means: LossMeans, drift: DesyncCheck | None = None
    ) -> tuple[dict[str, float], dict[str, Any]]:
        """Combine all ranks in one all-reduce. Every rank takes part, and waits for its device.

        Args:
            buffers: learns in the same collective whether training has changed further buffers.
            means: over several steps, with this one; its sums travel in the same collective.
            drift: compares the ranks' weights and buffers in the same collective.

        Returns:
            The losses of the global batch by name; and the mean losses, the gradient norms and the hash of the sample
            ids, by name.

        Raises:
            UserError: a loss or norm is not finite: it names the step, the ranks and the samples; or ranks differ.
        """
        names = sorted({name for name, _, _ in self.losses})
        # One slot for each micro-batch, filled by one rank: on every layout, losses are summed in the same order.
        slots = torch.zeros(len(names) * self.step.micro_count + 4, dtype=torch.float64, device=self.accelerator.device)
        changed = buffers.found()
        slots[-3:] = torch.tensor([*ledger_parts(self.step), len(changed)], dtype=torch.float64)
        slots[-4] = self.faults.there()
        for name, micro, loss in self.losses:
            if micro.weight:
                slot = names.index(name) * self.step.micro_count + micro.index
                slots[slot] += loss.double() * (micro.weight / self.step.weight)
        now = len(slots)
        slots = torch.cat([slots, means.slots(names)])
        own = len(slots)
        if drift is not None:
            slots = torch.cat([slots, drift.slots().to(slots.device)])
        if not collectives.alone():
            torch.distributed.all_reduce(slots)
            slots[:own] /= self.accelerator.num_processes // self.accelerator.data_ranks
        measured = torch.stack([*self.norms.values()]).double() if self.norms else slots[:0]
        numbers = torch.cat([measured, slots]).tolist()  # waits for the device
        norms, parts = numbers[: len(self.norms)], numbers[len(self.norms) :]
        parts, (earlier, high, low, fresh), sums, prints = (
            parts[: now - 4],
            parts[now - 4 : now],
            parts[now:own],
            parts[own:],
        )
        if earlier:
            raise UserError(self._earlier().advice())
        if fresh:
            buffers.learn(changed)
        if drift is not None and fresh:  # the numbers in `prints` are from before the ranks agreed on these buffers
            drift.compare_now(self.step.index + 1)
        elif drift is not None:
            drift.compare(prints, self.step.index + 1)
        losses = [sum(parts[i * self.step.micro_count : (i + 1) * self.step.micro_count]) for i in range(len(names))]
        for name, value in [*zip(names, losses, strict=True), *(("gradient", norm) for norm in norms)]:
            scaled = name == "gradient" and self.accelerator.scaler is not None
            if not math.isfinite(value) and not scaled and not self.skips:
                raise UserError(self._not_finite(name, value).advice())
        about = {f"grad_norm{suffix(i)}": norm for i, norm in zip(self.norms, norms, strict=True)}
        return dict(zip(names, losses, strict=True)), {
            **means.take(names, sums),
            **about,
            "ids": f"{int(high) % 2**32:08x}{int(low) % 2**32:08x}",
        }

    def _earlier(self) -> Report | None:
        """Say what was not finite in an earlier step; None if all was. Every rank takes part."""
        told = self.faults.tell()
        return told and told._replace(text=f"{told.text}; found in step {self.step.index + 1}")

    def _not_finite(self, what: str, value: float) -> Report:
        rank = self.accelerator.process_index
        own = {
            micro.index: place(micro.index, rank, micro.ids.tolist())
            for _, micro, loss in self.losses
            if micro.weight and not math.isfinite(loss.item())
        }
        places = {index: line for part in collectives.gather(own) for index, line in part.items()}
        text = f"the {what} of step {self.step.index + 1} is {value}"
        return report(text, places, self.step.micro_count, "every micro-batch's own loss is finite")


def suffix(index: int) -> str:
    """Return the suffix of an optimizer's names in the log: empty for the first, /1 for the second."""
    return f"/{index}" if index else ""


def ledger_parts(step: Step) -> tuple[int, int]:
    """Hash the sample ids of one rank's micro-batches to two numbers, whose sums over ranks hash the whole step.

    Each micro-batch's index and ids, in order, are hashed to 64 bits, and the two halves are summed apart: sums of
    32-bit numbers are exact in float64.
    """
    high = low = 0
    for turn in step.turns:
        if not turn.idle:
            key = turn.index.to_bytes(8, "little") + turn.ids.astype("<i8").tobytes()
            digest = hashlib.blake2b(key, digest_size=8).digest()
            high += int.from_bytes(digest[:4], "little")
            low += int.from_bytes(digest[4:], "little")
    return high, low
