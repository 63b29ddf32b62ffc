"""The layer that predicts tokens: it computes logits, or, told which tokens are right, their losses without all logits.

A loss needs the logit of the right token and the logarithm of the sum of all exponentials, and both can be combined
from parts of the vocabulary. So the logits of one part are in memory at a time. Nothing of them is kept: the backward
pass computes them once more (Wijmans et al., Cut Your Losses in Large-Vocabulary Language Models, 2024). Where layers
are split, each process has its own part of the vocabulary, and what is combined is a few numbers for each token.
"""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from app.distributed.naming import local_shard
from app.distributed.tensor_parallel.split import Split, cut

LAST = "last_layer"  # the attribute of the layer that holds it
LARGE = 2**28  # logits of a micro-batch from which "auto" computes them in chunks; a gigabyte in fp32
CHUNK = 2**25  # logits of a chunk, at most
_NARROWEST = 256  # tokens of the vocabulary in a chunk, at least, if there are as many
_FEWEST = 8  # chunks of the vocabulary, where they are asked for


class LastLayer:
    """The forward pass of the layer that predicts tokens, in place of its own."""

    def __init__(self, layer: nn.Linear, kind: Literal["auto", "chunked"]):
        """Take over a layer.

        Args:
            kind: "chunked"; or "auto": only where logits are large, or layers are split.
        """
        self.layer, self._logits = layer, layer.forward
        self.kind: Literal["auto", "chunked"] = kind
        self.likeliest: Tensor | None = None
        """The likeliest tokens of the last forward pass, if that computed losses and no gradients."""
        self._targets: Tensor | None = None
        self._smoothing = 0.0
        setattr(layer, LAST, self)
        layer.forward = self  # type: ignore[method-assign,assignment]  # only of this one

    @contextmanager
    def told(self, targets: Tensor, smoothing: float) -> Iterator[None]:
        """Inside this block, return losses in place of logits, if that saves memory."""
        self._targets, self._smoothing = targets, smoothing
        try:
            yield
        finally:
            self._targets = None

    def __call__(self, x: Tensor) -> Tensor:
        """Compute logits, [.., vocabulary], or the losses of all targets, fp32 [..]."""
        losses = self.losses(x, Split(None))
        return self._logits(x) if losses is None else losses

    def losses(self, x: Tensor, split: Split) -> Tensor | None:
        """Compute the losses of all targets, [..]; None if logits are asked for.

        Args:
            x: what goes into the layer, [.., width].
        """
        self.likeliest, targets = None, self._targets
        if targets is None:
            return None
        x = x[..., x.shape[-2] - targets.shape[-1] :, :]  # some models compute all tokens, if asked for the last ones
        count, size = targets.numel(), self.layer.out_features  # the whole, where the weight here is a part of it
        if self.kind == "auto" and split.count == 1 and count * size < LARGE:
            return None
        fewest = 1 if self.kind == "auto" else _FEWEST
        width = _width(count, size, split.count, fewest)
        how = _How(split, size, width, self._smoothing, not torch.is_grad_enabled(), targets.flatten())
        (rows,) = cut(x.flatten(0, -2), 1, 0)
        weight, bias = (None if p is None else local_shard(p) for p in (self.layer.weight, self.layer.bias))
        losses, likeliest = _Losses.apply(how, weight, bias, *split.copies(rows))
        self.likeliest = likeliest.view(targets.shape) if how.scored else None
        return losses.view(targets.shape)


class _How(NamedTuple):
    """How losses are computed.

    Args:
        vocabulary: the number of tokens in it.
        width: how many of them are in a chunk, at most.
        scored: whether the likeliest tokens are found too.
        targets: int64 [tokens]; those below 0 have no loss.
    """

    split: Split
    vocabulary: int
    width: int
    smoothing: float
    scored: bool
    targets: Tensor

    def chunks(self) -> Iterator[tuple[int, slice, int]]:
        """Yield each chunk of this process: the number of its slice, its rows of the weight, and its first token."""
        size, here = self.vocabulary // self.split.count, self.split.here
        for index in range(here):
            for low in range(0, size, self.width):
                rows = slice(index * size + low, index * size + min(low + self.width, size))
                yield index, rows, self.split.rank * here * size + rows.start

    def place(self, first: int, width: int) -> tuple[Tensor, Tensor]:
        """Return where in a chunk each target is, [tokens, 1], and whether it is in it, [tokens]."""
        place = self.targets - first
        return place.clamp(0, width - 1)[:, None], (place >= 0) & (place < width)


