"""Neighbourhoods: which neighbours a node has in an epoch, and the blocks of a micro-batch.

The neighbours that are drawn for a node depend on the seed, the epoch, the node and the hop, and on nothing else. So
the logits of a node do not depend on the layout, or on what else is in the micro-batch.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from app.sampling.seeding import below, mixed, words_of

if TYPE_CHECKING:
    from app.data.graphs.store import Graph

ALL = -1
"""A fan-out that takes all neighbours."""


class Block(NamedTuple):
    """One hop of a micro-batch: nodes that receive, the nodes that they receive from, and the edges between them.

    The receiving nodes are the first of the sending ones, in the same order. Edges are sorted by receiver; `order`
    sorts them by sender, for the gradients.
    """

    starts: np.ndarray
    """Where each receiver's edges begin, and at last their number: int64 [receivers + 1]."""
    senders: np.ndarray
    """The sending node of each edge, by its place in the block: int64 [edges]."""
    order: np.ndarray
    """Edges sorted by sender: int64 [edges]."""
    back_starts: np.ndarray
    """Where each sender's edges begin in `order`: int64 [senders + 1]."""


class Neighbourhood(NamedTuple):
    """A micro-batch before its features are read."""

    blocks: list[Block]
    """From the seeds outwards."""
    nodes: np.ndarray
    """The nodes whose features are needed: int64."""
    seeds: np.ndarray
    """The place of each row among the first block's receivers: int64 [rows]."""
    labels: np.ndarray
    """Of the rows: int64 [rows]."""


def draw(degrees: np.ndarray, keys: np.ndarray, fanout: int) -> tuple[np.ndarray, np.ndarray]:
    """Draw at most `fanout` of each node's neighbours, without repeats.

    Floyd's algorithm (Bentley and Floyd, 1987), for all nodes at a time: its cost does not depend on the degrees.

    Args:
        degrees: of the nodes, int64 [nodes].
        keys: a random word of each node, uint64 [nodes].

    Returns:
        How many were drawn, int64 [nodes]; and their places among the neighbours of their node, ascending, int64.
    """
    counts = degrees if fanout == ALL else np.minimum(degrees, fanout)
    ends = np.cumsum(counts)
    places = np.arange(ends[-1] if len(ends) else 0) - np.repeat(ends - counts, counts)
    many = np.flatnonzero(counts < degrees)
    if len(many):
        size, words = degrees[many], words_of(keys[many, None], np.arange(fanout)[None])
        chosen = np.empty((len(many), fanout), np.int64)
        for i in range(fanout):
            last = size - fanout + i
            place = below(words[:, i], last + 1)
            again = (chosen[:, :i] == place[:, None]).any(1)
            chosen[:, i] = np.where(again, last, place)
        chosen.sort(1)
        places[(ends - counts)[many, None] + np.arange(fanout)] = chosen
    return counts, places


def draw_neighbourhood(graph: "Graph", rows: np.ndarray, keys: np.ndarray, fanouts: Sequence[int]) -> Neighbourhood:
    """Draw the neighbourhood of a micro-batch's rows, hop by hop.

    Args:
        rows: nodes to classify, int64 [rows].
        keys: of their epoch, uint64 [rows]. Rows of two epochs share no node.
        fanouts: neighbours of each node, by hop; ALL for all.
    """
    epochs, epoch = np.unique(keys, return_inverse=True)
    distinct, seeds = np.unique(epoch * graph.nodes + rows, return_inverse=True)
    blocks, receivers = [], distinct
    for hop, fanout in enumerate(fanouts):
        block, receivers = _hop(graph, receivers, epochs, hop, fanout)
        blocks.append(block)
    return Neighbourhood(blocks, receivers % graph.nodes, seeds.astype(np.int64), graph.labels[rows].astype(np.int64))


def _hop(graph: "Graph", receivers: np.ndarray, epochs: np.ndarray, hop: int, fanout: int) -> tuple[Block, np.ndarray]:
    """Return a block and its sending nodes, each as its epoch's place times the graph's size, plus the node."""
    slot, node = np.divmod(receivers, graph.nodes)
    begin = graph.indptr[node]
    keys = words_of(epochs[slot] + mixed(np.array([hop], np.uint64)), node)
    counts, places = draw(graph.indptr[node + 1] - begin, keys, fanout)
    neighbours = graph.indices[np.repeat(begin, counts) + places] + np.repeat(slot * graph.nodes, counts)
    senders, place = _joined(receivers, neighbours)
    starts = np.concatenate([[0], np.cumsum(counts)])
    # Sixteen bits are sorted by radix, several times as fast.
    order = np.argsort(place.astype(np.uint16) if len(senders) <= 1 << 16 else place, kind="stable")
    back_starts = np.concatenate([[0], np.cumsum(np.bincount(place, minlength=len(senders)))])
    return Block(starts, place, order, back_starts), senders


def _joined(first: np.ndarray, more: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Make one list of two: the first, whose nodes are distinct, and then, sorted, each other node of the second once.

    Returns:
        The list; and the place in it of each node of the second list.
    """
    distinct, at, inverse = np.unique(np.concatenate([first, more]), return_index=True, return_inverse=True)
    new = at >= len(first)
    place = at.copy()
    place[new] = len(first) + np.arange(np.count_nonzero(new))
    return np.concatenate([first, distinct[new]]), place[inverse[len(first) :]]


class DrawNeighbours:
    """The first stage of run.batches(fetch=...): from rows, a `Neighbourhood`."""

    def __init__(self, graph: "Graph", fanouts: Sequence[int]):
        """Draw with these fan-outs."""
        self.graph, self.fanouts = graph, tuple(fanouts)

    def __call__(self, rows: tuple[np.ndarray, np.ndarray]) -> Neighbourhood:
        """Draw the neighbourhoods of rows and keys."""
        return draw_neighbourhood(self.graph, *rows, self.fanouts)


class Gather:
    """The second stage of run.batches(fetch=...): from a `Neighbourhood`, the inputs of the model, as tensors."""

    def __init__(self, graph: "Graph"):
        """Read features of a graph."""
        self.graph = graph

    def __call__(self, drawn: Neighbourhood) -> dict[str, Any]:
        """Read the features of the nodes; one read of the disk for each node, in their order."""
        import torch

        blocks = [{name: torch.from_numpy(array) for name, array in block._asdict().items()} for block in drawn.blocks]
        # take() is one loop of C, beside which the thread that trains goes on.
        features = torch.from_numpy(np.asarray(self.graph.features).take(drawn.nodes, axis=0))
        inputs = {"features": features, "blocks": blocks, "seeds": torch.from_numpy(drawn.seeds)}
        return {"graph": inputs, "labels": torch.from_numpy(drawn.labels)}


def stages(graph: "Graph", fanouts: Sequence[int]) -> tuple[DrawNeighbours, Gather]:
    """Return the stages for run.batches(fetch=...): of a model's inputs, `graph`, and their `labels`."""
    return DrawNeighbours(graph, fanouts), Gather(graph)
