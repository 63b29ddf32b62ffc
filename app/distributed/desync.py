"""Checks that ranks have not drifted apart: in weights and buffers that must be equal, and in the order of samples."""

import hashlib
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from app.distributed import collectives, placements
from app.distributed.naming import local_shard
from app.errors import UserError

if TYPE_CHECKING:
    from app.distributed.buffers import Buffers

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class DesyncCheck:
    """Fingerprints of this rank's weights and buffers, compared inside a collective that runs anyway."""

    def __init__(self, models: list[nn.Module], buffers: "Buffers", plan: str):
        """Compare `models`. Every rank takes part.

        Args:
            buffers: of the models; every rank has all of them.
            plan: a fingerprint of what decides the order of samples. It is compared now, as it does not change.

        Raises:
            UserError: a rank has another plan.
        """
        self.buffers = buffers
        self.named = [(name, p) for model in models for name, p in model.named_parameters()]
        plans_and_places = collectives.gather((plan, [_place(p) for _, p in self.named]))
        for rank, (other, _) in enumerate(plans_and_places):
            if other != plans_and_places[0][0]:
                raise UserError(
                    f"rank {rank} would go through other samples than rank 0: give every rank the same data, in the "
                    "same order, the same flags, and, if there is one, the same file of --data.mix"
                )
        # Ranks with the same text have the same shards of all weights.
        self.places = [str(place) for _, place in plans_and_places]

    def slots(self) -> Tensor:
        """Return four numbers for each rank, all 0 but this rank's, so that a sum over ranks collects them exactly."""
        slots = torch.zeros(len(self.places), 4, dtype=torch.float64)
        numbers = [number for prints in (self._weights(), self._buffers()) for number in _numbers(repr(prints))]
        slots[collectives.rank()] = torch.tensor(numbers, dtype=torch.float64)
        return slots.flatten()

    def compare_now(self, step: int) -> None:
        """Compare all ranks in a collective of its own. Every rank takes part.

        Raises:
            UserError: ranks differ, as in `compare`.
        """
        slots = self.slots().to(self.named[0][1].device)
        torch.distributed.all_reduce(slots)
        self.compare(slots.tolist(), step)

    def compare(self, slots: list[float], step: int) -> None:
        """Compare the numbers of all ranks. Every rank takes part, with the same numbers.

        Raises:
            UserError: ranks differ; it names them, and the first tensor that differs.
        """
        rows = [(tuple(slots[i : i + 2]), tuple(slots[i + 2 : i + 4])) for i in range(0, len(slots), 4)]
        first: dict[str, int] = {}
        pairs = [(first.setdefault(place, rank), rank) for rank, place in enumerate(self.places)]
        apart = [(one, other) for one, other in pairs if rows[one][0] != rows[other][0]]
        if apart:
            names = [name for name, _ in self.named]
            raise UserError(
                f"{_differing(apart[0], step, 'weights', names, self._weights())}; nothing of it was saved. Something "
                "changes weights or gradients on one rank alone; the same command goes on from the last checkpoint"
            )
        apart = [(0, rank) for rank, (_, numbers) in enumerate(rows) if numbers != rows[0][1]]
        if apart:
            raise UserError(
                f"{_differing(apart[0], step, 'buffers', list(self.buffers.places), self._buffers())}; nothing of it "
                "was saved. Look where the model is built: does code read the rank there, or draw unseeded numbers?"
            )

    def _weights(self) -> list[list[int]]:
        return fingerprints([local_shard(p) for _, p in self.named])

    def _buffers(self) -> list[list[int]]:
        return fingerprints([place.tensor for place in self.buffers.places.values()])


def _differing(pair: tuple[int, int], step: int, what: str, names: list[str], fingerprints: list[list[int]]) -> str:
    """Name the first tensor in which two ranks differ. Every rank takes part, with its own fingerprints."""
    (one, other), by_rank = pair, collectives.gather(fingerprints)
    differ = [name for name, a, b in zip(names, by_rank[one], by_rank[other], strict=True) if a != b]
    return (
        f"rank {other} has drifted from rank {one}: after step {step}, {len(differ)} of {len(names)} {what} differ, "
        f"first {differ[0].removeprefix('models.0.')}"
    )


def fingerprints(tensors: list[Tensor]) -> list[list[int]]:
    """Return two hashes of the bits of each tensor. Waits for the device, once."""
    return torch.stack([torch.stack(_print(t.detach())) for t in tensors]).tolist() if tensors else []


def _print(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Hash a tensor's bits in two ways, on its device."""
    if not tensor.numel():
        zero = torch.zeros((), dtype=torch.int64, device=tensor.device)
        return zero, zero
    bits = bits_of(tensor)
    return torch.hash_tensor(bits).view(torch.int64), bits.sum(dtype=torch.int64)


def bits_of(tensor: Tensor) -> Tensor:
    """Return the bits of a tensor's numbers as integers, [numbers]."""
    return tensor.contiguous().reshape(-1).view(_BITS.get(tensor.element_size(), torch.int64))


def _place(parameter: nn.Parameter) -> list[int]:
    """Return the coordinates of this rank's shard of a parameter; ranks with the same shard must agree."""
    return placements.coordinates(parameter) if isinstance(parameter, DTensor) else []


def _numbers(text: str) -> tuple[int, int]:
    """Digest a text to two numbers that float64 holds."""
    digest = hashlib.blake2b(text.encode(), digest_size=12).digest()
    return int.from_bytes(digest[:6], "little"), int.from_bytes(digest[6:], "little")
