"""Graphs: read from any form, refused where they do not fit, sampled by node and epoch, summed in one order."""

import json
import shutil

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.evaluating import as_it_is

from app import parse
from app.__main__ import main as app
from app.data.config import GraphData
from app.data.graphs import calls, nodes, readers
from app.data.graphs.neighbours import ALL, Gather, draw, draw_neighbourhood, stages
from app.data.graphs.store import Graph, csr_of
from app.errors import UserError
from app.sampling.seeding import below, words_of
from app.tasks.graphs import sums
from app.tasks.graphs.networks import NodeClassifier, finished
from app.tasks.graphs.shape import Shape
from app.tasks.graphs.use import classify
from app.training.feeding.fetching import Composed
from recipes import graph as graph_recipe

pytestmark = pytest.mark.usefixtures("data_cache")
SIZE = 40


def random_graph(seed: int = 0, size: int = SIZE, edges: int = 400) -> Graph:
    draw_ = np.random.default_rng(seed)
    indptr, indices = csr_of(*draw_.integers(0, size, (2, edges)), size, undirected=True)
    features = draw_.normal(size=(size, 5)).astype(np.float32)
    return Graph(indptr, indices, features, draw_.integers(0, 3, size))


GRAPH = random_graph()
KEYS = np.full(SIZE, 7, np.uint64)


@settings(derandomize=True, deadline=None, database=None, max_examples=60)
@given(st.integers(0, 12), st.integers(0, 2**60))
def test_neighbours_are_drawn_without_repeats(fanout, key):
    degrees = np.arange(30)
    counts, places = draw(degrees, words_of(np.full(30, key), degrees), fanout)
    assert counts.tolist() == np.minimum(degrees, fanout).tolist()
    for degree, own in zip(degrees, np.split(places, np.cumsum(counts)[:-1]), strict=True):
        assert (np.diff(own) > 0).all() and ((own >= 0) & (own < degree)).all()


def test_every_neighbour_is_drawn_as_often():
    counts, places = draw(np.full(20000, 7), words_of(np.zeros(20000), np.arange(20000)), 3)
    assert np.allclose(np.bincount(places) / 20000, 3 / 7, atol=0.015) and counts.sum() == 60000
    assert below(words_of(np.zeros(9), np.arange(9)), np.full(9, 1)).max() == 0


def neighbourhood(rows, key, fanouts=(3, 2), graph=GRAPH) -> dict:
    """For each hop and node, the neighbours that a micro-batch gives it."""
    sampled = draw_neighbourhood(graph, np.array(rows), np.full(len(rows), key, np.uint64), fanouts)
    found, receivers = {}, np.unique(rows)
    for hop, block in enumerate(sampled.blocks):
        new = np.full(len(block.back_starts) - 1, -1)
        new[: len(receivers)] = receivers
        senders = sampled.nodes if hop == len(fanouts) - 1 else None
        for place, node in enumerate(receivers):
            found[hop, int(node)] = block.senders[block.starts[place] : block.starts[place + 1]]
        if senders is None:
            following = draw_neighbourhood(
                graph, np.array(rows), np.full(len(rows), key, np.uint64), fanouts[: hop + 1]
            )
            senders = following.nodes
        assert (senders[: len(receivers)] == receivers).all() and len(set(senders.tolist())) == len(senders)
        found |= {at: tuple(senders[places].tolist()) for at, places in found.items() if at[0] == hop}
        receivers = senders
    return found


def test_a_nodes_neighbours_depend_on_seed_epoch_and_node_alone():
    """Whatever else is in the micro-batch; another key or hop gives others."""
    whole = neighbourhood(range(SIZE), 7)
    for rows in ([3], [3, 9, 20], [39, 3]):
        part = neighbourhood(rows, 7)
        assert part.items() <= whole.items() and (0, 3) in part
    other = neighbourhood(range(SIZE), 8)
    assert sum(whole[at] != other[at] for at in whole) > SIZE
    for (_, node), drawn in whole.items():
        assert set(drawn) <= set(GRAPH.indices[GRAPH.indptr[node] : GRAPH.indptr[node + 1]].tolist())


def test_keys_are_of_seed_and_epoch():
    def keys(seed, epochs):
        return nodes.collate(nodes.InEpoch().many([4, 5], seed, epochs, [0, 1]))[1].tolist()

    assert keys(0, [1, 1]) == keys(0, [1, 1]) and len({*keys(0, [1, 2]), *keys(1, [1, 1])}) == 3
    assert len(set(nodes.collate([4, 5])[1].tolist())) == 1


