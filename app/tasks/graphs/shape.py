"""The shape of a network for graphs, and the file that says it."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from app.config import setting
from app.data.reading import read_fields
from app.errors import UserError
from app.tasks.from_scratch import check_dropout

CONFIG = "config.json"
KIND = "samestep-graph"
"""What config.json gives as the type of the model."""


@dataclass
class GraphScratch:
    """The shape of a network for graphs; it has a layer for each number of --data.fanout."""

    kind: Literal["sage", "gat"] = "sage"
    """sage: GraphSAGE, the mean over neighbours and the node itself, each with weights of its own. gat: graph
    attention, a weighted mean over neighbours and the node itself."""
    width: int = setting(128, at_least=1)
    """Length of the hidden states' vectors."""
    heads: int = setting(4, at_least=1)
    """Attention heads of a gat; --scratch.width must be a multiple of it."""
    dropout: float = 0.5
    """Dropout probability of features and hidden states; of a gat, of attention weights too."""


def check_shape(shape: GraphScratch) -> None:
    """Raise a UserError if no network has this shape."""
    if shape.width < 1 or shape.heads < 1 or shape.width % shape.heads:
        raise UserError(f"--scratch.width {shape.width} must be a multiple of --scratch.heads {shape.heads}")
    check_dropout(shape.dropout)


class Shape:
    """config.json: how to build the network, and what its inputs and outputs are."""

    def __init__(self, arguments: dict[str, Any], classes: list[str], fanouts: Sequence[int], undirected: bool = True):
        """Keep what `finished` and people need.

        Args:
            arguments: of NodeClassifier.
            classes: their names.
            fanouts: neighbours of an evaluation.
            undirected: --data.undirected of the training, without which a graph would be read as another one.
        """
        self.fields: dict[str, Any] = {"model_type": KIND, "architectures": ["NodeClassifier"], "arguments": arguments}
        self.fields |= {"classes": classes, "fanouts": list(fanouts), "undirected": undirected}

    @property
    def id2label(self) -> dict[int, str]:
        """Return the names of the classes, as a config of transformers does."""
        return dict(enumerate(self.fields["classes"]))

    def save_pretrained(self, folder: Path) -> None:
        """Write config.json into a folder."""
        (folder / CONFIG).write_text(json.dumps(self.fields, indent=2) + "\n")


def read_config(folder: str) -> dict[str, Any] | None:
    """Read config.json of a network that recipes/graph.py has written; None if it is none."""
    file = Path(folder) / CONFIG
    fields = read_fields("--model", file) if file.is_file() else {}
    return fields if fields.get("model_type") == KIND else None
