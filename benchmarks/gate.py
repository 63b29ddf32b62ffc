"""A contestant's side of taking turns: it trains as many steps as told, reports how long they took, and waits."""

import json
import os
import resource
import sys
import time
from typing import Any


class Gate:
    """Blocks the process after a turn until the next one; of several processes, only the first waits here."""

    def __init__(self):
        self.left = 0
        folder = os.environ["BENCH_GATE"] if os.environ.get("RANK", "0") == "0" else ""
        self._orders = open(f"{folder}/orders") if folder else None  # noqa: SIM115
        self._reports = open(f"{folder}/reports", "w") if folder else None  # noqa: SIM115

    def begin(self) -> None:
        """Report that the first step may begin, and wait for the order to begin."""
        self._report()
        self._wait()

    def __call__(self, items: float) -> None:
        """Count a step, and its samples or supervised tokens."""
        self.left -= 1
        self._items += items
        if self.left == 0:
            wait_for_gpu()
            self._report(time.perf_counter() - self._start, time.process_time() - self._used, self._items)
            self._wait()

    def _report(self, wall: float = 0.0, cpu: float = 0.0, items: float = 0.0) -> None:
        if self._reports:
            print(
                json.dumps({"wall": wall, "cpu": cpu, "items": items, "peak": _peak(), "used": time.process_time()}),
                file=self._reports,
                flush=True,
            )

    def _wait(self) -> None:
        if self._orders:
            self.left = int(self._orders.readline())  # -1: to the end
        self._items = 0.0
        self._start, self._used = time.perf_counter(), time.process_time()


def _gpu() -> Any:
    """Return torch.cuda if this process computes on a GPU; else None."""
    torch = sys.modules.get("torch")
    return torch.cuda if torch and torch.cuda.is_initialized() else None


def wait_for_gpu() -> None:
    """Wait until the GPU has finished its work, if this process uses one."""
    if gpu := _gpu():
        gpu.synchronize()


def _peak() -> int:
    """Return the peak memory so far in bytes: the GPU's, or else the process's."""
    gpu = _gpu()
    return gpu.max_memory_allocated() if gpu else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
