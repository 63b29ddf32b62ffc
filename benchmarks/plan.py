"""Measure the time and memory of planning one step, for growing data sets, runs and numbers of ranks.

python -m benchmarks.plan
"""

import tracemalloc

from app.sampling.batch_plan import BatchPlan
from benchmarks.order import seconds


def main() -> None:
    print(f"{'samples':>8} {'ranks':>7} {'global batch':>13} {'first step':>12} {'last step':>12} {'peak':>12}")
    for ranks in (8, 10_000):
        for samples in (10**4, 10**8, 10**12):
            plan = BatchPlan(samples, 10**13, 4 * ranks, 4)
            first, last = (seconds(lambda: plan.step(step, 1, ranks), 20) for step in (0, plan.steps - 2))  # noqa: B023
            tracemalloc.start()
            plan.step(plan.steps - 2, 1, ranks)
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            times = f"{first * 1e3:>9.2f} ms {last * 1e3:>9.2f} ms"
            print(f"{samples:>8.0e} {ranks:>7} {plan.global_batch:>13} {times} {peak / 1024:>8.0f} KiB")


if __name__ == "__main__":
    main()
