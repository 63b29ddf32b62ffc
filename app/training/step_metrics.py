"""What one step measures: losses, gradient norms and the ledger; one collective, and only when it is logged."""

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
from app.training.nonfinite import FirstFault


class StepMetrics:
    """Losses and gradient norms of one step, left on the device until they are asked for."""

    def __init__(self, accelerator: Accelerator, step: Step, faults: FirstFault, skips: bool = False):
        """Begin a step.

        Args:
            faults: of the steps before that were not measured.
            skips: what is not finite leaves the update out, and does not stop the run.
        """
        self.accelerator, self.step, self.faults, self.skips = accelerator, step, faults, skips
        self.losses: list[tuple[str, Turn, Tensor]] = []
        self.norms: dict[int, Tensor] = {}

    def add(self, name: str, loss: Tensor, micro: Turn) -> None:
        """Remember a micro-batch's mean loss."""
        self.losses.append((name, micro, loss.detach()))

    def add_norm(self, norm: Tensor, index: int) -> bool:
        """Remember the norm of optimizer `index`'s gradient, unless it is known not to be finite.

        A GPU is not waited for, except by a run that skips such steps: a later step that is logged or saved looks at
        all norms since the last one.

        Returns:
            Whether it is finite, as far as is known; the same on every rank.
        """
        self.norms[index] = norm
        waits = norm.device.type == "cpu" or self.skips
        if not waits or self.accelerator.scaler is not None or math.isfinite(norm.item()):
            return True
        del self.norms[index]
        return False

    def explain(self, norm: Tensor) -> str:
        """Say what was not finite first: in an earlier step, or in this one's gradient. Every rank takes part."""
        return self._earlier() or self._not_finite("gradient", norm.item())

    def note(self) -> None:
        """Have losses and norms looked at, in a step that is not measured; does not wait for them."""
        if self.losses and not self.skips and self.accelerator.scaler is None:  # which leaves steps out by itself
            self.faults.note(self.step.index, self.losses, [*self.norms.values()])

    def collect(self, buffers: Buffers, drift: DesyncCheck | None = None) -> tuple[dict[str, float], dict[str, Any]]:
        """Combine all ranks: the losses of the global batch; gradient norms and the ledger's fingerprint.

        Args:
            buffers: learns in the same collective whether training has changed some that it was not known to.
            drift: compares the ranks' weights and buffers in it.

        Raises:
            UserError: a loss or norm is not finite, naming step, rank and samples; or ranks have drifted apart.
        """
        names = sorted({name for name, _, _ in self.losses})
        # A slot for each micro-batch, which one rank fills: what is added up has one order on every layout.
        slots = torch.zeros(len(names) * self.step.micros + 4, dtype=torch.float64, device=self.accelerator.device)
        changed = buffers.found()
        slots[-3:] = torch.tensor([*ledger_parts(self.step), len(changed)], dtype=torch.float64)
        slots[-4] = self.faults.there()
        for name, micro, loss in self.losses:
            if micro.weight:
                place = names.index(name) * self.step.micros + micro.index
                slots[place] += loss.double() * (micro.weight / self.step.weight)
        own = len(slots)
        if drift is not None:
            slots = torch.cat([slots, drift.slots().to(slots.device)])
        if not collectives.alone():
            torch.distributed.all_reduce(slots)
            slots[:own] /= self.accelerator.num_processes // self.accelerator.data_ranks
        measured = torch.stack([*self.norms.values()]).double() if self.norms else slots[:0]
        numbers = torch.cat([measured, slots]).tolist()  # waits for the device
        norms, parts = numbers[: len(self.norms)], numbers[len(self.norms) :]
        parts, (earlier, high, low, fresh), prints = parts[: own - 4], parts[own - 4 : own], parts[own:]
        if earlier:
            raise UserError(advice(self._earlier()))
        if fresh:
            buffers.learn(changed)
        if drift is not None and fresh:  # what was compared is from before all ranks agreed
            drift.compare_now(self.step.index + 1)
        elif drift is not None:
            drift.compare(prints, self.step.index + 1)
        losses = [sum(parts[i * self.step.micros : (i + 1) * self.step.micros]) for i in range(len(names))]
        for name, value in [*zip(names, losses, strict=True), *(("gradient", norm) for norm in norms)]:
            scaled = name == "gradient" and self.accelerator.scaler is not None
            if not math.isfinite(value) and not scaled and not self.skips:
                raise UserError(advice(self._not_finite(name, value)))
        about = {f"grad_norm{numbered(i)}": norm for i, norm in zip(self.norms, norms, strict=True)}
        return dict(zip(names, losses, strict=True)), {
            **about,
            "ids": f"{int(high) % 2**32:08x}{int(low) % 2**32:08x}",
        }

    def _earlier(self) -> str:
        """Say what was not finite in an earlier step, where something was. Every rank takes part."""
        told = self.faults.tell()
        return told and f"{told}, which is found in step {self.step.index + 1}"

    def _not_finite(self, what: str, value: float) -> str:
        own = [
            f"micro-batch {micro.index} on rank {self.accelerator.process_index}: samples {micro.ids.tolist()}"
            for _, micro, loss in self.losses
            if not math.isfinite(loss.item())
        ]
        where = [line for lines in collectives.gather(own) for line in lines] or [
            "every micro-batch's own loss is finite"
        ]
        return f"the {what} of step {self.step.index + 1} is {value} ({'; '.join(where)})"


def advice(what: str) -> str:
    """Say what the user can do about something that was not finite."""
    return (
        f"{what}; nothing of it was saved. Look at those samples. With --run.nonfinite skip the same command goes "
        "on from the last checkpoint and leaves such steps out; a lower --optim.lr wants another --run.dir"
    )


def numbered(index: int) -> str:
    """Tell several optimizers' columns apart: nothing for the first, /1 for the second."""
    return f"/{index}" if index else ""


def ledger_parts(step: Step) -> tuple[int, int]:
    """Fingerprint the sample ids of some of a step's micro-batches as two numbers that add up over ranks.

    Each micro-batch's number and ids, in order, are hashed to 64 bits; the halves are summed. Sums of 32-bit numbers
    are exact in float64.
    """
    high = low = 0
    for turn in step.turns:
        if not turn.idle:
            key = turn.index.to_bytes(8, "little") + turn.ids.astype("<i8").tobytes()
            digest = hashlib.blake2b(key, digest_size=8).digest()
            high += int.from_bytes(digest[:4], "little")
            low += int.from_bytes(digest[4:], "little")
    return high, low
