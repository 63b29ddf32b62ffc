"""The bytes of all tensors that are alive while a program runs, and their maximum."""

import weakref
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from app.distributed.naming import local_shard


class LiveStorages(TorchDispatchMode):
    """Follows every storage that operations create, from its first tensor to its last, on any device, meta included.

    Memory that a kernel allocates and frees by itself is not seen.
    """

    def __init__(self, block: int = 1):
        """Start with no storages.

        Args:
            block: bytes; the allocator rounds sizes up to multiples of it.
        """
        super().__init__()
        self.block, self.alive, self.phase = block, 0, ""
        self.copies = 0  # bytes of weights cast to another type, among those alive
        self.most: dict[str, int] = defaultdict(int)  # by phase
        self.most_without: dict[str, int] = defaultdict(int)  # by phase, without those copies
        self._known: dict[int, weakref.ref] = {}
        self._copying = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Run an operation."""
        result = func(*args, **(kwargs or {}))
        self.add([result] if isinstance(result, Tensor) else result if isinstance(result, tuple | list) else ())
        return result

    def add(self, tensors: Iterable) -> None:
        """Follow tensors that exist already; each storage counts once, however many views it has."""
        for tensor in tensors:
            if isinstance(tensor, tuple | list):
                self.add(tensor)
            elif isinstance(tensor, Tensor):
                self._follow(local_shard(tensor).untyped_storage())
        self.most[self.phase] = max(self.most[self.phase], self.alive)
        self.most_without[self.phase] = max(self.most_without[self.phase], self.alive - self.copies)

    @contextmanager
    def copying(self) -> Iterator[None]:
        """Count what is made inside as copies of weights."""
        self._copying = True
        try:
            yield
        finally:
            self._copying = False

    def rounded(self, size: int) -> int:
        """Return the bytes that the allocator takes for a request of `size` bytes."""
        return -(-size // self.block) * self.block

    def _follow(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._known:
            return
        size = self.rounded(storage.nbytes())
        copied = size if self._copying else 0

        def freed(_: object) -> None:
            del self._known[key]
            self.alive -= size
            self.copies -= copied

        self._known[key] = weakref.ref(storage, freed)
        self.alive += size
        self.copies += copied