def network(kind="sage", **more):
    torch.manual_seed(0)
    return NodeClassifier(kind, 5, 8, 3, layers=2, heads=2, **more).eval()


def inputs(rows, fanouts=(3, 2), keys=None):
    rows = np.array(rows)
    return Gather(GRAPH)(draw_neighbourhood(GRAPH, rows, KEYS[: len(rows)] if keys is None else keys, fanouts))


@pytest.mark.parametrize("kind", ["sage", "gat"])
def test_logits_of_a_node_do_not_depend_on_the_others(kind):
    """Also where rows of two epochs share a micro-batch, and in any order."""
    model = network(kind)
    whole = model(**inputs(range(SIZE))["graph"])
    torch.testing.assert_close(model(**inputs([9, 3])["graph"]), whole[[9, 3]])
    mixed = model(**inputs([3, 9, 3], keys=np.array([7, 7, 8], np.uint64))["graph"])
    torch.testing.assert_close(mixed[:2], whole[[3, 9]])
    alone = model(**inputs([3], keys=np.array([8], np.uint64))["graph"])
    torch.testing.assert_close(mixed[2:], alone)
    assert (mixed[2] - mixed[0]).abs().max() > 1e-4


@pytest.mark.parametrize("kind", ["sage", "gat"])
def test_layers_are_what_their_papers_say(kind):
    """By dense matrices, over all neighbours, with the gradients."""
    model = network(kind).double()
    graph = inputs(range(SIZE), (ALL, ALL))["graph"]
    adjacency = torch.zeros(SIZE, SIZE, dtype=torch.double)
    adjacency[np.repeat(np.arange(SIZE), np.diff(GRAPH.indptr)), GRAPH.indices] = 1
    features = torch.from_numpy(GRAPH.features).double().requires_grad_()
    values = features
    for layer, norm in zip(model.layers, model.norms, strict=True):
        if kind == "sage":
            mean = adjacency @ values / adjacency.sum(1, keepdim=True).clamp(min=1)
            values = layer.own(values) + layer.neighbours(mean)
        else:
            heads = layer.values(values).unflatten(1, (2, -1))
            send, receive = (heads * layer.sends).sum(2), (heads * layer.receives).sum(2)
            scores = torch.nn.functional.leaky_relu(receive[:, None] + send[None], 0.2)
            seen = (adjacency + torch.eye(SIZE)).clamp(max=2)[..., None]
            shares = scores.exp() * seen / (scores.exp() * seen).sum(1, keepdim=True)
            values = torch.einsum("ijh,jhf->ihf", shares, heads).flatten(1) + layer.bias
        values = torch.relu(norm(values))
    expected = model.head(values)
    given = graph.pop("features").double().requires_grad_()
    found = model(given, **graph)
    torch.testing.assert_close(found, expected)
    ours, theirs = (
        torch.autograd.grad(out.square().sum(), [x, *model.parameters()])
        for out, x in ((found, given), (expected, features))
    )
    order = np.argsort(draw_neighbourhood(GRAPH, np.arange(SIZE), KEYS, (ALL, ALL)).nodes)
    torch.testing.assert_close([ours[0][order], *ours[1:]], [theirs[0], *theirs[1:]])


def test_sums_without_edges_are_zero():
    graph = inputs([1, 2], (0, 0))["graph"]
    values = torch.ones(2, 5, requires_grad=True)
    total = sums.neighbours_sum(values, graph["blocks"][0])
    total.sum().backward()
    assert total.abs().sum() == 0 == values.grad.abs().sum()
    assert network("gat")(**graph).isfinite().all()


