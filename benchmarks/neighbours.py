"""Compare sampling neighbourhoods and reading their features with PyTorch Geometric's NeighborLoader.

    python -m benchmarks.neighbours [--nodes 200000] [--width 32] [--batch 512] [--fanout 10 5]

It needs torch_geometric, with pyg-lib or with torch-sparse and torch-scatter. Both draw micro-batches of one random
graph of a heavy-tailed degree in one process with one thread, in turns, and nothing is trained. Speed is samples a
second of processor time, which does not count what else the machine does.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from app.data.config import GraphData
from app.data.graphs import nodes
from benchmarks import fetching


def speed(source: Iterator[Any], steps: int, batch: int) -> float:
    """Draw some micro-batches; return samples a second of processor time."""
    began = time.process_time()
    for _ in range(steps):
        next(source)
    return steps * batch / (time.process_time() - began)


def main() -> None:
    """Print the samples a second of each, and how many nodes and edges a micro-batch has."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("nodes", 200_000), ("width", 32), ("edges", 10), ("batch", 512), ("rounds", 8)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--steps", type=int, default=20, help="micro-batches of a turn")
    parser.add_argument("--fanout", type=int, nargs="+", default=[10, 5])
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        fetching.write(Path(folder), options.nodes, options.width, options.edges)
        train = nodes.load(GraphData(path=folder, fanout=tuple(options.fanout))).train
        theirs = fetching.pyg(train, options)
        if theirs is None:
            sys.exit("torch_geometric cannot sample here, so there is nothing to compare with")
        sources = {"samestep": fetching.inline(train, options), "pyg": theirs}
        ours, batch = next(sources["samestep"]), next(sources["pyg"])
        edges = sum(len(block["senders"]) for block in ours["graph"]["blocks"])
        print(f"samestep: {len(ours['graph']['features']):,} nodes and {edges:,} edges in the first micro-batch")
        print(f"pyg: {batch.num_nodes:,} nodes and {batch.num_edges:,} edges in the first micro-batch")
        speeds_by_name: dict[str, list[float]] = {name: [] for name in sources}
        for number in range(options.rounds):
            for name in list(sources)[:: -1 if number % 2 else 1]:
                speeds_by_name[name].append(speed(sources[name], options.steps, options.batch))
    for name, speeds in speeds_by_name.items():
        print(f"{name:9}{statistics.median(speeds):8.0f} samples/s ({min(speeds):.0f} to {max(speeds):.0f})")
    print(f"torch {torch.__version__}, torch_geometric {version('torch_geometric')}, options {vars(options)}")


if __name__ == "__main__":
    main()
