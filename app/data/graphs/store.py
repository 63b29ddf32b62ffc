"""A graph on disk: edges as CSR, features and labels, memory-mapped, so that processes of a machine share them."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from app.data.tables.columns import counted
from app.data.tables.splits import SPLITS
from app.errors import UserError
from app.sampling.hashing import hash_of_bytes

ARRAYS = ("indptr", "indices", "features", "labels")
UNKNOWN = -1
"""The label of a node that has none."""
# Items of an array that are looked at together, so that checks need little memory.
PIECE = 1 << 22


@dataclass
class Graph:
    """A graph whose node `v` receives from `indices[indptr[v] : indptr[v + 1]]`."""

    indptr: np.ndarray
    indices: np.ndarray
    features: np.ndarray
    """[nodes, width], of any type of number."""
    labels: np.ndarray
    """[nodes], the place of each node's class, or UNKNOWN."""
    splits: dict[str, np.ndarray] = field(default_factory=dict)
    """Nodes of the splits that the data have, by name, ascending, int64."""
    names: list[str] = field(default_factory=list)
    """Of the classes; empty if the data do not name them."""
    fingerprint: str = ""
    """Hash of all of it."""

    @property
    def nodes(self) -> int:
        """Count the nodes."""
        return len(self.indptr) - 1


def save(graph: Graph, folder: Path) -> None:
    """Write a graph into a folder, from where `load` maps it."""
    for name in ARRAYS:
        np.save(folder / f"{name}.npy", getattr(graph, name))
    for name, nodes in graph.splits.items():
        np.save(folder / f"{name}.npy", nodes)
    about = {"names": graph.names, "fingerprint": fingerprint_of(graph)}
    (folder / "graph.json").write_text(json.dumps(about))


def load(folder: Path) -> Graph:
    """Map the graph that `save` wrote."""
    about = json.loads((folder / "graph.json").read_text())
    arrays = {name: np.load(folder / f"{name}.npy", mmap_mode="r") for name in ARRAYS}
    splits = {name: np.load(folder / f"{name}.npy") for name in SPLITS if (folder / f"{name}.npy").exists()}
    return Graph(**arrays, splits=splits, names=about["names"], fingerprint=about["fingerprint"])


def fingerprint_of(graph: Graph) -> str:
    """Hash all that a graph holds, a piece at a time."""
    arrays = [getattr(graph, name) for name in ARRAYS] + [graph.splits[name] for name in sorted(graph.splits)]
    about = [f"{array.dtype} {array.shape}".encode() for array in arrays]
    names = [*graph.names, *sorted(graph.splits)]
    pieces = (piece for array in arrays for _, piece in pieces_of(array))
    return hash_of_bytes([json.dumps(names).encode(), *about, *pieces])


def pieces_of(array: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """Yield pieces of an array along its first axis, each with the place of its first row."""
    rows = max(1, PIECE // max(1, int(np.prod(array.shape[1:]))))
    for start in range(0, len(array), rows):
        yield start, array[start : start + rows]


def csr_of(source: np.ndarray, target: np.ndarray, nodes: int, undirected: bool) -> tuple[np.ndarray, np.ndarray]:
    """Sort edges by their target, each once; `undirected` adds the way back. Returns indptr and indices."""
    source, target = np.asarray(source, np.int64), np.asarray(target, np.int64)
    if undirected:
        source, target = np.concatenate([source, target]), np.concatenate([target, source])
    target, source = np.divmod(np.unique(target * nodes + source), nodes)
    indptr = np.concatenate([[0], np.cumsum(np.bincount(target, minlength=nodes))])
    return indptr.astype(np.int64), source.astype(np.int32 if nodes < 1 << 31 else np.int64)


def checked(graph: Graph, files: Mapping[str, str], flag: str) -> Graph:
    """Return a graph whose parts fit together.

    Args:
        files: what to call each array in an error.

    Raises:
        UserError: they do not; it names file and row.
    """
    nodes = graph.nodes

    def wrong(array: str, row: Any, fault: str) -> UserError:
        return UserError(f"{flag}: {'' if row is None else f'{counted(row)} of '}{files[array]} {fault}")

    for name in ("indptr", "indices"):
        array = getattr(graph, name)
        # Drawing neighbours calculates with both: unsigned numbers would become floats there.
        if array.ndim != 1 or array.dtype not in (np.int32, np.int64):
            raise wrong(name, None, f"is {array.dtype} {array.shape}: store a list of int32 or int64")
    if nodes < 1:
        raise wrong("indptr", None, "has no nodes: it is one longer than there are nodes")
    last = 0
    for start, piece in pieces_of(graph.indptr):
        steps = np.diff(piece.astype(np.int64), prepend=last)
        if (low := np.flatnonzero(steps < 0)).size:
            raise wrong("indptr", start + int(low[0]), "is smaller than the row before: rows count edges up")
        last = int(piece[-1])
    if int(graph.indptr[0]) or last != len(graph.indices):
        raise wrong(
            "indptr", None, f"goes from {graph.indptr[0]} to {last}, and must from 0 to {len(graph.indices)}, the edges"
        )
    for start, piece in pieces_of(graph.indices):
        if (out := np.flatnonzero((piece < 0) | (piece >= nodes))).size:
            row = start + int(out[0])
            there = f"is an edge to node {piece[out[0]]}, which is not there: nodes are 0 to {nodes - 1}"
            raise wrong("indices", row, there)
    for name in ("features", "labels"):
        if (rows := len(getattr(graph, name))) != nodes:
            raise wrong(name, None, f"has {rows} rows, and the edges are of {nodes} nodes: give a row for each node")
    _check_values(graph, wrong)
    return graph


def _check_values(graph: Graph, wrong: Any) -> None:
    """Raise an error if features or labels are no numbers that can be learnt."""
    if graph.features.ndim != 2 or graph.features.dtype.kind not in "fiub":
        raise wrong("features", None, f"is {graph.features.dtype} {graph.features.shape}: give numbers [nodes, width]")
    for start, piece in pieces_of(graph.features) if graph.features.dtype.kind == "f" else ():
        if (bad := np.flatnonzero(~np.isfinite(piece).all(1))).size:
            raise wrong("features", start + int(bad[0]), "has a value that is not finite")
    labels = graph.labels
    if labels.ndim != 1 or labels.dtype.kind not in "iu":
        raise wrong("labels", None, f"is {labels.dtype} {labels.shape}: give whole numbers, one for each node")
    classes = len(graph.names)
    for start, piece in pieces_of(labels):
        if (bad := np.flatnonzero((piece < UNKNOWN) | ((piece >= classes) & bool(classes)))).size:
            allowed = f"0 to {classes - 1}" if classes else "0 or more"
            row = start + int(bad[0])
            raise wrong("labels", row, f"is class {piece[bad[0]]}: classes are {allowed}, and -1 is a node without one")