def write(folder, kind, graph=GRAPH, **splits):
    """Write a graph in a form; return the flags that read it."""
    ends = np.stack([graph.indices, np.repeat(np.arange(SIZE), np.diff(GRAPH.indptr))])
    if kind == "folder":
        for name in ("indptr", "indices", "features", "labels"):
            np.save(folder / f"{name}.npy", getattr(graph, name))
        for name, given in splits.items():
            np.save(folder / f"{name}.npy", given)
        return {"path": str(folder)}
    if kind == "npz":
        np.savez(folder / "a.npz", edges=ends, x=graph.features, labels=graph.labels, **splits)
        return {"path": str(folder / "a.npz")}
    if kind == "planetoid":
        places = [np.flatnonzero(row) for row in graph.features]
        about = {"indptr": np.cumsum([0, *map(len, places)]), "indices": np.concatenate(places)}
        about |= {"data": graph.features[graph.features != 0], "shape": graph.features.shape}
        np.savez(folder / "a.npz", edges=ends, labels=graph.labels, **about, **splits)
        return {"path": str(folder / "a.npz")}
    columns = [f"f{i}" for i in range(graph.features.shape[1])]
    (folder / "edges.csv").write_text("source,target\n" + "".join(f"n{a},n{b}\n" for a, b in ends.T))
    lines = [
        f"n{i},{label},{','.join(map(repr, map(float, row)))}\n"
        for i, (label, row) in enumerate(zip(graph.labels, graph.features, strict=True))
    ]
    (folder / "nodes.csv").write_text(f"id,label,{','.join(columns)}\n" + "".join(lines))
    return {"path": str(folder / "edges.csv"), "nodes": str(folder / "nodes.csv")}


@pytest.mark.parametrize("kind", ["folder", "npz", "planetoid", "tables"])
def test_every_form_gives_the_same_graph(tmp_path, kind):
    config = GraphData(**write(tmp_path, kind))
    loaded = nodes.load(config)
    graph = loaded.train.graph
    assert (graph.indptr == GRAPH.indptr).all() and (graph.indices == GRAPH.indices).all()
    np.testing.assert_allclose(graph.features, GRAPH.features, rtol=1e-6)
    assert (graph.labels == GRAPH.labels).all() and loaded.names == ["0", "1", "2"]
    assert len(loaded.train) == 32 and sorted([*loaded.train.nodes, *loaded.evaluation.nodes]) == list(range(SIZE))
    assert isinstance(graph.features, np.memmap) and "40 nodes with 5 features" in loaded.about
    assert nodes.load(config).train.fingerprint == loaded.train.fingerprint


def test_splits_of_the_data_are_kept(tmp_path):
    own = {"train": np.arange(10), "val": np.arange(SIZE) == 12, "test": [20, 21]}
    for kind in ("npz", "folder"):
        flags = write(tmp_path, kind, **own)
        loaded = nodes.load(GraphData(**flags))
        assert loaded.train.nodes.tolist() == list(range(10)) and loaded.evaluation.nodes.tolist() == [12]
        assert "--data.eval-split chooses" in loaded.about
        assert nodes.load(GraphData(**flags, eval_split="test")).evaluation.nodes.tolist() == [20, 21]


@pytest.mark.parametrize("kind", ["npz", "folder"])
def test_splits_of_any_usual_name_are_found(tmp_path, kind):
    """As in all other data; what is nearly such a name is refused and not left out."""
    own = {"idx_training": np.arange(10), "validation_mask": np.arange(SIZE) == 12, "Dev": [20, 21], "seed": [9, 9]}
    loaded = nodes.load(GraphData(**write(tmp_path, kind, **own)))
    assert loaded.train.nodes.tolist() == list(range(10)) and loaded.evaluation.nodes.tolist() == [12]
    assert "validation, not dev" in loaded.about
    for wrong, said in (
        (
            {"holdout_mask": [3]},
            r"holdout_mask.* seems to be a split, and holdout is none: rename it; splits are",
        ),
        ({"vaild": [3]}, r"vaild.* seems to be a split"),
        ({"train": [3], "train_mask": np.arange(SIZE) == 4}, r"train.* and .*train_mask.* are both train, and differ"),
    ):
        (folder := tmp_path / next(iter(wrong))).mkdir()
        with pytest.raises(UserError, match=said):
            nodes.load(GraphData(**write(folder, kind, **wrong)))


@pytest.mark.parametrize("split", ["val", "test"])
def test_nodes_to_evaluate_on_are_never_trained_on(tmp_path, split):
    """Also where the data do not say what to train on."""
    flags = write(tmp_path, "npz", val=[12], test=[20, 21])
    loaded = nodes.load(GraphData(**flags, eval_split=split))
    assert loaded.evaluation.nodes.tolist() == {"val": [12], "test": [20, 21]}[split]
    assert loaded.train.nodes.tolist() == [node for node in range(SIZE) if node not in (12, 20, 21)]
    with pytest.raises(UserError, match="eval-split train: no such split; there are val, test"):
        nodes.load(GraphData(**flags, eval_split="train"))


