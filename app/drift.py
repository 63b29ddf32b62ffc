"""Finding ranks that have drifted apart: weights that should be copies of each other, and the order of samples."""

import hashlib

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from app import ranks, sums
from app.errors import UserError

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Drift:
    """Fingerprints of this rank's weights, to be compared inside a collective that runs anyway."""

    def __init__(self, models: list[nn.Module], plan: str):
        """Compare `models`. Every rank takes part.

        Args:
            plan: a fingerprint of what decides the order of samples, compared at once: it does not change.

        Raises:
            UserError: a rank has another plan.
        """
        self.named = [(name, p) for model in models for name, p in model.named_parameters()]
        found = ranks.gather((plan, [_place(p) for _, p in self.named]))
        for rank, (other, _) in enumerate(found):
            if other != found[0][0]:
                raise UserError(
                    f"rank {rank} would go through other samples than rank 0: give every rank the same data, in the "
                    "same order, and the same flags"
                )
        # Which ranks hold the same shards of everything.
        self.places = [str(place) for _, place in found]

    def slots(self) -> Tensor:
        """Return two numbers for each rank, this rank's filled in and the others 0; their sums are exact in float64."""
        slots = torch.zeros(len(self.places), 2, dtype=torch.float64)
        slots[ranks.rank()] = torch.tensor(_numbers(repr(self._prints())), dtype=torch.float64)
        return slots.flatten()

    def compare(self, slots: list[float], step: int) -> None:
        """Compare all ranks' numbers. Every rank takes part, with the same numbers.

        Raises:
            UserError: ranks differ; it names them, and the first tensor that differs.
        """
        rows = [tuple(slots[i : i + 2]) for i in range(0, len(slots), 2)]
        first: dict[str, int] = {}
        pairs = [(first.setdefault(place, rank), rank) for rank, place in enumerate(self.places)]
        apart = [(one, other) for one, other in pairs if rows[one] != rows[other]]
        if apart:
            one, other = apart[0]
            prints = ranks.gather(self._prints())
            names = [name for (name, _), a, b in zip(self.named, prints[one], prints[other], strict=True) if a != b]
            raise UserError(
                f"rank {other} has drifted from rank {one}: after step {step}, {len(names)} of {len(self.named)} "
                f"weights differ, first {names[0]}; nothing of it was saved. Something changes weights or gradients on "
                "one rank alone; the same command goes on from the last checkpoint"
            )

    def _prints(self) -> list[list[int]]:
        """Return two numbers for each weight."""
        found = [_print(sums.local(p.detach())) for _, p in self.named]
        return torch.stack([torch.stack(pair) for pair in found]).tolist()


def _print(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Combine a tensor's bits in two ways, on its device."""
    if not tensor.numel():
        zero = torch.zeros((), dtype=torch.int64, device=tensor.device)
        return zero, zero
    bits = tensor.contiguous().view(_BITS[tensor.element_size()])
    return torch.hash_tensor(bits).view(torch.int64), bits.sum(dtype=torch.int64)


def _place(parameter: nn.Parameter) -> list[int]:
    """Tell which shard of a parameter this rank holds; ranks that hold the same one must agree."""
    if not isinstance(parameter, DTensor):
        return []
    where = parameter.device_mesh.get_coordinate()
    return [at for at, placement in zip(where, parameter.placements, strict=True) if placement.is_shard()]


def _numbers(text: str) -> tuple[int, int]:
    """Digest a text to two numbers that float64 holds."""
    digest = hashlib.blake2b(text.encode(), digest_size=12).digest()
    return int.from_bytes(digest[:6], "little"), int.from_bytes(digest[6:], "little")
