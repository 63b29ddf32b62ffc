"""Measure how much of sampling and gathering is hidden behind the step, when recipes/graph.py fetches ahead.

    python -m benchmarks.fetching [--nodes 1000000] [--rounds 8]

A random graph of a heavy-tailed degree is written to disk as a folder that --data.path takes. Four loops train the same
GraphSAGE on the same micro-batches, a few steps each in turn, in one process:

* there: the inputs of all steps were made before: what the step itself takes.
* ahead: run.batches(fetch=...)'s stages, in threads.
* inline: the same stages between the steps.
* pyg: PyTorch Geometric's NeighborLoader with its own sampling of the same fan-outs, where it and torch-sparse or
  pyg-lib are installed.

With --wait MS a wait stands for the step, as a device computes it that leaves the processor free. The share of the
stages' time that does not lengthen the step is (inline - ahead) / (inline - there).
"""

import argparse
import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.functional import cross_entropy

from app.data.config import GraphData
from app.data.graphs import nodes
from app.data.graphs.neighbours import stages
from app.data.graphs.store import csr_of
from app.sampling.batch_plan import BatchPlan
from app.tasks.graphs.networks import NodeClassifier
from app.training.feeding.fetching import Composed
from app.training.feeding.loader import load

CPU, CLASSES = torch.device("cpu"), 32


def write(folder: Path, count: int, width: int, edges: int) -> None:
    """Write a graph with `edges` edges a node, of which some nodes have many."""
    draw = np.random.default_rng(0)
    source = (count * draw.random(count * edges) ** 3).astype(np.int64)
    indptr, indices = csr_of(source, draw.integers(0, count, count * edges), count, undirected=True)
    np.save(folder / "indptr.npy", indptr)
    np.save(folder / "indices.npy", indices)
    features = np.lib.format.open_memmap(folder / "features.npy", "w+", np.float32, (count, width))
    for start in range(0, count, 1 << 16):
        features[start : start + (1 << 16)] = draw.standard_normal((min(1 << 16, count - start), width), np.float32)
    features.flush()
    np.save(folder / "labels.npy", draw.integers(0, CLASSES, count))


def loops(folder: Path, options: argparse.Namespace) -> dict[str, Iterator[Any]]:
    """Return for each contestant an endless source of micro-batches' inputs."""
    train = nodes.load(GraphData(path=str(folder), fanout=tuple(options.fanout))).train
    made = list(itertools.islice(inline(train, options), options.steps))
    ahead = source(train, options, nodes.collate, stages(train.graph, options.fanout))
    sources = {"there": itertools.cycle(made), "ahead": ahead, "inline": inline(train, options)}
    if (peer := pyg(train, options)) is not None:
        sources["pyg"] = peer
    return sources


def source(train: nodes.Nodes, options: argparse.Namespace, collate: Any, ahead: Any) -> Iterator[Any]:
    """Return an endless source of micro-batches' inputs, with the stages `ahead` in threads."""
    plan = BatchPlan(len(train), 10**9, options.batch, options.batch)
    steps = load(plan, range(10**6), train, collate, 0, 1, CPU, 0, nodes.InEpoch(), ahead)
    return (turn.inputs for step in steps for turn in step.turns)


def inline(train: nodes.Nodes, options: argparse.Namespace) -> Iterator[Any]:
    """Return a source whose stages work where the next inputs are asked for."""
    return source(train, options, Composed(nodes.collate, stages(train.graph, options.fanout)), ())


def pyg(train: nodes.Nodes, options: argparse.Namespace) -> Iterator[Any] | None:
    """Return PyTorch Geometric's batches of the same graph; None where it cannot sample."""
    try:
        from torch_geometric.data import Data
        from torch_geometric.loader import NeighborLoader
        from torch_geometric.typing import WITH_PYG_LIB, WITH_TORCH_SPARSE
    except ImportError:
        return None
    if not (WITH_PYG_LIB or WITH_TORCH_SPARSE):
        print("torch_geometric has neither pyg-lib nor torch-sparse, so its NeighborLoader cannot sample: left out")
        return None
    graph = train.graph
    target = np.repeat(np.arange(graph.nodes), np.diff(graph.indptr))
    ends = torch.from_numpy(np.stack([graph.indices.astype(np.int64), target]))
    data = Data(torch.from_numpy(np.array(graph.features)), ends, y=torch.from_numpy(np.array(graph.labels)))
    seeds = torch.from_numpy(train.nodes)
    loader = NeighborLoader(data, options.fanout, seeds, batch_size=options.batch, shuffle=True)
    return itertools.chain.from_iterable(itertools.repeat(loader))


def turn(source: Iterator[Any], name: str, network: Any, optimizer: Any, steps: int, wait: float) -> float:
    """Make some steps; return the seconds of one. PyG's batches are drawn, and not trained on."""
    began = time.perf_counter()
    for _ in range(steps):
        inputs = next(source)
        if name == "pyg":
            continue
        if wait:
            time.sleep(wait / 1000)
            continue
        cross_entropy(network(**inputs["graph"]), inputs["labels"]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return (time.perf_counter() - began) / steps


def main() -> None:
    """Print the median milliseconds of a step for each loop, and what is hidden."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("nodes", 1_000_000), ("width", 128), ("edges", 10), ("batch", 512), ("hidden", 128)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=6, help="steps of a turn")
    parser.add_argument("--fanout", type=int, nargs="+", default=[10, 5])
    parser.add_argument("--wait", type=float, default=0.0, help="ms that stand for a device's step, in place of one")
    parser.add_argument("--threads", type=int, default=1, help="of torch, for the step")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder), options.nodes, options.width, options.edges)
        sources = loops(Path(folder), options)
        network = NodeClassifier("sage", options.width, options.hidden, CLASSES, len(options.fanout), dropout=0.5)
        optimizer = torch.optim.AdamW(network.parameters(), fused=True)
        took: dict[str, list[float]] = {name: [] for name in sources}
        for name, source in sources.items():
            turn(source, name, network, optimizer, 2, options.wait)
        for number in range(options.rounds):
            for name in list(sources)[:: -1 if number % 2 else 1]:
                took[name].append(turn(sources[name], name, network, optimizer, options.steps, options.wait))
    step = {name: statistics.median(each) for name, each in took.items()}
    hidden = (step["inline"] - step["ahead"]) / (step["inline"] - step["there"])
    print(f"{options.nodes:,} nodes, batch {options.batch}, fan-out {options.fanout}, {options.rounds} rounds")
    for name, seconds in step.items():
        print(f"{name:8}{1000 * seconds:9.1f} ms a step{options.batch / seconds:10.0f} samples/s")
    print(json.dumps({"milliseconds": {name: 1000 * each for name, each in step.items()}, "hidden": hidden}))


if __name__ == "__main__":
    main()
