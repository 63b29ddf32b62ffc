"""Flags that make each recipe small enough for tests; a recipe without an entry here fails its laws."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np


@dataclass
class Small:
    """How to make a recipe small.

    Args:
        flags: of the recipe. It is called with a function that writes a jsonl file of a number of labelled texts. They
            must give at least 21 training samples, so that an epoch ends inside a step.
        syncs: gradient synchronisations of a step, one for each optimizer.
    """

    flags: Callable[[Callable[[int], Path]], list]
    syncs: int = 1


def graph_file(file: Path, nodes: int = 51) -> Path:
    """Write a random graph of three classes, of which features and edges tell a little."""
    if not file.exists():
        draw = np.random.default_rng(0)
        labels, edges = draw.integers(0, 3, nodes), draw.integers(0, nodes, (2, 6 * nodes))
        like = labels[edges[0]] == labels[edges[1]]
        edges = edges[:, like | (draw.random(6 * nodes) < 0.2)]
        features = draw.normal(size=(nodes, 8)) + np.eye(8)[labels]
        np.savez(file, edges=edges, x=features.astype(np.float32), labels=labels)
    return file


SMALL = {
    "cls": Small(
        lambda rows: [
            *("--scratch.layers", 1, "--scratch.width", 32, "--scratch.vocab", 300, "--data.max-length", 64),
            *("--data.path", rows(101), "--data.eval-path", rows(7)),
        ]
    ),
    # Labels as prompts, so that blocks have different weights.
    "lm": Small(
        lambda rows: [
            *("--scratch.layers", 2, "--scratch.width", 32, "--scratch.heads", 2, "--scratch.kv-heads", 1),
            *("--scratch.tokenizer", "byte", "--scratch.dropout", 0.1, "--data.block", 64, "--sample-length", 4),
            *("--data.prompt", "label", "--data.completion", "text", "--data.path", rows(31)),
            *("--data.eval-path", rows(7)),
        ]
    ),
    # Relative to the untrained model, which all layouts must know alike; several terms, and layers with dropout.
    "dpo": Small(
        lambda rows: [
            *("--scratch.layers", 1, "--scratch.width", 16, "--scratch.heads", 2, "--scratch.tokenizer", "byte"),
            *(
                "--scratch.dropout",
                0.1,
                "--data.max-length",
                48,
                "--loss.reference",
                "cached",
                "--loss.sft-weight",
                0.1,
            ),
            *("--data.prompt", "label", "--data.chosen", "text", "--data.rejected", "label"),
            *("--data.path", rows(101), "--data.eval-path", rows(7)),
        ]
    ),
    "img": Small(
        lambda rows: [
            *("--scratch.layers", 1, "--scratch.width", 8, "--augment.flip", 0.5, "--augment.erase", 0.5),
            *("--data.split", "train[:31]", "--data.eval-split", "train[31:40]"),
        ]
    ),
    "det": Small(
        lambda rows: [
            *("--scratch.width", 8, "--data.size", 32, "--augment.flip", 0.5, "--augment.rotate", 10),
            *("--data.split", "train[:31]", "--data.eval-split", "test[:9]"),
        ]
    ),
    "gan": Small(
        lambda rows: [
            *("--width", 8, "--samples", 17, "--optim.clip", 1, "--optim-d.clip", 1),
            *("--data.split", "train[:31]", "--data.eval-split", "train[31:40]"),
        ],
        syncs=2,
    ),
    "tag": Small(
        lambda rows: [
            *("--scratch.layers", 1, "--scratch.width", 32, "--scratch.vocab", 300, "--data.max-length", 64),
            *("--data.split", "train[:31]", "--data.eval-split", "train[31:40]"),
        ]
    ),
    "s2s": Small(
        lambda rows: [
            *("--scratch.layers", 1, "--scratch.width", 16, "--scratch.heads", 2, "--scratch.vocab", 300),
            *("--scratch.shape", "t5", "--optim.lr", 0.002),
            *("--data.max-source", 32, "--data.max-target", 8, "--generate.rows", 5, "--generate.samples", 0),
            *("--data.split", "train[:31]", "--data.eval-split", "train[31:40]"),
        ]
    ),
    "seg": Small(
        lambda rows: [
            *("--data.patch", 32, "--data.patches-per-image", 1, "--data.holdout", 0.05),
            *("--scratch.channels", 4, 8),
        ]
    ),
    "graph": Small(
        lambda rows: [
            *("--data.path", graph_file(rows(31).with_name("graph.npz")), "--data.fanout", 3, 2),
            *("--scratch.width", 8, "--scratch.heads", 2, "--scratch.kind", "gat"),
        ]
    ),
}
