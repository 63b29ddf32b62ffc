"""Count launches: kernels on a GPU; on a CPU, torch's operations, forward and backward.

A CPU's operations are not a GPU's kernels, but both grow with the same things. Views are not counted.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

SILENT = ("empty", "detach", "lift_fresh", "alias", "resize_", "set_")


class Launches(TorchDispatchMode):
    """Count operations by their names while it is entered."""

    def __init__(self):
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name, returns = function.name().removeprefix("aten::").partition(".")[0], function._schema.returns
        view = returns and all(each.alias_info and not each.alias_info.is_write for each in returns)
        if function.namespace == "aten" and not view and not name.startswith(SILENT):
            self.counts[name] += 1
        return function(*args, **(kwargs or {}))

    @property
    def total(self) -> int:
        return sum(self.counts.values())


@contextmanager
def counted() -> Iterator[Counter]:
    """Yield a counter of the launches in the block: kernels and copies on a GPU, else torch's operations."""
    counter: Counter[str] = Counter()
    if not torch.cuda.is_available():
        with Launches() as launches:
            yield counter
        counter.update(launches.counts)
        return
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        yield counter
        torch.cuda.synchronize()
    counter.update(event.name for event in profiler.events() if event.device_type == torch.autograd.DeviceType.CUDA)
