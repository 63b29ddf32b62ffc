"""The nodes that a run trains and evaluates on: a graph, its splits, and rows for run.batches."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from app.data.graphs import classes, readers
from app.data.graphs.config import GraphData
from app.data.graphs.sampling import ALL
from app.data.graphs.splits import check_disjoint
from app.data.graphs.store import UNKNOWN, Graph
from app.data.tables.classes import some
from app.data.tables.splits import EVAL_SPLITS, count_of, drawn
from app.errors import UserError
from app.launching import dry_run
from app.sampling.hashing import hash_of_bytes, key_of
from app.sampling.seeding import EVALUATION, seed_of


class Nodes:
    """Nodes of a graph as rows: each row is the number of a node."""

    def __init__(self, graph: Graph, nodes: np.ndarray):
        """Choose nodes, int64 [rows]."""
        self.graph, self.nodes = graph, nodes
        self.fingerprint = key_of(graph.fingerprint, hash_of_bytes([nodes]))

    def __len__(self) -> int:
        return len(self.nodes)

    def __getitem__(self, row: int) -> int:
        return int(self.nodes[row])

    def __getitems__(self, rows: Sequence[int]) -> list[int]:
        """Return the nodes of these rows."""
        return self.nodes[np.asarray(rows)].tolist()


class InEpoch:
    """Give rows of training the key of their epoch, by which neighbours are drawn; see `run.batches(augment=...)`."""

    def many(self, rows: list[int], seed: int, epochs: list[int], ids: list[int]) -> list[tuple[int, int]]:
        """Return pairs of a node and a key."""
        keys = {epoch: seed_of(seed, epoch) for epoch in set(epochs)}
        return [(row, keys[epoch]) for row, epoch in zip(rows, epochs, strict=True)]


def collate(rows: list) -> tuple[np.ndarray, np.ndarray]:
    """Return nodes (int64) and keys (uint64) of rows; rows without a key have that of every evaluation."""
    pairs = [row if isinstance(row, tuple) else (row, seed_of(EVALUATION)) for row in rows]
    return np.array([node for node, _ in pairs], np.int64), np.array([key for _, key in pairs], np.uint64)


@dataclass
class Loaded:
    """What a run trains and evaluates on."""

    train: Nodes
    evaluation: Nodes
    names: list[str]
    """Of the classes."""
    about: str
    """Lines for the user."""

    @property
    def width(self) -> int:
        """Return the length of a node's features."""
        return self.train.graph.features.shape[1]


def load(config: GraphData, width: int = 0) -> Loaded:
    """Load the graph to train on, and the nodes to evaluate on, of the same graph or another.

    Args:
        width: of the features that the model takes; 0: any.
    """
    check_fanouts(config)
    graph, scored = _graphs(config)
    train, held, note = _split(graph, scored, config)
    names = graph.names or [str(place) for place in range(classes.count(graph))]
    if width and graph.features.shape[1] != width:
        raise UserError(f"the model takes {width} features, and nodes of --data.path have {graph.features.shape[1]}")
    if not len(train) or not len(held):
        raise UserError(
            f"{config.path or config.eval_path}: {len(train)} nodes to train on, {len(held)} to evaluate on"
        )
    if not dry_run.needs_no_training_data(config):
        classes.check_several(graph, train, names, config.path)
    about = [
        f"{graph.nodes:,} nodes with {graph.features.shape[1]} features, {len(graph.indices):,} edges; "
        f"{len(train):,} nodes to train on, {len(held):,} to evaluate on{note}",
        f"{len(names)} classes: {some(names)}",
    ]
    return Loaded(Nodes(graph, train), Nodes(scored, held), names, "\n".join(about))


def _graphs(config: GraphData) -> tuple[Graph, Graph]:
    """Return the graph to train on and that to evaluate on, which are one if the flags name only one."""

    def read(flag: str, path: str, table: str = "") -> Graph:
        return classes.named(readers.read(flag, path, table, config.undirected), config.classes)

    scored = read("--data.eval-path", config.eval_path) if config.eval_path else None
    if scored is not None and dry_run.needs_no_training_data(config):
        return scored, scored
    graph = read("--data.path", config.path, config.nodes)
    if scored is None:
        return graph, graph
    if scored.features.shape[1] != graph.features.shape[1]:
        raise UserError(
            f"--data.eval-path {config.eval_path}: its nodes have {scored.features.shape[1]} features, and those of "
            f"--data.path {graph.features.shape[1]}"
        )
    return graph, classes.as_trained(scored, graph, config.eval_path)


def check_fanouts(config: GraphData) -> None:
    """Refuse numbers of neighbours that cannot be drawn."""
    said = " ".join(map(str, config.fanout))
    if not config.fanout or min(config.fanout) < ALL:
        raise UserError(f"--data.fanout {said}: give a number for each hop, 0 or more, or -1 for all neighbours")
    if config.eval_fanout and (len(config.eval_fanout) != len(config.fanout) or min(config.eval_fanout) < ALL):
        told = " ".join(map(str, config.eval_fanout))
        raise UserError(
            f"--data.eval-fanout {told}: give {len(config.fanout)} numbers, as many as --data.fanout, each 0 or more, "
            "or -1 for all neighbours"
        )


def eval_fanouts(config: GraphData) -> tuple[int, ...]:
    """Return the neighbours to draw in an evaluation, for each hop; where training has none, there are none."""
    return config.eval_fanout or tuple(ALL if each else 0 for each in config.fanout)


def _labelled(graph: Graph) -> np.ndarray:
    return np.flatnonzero(np.asarray(graph.labels) != UNKNOWN)


def _split(graph: Graph, scored: Graph, config: GraphData) -> tuple[np.ndarray, np.ndarray, str]:
    """Return the nodes to train on, those to evaluate on, and what the user should know of the choice."""
    own, name = _evaluated(scored), config.eval_split
    if name and name not in own:
        there = f"there are {', '.join(own)}" if own else "the graph has none"
        raise UserError(f"--data.eval-split {name}: no such split; {there}")
    if not own and not config.eval_path:
        nodes = _trained(graph)
        if len(nodes) < 2:
            raise UserError(f"--data.path {config.path}: {len(nodes)} nodes have labels, too few to hold some out")
        count_of(len(nodes), config.holdout)
        out = drawn(len(nodes), config.holdout)
        return nodes[~out], nodes[out], ""
    name = name or (own[0] if own else "")
    held = scored.splits[name] if name else _labelled(scored)
    others = [other for other in own if other != name]
    note = f" ({name}, not {' or '.join(others)}; --data.eval-split chooses)" if others else ""
    only_eval = dry_run.needs_no_training_data(config)
    return held if only_eval else _trained(graph), held, note


def _evaluated(graph: Graph) -> list[str]:
    """Name the splits to evaluate on that a graph has, the preferred one first."""
    return [name for name in EVAL_SPLITS if name in graph.splits]


def _trained(graph: Graph) -> np.ndarray:
    """Return the split to train on; without one, the nodes with a label that are in no other split."""
    own = _evaluated(graph)
    if "train" in graph.splits:
        check_disjoint(graph, ["train", *own], "--data.path")
        return graph.splits["train"]
    return np.setdiff1d(_labelled(graph), [node for name in own for node in graph.splits[name]])
