"""Networks that classify nodes by their neighbourhoods: GraphSAGE and GAT, and the files that they are saved in."""

import itertools
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from app.data.reading import reading
from app.errors import UserError
from app.tasks.graphs import sums
from app.tasks.graphs.shape import CONFIG, KIND, Shape, read_config
from app.tasks.graphs.sums import Edges


class SAGE(nn.Module):
    """A layer of GraphSAGE (Hamilton et al., 2017) with the mean aggregator."""

    def __init__(self, inputs: int, outputs: int):
        super().__init__()
        self.own, self.neighbours = nn.Linear(inputs, outputs), nn.Linear(inputs, outputs, bias=False)

    def forward(self, values: Tensor, edges: Edges) -> Tensor:
        """Return [receivers, outputs] from [senders, inputs]; a node without neighbours has 0 as their mean."""
        counts = edges["starts"].diff()
        mean = sums.neighbours_sum(values, edges) / counts.clamp(min=1).unsqueeze(1).to(values.dtype)
        return self.own(values[: len(counts)]) + self.neighbours(mean)


class GAT(nn.Module):
    """A layer of graph attention (Veličković et al., 2018); the node itself is one of its neighbours."""

    def __init__(self, inputs: int, outputs: int, heads: int, dropout: float):
        super().__init__()
        self.heads, self.dropout = heads, nn.Dropout(dropout)
        self.values = nn.Linear(inputs, outputs, bias=False)
        self.sends, self.receives = (nn.Parameter(torch.empty(heads, outputs // heads)) for _ in range(2))
        self.bias = nn.Parameter(torch.zeros(outputs))
        nn.init.xavier_uniform_(self.values.weight)
        for vector in (self.sends, self.receives):
            nn.init.xavier_uniform_(vector)

    def forward(self, values: Tensor, edges: Edges) -> Tensor:
        """Return [receivers, outputs] from [senders, inputs]."""
        count = len(edges["starts"]) - 1
        hidden = self.values(values)
        by_head = hidden.unflatten(1, (self.heads, -1))
        sends, receives = (by_head * self.sends).sum(2), (by_head[:count] * self.receives).sum(2)
        receiver_scores = nn.functional.leaky_relu(sends[:count] + receives, 0.2)
        scores = nn.functional.leaky_relu(sums.at_senders(sends, edges) + sums.at_receivers(receives, edges), 0.2)
        shares, own_shares = sums.softmax(scores, receiver_scores, edges)
        sent = sums.at_senders(hidden, edges).unflatten(1, (self.heads, -1)) * self.dropout(shares).unsqueeze(2)
        from_receivers = by_head[:count] * self.dropout(own_shares).unsqueeze(2)
        return sums.edges_sum(sent.flatten(1), edges) + from_receivers.flatten(1) + self.bias


class NodeClassifier(nn.Module):
    """Layers of one kind; the first layer reads the hop that is furthest from the nodes to classify."""

    _no_split_modules = ("SAGE", "GAT")  # what FSDP shards by itself

    def __init__(
        self, kind: str, inputs: int, width: int, classes: int, layers: int, heads: int = 1, dropout: float = 0.0
    ):
        super().__init__()
        sizes = [inputs, *[width] * layers]
        pairs = list(itertools.pairwise(sizes))
        self.layers = nn.ModuleList(
            SAGE(*pair) if kind == "sage" else GAT(*pair, heads=heads, dropout=dropout) for pair in pairs
        )
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in pairs)
        self.head, self.dropout = nn.Linear(width, classes), nn.Dropout(dropout)

    def forward(self, features: Tensor, blocks: list[Edges], seeds: Tensor) -> Tensor:
        """Return logits [rows, classes].

        Args:
            features: of the nodes of the furthest hop, [nodes, inputs].
            blocks: of app.data.graphs.neighbours, from the seeds outwards.
            seeds: each row's place among the first block's receivers.
        """
        values = features.to(self.head.weight.dtype)
        for layer, norm, edges in zip(self.layers, self.norms, reversed(blocks), strict=True):
            values = nn.functional.relu(norm(layer(self.dropout(values), edges)))
        return self.head(self.dropout(values))[seeds]


def finished(folder: str) -> NodeClassifier:
    """Load the network in a folder.

    Raises:
        UserError: recipes/graph.py has not written it.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    config = read_config(folder)
    if config is None:
        raise UserError(f"{folder} holds no network of recipes/graph.py: it has no {CONFIG} of type {KIND}")
    network, file = NodeClassifier(**config["arguments"]), Path(folder) / "model.safetensors"
    with reading("--model", file, SafetensorError, RuntimeError):  # the latter for names or shapes of another network
        network.load_state_dict(load_file(file))
    return network


def load_for(
    folder: str, width: int, classes: list[str], layers: int, fanouts: Sequence[int], undirected: bool
) -> tuple[NodeClassifier, Shape]:
    """Load a network to train further or to evaluate, with the config to save with it.

    Raises:
        UserError: it does not take these features or hops, or has other classes.
    """
    network, config = finished(folder), read_config(folder) or {}
    arguments = config["arguments"]
    if arguments["inputs"] != width:
        raise UserError(f"--model {folder} takes {arguments['inputs']} features, and the nodes have {width}")
    if config["classes"] != classes:
        raise UserError(
            f"--model {folder} has the classes {' '.join(config['classes'])}, and the data {' '.join(classes)}: give "
            "--data.classes in the model's order"
        )
    if arguments["layers"] != layers:
        raise UserError(f"--model {folder} has {arguments['layers']} layers, and --data.fanout gives {layers} numbers")
    return network, Shape(arguments, classes, fanouts, undirected)
