"""Graphs in the forms that people have them: a folder of arrays, an npz file, tables of edges and of nodes."""

import os
import re
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from app.data.cache import cache_of, made_once, remember, using_cache
from app.data.graphs import store
from app.data.graphs.splits import of_arrays, of_column
from app.data.graphs.store import ARRAYS, UNKNOWN, Graph
from app.data.reading import near, read_text, reading, refuse_url
from app.data.tables.classes import some
from app.data.tables.columns import counted
from app.errors import UserError

if TYPE_CHECKING:
    from datasets import Dataset

# Part of the cache's key: raise it when what is stored changes.
FORMAT = 4
# What other programs call the parts of an npz file.
ALIASES = {
    "labels": ("labels", "y"),
    "edges": ("edges", "edge_index"),
    "features": ("features", "x"),
}

IDS = ("id", "source", "target")
"""Columns of ids."""
ARCHIVE = (RuntimeError, KeyError, TypeError, AttributeError)
"""What numpy raises for archives that are damaged, locked, or no archives."""
SHOWN = 3
"""Ids in an error."""
_WHOLE = re.compile(r"(0|-?[1-9]\d*)(\.0*)?")

NODES = {"--data.path": "--data.nodes", "path": "table"}
"""What gives the table of the nodes with a table of edges, by what gives that one; --data.eval-path takes no tables."""


def read(flag: str, path: str, nodes: str, undirected: bool) -> Graph:
    """Return the graph at a path: arrays of a folder are used where they are, others are converted once.

    Args:
        flag: the one that gives the path, for errors.
        nodes: table of the nodes, if the path is a table of edges.
        undirected: whether edges go both ways, where they are given one by one.
    """
    refuse_url(flag, path)
    path = os.path.expanduser(path)
    if not path.startswith("builtin:") and not os.path.exists(path):
        raise UserError(f"{flag} {path}: no such file or folder{near(path)}")
    if nodes and (os.path.isdir(path) or path.endswith(".npz") or path.startswith("builtin:")):
        raise UserError(f"{NODES.get(flag, '')} {nodes}: {path} has its own nodes; give it with a table of edges alone")
    with using_cache():
        if path.startswith("builtin:"):
            from app.data.graphs import calls

            if path != "builtin:calls":
                raise UserError(f"{flag} {path}: no such builtin data; there is builtin:calls")
            return calls.load()
        if os.path.isdir(path):
            return _folder(flag, Path(path))
        kind = f"graph-{FORMAT}-{int(undirected)}"
        if path.endswith(".npz"):
            place = cache_of([path]) / kind
            return store.load(made_once(place, lambda draft: store.save(_npz(flag, path, undirected), draft)))
        if not nodes:
            asked = NODES.get(flag)
            how = f"give the table of their nodes with {asked}" if asked else "give a folder or an .npz file here"
            raise UserError(f"{flag} {path} is a table of edges: {how}")
        place = cache_of([path, os.path.expanduser(nodes)]) / kind
        return store.load(made_once(place, lambda draft: store.save(_tables(flag, path, nodes, undirected), draft)))


def _folder(flag: str, folder: Path) -> Graph:
    """Map the arrays of a folder; they are checked once, as long as they stay as they are."""
    missing = [name for name in ARRAYS if not (folder / f"{name}.npy").is_file()]
    if missing:
        raise UserError(f"{flag} {folder}: there is no {missing[0]}.npy; a graph has {', '.join(ARRAYS)} there")
    arrays: dict[str, Any] = {name: _mapped(flag, folder / f"{name}.npy") for name in ARRAYS}
    file = folder / "classes.txt"
    names = [line for line in read_text(flag, file).split("\n") if line] if file.is_file() else []
    graph = Graph(**arrays, names=names)
    files = {name: str(folder / f"{name}.npy") for name in ARRAYS}

    def check() -> str:
        store.checked(graph, files, flag)
        graph.splits = splits()
        return store.fingerprint_of(graph)

    def splits() -> dict[str, np.ndarray]:
        at = {file.stem: file for file in sorted(folder.glob("*.npy")) if file.stem not in ARRAYS}
        return of_arrays(at, lambda name: _mapped(flag, at[name]), lambda name: str(at[name]), graph, flag)

    graph.fingerprint = remember(cache_of([str(folder)]) / f"graph-{FORMAT}.json", check)
    graph.splits = graph.splits or splits()
    return graph


