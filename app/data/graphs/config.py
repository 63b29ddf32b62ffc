"""Flags of graphs. Importing this module loads none of the libraries that read them."""

from dataclasses import dataclass

from app.data.config import EvalSets


@dataclass
class GraphData(EvalSets):
    """A graph whose nodes are classified: where it is, and how many neighbours of a node are drawn."""

    path: str = "builtin:calls"
    """Graph to train on: builtin:calls; a folder with indptr.npy, indices.npy, features.npy and labels.npy (node v
    receives from indices[indptr[v]:indptr[v + 1]]; label -1: none), and perhaps train.npy, val.npy and test.npy (masks
    or numbers of nodes) and classes.txt (a name in each line); an .npz file like Planetoid's; or a table of edges with
    the columns source and target, with --data.nodes."""
    nodes: str = ""
    """Table of the nodes, where --data.path is a table of edges: label, perhaps id (default: the number of the row,
    from 0) and split (train, val, test and so on, or empty), and features in all other columns."""
    eval_path: str = ""
    """Graph to evaluate on: a folder or an .npz file, as --data.path, with the same classes (by name, where both have
    names). Default: nodes of the same graph."""
    eval_split: str = ""
    """Split to evaluate on. Default: the first of validation, valid, val, dev and test that the data have, else the
    nodes that --data.holdout takes, or all nodes with a label of --data.eval-path."""
    classes: tuple[str, ...] = ()
    """Names of the classes, in the order of the model's outputs. Default: those of the data, or their numbers."""
    holdout: float = 0.2
    """Fraction of the labelled nodes that is held out for evaluation if the data have no splits."""
    undirected: bool = True
    """Whether edges that are given one by one (npz files, tables) also go the other way."""
    fanout: tuple[int, ...] = (10, 5)
    """Neighbours drawn for each node, one number for each hop, the first for the nodes that are classified; the model
    has as many layers. -1: all; 0: none, which leaves a model of the node's own features."""
    eval_fanout: tuple[int, ...] = ()
    """The same in evaluations, in which draws are always the same. Default: all neighbours, where training has any."""
