"""The nodes of a graph's splits: from arrays, masks or numbers of nodes, and from a column of names."""

import difflib
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from app.data.graphs.store import UNKNOWN, Graph
from app.data.tables.columns import counted
from app.data.tables.splits import EVAL_SPLITS, SPLITS, split_of
from app.errors import UserError

# What other programs add to the name of a split that an array holds.
_ADDED = re.compile(r"idx_(?P<before>\w+)|(?P<after>\w+?)_(?:masks?|idx)")
# How like a split's name another one must be to be taken for a slip of the pen.
ALIKE = 0.8
KNOWN = f"splits are {', '.join(('train', *EVAL_SPLITS))}"


def of_arrays(
    names: Iterable[str], load: Callable[[str], np.ndarray], called: Callable[[str], str], graph: Graph, flag: str
) -> dict[str, np.ndarray]:
    """Return the nodes of each split that an array names, such as val, val_mask or idx_val.

    Args:
        names: of all arrays that there are; `load` reads one, and `called` says what to call it in errors.

    Raises:
        UserError: a name is nearly a split's, two arrays of one split differ, or one does not fit the graph.
    """
    nodes_by_split: dict[str, np.ndarray] = {}
    origin: dict[str, str] = {}
    for name in names:
        if split := _named(name, called(name), flag):
            nodes = split_nodes(load(name), graph, called(name), flag)
            if split in nodes_by_split and not np.array_equal(nodes_by_split[split], nodes):
                raise UserError(f"{flag}: {origin[split]} and {called(name)} are both {split}, and differ: keep one")
            nodes_by_split[split], origin[split] = nodes, called(name)
    return nodes_by_split


def _named(name: str, called: str, flag: str) -> str:
    """Return the split that the name of an array means; nothing if it is not one of a split."""
    added = _ADDED.fullmatch(name)
    word = (added["before"] or added["after"]) if added else name
    split = split_of(word)
    if not split and (added or difflib.get_close_matches(word.lower(), SPLITS, cutoff=ALIKE)):
        raise UserError(f"{flag}: {called} seems to be a split, and {word} is none: rename it; {KNOWN}")
    return split


def of_column(values: Sequence[Any], graph: Graph, file: str, flag: str) -> dict[str, np.ndarray]:
    """Return the nodes of each split that a table's column names; an empty cell is a node of none.

    Raises:
        UserError: a value is no split's name, or a node of a split has no label.
    """
    said = ["" if value is None else str(value).strip() for value in values]
    told = np.array([split_of(text) for text in said])
    for row, text in enumerate(said):
        if text and not told[row]:
            raise UserError(f"{flag} {file}: {counted(row)} has the split {text}, and there is none; {KNOWN}, or empty")
    return {split: split_nodes(told == split, graph, file, flag) for split in sorted({*told.tolist()} - {""})}


def split_nodes(numbers_or_mask: np.ndarray, graph: Graph, file: str, flag: str) -> np.ndarray:
    """Return the nodes of a split, ascending, from a mask or their numbers.

    Raises:
        UserError: they do not fit the graph, or one has no label.
    """
    numbers_or_mask = np.asarray(numbers_or_mask)
    if numbers_or_mask.dtype == bool:
        if numbers_or_mask.shape != (graph.nodes,):
            raise UserError(f"{flag}: {file} is a mask of {numbers_or_mask.size} nodes, and there are {graph.nodes}")
        rows = nodes = np.flatnonzero(numbers_or_mask)
    else:
        fix = "give the number of each node once, or a mask as bool"
        if numbers_or_mask.ndim != 1 or numbers_or_mask.dtype.kind not in "iu":
            raise UserError(f"{flag}: {file} is {numbers_or_mask.dtype} {numbers_or_mask.shape}: {fix}")
        nodes, rows = numbers_or_mask.astype(np.int64), np.arange(len(numbers_or_mask))
        if (out := np.flatnonzero((nodes < 0) | (nodes >= graph.nodes))).size:
            row = int(out[0])
            raise UserError(
                f"{flag}: {counted(row)} of {file} is node {nodes[row]}, which is not there: nodes are 0 to "
                f"{graph.nodes - 1}"
            )
        order = np.argsort(nodes, kind="stable")
        if (again := np.flatnonzero(np.diff(nodes[order]) == 0)).size:
            first, second = order[again[0]], order[again[0] + 1]
            raise UserError(f"{flag}: {counted(first, second)} of {file} are both node {nodes[first]}: {fix}")
    if (bare := np.flatnonzero(graph.labels[nodes] == UNKNOWN)).size:
        raise UserError(f"{flag}: {counted(rows[bare[0]])} of {file} is node {nodes[bare[0]]}, which has no label")
    return np.unique(nodes)


def check_disjoint(graph: Graph, names: Sequence[str], flag: str) -> None:
    """Refuse a node that is in the split to train on and in one to evaluate on."""
    for name in names[1:]:
        both = np.intersect1d(graph.splits[names[0]], graph.splits[name], assume_unique=True)
        if len(both):
            raise UserError(f"{flag}: node {both[0]} is in {names[0]} and in {name}; {len(both)} nodes are")
