"""What models of transformers are for, by the end of their class's name."""

from collections.abc import Iterable
from typing import NamedTuple


class Kind(NamedTuple):
    """A task: the recipe that trains and scores models for it, and its name on the Hub, which is a pipeline's."""

    recipe: str
    task: str


KINDS = {
    "ForSequenceClassification": Kind("cls", "text-classification"),
    "ForTokenClassification": Kind("tag", "token-classification"),
    "ForCausalLM": Kind("lm", "text-generation"),
    "LMHeadModel": Kind("lm", "text-generation"),
    "ForMaskedLM": Kind("lm", "fill-mask"),
    "ForConditionalGeneration": Kind("s2s", "text-generation"),
    "MTModel": Kind("s2s", "translation"),
    "ForImageClassification": Kind("img", "image-classification"),
    "ForObjectDetection": Kind("det", "object-detection"),
    "DenseDetector": Kind("det", "object-detection"),
    "ForSemanticSegmentation": Kind("seg", "image-segmentation"),
}


def kind_of(classes: Iterable[str]) -> Kind | None:
    """Return what the first known class of a model is for; None if none is known."""
    return next((kind for name in classes for end, kind in KINDS.items() if name.endswith(end)), None)
