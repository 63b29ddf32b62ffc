"""Copies of tensors in the host's memory, so that training may go on before they are written."""

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from app.distributed import accelerate_patches
from app.distributed.naming import local_shard


class Stager:
    """Copy tensors to the host, into memory that is kept from one checkpoint to the next.

    Tensors of a GPU are copied into pinned memory: all copies are queued, then waited for once. torch rounds each piece
    of pinned memory up to a power of two.
    """

    def __init__(self):
        """Begin without memory."""
        self._copies: dict[str, Tensor] = {}

    @torch.no_grad()
    def stage(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Copy tensors; of a sharded one, this process's part. The next call overwrites the copies.

        Returns:
            Copies by name, sharded like their originals. A tensor with several names has one copy.
        """
        sources = {name: local_shard(tensor) for name, tensor in tensors.items()}
        names: dict[tuple, str] = {}
        first = {
            name: names.setdefault((source.data_ptr(), source.dtype, source.shape, source.stride()), name)
            for name, source in sources.items()
        }
        # Memory that no longer fits is freed before more is allocated.
        self._copies = {n: copy for n, copy in self._copies.items() if first.get(n) == n and _fits(copy, sources[n])}
        for name in names.values():
            source = sources[name]
            if name not in self._copies:
                self._copies[name] = torch.empty_like(source, device="cpu", pin_memory=source.is_cuda)
            self._copies[name].copy_(source, non_blocking=source.is_cuda)
        if any(source.is_cuda for source in sources.values()):
            torch.cuda.synchronize()
        return {name: _like(tensor, self._copies[first[name]]) for name, tensor in tensors.items()}


def _fits(copy: Tensor, source: Tensor) -> bool:
    return copy.shape == source.shape and copy.dtype == source.dtype


def _like(tensor: Tensor, copy: Tensor) -> Tensor:
    """Mark a copy as sharded, as its original is."""
    return accelerate_patches.sharded_like(tensor, copy) if isinstance(tensor, DTensor) else copy
