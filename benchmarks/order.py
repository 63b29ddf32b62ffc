"""Measure app.sampling.permutation: indices per second, the time of one small call, and peak memory, for growing n.

python -m benchmarks.order
"""

import time
import tracemalloc

import numpy as np

from app.sampling.permutation import permute

COUNT = 1_000_000


def seconds(call, repeats: int) -> float:
    """Return the shortest time of a call, in which other work disturbed it least."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)


def main() -> None:
    print(f"{'n':>8} {'indices/s':>12} {'32 indices':>12} {'peak, 32 indices':>18}")
    for n in (100, 10**4, 10**6, 10**9, 10**12, 2**62):
        many = np.random.default_rng(0).integers(0, n, COUNT)
        few = many[:32]
        rate = COUNT / seconds(lambda: permute(many, n, 0, 0), 5)  # noqa: B023
        small = seconds(lambda: permute(few, n, 0, 0), 200)  # noqa: B023
        tracemalloc.start()
        permute(few, n, 0, 0)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        print(f"{n:>8.0e} {rate:>12,.0f} {small * 1e6:>9,.0f} us {peak / 1024:>14.1f} KiB")


if __name__ == "__main__":
    main()
