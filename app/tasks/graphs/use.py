"""Use a finished network: classify nodes of a graph."""

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from app.data.graphs import readers
from app.data.graphs.neighbours import stages
from app.data.graphs.nodes import collate
from app.data.graphs.store import Graph
from app.errors import UserError
from app.tasks.graphs.networks import finished
from app.tasks.graphs.shape import read_config
from app.training.feeding.fetching import Composed

ROWS = 256  # nodes at a time


class Classifier:
    """A finished network, and how it reads graphs."""

    def __init__(self, folder: str):
        """Load it from a model's folder.

        Raises:
            UserError: there is no such model.
        """
        self.folder, self.network, self._config = folder, finished(folder).eval(), read_config(folder) or {}
        self.names: list[str] = self._config["classes"]

    def read(self, path: str, table: str) -> Graph:
        """Read a graph, whose edges go the ways that they went in training (--data.undirected).

        Args:
            table: of the nodes, as --data.nodes.

        Raises:
            UserError: it cannot be read, or its nodes have other features.
        """
        graph = readers.read("path", path, table, self._config["undirected"])
        if graph.features.shape[1] != (takes := self._config["arguments"]["inputs"]):
            raise UserError(f"{self.folder} takes {takes} features; {path} has {graph.features.shape[1]}")
        return graph

    def shares(self, graph: Graph, nodes: Sequence[int]) -> Iterator[np.ndarray]:
        """Yield the probabilities of the classes for each of these nodes, float32 [classes]."""
        inputs_of = Composed(collate, stages(graph, self._config["fanouts"]))
        for start in range(0, len(nodes), ROWS):
            inputs = inputs_of(list(nodes[start : start + ROWS]))
            with torch.no_grad():
                yield from self.network(**inputs["graph"]).softmax(1).numpy()


def classify(folder: str, path: str, nodes: Sequence[int] = (), table: str = "") -> list[str]:
    """Return the classes that a finished model gives to nodes of a graph.

    Args:
        folder: of the model.
        path: of the graph, as --data.path.
        nodes: their numbers; none: all nodes.
        table: of the nodes, as --data.nodes.

    Raises:
        UserError: there is no such model or graph, or they do not fit.
    """
    classifier = Classifier(folder)
    graph = classifier.read(path, table)
    chosen = list(nodes) or range(graph.nodes)
    if (least := min(chosen)) < 0 or max(chosen) >= graph.nodes:
        raise UserError(f"{path} has nodes 0 to {graph.nodes - 1}; {least if least < 0 else max(chosen)} is not there")
    return [classifier.names[int(shares.argmax())] for shares in classifier.shares(graph, chosen)]
