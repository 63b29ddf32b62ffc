"""Measure how well rows that are read by chunks are mixed, for several windows, next to shuffling them all.

    python -m benchmarks.stream_mixing [--seeds 8] [--epochs 1]

The rows lie sorted by their class, which is the worst case, in chunks of equal size. First, the order alone: how far
apart the rows of a micro-batch were in the data, and how evenly each batch has the classes. Then training: the held-out
loss of a small network after some epochs, from the same weights, with each order. At last, what lanes do to a mixture.
"""

import argparse
import statistics
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from app.commands.output import table
from app.sampling.mixture import Mixture, Part
from app.sampling.permutation import stream
from app.sampling.stream_order import StreamOrder
from benchmarks.results import describe, machine

ROWS, CHUNK, CLASSES, FEATURES, HELD_OUT = 65_536, 128, 16, 32, 8_192
BATCH, LANES = 64, 4
WINDOWS = (1, 4, 16, 64)
SHUFFLED, SORTED = "all rows shuffled", "not shuffled"


def orders(total: int, seed: int) -> dict[str, np.ndarray]:
    """Return the rows of the first `total` samples, int64 [total], by the name of their order."""
    samples, rows_by_order = np.arange(total), {}
    for window in WINDOWS:
        located = StreamOrder(np.full(ROWS // CHUNK, CHUNK), LANES, window, seed).locate(samples)
        rows_by_order[f"window {window}"] = located.chunks * CHUNK + located.rows
    return {**rows_by_order, SHUFFLED: stream(samples, ROWS, seed)[0], SORTED: samples % ROWS}


def distance(rows: np.ndarray) -> tuple[float, float]:
    """Return the mean distance of neighbours in a lane (1: that of shuffled rows), and how many are of one chunk."""
    lanes = rows.reshape(-1, LANES)
    share = np.mean(np.diff(lanes // CHUNK, axis=0) == 0)
    return float(np.abs(np.diff(lanes, axis=0)).mean() / (ROWS / 3)), float(share)


def imbalance(rows: np.ndarray) -> float:
    """Return the mean chi-square of the classes of a batch, per degree of freedom: 1 if rows were drawn at random."""
    classes = rows.reshape(-1, BATCH) * CLASSES // ROWS
    counts = (classes[:, :, None] == np.arange(CLASSES)).sum(axis=1)
    expected = BATCH / CLASSES
    return float((((counts - expected) ** 2 / expected).sum(axis=1) / (CLASSES - 1)).mean())


def examples(classes: np.ndarray, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw a point for each class, from clouds that overlap: [rows, FEATURES], and the classes again, int64 [rows]."""
    centres = torch.randn(CLASSES, FEATURES, generator=torch.Generator().manual_seed(0)) * 0.45
    labels = torch.from_numpy(classes)
    return centres[labels] + torch.randn(len(labels), FEATURES, generator=generator), labels


def train(rows: np.ndarray, seed: int, falls: bool) -> tuple[float, float]:
    """Train on rows in this order; return the mean loss of the last tenth of the steps, and the held-out loss.

    Args:
        falls: whether the learning rate falls to 0, in a straight line, or is constant.
    """
    generator = torch.Generator().manual_seed(1)
    points, labels = examples(np.arange(ROWS) * CLASSES // ROWS, generator)
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(FEATURES, 64), nn.ReLU(), nn.Linear(64, CLASSES))
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=3e-3), []
    batches = torch.from_numpy(rows).split(BATCH)
    for step, ids in enumerate(batches):
        if falls:
            optimizer.param_groups[0]["lr"] = 3e-3 * (1 - step / len(batches))
        loss = nn.functional.cross_entropy(model(points[ids]), labels[ids])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    points, labels = examples(np.arange(HELD_OUT) % CLASSES, generator)
    with torch.no_grad():
        held_out = nn.functional.cross_entropy(model(points), labels).item()
    return statistics.mean(losses[-len(losses) // 10 :]), held_out


def compare_orders(seeds: int, epochs: int) -> str:
    """Return a table of the orders."""
    measured: dict[str, list[tuple[float, ...]]] = {}
    for seed in range(seeds):
        for name, rows in orders(epochs * ROWS, seed).items():
            numbers = (
                *distance(rows),
                imbalance(rows),
                *train(rows, seed, falls=False),
                train(rows, seed, falls=True)[1],
            )
            measured.setdefault(name, []).append(numbers)
    head = ["order", "distance", "from one chunk", "imbalance", "training loss", "held-out loss", "with a falling rate"]
    lines = []
    for name, numbers_by_seed in measured.items():
        far, share, uneven, *losses = zip(*numbers_by_seed, strict=True)
        means = [f"{statistics.mean(far):.2f}", f"{statistics.mean(share):.1%}", f"{statistics.mean(uneven):.2f}"]
        lines.append([name, *means, *map(with_deviation, losses)])
    return table(head, lines, right=(1, 2, 3, 4, 5, 6))


def with_deviation(numbers: Sequence[float]) -> str:
    """Write the mean and the deviation."""
    return f"{statistics.mean(numbers):.3f}, {statistics.stdev(numbers):.3f}"


def surplus(weights: tuple[float, ...], lanes: int, micro_batch: int, samples: int) -> int:
    """Return by how many rows the largest micro-batch is too large if each source is dealt to the lanes by itself."""
    origins = Mixture([Part(0, weights)]).origins(np.arange(samples // (lanes * micro_batch) * lanes * micro_batch))
    steps = (origins.samples % lanes).reshape(-1, lanes * micro_batch)
    return int((steps[:, :, None] == np.arange(lanes)).sum(axis=1).max()) - micro_batch


def deviations(weights: tuple[float, ...], lanes: int, micro_batch: int, samples: int) -> tuple[float, float, float]:
    """Return how far a source's count is from its quota at most, if each lane has quotas of its own.

    Returns:
        At any sample, at the end of a step, and in one lane.
    """
    samples = samples // (lanes * micro_batch) * lanes * micro_batch
    sources = Mixture([Part(0, weights)], lanes).origins(np.arange(samples)).sources
    shares, here = np.array(weights) / sum(weights), sources[:, None] == np.arange(len(weights))
    off = np.abs(np.cumsum(here, axis=0) - np.arange(1, samples + 1)[:, None] * shares)
    in_lanes = np.cumsum(here.reshape(-1, lanes, len(weights)), axis=0)
    off_in_lanes = np.abs(in_lanes - np.arange(1, samples // lanes + 1)[:, None, None] * shares)
    return float(off.max()), float(off[lanes * micro_batch - 1 :: lanes * micro_batch].max()), float(off_in_lanes.max())


def compare_mixtures(cases: int, micro_batch: int, samples: int) -> str:
    """Return a table of mixtures of some sources in some lanes, each with several draws of weights."""
    lines = []
    for lanes in (1, 4, 8, 32, 128):
        for sources in (2, 5, 20):
            draws = [np.random.default_rng(case).dirichlet(np.full(sources, 0.5)) + 1e-6 for case in range(cases)]
            mixes = [tuple(weights.tolist()) for weights in draws]
            extra = [surplus(weights, lanes, micro_batch, samples) for weights in mixes]
            off = [deviations(weights, lanes, micro_batch, samples) for weights in mixes]
            worst = [f"{max(column):.2f}" for column in zip(*off, strict=True)]
            median = f"{statistics.median(anywhere for anywhere, _, _ in off):.2f}"
            lines.append([str(lanes), str(sources), f"+{max(extra)}", *worst, median])
    head = ["lanes", "sources", "rows too many", "off at any sample", "at ends of steps", "in a lane", "median"]
    return table(head, lines, right=tuple(range(7)))


def main() -> None:
    """Print both tables, and the machine."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("seeds", 5), ("epochs", 1), ("cases", 5), ("micro-batch", 8), ("samples", 8192)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(compare_orders(options.seeds, options.epochs))
    print(compare_mixtures(options.cases, options.micro_batch, options.samples))
    print(f"{describe(machine())}; options {vars(options)}")


if __name__ == "__main__":
    main()
