"""Layers that are split: their weights as DTensors, and forward passes that compute slices.

The weights keep their names and whole shapes, so checkpoints do not know how they were split. A layer's arithmetic is
that of Megatron-LM (Shoeybi et al., 2019): columns, then rows, and one sum.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.nn import functional

from app.distributed import made_once
from app.distributed.naming import local_shard
from app.distributed.tensor_parallel.between_layers import BetweenLayers
from app.distributed.tensor_parallel.fused import in_thirds, own_columns
from app.distributed.tensor_parallel.last_layer import LAST, LastLayer
from app.distributed.tensor_parallel.plan import COLUMNS, EMBEDDING, FUSED, HEAD, HEADS_NORM, ROWS, is_transposed
from app.distributed.tensor_parallel.split import Split, cut, joined

_WEIGHT = {COLUMNS: 0, FUSED: 1, HEAD: 0, EMBEDDING: 0, ROWS: 1}  # the dimension that is cut, of [outputs, inputs]
_BIAS = {COLUMNS: 0, HEAD: 0}


def split_model(model: nn.Module, plan: dict[str, str], split: Split) -> dict[nn.Parameter, nn.Parameter]:
    """Split the layers of a model in place; return the new parameter of each old one.

    Args:
        plan: how each split module is split, by its name.
    """
    replaced = _split_weights(model, plan, split.mesh) if split.mesh else {}
    forwards: dict[str, Callable[..., Tensor]] = {
        COLUMNS: _columns,
        FUSED: _fused,
        ROWS: _rows,
        EMBEDDING: _embedding,
        HEAD: _head,
        HEADS_NORM: _norm_of_heads,
    }
    for name, module in model.named_modules():
        if how := plan.get(name):
            module.forward = partial(forwards[how], module, split, module.forward)
        elif module._parameters and split.mesh:
            module.forward = partial(_whole, module, module.forward)
    layers = {name for name, how in plan.items() if how in (COLUMNS, FUSED)}
    # A layer with adapters is one of the module's layers.
    layers = {name.removesuffix(".base_layer") for name in layers if ".lora_" not in name}
    for parent in {name.rpartition(".")[0] for name in layers}:
        module = model.get_submodule(parent)
        if any(plan.get(f"{parent}.{name}") == FUSED for name, _ in module.named_children()):
            module.forward = partial(_narrower, module, split, module.forward)
        module.forward = partial(_within, split, module.forward)
    for module in model.modules():
        for dropout in getattr(module, "lora_dropout", {}).values():
            is_cut = _is(cast(Any, module).base_layer, _rows)
            dropout.forward = partial(_drop_inputs, split, is_cut, dropout.forward)
    return replaced


def row_weights(model: nn.Module) -> set[Tensor]:
    """Return the weights of a split model whose rows, as they are stored, are cut."""
    across = {module: _columns if is_transposed(module) else _rows for module in model.modules()}
    return {cast(nn.Linear, module).weight for module, how in across.items() if _is(module, how)}


def cuts(model: nn.Module, plan: dict[str, str]) -> dict[nn.Parameter, int]:
    """Return the dimension along which each parameter of split layers is cut; those left out are held whole."""
    dimension_by_parameter: dict[nn.Parameter, int] = {}
    for name, how in plan.items():
        module = model.get_submodule(name)
        for kind, dimensions in (("weight", _WEIGHT), ("bias", _BIAS)):
            parameter = module._parameters.get(kind)
            if parameter is not None and how in dimensions:
                turned = kind == "weight" and is_transposed(module)
                dimension_by_parameter[parameter] = 1 - dimensions[how] if turned else dimensions[how]
    return dimension_by_parameter


def is_split(module: nn.Module) -> bool:
    """Tell whether a layer is computed in slices."""
    return any(_is(module, forward) for forward in (_columns, _fused, _rows, _embedding, _head, _norm_of_heads))


def adds_bias_itself(module: nn.Module) -> bool:
    """Tell whether a layer takes its bias as it is, without a cast for its product."""
    return _is(module, _rows) or hasattr(module, LAST)


def _is(module: nn.Module, forward: Callable[..., Tensor]) -> bool:
    """Tell whether a module computes by one of the functions below; FSDP's casts may be wrapped around it."""
    unwrapped = inspect.unwrap(module.forward)
    return isinstance(unwrapped, partial) and unwrapped.func is forward


def _split_weights(model: nn.Module, plan: dict[str, str], mesh: DeviceMesh) -> dict[nn.Parameter, nn.Parameter]:
    """Replace all parameters by DTensors: those of split layers hold this process's part."""
    placements: dict[nn.Parameter, Placement] = {p: Shard(dim) for p, dim in cuts(model, plan).items()}
    replaced: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            if parameter not in replaced:
                where = [placements.get(parameter, Replicate())]
                filled = made_once.fill([parameter])
                # Every process has built the same weights, so nothing is sent.
                part = distribute_tensor(parameter.data, mesh, where, src_data_rank=None).to_local().clone()
                sharded = DTensor.from_local(part, mesh, where, run_check=False)
                replaced[parameter] = nn.Parameter(sharded, requires_grad=parameter.requires_grad)
                if filled:
                    parameter.data = parameter.data.new_empty(0)
            module._parameters[name] = replaced[parameter]
    return replaced