def _mapped(flag: str, file: Path) -> np.ndarray:
    with reading(flag, file):
        return np.load(file, mmap_mode="r")


def _npz(flag: str, file: str, undirected: bool) -> Graph:
    """Read an npz file: `edges` [2, edges] and sparse features, as Planetoid's, or CSR with adj_ and attr_."""
    with reading(flag, file, *ARCHIVE), zipfile.ZipFile(file) as archive:
        if (bad := archive.testzip()) is not None:  # numpy does not look at the sums of parts
            raise ValueError(f"its part {bad} is damaged")
    with reading(flag, file, *ARCHIVE), np.load(file) as arrays:
        contents = {name: arrays[name] for name in arrays.files}

    def part(name: str) -> np.ndarray | None:
        return next((contents[alias] for alias in ALIASES[name] if alias in contents), None)

    labels, edges, features = part("labels"), part("edges"), part("features")
    if features is None:
        features = next((made for made in (_dense(contents, "attr_"), _dense(contents, "")) if made is not None), None)
    if labels is None or features is None or (edges is None and "adj_indptr" not in contents):
        raise UserError(
            f"{flag} {file}: it has {', '.join(sorted(contents))}; a graph needs labels, edges [2, edges] and features "
            "[nodes, width], or features as indptr, indices, data and shape"
        )
    files = {name: f"{name} in {file}" for name in (*ARRAYS, "edges")}
    nodes = len(labels)
    if edges is None:
        sizes = np.diff(contents["adj_indptr"])
        edges = np.stack([np.repeat(np.arange(len(sizes)), sizes), contents["adj_indices"]])
    if edges.ndim != 2 or 2 not in edges.shape:
        raise UserError(f"{flag}: {files['edges']} is {edges.shape}: give [2, edges]")
    edges = edges if len(edges) == 2 else edges.T
    _check_ends(flag, files["edges"], edges, nodes)
    indptr, indices = store.csr_of(edges[0], edges[1], nodes, undirected)
    names = [str(name) for name in contents["class_names"]] if "class_names" in contents else []
    graph = store.checked(Graph(indptr, indices, features, labels.squeeze(), names=names), files, flag)
    graph.splits = of_arrays(contents, contents.__getitem__, lambda name: f"{name} in {file}", graph, flag)
    return graph


def _dense(arrays: dict[str, np.ndarray], prefix: str) -> np.ndarray | None:
    """Return features [nodes, width] from CSR, if an npz file has them so."""
    names = [f"{prefix}{name}" for name in ("indptr", "indices", "data", "shape")]
    if not all(name in arrays for name in names):
        return None
    indptr, indices, data, shape = (arrays[name] for name in names)
    features = np.zeros(tuple(shape), data.dtype)
    features[np.repeat(np.arange(len(indptr) - 1), np.diff(indptr)), indices] = data
    return features


def _check_ends(flag: str, file: str, edges: np.ndarray, nodes: int) -> None:
    """Refuse an edge to a node that is not there."""
    if (out := np.flatnonzero(((edges < 0) | (edges >= nodes)).any(0))).size:
        row = int(out[0])
        raise UserError(
            f"{flag}: {counted(row)} of {file} is an edge from {edges[0, row]} to {edges[1, row]}, and nodes are 0 to "
            f"{nodes - 1}"
        )


