"""The nodes that a run trains and evaluates on: a graph, its splits, and rows for run.batches."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from app.config.needs import EVERYTHING, Needs
from app.data.config import GraphData
from app.data.graphs import classes, readers
from app.data.graphs.neighbours import ALL
from app.data.graphs.splits import check_disjoint
from app.data.graphs.store import UNKNOWN, Graph
from app.data.tables.classes import some
from app.data.tables.splits import count_of, drawn, for_evaluation, named_sets
from app.errors import UserError
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
    others: dict[str, Nodes] = field(default_factory=dict)
    """Further sets to evaluate on, by name."""

    @property
    def sets(self) -> dict[str, Nodes]:
        """Return all sets to evaluate on; the first one has no name."""
        return {"": self.evaluation, **self.others}

    @property
    def width(self) -> int:
        """Return the length of a node's features."""
        return self.train.graph.features.shape[1]


def load(config: GraphData, width: int = 0, needs: Needs = EVERYTHING) -> Loaded:
    """Load the graph to train on, and the nodes to evaluate on, of the same graph or another.

    Args:
        width: of the features that the model takes; 0: any.
        needs: of the run, `run.needs`.
    """
    check_fanouts(config)
    only_eval = needs.skips_training_rows(config)
    graph, scored = _graphs(config, only_eval)
    train, held, note = _split(graph, scored, config, only_eval)
    evaluation, others = Nodes(scored, held), _further_sets(graph, train, config, needs)
    if only := needs.only_set:
        evaluation, others, note = others[only], {}, f" ({config.eval_sets[0].partition('=')[2]})"
    names = graph.names or [str(place) for place in range(classes.count(graph))]
    if width and graph.features.shape[1] != width:
        raise UserError(f"the model takes {width} features, and nodes of --data.path have {graph.features.shape[1]}")
    if not len(train) or not len(evaluation):
        raise UserError(
            f"{config.path or config.eval_path}: {len(train)} nodes to train on, {len(evaluation)} to evaluate on"
        )
    if not only_eval:
        classes.check_several(graph, train, names, config.path)
    about = [
        f"{graph.nodes:,} nodes with {graph.features.shape[1]} features, {len(graph.indices):,} edges; "
        f"{len(train):,} nodes to train on, {len(evaluation):,} to evaluate on{note}",
        f"{len(names)} classes: {some(names)}",
        *(f"evaluated too, as eval-{name}: {len(nodes):,} nodes" for name, nodes in others.items()),
    ]
    return Loaded(Nodes(graph, train), evaluation, names, "\n".join(about), others)


def _further_sets(graph: Graph, train: np.ndarray, config: GraphData, needs: Needs) -> dict[str, Nodes]:
    """Return the nodes of --data.eval-sets, of the graph that is trained on or of others, by the names of the sets."""
    nodes_by_set, flag = {}, needs.set_flag
    for name, (path, split) in named_sets(config.eval_sets).items():
        same = os.path.realpath(os.path.expanduser(path)) == os.path.realpath(os.path.expanduser(config.path))
        other = graph if same else _as_trained(flag, path, graph, config)
        nodes, _ = _chosen(other, split, needs.split_flag)
        if same and (twice := np.intersect1d(nodes, train)).size:
            raise UserError(
                f"{flag} {path}: node {twice[0]} is trained on, and so are {len(twice):,} of its "
                f"nodes: name a split with {path}::SPLIT"
            )
        nodes_by_set[name] = Nodes(other, nodes)
    return nodes_by_set


def _chosen(graph: Graph, split: str, flag: str) -> tuple[np.ndarray, str]:
    """Return the nodes of a graph's split, and its name; without one, of the first to evaluate on, else all labelled.

    Args:
        flag: the one that names the split, for errors.
    """
    splits = _evaluated(graph)
    if split and split not in splits:
        there = f"there are {', '.join(splits)}" if splits else "the graph has none"
        raise UserError(f"{flag} {split}: no such split; {there}")
    split = split or (splits[0] if splits else "")
    return (graph.splits[split] if split else _labelled(graph)), split


def _graphs(config: GraphData, only_eval: bool) -> tuple[Graph, Graph]:
    """Return the graph to train on and that to evaluate on, which are one if the flags name only one."""

    def read(flag: str, path: str, table: str = "") -> Graph:
        return classes.named(readers.read(flag, path, table, config.undirected), config.classes)

    scored = read("--data.eval-path", config.eval_path) if config.eval_path else None
    if scored is not None and only_eval:
        return scored, scored
    graph = read("--data.path", config.path, config.nodes)
    return graph, graph if scored is None else _fitting(scored, "--data.eval-path", config.eval_path, graph)


def _as_trained(flag: str, path: str, graph: Graph, config: GraphData) -> Graph:
    """Read a graph to evaluate on, as the one that is trained on has its classes and features."""
    return _fitting(classes.named(readers.read(flag, path, "", config.undirected), config.classes), flag, path, graph)


def _fitting(scored: Graph, flag: str, path: str, graph: Graph) -> Graph:
    """Return a graph to evaluate on with the classes of the one that is trained on.

    Raises:
        UserError: it has other features, or other classes.
    """
    if scored.features.shape[1] != graph.features.shape[1]:
        raise UserError(
            f"{flag} {path}: its nodes have {scored.features.shape[1]} features, and those of --data.path "
            f"{graph.features.shape[1]}"
        )
    return classes.as_trained(scored, graph, path)


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


def _split(graph: Graph, scored: Graph, config: GraphData, only_eval: bool) -> tuple[np.ndarray, np.ndarray, str]:
    """Return the nodes to train on, those to evaluate on, and what the user should know of the choice."""
    splits = _evaluated(scored)
    held, name = _chosen(scored, config.eval_split, "--data.eval-split")
    if not splits and not config.eval_path:
        nodes = _trained(graph)
        if len(nodes) < 2:
            raise UserError(f"--data.path {config.path}: {len(nodes)} nodes have labels, too few to hold some out")
        count_of(len(nodes), config.holdout)
        out = drawn(len(nodes), config.holdout)
        return nodes[~out], nodes[out], ""
    others = [other for other in splits if other != name]
    note = f" ({name}, not {' or '.join(others)}; --data.eval-split chooses)" if others else ""
    return held if only_eval else _trained(graph), held, note


def _evaluated(graph: Graph) -> list[str]:
    """Name the splits to evaluate on that a graph has, the preferred one first."""
    return for_evaluation(graph.splits)


def _trained(graph: Graph) -> np.ndarray:
    """Return the split to train on; without one, the nodes with a label that are in no other split."""
    evaluated = _evaluated(graph)
    if "train" in graph.splits:
        check_disjoint(graph, ["train", *evaluated], "--data.path")
        return graph.splits["train"]
    return np.setdiff1d(_labelled(graph), [node for name in evaluated for node in graph.splits[name]])
