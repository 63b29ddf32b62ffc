"""Use a finished network: classify nodes of a graph."""

from collections.abc import Sequence

import numpy as np
import torch

from app.data.graphs import readers
from app.data.graphs.nodes import collate
from app.data.graphs.sampling import stages
from app.errors import UserError
from app.tasks.graphs.networks import finished
from app.tasks.graphs.shape import read_config
from app.training.fetching import Composed

ROWS = 256  # nodes at a time


def classify(folder: str, path: str, nodes: Sequence[int] = (), table: str = "") -> list[str]:
    """Return the classes that a finished model gives to nodes of a graph.

    Args:
        folder: of the model.
        path: of the graph, as --data.path.
        nodes: their numbers; none: all nodes.
        table: of the nodes, as --data.nodes; edges go the ways that they went in training (--data.undirected).

    Raises:
        UserError: there is no such model or graph, or they do not fit.
    """
    network, config = finished(folder).eval(), read_config(folder) or {}
    undirected = config.get("undirected", True)  # earlier versions did not write it
    graph = readers.read("path", path, table, undirected)
    if graph.features.shape[1] != config["arguments"]["inputs"]:
        raise UserError(
            f"{folder} takes {config['arguments']['inputs']} features; {path} has {graph.features.shape[1]}"
        )
    chosen = list(nodes) or range(graph.nodes)
    if (least := min(chosen)) < 0 or max(chosen) >= graph.nodes:
        raise UserError(f"{path} has nodes 0 to {graph.nodes - 1}; {least if least < 0 else max(chosen)} is not there")
    inputs_of = Composed(collate, stages(graph, config["fanouts"]))
    found: list[np.ndarray] = []
    with torch.no_grad():
        for start in range(0, len(chosen), ROWS):
            inputs = inputs_of(list(chosen[start : start + ROWS]))
            found.append(network(**inputs["graph"]).argmax(1).numpy())
    return [config["classes"][place] for place in np.concatenate(found)]
