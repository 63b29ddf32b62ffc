"""Copies of inputs to the device: on a GPU on a stream of their own, while the step before is computed."""

import copy
import functools
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

import torch

from app.sampling.batch_plan import Step


@functools.cache
def copying_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the one stream for all copies: torch's allocator keeps freed memory for each stream apart."""
    return torch.cuda.Stream(device)


class Copy:
    """Copies a micro-batch to a device, from a thread beside the one that trains."""

    def __init__(self, device: torch.device):
        """Choose the device; on a GPU, copies are made from pinned memory."""
        self.device = device
        self.stream = copying_stream(device) if device.type == "cuda" else None

    def __call__(self, inputs: Any) -> Any:
        """Begin to copy; for a GPU, return also the event that says when the copies are there."""
        if self.stream is None:
            return map_tensors(lambda tensor: tensor.to(self.device), inputs)
        with torch.cuda.stream(self.stream):  # of this thread alone
            moved = map_tensors(lambda tensor: tensor.pin_memory().to(self.device, non_blocking=True), inputs)
            return moved, self.stream.record_event()

    def arrive(self, copied: Any) -> Any:
        """Let the stream of the thread that trains wait for the copies; called in that thread."""
        if self.stream is None:
            return copied
        inputs, there = copied
        ours = torch.cuda.current_stream(self.device)
        ours.wait_event(there)
        map_tensors(lambda tensor: tensor.record_stream(ours), inputs)
        return inputs


def on_cuda(steps: Iterator[Step], device: torch.device) -> Iterator[Step]:
    """Copy each step to the GPU on a separate stream, while the step before it is computed."""
    copying = copying_stream(device)

    def copy(step: Step | None) -> Step | None:
        if step is None:
            return None
        with torch.cuda.stream(copying):
            return to_device(step, device)

    following = copy(next(steps, None))
    while following is not None:
        torch.cuda.current_stream(device).wait_stream(copying)
        current, following = following, copy(next(steps, None))
        for turn in current.turns:
            map_tensors(lambda t: t.record_stream(torch.cuda.current_stream(device)), turn.inputs)
        yield current


def to_device(step: Step, device: torch.device) -> Step:
    """Copy the inputs of a step to a device; on a GPU, begin to."""
    if device.type == "cpu":
        return step
    turns = [t._replace(inputs=map_tensors(lambda x: x.to(device, non_blocking=True), t.inputs)) for t in step.turns]
    return step._replace(turns=turns)


def map_tensors(change: Callable[[torch.Tensor], Any], value: Any) -> Any:
    """Apply `change` to the tensors in nested dicts, lists and tuples; other values stay."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, MutableMapping):
        changed = copy.copy(value)  # its constructor may need more than the items
        changed.update({key: map_tensors(change, item) for key, item in value.items()})
        return changed
    if isinstance(value, Mapping):
        kind: Any = type(value)  # whose constructor takes items, as that of dict does
        return kind({key: map_tensors(change, item) for key, item in value.items()})
    if isinstance(value, list | tuple):
        items = [map_tensors(change, item) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value
