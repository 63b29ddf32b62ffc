"""A process group whose collectives go through host memory, so that several ranks can train on one GPU.

NCCL refuses two ranks on one GPU, and gloo supports only some collectives on GPU tensors. Here each collective copies
its tensors to the host, calls gloo, and copies the results back. It is for tests: the kernels are the GPU's own, and
only the sums between ranks take another way.
"""

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _create_work_from_future
from torch.utils import _pytree as pytree

NAME = "staged"
# Each writes to its first argument. Collectives that torch 2.13 renamed are here under both names.
COLLECTIVES = (
    "allreduce",
    "allreduce_coalesced",
    "allgather",
    "allgather_coalesced",
    "allgather_into_tensor_coalesced",
    "all_gather_single_coalesced",
    "_allgather_base",
    "all_gather_single",
    "broadcast",
    "gather",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor_coalesced",
    "reduce_scatter_single_coalesced",
    "_reduce_scatter_base",
    "reduce_scatter_single",
    "scatter",
    "alltoall",
    "alltoall_base",
    "all_to_all_single",
)


class Staged(dist.ProcessGroup):
    """Gloo on copies in host memory."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta):
        super().__init__(rank, size)
        self.ranks = (rank, size)
        self.seen: set[str] = set()
        self.inner = dist.ProcessGroup(store, rank, size)
        gloo = dist.ProcessGroupGloo(store, rank, size, timeout)
        for group in (self.inner, self):  # self: for what is not listed below
            for device in ("cpu", "cuda"):
                group._register_backend(torch.device(device), dist.ProcessGroup.BackendType.GLOO, gloo)

    def rank(self) -> int:
        """Return this process's rank."""
        return self.ranks[0]

    def size(self) -> int:
        """Return the number of ranks."""
        return self.ranks[1]

    def getBackendName(self) -> str:
        """Return this backend's name; if it were "gloo", torch would make NCCL groups on a GPU."""
        return NAME

    def barrier(self, *_, **__) -> dist.Work:
        """Wait for all ranks, on the host."""
        self.inner.barrier().wait()
        return _done([])

    def call(self, name: str, arguments: tuple) -> dist.Work:
        """Run a collective on copies, and copy its first argument back."""
        self.seen |= {
            f"{name} {leaf.device.type}" for leaf in pytree.tree_leaves(arguments) if isinstance(leaf, Tensor)
        }
        copies = pytree.tree_map_only(Tensor, _on_host, arguments)
        getattr(self.inner, name)(*copies).wait()
        targets, changed = (
            [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]
            for tree in (arguments[0], copies[0])
        )
        with torch.no_grad():
            for target, copy in zip(targets, changed, strict=True):
                target.detach().copy_(copy)
        return _done(targets)


def _collective(name: str) -> Any:
    def collective(self: Staged, *arguments, **named) -> dist.Work:
        return self.call(name, (*arguments, *named.values()))  # keyword arguments are options, which come last

    return collective


for _name in COLLECTIVES:
    setattr(Staged, _name, _collective(_name))


def _on_host(tensor: Tensor) -> Tensor:
    """Copy a tensor, even if it is on the host: so a test without a GPU takes the same way."""
    return tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)


def _done(value: list[Tensor]) -> dist.Work:
    future = torch.futures.Future()
    future.set_result(value)
    return _create_work_from_future(future)


def join() -> None:
    """Create the default process group with this backend, before accelerate creates its own."""
    dist.Backend.register_backend(NAME, Staged, devices=["cpu", "cuda"])
    dist.init_process_group(NAME)
