"""Classes of a graph's nodes: a line of the table for each node, or for those of a split."""

from pathlib import Path
from typing import TYPE_CHECKING

from app.commands.predict import tables
from app.errors import UserError

if TYPE_CHECKING:
    from app.commands.predict.command import Options


def main(options: "Options", model: str) -> int:
    """Write the class of each node with its probabilities, and return the exit status.

    Raises:
        UserError: the graph cannot be read, or does not fit the model.
    """
    from app.tasks.graphs.use import Classifier

    classifier = Classifier(model)
    graph = classifier.read(options.data, options.nodes)
    if options.split and options.split not in graph.splits:
        there = ", ".join(graph.splits) or "none"
        raise UserError(f"--split {options.split}: {options.data} has no such split; there are {there}")
    chosen = graph.splits[options.split].tolist() if options.split else range(graph.nodes)
    file = Path(options.to or tables.FILE)
    with tables.Writer(file) as writer:
        for node, shares in zip(chosen, classifier.shares(graph, chosen), strict=True):
            best = int(shares.argmax())
            each = {f"p/{name}": float(share) for name, share in zip(classifier.names, shares, strict=True)}
            writer.add({"node": node, "prediction": classifier.names[best], "probability": float(shares[best]), **each})
    print(f"{file}: {len(chosen):,} nodes")
    return 0