def test_further_sets_are_of_the_graph_or_of_others(tmp_path):
    """None of their nodes is trained on."""
    flags = write(tmp_path, "npz", val=[12], test=[20, 21])
    (tmp_path / "other").mkdir()
    other = write(tmp_path / "other", "folder", test=[3])["path"]
    sets = (f"test={flags['path']}::test", f"far={other}", f"named={other}::test")
    loaded = nodes.load(GraphData(**flags, eval_sets=sets))
    found = {name: held.nodes.tolist() for name, held in loaded.sets.items()}
    assert found == {"": [12], "test": [20, 21], "far": [3], "named": [3]}
    assert "evaluated too, as eval-test: 2 nodes" in loaded.about
    (tmp_path / "plain").mkdir()
    whole = write(tmp_path / "plain", "npz")
    for wrong, said in (
        (f"a={flags['path']}::train", "no such split; there are val, test"),
        (f"a={other}::val", "no such split; there are test"),
        (f"a={whole['path']}", "is trained on, and so are 32 of its nodes"),
    ):
        with pytest.raises(UserError, match=said):
            nodes.load(GraphData(**(whole if "plain" in wrong else flags), eval_sets=(wrong,)))


def test_a_graph_to_evaluate_on_has_splits_of_its_own(tmp_path):
    flags = write(tmp_path, "npz")
    for own, expected in (
        ({}, list(range(SIZE))),
        ({"test": [3]}, [3]),
        ({"val": [5, 6], "test": [3]}, [5, 6]),
    ):
        folder = tmp_path / "-".join(["eval", *own])
        folder.mkdir()
        flags["eval_path"] = write(folder, "folder", **own)["path"]
        loaded = nodes.load(GraphData(**flags))
        assert loaded.evaluation.nodes.tolist() == expected and len(loaded.train) == SIZE
    assert nodes.load(GraphData(**flags, eval_split="test")).evaluation.nodes.tolist() == [3]
    assert "val, not test; --data.eval-split chooses" in loaded.about


def test_classes_of_a_graph_to_evaluate_on_are_found_by_name(tmp_path):
    """By number where one of the graphs has no names."""

    def load(own, others, labels=GRAPH.labels):
        flags = {}
        for flag, names in (("path", own), ("eval_path", others)):
            folder = tmp_path / f"{flag} {own} {others}"
            folder.mkdir()
            graph = Graph(GRAPH.indptr, GRAPH.indices, GRAPH.features, labels if flag == "eval_path" else GRAPH.labels)
            flags[flag] = write(folder, "folder", graph)["path"]
            (folder / "classes.txt").write_text("\n".join(names))
        return nodes.load(GraphData(**flags))

    hidden = np.where(np.arange(SIZE) == 4, -1, GRAPH.labels)
    found = load("abc", "cab", hidden)
    turned = np.array([2, 0, 1, -1])[hidden]
    assert (found.evaluation.graph.labels == turned).all() and found.names == ["a", "b", "c"]
    assert found.evaluation.fingerprint != load("cab", "cab", hidden).evaluation.fingerprint
    assert (load("", "cab").evaluation.graph.labels == GRAPH.labels).all()
    for own, others, labels, said in (
        ("abc", "abcd", GRAPH.labels, r"--data.eval-path .*: d: no such class in --data.path, which has a, b, c"),
        ("abc", "", GRAPH.labels + 1, r"--data.eval-path .*: node \d+ is of class 3, .* 0 to 2"),
        ("", "", GRAPH.labels + 2, r"--data.eval-path .*: node \d+ is of class 4, .* 0 to 2"),
    ):
        with pytest.raises(UserError, match=said):
            load(own, others, labels)


@pytest.mark.parametrize("dtype", [np.uint8, np.uint64])
def test_labels_without_a_sign_are_brought_into_order(tmp_path, dtype):
    flags = write(tmp_path, "folder", spoilt(labels=GRAPH.labels.astype(dtype)))
    (tmp_path / "classes.txt").write_text("a\nb\nc\n")
    loaded = nodes.load(GraphData(**flags, classes=("c", "b", "a")))
    assert (loaded.train.graph.labels == 2 - GRAPH.labels).all()


