"""A difference between two runs, in words: where it is, and what it usually comes from."""

import math
from dataclasses import dataclass, field
from typing import Any

GRADIENT = (
    "the same losses and another gradient: the weighting or the reduction. A gradient averaged on each rank instead of "
    "weighted by its micro-batch's share; a backward pass outside run.backward; gradients changed by hand before "
    "run.step; a model that batch.micros was not given"
)
# What is compared, in the order in which a step computes it. The first that differs is nearest to the cause.
MEANS = {
    "samples": "other samples make the step: load_data gives other rows, lengths or weights here. Look in it for the "
    "rank, the number of processes, an unsorted listing of files, or random numbers without a seed",
    "inputs": "the same samples come in as other numbers: augmentation, the data set or collate draws from a generator "
    "of its own, or reads the rank. Take the generator that run.batches passes to `augment`",
    "loss": "the forward pass differs on the same inputs: random numbers in the loop or the model that do not come "
    "from the global generators of torch, numpy and random (those are seeded for each micro-batch); a loss divided by "
    "a count that only this rank has; or state that passes from one micro-batch to the next",
    "loss weights": "every micro-batch has the same loss, and their sum over the step differs: the recipe weighs them "
    "otherwise here. Look at what run.batches gets as `weights`, and at what the loop changes in `micro`",
    "gradient norm": GRADIENT,
    "gradients": GRADIENT,
    "learning rate": "the recipe sets the learning rate by something that knows processes or micro-batches, such as "
    "a scheduler that is stepped once for each",
    "weights": "the same gradient norm and learning rate, and other weights: an update that depends on the layout, "
    "such as an optimizer that takes a tensor as a whole (Adafactor, Muon) and gets shards, or a change by hand",
    "buffers": "a module keeps statistics of the samples that its process happens to hold (a codebook, a queue), or a "
    "BatchNorm has a forward pass outside batch.micros: the steps agree, and scores will not",
}
TENSORS = ("gradients", "weights", "buffers")  # a difference in these names tensors as its places
ROUNDED = ("loss", "loss weights", "gradient norm", "gradients", "weights")  # these can differ by rounding
START = (
    "the runs begin with other weights: build_model draws from a generator of its own or reads the rank, or something "
    "draws from the global ones on this layout only, before the model is built"
)


@dataclass
class Difference:
    """One quantity in which a step differs from the same step of the reference.

    Args:
        places: the micro-batches or tensors that differ; the tensor that differs most is the first.
        deviation: relative; None if there is nothing to measure.
    """

    what: str
    places: list[str] = field(default_factory=list)
    reference: Any = None
    here: Any = None
    deviation: float | None = None
    step: int = 0

    @property
    def means(self) -> str:
        """Say what usually causes such a difference, if it is the first one."""
        return MEANS[self.what] if self.step or self.what == "buffers" else START

    def __str__(self) -> str:
        text = f"step {self.step}: {self.what}" if self.step else f"before the first step: {self.what}"
        if self.reference is not None:
            text += f" {self.here}, in the reference {self.reference}"
        if self.deviation is not None and math.isfinite(self.deviation):
            text += f" (relative {self.deviation:.1e})"
        more = f" and {len(self.places) - 1} more" if len(self.places) > 1 else ""
        return f"{text}, in {self.places[0]}{more}" if self.places else text