def _tables(flag: str, edges: str, nodes: str, undirected: bool) -> Graph:
    """Read tables: of edges, with source and target; of nodes, with label, perhaps id and split, and features."""
    from app.data.loading import open_source

    rows = open_source("--data.nodes", (nodes,), words=IDS).tables["train"].with_format("numpy")
    ends = open_source(flag, (edges,), words=IDS).tables["train"]
    _columns(flag, edges, ends, ("source", "target"))
    _columns("--data.nodes", nodes, rows, ("label",))
    sources, targets = _places(flag, edges, ends, nodes, rows)
    widths = [name for name in rows.column_names if name not in ("id", "label", "split")]
    columns = [np.asarray(rows[name]) for name in widths]
    for name, column in zip(widths, columns, strict=True):
        if column.dtype.kind not in "fiub":
            raise UserError(f"--data.nodes {nodes}: column {name} holds no numbers; id, label and split may be texts")
        if (bad := np.flatnonzero(~np.isfinite(column.reshape(len(rows), -1)).all(1))).size:
            raise UserError(f"--data.nodes {nodes}: column {name}, {counted(bad[0])}: empty, or not finite: fill it")
    if not columns:
        raise UserError(f"--data.nodes {nodes}: it has no column of features; give numbers in further columns")
    features = np.concatenate([c.reshape(len(rows), -1) for c in columns], 1).astype(np.float32)
    labels, names = _labels(rows["label"], nodes)
    indptr, indices = store.csr_of(sources, targets, len(rows), undirected)
    files = dict.fromkeys(ARRAYS, nodes)
    graph = store.checked(Graph(indptr, indices, features, labels, names=names), files, flag)
    if "split" in rows.column_names:
        graph.splits = of_column(rows.with_format(None)["split"], graph, nodes, "--data.nodes")
    return graph


def _columns(flag: str, path: str, table: "Dataset", needed: tuple[str, ...]) -> None:
    if missing := [name for name in needed if name not in table.column_names]:
        raise UserError(f"{flag} {path}: there is no column {missing[0]}; there are {', '.join(table.column_names)}")


def _places(flag: str, edges: str, ends: "Dataset", nodes: str, rows: "Dataset") -> list[np.ndarray]:
    """Return the numbers of the nodes that edges come from and go to, by the ids in two tables.

    Args:
        edges, nodes: the files that `ends` and `rows` are from, for errors.
    """
    ids_of_nodes = _filled("--data.nodes", nodes, rows, "id") if "id" in rows.column_names else range(len(rows))
    ids, *named = alike(ids_of_nodes, *(_filled(flag, edges, ends, name) for name in ("source", "target")))
    places: dict[str, int] = {}
    for row, each in enumerate(ids):
        if (first := places.setdefault(each, row)) != row:
            raise UserError(f"--data.nodes {nodes}: {counted(first, row)} both have the id {each}")
    pair = []
    for name, column in zip(("source", "target"), named, strict=True):
        at = np.array([places.get(each, -1) for each in column], np.int64)
        if (lost := np.flatnonzero(at < 0)).size:
            row = int(lost[0])
            raise UserError(
                f"{flag} {edges}: {counted(row)} has the {name} {column[row]}, and {nodes} has no such node; its ids "
                f"are {some(ids[:SHOWN])} and so on"
            )
        pair.append(at)
    return pair


def alike(*columns: Iterable[Any]) -> list[list[str]]:
    """Return the ids of several columns as texts that are equal where the ids are: 12, 12.0 and "12" are one id.

    Where any of them is no plain whole number, such as 007 or x12, all count as they are written.
    """
    texts = [[_written(value) for value in column] for column in columns]
    if all(_WHOLE.fullmatch(text) for column in texts for text in column):
        return [[text.partition(".")[0] for text in column] for column in texts]
    return texts


def _written(value: Any) -> str:
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


def _filled(flag: str, path: str, table: "Dataset", name: str) -> list[Any]:
    """Return the values of a column in which each row needs one."""
    values = list(table.with_format(None)[name])
    for row, value in enumerate(values):
        if value is None or value != value or value == "":
            raise UserError(f"{flag} {path}: {counted(row)} has no {name}: fill the cell, or leave the row out")
    return values


def _labels(column: Any, file: str) -> tuple[np.ndarray, list[str]]:
    """Return labels as numbers, and the names of the classes if they are texts; an empty text is no label."""
    values = np.asarray(column)
    if values.dtype.kind in "iu":
        return values.astype(np.int64), []
    if values.dtype.kind == "f":
        numbers = np.where(np.isnan(values), UNKNOWN, values)
        if (bad := np.flatnonzero(~np.isfinite(numbers) | (numbers != np.trunc(numbers)))).size:
            raise UserError(
                f"--data.nodes {file}: {counted(bad[0])} has the label {numbers[bad[0]]}, which is no class: give "
                "whole numbers or texts"
            )
        return numbers.astype(np.int64), []
    texts = ["" if value is None else str(value) for value in values.tolist()]
    names = sorted({text for text in texts if text})
    places = {name: place for place, name in enumerate(names)} | {"": UNKNOWN}
    return np.array([places[text] for text in texts], np.int64), names