def _width(count: int, size: int, slices: int, fewest: int) -> int:
    """Return how many tokens of the vocabulary are in a chunk; it is the same on every layout."""
    of_slice = size // slices
    return max(1, min(max(_NARROWEST, CHUNK // max(1, count)), -(-of_slice // max(1, fewest // slices))))


class _Parts(NamedTuple):
    """What is known of each token's logits in a slice; all fp32 [tokens], but the last."""

    largest: Tensor
    exponentials: Tensor
    """The sum of the exponentials of logits, relative to the largest one."""
    right: Tensor
    """The logit of the right token, or 0 if it is in another slice."""
    sums: Tensor
    likeliest: Tensor


def _of_chunk(how: _How, logits: Tensor, first: int) -> _Parts:
    """Describe the logits of a chunk, fp32 [tokens, width], and overwrite them."""
    place, inside = how.place(first, logits.shape[1])
    if how.scored:
        largest, likeliest = logits.max(1)
    else:
        largest, likeliest = logits.amax(1), how.targets  # a fifth of the time
    right = logits.gather(1, place)[:, 0].where(inside, 0)
    sums = logits.sum(1) if how.smoothing else right
    return _Parts(largest, logits.sub_(largest[:, None]).exp_().sum(1), right, sums, likeliest + first)


def _joined(a: _Parts, b: _Parts) -> _Parts:
    """Describe what two descriptions say together."""
    largest = torch.maximum(a.largest, b.largest)
    exponentials = a.exponentials * (a.largest - largest).exp() + b.exponentials * (b.largest - largest).exp()
    likeliest = torch.where(b.largest > a.largest, b.likeliest, a.likeliest)
    return _Parts(largest, exponentials, a.right + b.right, a.sums + b.sums, likeliest)


class _Losses(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, how: _How, weight: Tensor, bias: Tensor | None, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        slices: dict[int, _Parts] = {}
        for index, rows, first in how.chunks():
            # A copy of the weights lies in memory alike on every layout.
            logits = functional.linear(inputs[index], weight[rows].clone(), None if bias is None else bias[rows])
            ctx.dtype = logits.dtype  # autocast may have chosen it
            part = _of_chunk(how, logits.float(), first)
            slices[index] = _joined(slices[index], part) if index in slices else part
            del logits
        parts, split = [*slices.values()], how.split
        largest = split.largest(torch.stack([part.largest for part in parts]).amax(0))
        totals = split.total([torch.stack([_relative(part, largest), part.right, part.sums]) for part in parts])
        normaliser = largest + totals[0].log()
        smoothing = how.smoothing
        losses = normaliser - (1 - smoothing) * totals[1]
        if smoothing:
            losses -= smoothing / how.vocabulary * totals[2]
        ctx.how = how
        ctx.save_for_backward(weight, bias, normaliser, *inputs)
        likeliest = _likeliest(how, parts)
        ctx.mark_non_differentiable(likeliest)
        return losses.masked_fill(how.targets < 0, 0), likeliest

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        how, (weight, bias, normaliser, *inputs) = ctx.how, ctx.saved_tensors
        factors = gradient.float().masked_fill(how.targets < 0, 0)[:, None]
        _, learn_weight, learn_bias, *_ = ctx.needs_input_grad
        of_weight = torch.empty_like(weight) if learn_weight else None
        of_bias = torch.empty_like(bias) if learn_bias else None
        computed = [x.to(ctx.dtype) for x in inputs]
        of_inputs = [torch.zeros_like(x, dtype=torch.float32) for x in inputs]
        for index, rows, first in how.chunks():
            x, part = computed[index], weight[rows].to(ctx.dtype, copy=True)
            logits = functional.linear(x, part, None if bias is None else bias[rows].to(ctx.dtype))
            wrong = _wrong(how, logits.float(), normaliser, first).mul_(factors)
            del logits
            if of_bias is not None:
                of_bias[rows] = wrong.sum(0)
            wrong = wrong.to(ctx.dtype)
            of_inputs[index] += wrong @ part
            if of_weight is not None:
                of_weight[rows] = wrong.T @ x
        return None, of_weight, of_bias, *(g.to(x.dtype) for g, x in zip(of_inputs, inputs, strict=True))


def _relative(part: _Parts, largest: Tensor) -> Tensor:
    return part.exponentials * (part.largest - largest).exp()


def _wrong(how: _How, logits: Tensor, normaliser: Tensor, first: int) -> Tensor:
    """Return how far probabilities are from the targets in a chunk, [tokens, width], in place of the logits."""
    place, inside = how.place(first, logits.shape[1])
    wrong = logits.sub_(normaliser[:, None]).exp_()
    if how.smoothing:
        wrong -= how.smoothing / how.vocabulary
    target = (1 - how.smoothing) * inside[:, None]
    return wrong.scatter_(1, place, wrong.gather(1, place) - target)


def _likeliest(how: _How, parts: list[_Parts]) -> Tensor:
    """Return the likeliest token of all slices; the first of several."""
    best = functools.reduce(_joined, parts)
    if not how.scored or how.split.processes == 1:
        return best.likeliest
    # float64 holds all tokens.
    gathered = how.split.gathered(torch.stack([best.largest.double(), best.likeliest.double()]))
    every = [best._replace(largest=largest, likeliest=token) for largest, token in gathered]
    return functools.reduce(_joined, every).likeliest.long()
