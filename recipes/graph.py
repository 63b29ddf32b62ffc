r"""Train a classifier of a graph's nodes: GraphSAGE or GAT, on neighbourhoods that are drawn ahead of the step.

    accelerate launch recipes/graph.py
    accelerate launch recipes/graph.py --scratch.kind gat --run.dir runs/gat
    accelerate launch --config_file accelerate_configs/ddp_cpu.yaml recipes/graph.py --run.dir runs/ddp \
        --data.path graph/ --data.fanout 15 10 5
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from app import EMAConfig, Needs, OptimConfig, Run, RunConfig, parse
from app.data.config import GraphData
from app.tasks.graphs.shape import GraphScratch, check_shape

if TYPE_CHECKING:
    from torch import nn

    from app.data.graphs.nodes import Loaded, Nodes
    from app.tasks.graphs.networks import NodeClassifier
    from app.tasks.graphs.shape import Shape

USE_IT = (
    "python -c 'from app.tasks.graphs.use import classify; "
    """print(classify("{model}", "{data}", [0, 1, 2]{table}))'"""
)


@dataclass
class Config:
    """Train a classifier of a graph's nodes."""

    model: str = ""
    """Folder of a model that this recipe has trained. Default: train from scratch, in the shape of --scratch."""
    scratch: GraphScratch = field(default_factory=GraphScratch)
    data: GraphData = field(default_factory=GraphData)
    optim: OptimConfig = field(default_factory=lambda: OptimConfig(lr=None))
    ema: EMAConfig = field(default_factory=EMAConfig)
    run: RunConfig = field(default_factory=lambda: RunConfig(epochs=20, global_batch=256, micro_batch=128))

    def default_lr(self) -> tuple[float, str]:
        """Return the learning rate if --optim.lr is not given, and what it is for."""
        return (1e-3, "going on with a model") if self.model else (5e-3, "training from scratch")


def use_it(data: GraphData) -> str:
    """Return the command that classifies nodes of the graph that was trained on."""
    table = f', table="{data.nodes}"' if data.nodes else ""
    return USE_IT.replace("{data}", data.path).replace("{table}", table)


def load_data(config: Config, needs: Needs = Needs()) -> "Loaded":
    """Return the nodes to train on and to evaluate on, the names of the classes, and a description."""
    from app.data.graphs import nodes

    return nodes.load(config.data, needs=needs)


def build_model(config: Config, data: "Loaded") -> "tuple[NodeClassifier, Shape]":
    """Build a network with an output for each class, and the config to save with it."""
    from app.data.graphs.nodes import eval_fanouts
    from app.tasks.graphs import networks
    from app.tasks.graphs.shape import Shape

    if config.model:
        about = data.names, len(config.data.fanout), eval_fanouts(config.data), config.data.undirected
        return networks.load_for(config.model, data.width, *about)
    arguments: dict[str, Any] = {
        "kind": config.scratch.kind,
        "inputs": data.width,
        "width": config.scratch.width,
        "classes": len(data.names),
        "layers": len(config.data.fanout),
        "heads": config.scratch.heads,
        "dropout": config.scratch.dropout,
    }
    shape = Shape(arguments, data.names, eval_fanouts(config.data), config.data.undirected)
    return networks.NodeClassifier(**arguments), shape


def evaluate(
    run: Run, model: "nn.Module", nodes: "Nodes", names: list[str], fanouts: Sequence[int]
) -> dict[str, float]:
    """Score the model on every node, once each, with the same neighbours every time."""
    from torch.nn.functional import cross_entropy

    from app.data.graphs.neighbours import stages
    from app.data.graphs.nodes import collate
    from app.training.scores.classification import Classification

    scores = run.scores_of(Classification(names))
    for micro in run.evaluation(model, nodes, collate, fetch=stages(nodes.graph, fanouts)):
        logits, labels = model(**micro.inputs["graph"]), micro.inputs["labels"]
        scores.update(micro.weight, logits, labels, loss=cross_entropy(logits, labels))
    return scores.compute()


def main(config: Config) -> dict[str, float]:
    """Train the model and return its last scores."""
    from torch.nn.functional import cross_entropy

    from app.data.graphs.neighbours import stages
    from app.data.graphs.nodes import InEpoch, collate, eval_fanouts

    with Run(config) as run:
        check_shape(config.scratch)
        with run.main_process_first():
            data = load_data(config, run.needs)
        run.say(data.about)
        run.keep_best("eval/accuracy")
        network, shape = build_model(config, data)
        model, optimizer = run.prepare(network, config.optim)
        ahead = stages(data.train.graph, config.data.fanout)
        for batch in run.batches(data.train, collate, augment=InEpoch(), fetch=ahead):
            for micro in batch.micros(model):
                loss = cross_entropy(model(**micro.inputs["graph"]), micro.inputs["labels"])
                run.backward(loss, micro)
            run.step(optimizer)
            if run.due(config.run.eval_every):
                run.evaluate(evaluate, model, data.sets, data.names, eval_fanouts(config.data))
        return run.finish(model, shape, use=use_it(config.data))


if __name__ == "__main__":
    main(parse(Config))