def tables(folder, lines: list[str]) -> GraphData:
    (folder / "edges.csv").write_text("source,target\n0,1\n1,2\n")
    (folder / "nodes.csv").write_text("\n".join(lines) + "\n")
    return GraphData(path=str(folder / "edges.csv"), nodes=str(folder / "nodes.csv"))


def test_labels_of_tables_are_true_or_false_or_whole(tmp_path):
    config = tables(tmp_path, ["label,x", "1,1"])
    (tmp_path / "nodes.jsonl").write_text(
        "".join(f'{{"label": {label}, "x": 1}}\n' for label in ("true", "false", "null", "false"))
    )
    graph = readers.read("--data.path", config.path, str(tmp_path / "nodes.jsonl"), True)
    assert graph.labels.tolist() == [1, 0, -1, 0] and graph.names == ["False", "True"]
    config = tables(tmp_path, ["label,x", "1.0,1", "0.0,2", ",3"])
    assert readers.read("--data.path", config.path, config.nodes, True).labels.tolist() == [1, 0, -1]


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (["label,x", "1.0,1", "0.4,2", "0,3"], r"nodes.csv: row 1 .* has the label 0.4, which is no class"),
        (["id,label,x", "0,1,1", "1,0,2", "2,0,3", "1,0,4"], r"nodes.csv: rows 1 and 3 .* both have the id 1"),
        (
            ["label,split,x", "1,test,1", "1,train,2", ",train,3"],
            r"row 2 .* of .*csv is node 2, which has no label",
        ),
        (
            ["label,split,x", "1,training,1", "0,Validation,2", "0,holdout,3"],
            r"nodes.csv: row 2 \(counted from 0\) has the split holdout, and there is none; splits are train, .*, or",
        ),
        (["label,x,y", "1,1,1", "0,2,", "0,3,3"], r"nodes.csv: column y, row 1 \(counted from 0\): empty"),
        (["id,label,x", "0,1,1", ",0,2", "2,0,3"], r"nodes.csv: row 1 .* has no id"),
    ],
)
def test_rows_of_tables_that_do_not_fit_are_named(tmp_path, lines, said):
    with pytest.raises(UserError, match=said):
        nodes.load(tables(tmp_path, lines))


def test_splits_of_tables_have_any_usual_name(tmp_path):
    lines = ["label,split,x", "1,training,1", "0,Train,2", "0,validation,3", "1,test,4", "1,,5"]
    config = tables(tmp_path, lines)
    loaded = nodes.load(config)
    assert loaded.train.nodes.tolist() == [0, 1] and loaded.evaluation.nodes.tolist() == [2]
    (tmp_path / "edges.csv").write_text("source,target\n0,1\n1,\n")
    with pytest.raises(UserError, match=r"edges.csv: row 1 \(counted from 0\) has no target"):
        nodes.load(config)


def test_a_table_of_edges_alone_says_what_gives_its_nodes(tmp_path):
    """Where nothing does, another form of the graph is the way."""
    path = tables(tmp_path, ["label,x", "1,1"]).path
    for flag, said in (
        ("--data.path", "table of their nodes with --data.nodes$"),
        ("path", "table of their nodes with table$"),
        ("--data.eval-path", "table of edges: give a folder or an .npz file here"),
    ):
        with pytest.raises(UserError, match=said):
            readers.read(flag, path, "", True)


def one_way(folder, size=120):
    """Write tables in which the class of a node is what its only sender has as a feature; return their flags."""
    random = np.random.default_rng(0)
    feature, senders = random.integers(0, 2, size), random.integers(0, size, size)
    (folder / "edges.csv").write_text("source,target\n" + "".join(f"{s},{v}\n" for v, s in enumerate(senders)))
    split = ["test" if v % 3 == 0 else "train" for v in range(size)]
    lines = [f"{'ab'[feature[senders[v]]]},{split[v]},{feature[v]}\n" for v in range(size)]
    (folder / "nodes.csv").write_text("label,split,x\n" + "".join(lines))
    ends, labels = np.stack([senders, np.arange(size)]), feature[senders]
    parts = {"x": np.float32(feature)[:, None], "labels": labels, "class_names": ["a", "b"]}
    np.savez(folder / "one-way.npz", edges=ends, test=np.arange(size) % 3 == 0, **parts)
    return folder / "edges.csv", folder / "nodes.csv", labels


