"""Flags that make each recipe small enough for tests; a recipe without an entry here fails its laws."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


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
    "img": Small(
        lambda rows: [
            *("--scratch.layers", 1, "--scratch.width", 8, "--augment.flip", 0.5, "--augment.erase", 0.5),
            *("--data.split", "train[:41]", "--data.eval-split", "train[41:58]"),
        ]
    ),
    "gan": Small(
        lambda rows: [
            *("--width", 8, "--samples", 17, "--optim.clip", 1, "--optim-d.clip", 1),
            *("--data.split", "train[:41]", "--data.eval-split", "train[41:58]"),
        ],
        syncs=2,
    ),
    "tag": Small(
        lambda rows: [
            *("--scratch.layers", 1, "--scratch.width", 32, "--scratch.vocab", 300, "--data.max-length", 64),
            *("--data.split", "train[:41]", "--data.eval-split", "train[41:58]"),
        ]
    ),
    "s2s": Small(
        lambda rows: [
            *("--scratch.layers", 1, "--scratch.width", 16, "--scratch.heads", 2, "--scratch.vocab", 300),
            *("--scratch.shape", "t5", "--optim.lr", 0.002),
            *("--data.max-source", 32, "--data.max-target", 8, "--generate.rows", 5, "--generate.samples", 0),
            *("--data.split", "train[:41]", "--data.eval-split", "train[41:58]"),
        ]
    ),
    "seg": Small(
        lambda rows: [
            *("--data.patch", 32, "--data.patches-per-image", 1, "--data.holdout", 0.05),
            *("--scratch.channels", 4, 8),
        ]
    ),
}
