"""The classes of graphs: their names, their order, and whether two graphs have the same."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from app.data.graphs.store import UNKNOWN, Graph
from app.data.tables.classes import some
from app.errors import UserError
from app.sampling.hashing import key_of


def named(graph: Graph, classes: Sequence[str]) -> Graph:
    """Give the classes the names of --data.classes, which say their order too; none: leave the graph as it is.

    Raises:
        UserError: the data have other classes.
    """
    if not classes:
        return graph
    if missing := sorted(set(graph.names) - set(classes)):
        raise UserError(f"--data.classes: {missing[0]} is a class of the data, and not among them")
    if graph.names:
        return _in_order(graph, classes)
    row, largest = _largest(graph)
    if largest >= len(classes):
        raise UserError(f"--data.classes names {len(classes)} classes, and node {row} is of class {largest}")
    return replace(graph, names=list(classes), fingerprint=key_of(graph.fingerprint, *classes))


def as_trained(graph: Graph, trained: Graph, path: str) -> Graph:
    """Return the graph to evaluate on with the classes of the one to train on: by name, where both have names.

    Args:
        path: what --data.eval-path gives.

    Raises:
        UserError: it has a class that the other has not.
    """
    if graph.names and trained.names:
        if unknown := sorted(set(graph.names) - set(trained.names)):
            raise UserError(
                f"--data.eval-path {path}: {some(unknown)}: no such class in --data.path, which has "
                f"{some(trained.names)}"
            )
        return graph if graph.names == trained.names else _in_order(graph, trained.names)
    row, largest = _largest(graph)
    if largest >= (classes := count(trained)):
        raise UserError(
            f"--data.eval-path {path}: node {row} is of class {largest}, and the classes of --data.path are 0 to "
            f"{classes - 1}"
        )
    return graph


def count(graph: Graph) -> int:
    """Count the classes: the names, or the numbers up to the largest label."""
    return len(graph.names) or 1 + _largest(graph)[1]


def check_several(graph: Graph, nodes: np.ndarray, names: Sequence[str], path: str) -> None:
    """Refuse to train on nodes that are all of one class, from which there is nothing to learn."""
    labels = np.asarray(graph.labels[nodes])
    if (labels == labels[0]).all():
        raise UserError(
            f"--data.path {path}: all {len(nodes):,} nodes to train on are of the class {names[int(labels[0])]}: give "
            "nodes of two classes or more"
        )


def _in_order(graph: Graph, names: Sequence[str]) -> Graph:
    """Number the classes by their places among these names."""
    order = list(names)
    places = np.array([*map(order.index, graph.names), UNKNOWN], np.int64)
    return replace(graph, labels=places[graph.labels], names=order, fingerprint=key_of(graph.fingerprint, *order))


def _largest(graph: Graph) -> tuple[int, int]:
    """Return the node with the largest label, and the label."""
    node = int(np.argmax(graph.labels))
    return node, int(graph.labels[node])