def test_a_model_reads_graphs_in_the_direction_that_it_was_trained_on(tmp_path, capsys):
    """In `classify`, in the command that is printed, and in an evaluation, which names the classes."""
    edges, table, truth = one_way(tmp_path)
    flags = ["--data.path", edges, "--data.nodes", table, "--data.undirected", "False", "--data.fanout", "4"]
    flags += ["--scratch.width", 16, "--scratch.dropout", 0, "--run.epochs", 40, "--run.global-batch", 40]
    flags += ["--run.micro-batch", 40, "--run.trackers", "--run.dir", tmp_path / "run"]
    graph_recipe.main(parse(graph_recipe.Config, [str(word) for word in flags]))
    assert f'"{edges}", [0, 1, 2], table="{table}"))' in capsys.readouterr().out
    model = tmp_path / "run" / "model"
    test = list(range(0, 120, 3))
    right = np.mean(np.array(classify(str(model), str(edges), test, str(table))) == np.array(["a", "b"])[truth[test]])
    assert right > 0.95
    alone = shutil.copytree(model, tmp_path / "alone")
    for words in ([model], [alone, tmp_path / "one-way.npz"]):
        found = as_it_is(*words)
        assert found["scores"]["eval/accuracy"] == pytest.approx(right) and list(found["classes"]) == ["a", "b"]


def spoilt(**changes) -> Graph:
    """Change single values of the graph: NAME=(place, value), or a whole array."""
    arrays = {name: getattr(GRAPH, name).copy() for name in ("indptr", "indices", "features", "labels")}
    for name, change in changes.items():
        if isinstance(change, tuple):
            arrays[name][change[0]] = change[1]
        else:
            arrays[name] = change
    return Graph(**arrays)


@pytest.mark.parametrize(
    ("kind", "graph", "flags", "said"),
    [
        ("folder", spoilt(indices=(5, 40)), {}, r"row 5 .* of .*indices.npy is an edge to node 40, .* 0 to 39"),
        (
            "folder",
            spoilt(indptr=np.sort(GRAPH.indptr)[np.r_[0, 2, 1, 3:41]]),
            {},
            r"row 2 .*indptr.npy is smaller",
        ),
        ("folder", spoilt(features=GRAPH.features[:-1]), {}, r"features.npy has 39 rows, .* 40 nodes"),
        ("folder", spoilt(features=((7, 2), np.nan)), {}, r"row 7 .* of .*features.npy .* not finite"),
        ("folder", spoilt(labels=(9, -2)), {}, r"row 9 .* of .*labels.npy is class -2"),
        ("folder", spoilt(indptr=GRAPH.indptr.astype(np.uint32)), {}, r"indptr.npy is uint32 .*: .* int32 or int64"),
        ("folder", spoilt(indices=GRAPH.indices.astype(np.uint64)), {}, r"indices.npy is uint64 .*: .* int32 or int64"),
        ("folder", spoilt(indices=GRAPH.indices * 1.0), {}, r"indices.npy is float64 .*: .* int32 or int64"),
        ("folder", spoilt(labels=np.full(SIZE, 2)), {}, r"--data.path .*: all 32 nodes to train on are of the class 2"),
        ("folder", GRAPH, {"classes": ("a", "b")}, r"names 2 classes, and node \d+ is of class 2"),
        ("npz", spoilt(indices=(5, 41)), {}, r"row 5 .* of edges in .*a.npz is an edge from 41 to \d+"),
        ("npz", spoilt(features=GRAPH.features[:-1]), {}, r"features in .* has 39 rows"),
        ("tables", spoilt(indices=(5, 41)), {}, r"row 5 .* has the source n41, and .*nodes.csv has no such node"),
        ("folder", GRAPH, {"eval_split": "test"}, r"--data.eval-split test: no such split"),
        ("folder", GRAPH, {"fanout": (3, -2)}, r"--data.fanout 3 -2: give a number for each hop"),
        ("folder", GRAPH, {"eval_fanout": (3,)}, r"--data.eval-fanout 3: give 2 numbers"),
        ("folder", GRAPH, {"nodes": "x.csv"}, r"--data.nodes x.csv: .* has its own nodes"),
    ],
)
def test_what_does_not_fit_is_named(tmp_path, kind, graph, flags, said):
    with pytest.raises(UserError, match=said):
        nodes.load(GraphData(**{**write(tmp_path, kind, graph), **flags}))