def _parts(parameter: Tensor | None, split: Split, dim: int = 0) -> list[Any]:
    """Return each of this process's slices of a parameter."""
    return [None] * split.here if parameter is None else cut(local_shard(parameter), split.here, dim)


def _columns(module: nn.Linear, split: Split, _: Any, x: Tensor) -> Tensor:
    """Compute the outputs of this process's slices, [.., its part of the outputs]."""
    split.inside = True
    return _outputs(module, split, x)


def _outputs(module: nn.Linear, split: Split, x: Tensor) -> Tensor:
    weights, biases = _weight_parts(module, split, 0), _parts(module.bias, split)
    return joined([functional.linear(*each) for each in zip(split.copies(x), weights, biases, strict=True)], -1)


def _weight_parts(module: nn.Linear, split: Split, dim: int) -> list[Tensor]:
    """Return each of this process's slices of a layer's weight, [outputs, inputs], cut along `dim`."""
    if is_transposed(module):
        return [part.t() for part in _parts(module.weight, split, 1 - dim)]
    return _parts(module.weight, split, dim)


def _fused(module: nn.Module, split: Split, _: Any, x: Tensor) -> Tensor:
    """Compute this process's queries, keys and values, [.., 3 x its part of the width]; of transposed weights."""
    split.inside = True
    weights, bias = own_columns(cast(Tensor, module.weight), split, exchanged=True), cast(Tensor | None, module.bias)
    biases = [None] * split.here if bias is None else own_columns(bias, split, exchanged=False)
    slices = zip(split.copies(x), weights, biases, strict=True)
    return joined([in_thirds(functional.linear(x, weight.t(), bias)) for x, weight, bias in slices], -1).flatten(-2)


def _rows(module: nn.Linear, split: Split, _: Any, x: Tensor) -> Tensor:
    """Compute a product of each of this process's slices of the inputs, and add all slices'."""
    split.inside = False
    split.forget()
    slices = zip(cut(x, split.here, -1), _weight_parts(module, split, 1), strict=True)
    product = split.sum([functional.linear(*each) for each in slices])
    return product if module.bias is None else product + local_shard(module.bias)


def _embedding(module: nn.Embedding, split: Split, whole: Callable[..., Tensor], ids: Tensor) -> Tensor:
    """Look up the tokens that this process has the vectors of; the others' are zero, and added."""
    if split.processes == 1:
        return whole(ids)
    weight = local_shard(module.weight)
    first = split.rank * len(weight)
    local_ids = ids - first
    here = (local_ids >= 0) & (local_ids < len(weight))
    padding = None if module.padding_idx is None else module.padding_idx - first
    if padding is not None and not 0 <= padding < len(weight):
        padding = None
    vectors = functional.embedding(local_ids.where(here, 0), weight, padding)
    return split.sum([vectors.masked_fill(~here[..., None], 0)])


def _head(module: nn.Linear, split: Split, _: Any, x: Tensor) -> Tensor:
    """Compute losses, [..]; or this process's part of the logits, and collect those of all, [.., vocabulary]."""
    split.forget()
    last: LastLayer | None = getattr(module, LAST, None)
    output = last.losses(x, split) if last else None
    if output is None:
        output = split.join(_outputs(module, split, x))
    split.forget()
    return output


def _norm_of_heads(module: nn.Module, split: Split, whole: Callable[..., Tensor], x: Tensor) -> Tensor:
    """Normalise heads, [.., heads, width], with weights whose gradients are summed over all slices."""
    copies_by_name = {name: split.copies_of_weight(weight) for name, weight in _weights(module).items()}
    normalised = []
    for index, part in enumerate(cut(x, split.here, -2)):
        with _instead(module, {name: copies[index] for name, copies in copies_by_name.items()}):
            normalised.append(whole(part))
    return joined(normalised, -2)


def _whole(module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a layer that is not split, with its weights as plain tensors."""
    with _instead(module, _weights(module)):
        return forward(*args, **kwargs)


def _weights(module: nn.Module) -> dict[str, Tensor]:
    """Return a module's own parameters as plain tensors, by name."""
    return {name: local_shard(parameter) for name, parameter in module._parameters.items() if parameter is not None}


@contextmanager
def _instead(module: nn.Module, tensors: dict[str, Tensor]) -> Iterator[None]:
    """Give a module other tensors in place of its own parameters for a while."""
    before = dict(module._parameters)
    module._parameters.update(tensors)  # type: ignore[arg-type]
    try:
        yield
    finally:
        module._parameters.update(before)


def _drop_inputs(split: Split, cut: bool, forward: Callable[..., Any], x: Tensor) -> Tensor:
    """Drop inputs of an adapter, after its layer; `cut` tells whether they are split."""
    before, split.inside = split.inside, cut
    try:
        with BetweenLayers(split):
            return forward(x)
    finally:
        split.inside = before


def _within(split: Split, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a module that has split layers, with dropout that draws for all slices alike."""
    with BetweenLayers(split):
        return forward(*args, **kwargs)


def _narrower(module: Any, split: Split, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a module that takes queries, keys and values apart, with the width that is here of each."""
    whole = module.split_size
    module.split_size = whole // split.processes
    try:
        return forward(*args, **kwargs)
    finally:
        module.split_size = whole