def test_splits_that_do_not_fit_are_named(tmp_path):
    labels = GRAPH.labels.copy()
    labels[4] = -1
    for splits, said in (
        ({"train": [1, 40]}, r"row 1 .* of train in .* is node 40, which is not there"),
        ({"train": [1, 4]}, r"is node 4, which has no label"),
        ({"train": [1, 2], "val": [2, 3]}, r"node 2 is in train and in val"),
        ({"train": np.ones(3, bool)}, r"is a mask of 3 nodes, and there are 40"),
        ({"train": np.arange(SIZE) > 3}, r"row 4 .* of train in .* is node 4, which has no label"),
        (
            {"train": (np.arange(SIZE) < 2).astype(np.uint8)},
            r"rows 2 and 3 .* of train in .* are both node 0: .* mask as bool",
        ),
        ({"train": np.ones(SIZE)}, r"train in .* is float64 .* mask as bool"),
    ):
        flags = write(tmp_path, "npz", Graph(GRAPH.indptr, GRAPH.indices, GRAPH.features, labels), **splits)
        with pytest.raises(UserError, match=said):
            nodes.load(GraphData(**flags))


def test_a_finished_model_classifies(tmp_path):
    from safetensors.torch import save_file

    model = network()
    arguments = {"kind": "sage", "inputs": 5, "width": 8, "classes": 3, "layers": 2, "heads": 2, "dropout": 0.5}
    Shape(arguments, ["a", "b", "c"], [ALL, ALL]).save_pretrained(tmp_path)
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    rows = [3, 30]
    expected = model(**Composed(nodes.collate, stages(GRAPH, [ALL, ALL]))(rows)["graph"]).argmax(1)
    path = write(tmp_path, "npz")["path"]
    assert classify(str(tmp_path), path, rows) == [["a", "b", "c"][i] for i in expected]
    assert len(classify(str(tmp_path), path)) == SIZE
    assert app(["predict", str(tmp_path), path, "--to", str(tmp_path / "found.jsonl")]) == 0
    lines = [json.loads(line) for line in (tmp_path / "found.jsonl").read_text().splitlines()]
    assert [line["node"] for line in lines] == list(range(SIZE))
    assert [line["prediction"] for line in lines] == classify(str(tmp_path), path)
    assert sum(lines[3][f"p/{name}"] for name in "abc") == pytest.approx(1)
    assert max("abc", key=lambda name: lines[3][f"p/{name}"]) == lines[3]["prediction"]
    with pytest.raises(UserError, match=r"--split test: .* has no such split; there are none"):
        app(["predict", str(tmp_path), path, "--split", "test"])
    with pytest.raises(UserError, match="40 is not there"):
        classify(str(tmp_path), path, [40])
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert"}))
    with pytest.raises(UserError, match=r"no network of recipes/graph\.py"):
        finished(str(tmp_path))


SOURCES = {
    "one/__init__.py": "from two import helper as h\nimport two.deep as d\n\n"
    "def run(path):\n    h(path)\n    d.under()\n",
    "two/__init__.py": "class Base:\n    def __init__(self): self.begin()\n    def begin(self): pass\n\n"
    "def helper(x):\n    Child().only_one()\n\nclass Child(Base):\n    def only_one(self): self.begin()\n",
    "two/deep.py": "from . import helper\n\ndef under():\n    helper(1)\n    unknown()\n",
}


def test_calls_lead_to_the_functions_that_they_name(tmp_path):
    for file, text in SOURCES.items():
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text(text)
    modules, functions = calls._read(tmp_path, sorted(SOURCES))
    named = {n: f"{dotted}.{own}" for dotted, m in modules.items() for own, n in m.functions.items()}
    found = {(named[a], named[b]) for a, b in calls._edges(modules, functions)}
    assert found == {
        ("one.run", "two.helper"),
        ("one.run", "two.deep.under"),
        ("two.Base.__init__", "two.Base.begin"),
        ("two.Child.only_one", "two.Base.begin"),
        ("two.deep.under", "two.helper"),
    }
    graph = calls.build(tmp_path, sorted(SOURCES))
    assert graph.names == ["one", "two"] and graph.nodes == 6 and len(graph.indices) == 10


def test_reading_says_what_is_missing(tmp_path):
    with pytest.raises(UserError, match=r"there is no indptr.npy"):
        readers.read("--data.path", str(tmp_path), "", True)
    with pytest.raises(UserError, match=r"no such builtin data; there is builtin:calls"):
        readers.read("--data.path", "builtin:x", "", True)
