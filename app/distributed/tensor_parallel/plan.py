"""Which layers of a model are split, and how: by the plans of transformers, or by ours where it has none."""

import re
from collections.abc import Callable
from typing import Any

from torch import nn

from app.errors import UserError

COLUMNS, ROWS, HEADS_NORM, EMBEDDING, HEAD = "colwise", "rowwise", "replicated_with_grad_allreduce", "embedding", "head"
FUSED = "fused"  # columns of queries, keys and values in one transposed matrix

ASKED = "tp_size in the profile, or --run.slices: "

# Models built as BERT is: RoBERTa, ELECTRA and others name their layers alike.
_LIKE_BERT = {
    r".*encoder\.layer\.\d+\.attention\.self\.query": COLUMNS,
    r".*encoder\.layer\.\d+\.attention\.self\.key": COLUMNS,
    r".*encoder\.layer\.\d+\.attention\.self\.value": COLUMNS,
    r".*encoder\.layer\.\d+\.attention\.output\.dense": ROWS,
    r".*encoder\.layer\.\d+\.intermediate\.dense": COLUMNS,
    r".*encoder\.layer\.\d+\.output\.dense": ROWS,
}
_GPT2 = {
    r".*h\.\d+\.attn\.c_attn": FUSED,
    r".*h\.\d+\.attn\.c_proj": ROWS,
    r".*h\.\d+\.mlp\.c_fc": COLUMNS,
    r".*h\.\d+\.mlp\.c_proj": ROWS,
}
_OURS = {**dict.fromkeys(("bert", "roberta", "electra"), _LIKE_BERT), "gpt2": _GPT2}


def plan_of(model: nn.Module, parts: int) -> dict[str, str]:
    """Return how each split module of a model is split, by the module's name.

    Args:
        parts: how many slices or processes there are.

    Raises:
        UserError: there is no plan for this model, or its sizes are not divisible.
    """
    config = getattr(model, "config", None)
    kind = getattr(config, "model_type", type(model).__name__)
    patterns = _patterns(model, config)
    if not patterns:
        raise UserError(
            f"{ASKED}there is no plan to split the layers of {kind}: take a model that transformers has one for, "
            "such as a Llama, Qwen or Mistral, or a BERT or GPT-2; or neither of both"
        )
    how_by_name: dict[str, str] = {}
    for name, module in model.named_modules():
        for pattern, how in patterns.items():
            if re.fullmatch(pattern, name):
                how_by_name |= _with_adapters(name, module, how)
    unknown = set(how_by_name.values()) - {COLUMNS, FUSED, ROWS, HEADS_NORM}
    if unknown:
        raise UserError(f"{ASKED}the plan of {kind} has {', '.join(sorted(unknown))}, which is not supported yet")
    _check_heads(config, kind, parts)
    _check_widths(model, how_by_name, parts)
    return how_by_name | _vocabulary(model, parts)


def check_slices(slices: int, processes: int) -> None:
    """Refuse a number of slices that layers cannot be cut into, or that the processes cannot share.

    Args:
        slices: of --run.slices; 0: none are asked for.
        processes: of tensor parallelism, tp_size.

    Raises:
        UserError: they do not fit.
    """
    if slices & (slices - 1):
        raise UserError(f"--run.slices {slices}: it must be a power of two, such as 4, or 0 for none")
    if slices and slices % processes:
        raise UserError(
            f"--run.slices {slices} cannot be shared by tp_size {processes} processes: take a multiple of {processes} "
            "that is a power of two, or a tp_size that is one"
        )


def is_transposed(module: nn.Module) -> bool:
    """Tell whether a module is a layer of transformers with a weight that is stored as [inputs, outputs]."""
    # By its name, because transformers may not be installed.
    return any(kind.__name__ == "Conv1D" for kind in type(module).__mro__)


def _patterns(model: nn.Module, config: Any) -> dict[str, str]:
    """Return regular expressions of module names, and how such modules are split."""
    shipped = getattr(config, "base_model_tp_plan", None)
    if shipped:
        # transformers writes * for the number of a layer, and names modules of the model without its head.
        numbered = {re.escape(name).replace(r"\*", r"\d+"): how for name, how in shipped.items()}
        return {rf"(.*\.)?{name}": how for name, how in numbered.items()}
    return _OURS.get(getattr(config, "model_type", ""), {})


def _with_adapters(name: str, module: Any, how: str) -> dict[str, str]:
    """Return how a module is split; of one with adapters (LoRA), how the layer in it and its adapters are.

    The adapters' inner dimension is not split: A follows the layer where inputs are, B where outputs are.
    """
    if not hasattr(module, "base_layer"):
        return {name: how}
    if how == FUSED:
        raise UserError(
            f"{ASKED}{name} computes queries, keys and values in one, and its adapter cannot be split yet: leave it "
            "out of --lora.targets (for GPT-2: c_proj c_fc), or leave out both"
        )
    outer = "lora_B" if how == COLUMNS else "lora_A"
    return {f"{name}.base_layer": how} | {f"{name}.{outer}.{each}": how for each in getattr(module, outer, ())}


def _check_heads(config: Any, kind: str, parts: int) -> None:
    names = {"num_attention_heads": "attention heads", "num_key_value_heads": "heads of keys and values"}
    for name, words in names.items():
        count = getattr(config, name, None)
        if count and count % parts:
            raise UserError(
                f"{count} {words} of this {kind} cannot be divided by {parts} (tp_size, or --run.slices): take a "
                "number that divides them"
            )


def _check_widths(model: nn.Module, how_by_name: dict[str, str], parts: int) -> None:
    for name, how in how_by_name.items():
        module: Any = model.get_submodule(name)
        if how == HEADS_NORM:
            continue
        if not isinstance(module, nn.Linear) and not is_transposed(module):
            raise UserError(f"{ASKED}{name} is a {type(module).__name__}, which cannot be split yet; only Linear is")
        outputs, inputs = module.weight.shape[:: -1 if is_transposed(module) else 1]
        width = outputs if how == COLUMNS else inputs
        if width % parts:
            raise UserError(f"the width {width} of {name} cannot be divided by {parts} (tp_size, or --run.slices)")


def _vocabulary(model: nn.Module, parts: int) -> dict[str, str]:
    """Split the embedding of tokens and the layer that predicts them, if the vocabulary can be divided."""
    ends: list[tuple[str, Callable[[], Any]]] = [
        (EMBEDDING, getattr(model, "get_input_embeddings", lambda: None)),
        (HEAD, getattr(model, "get_output_embeddings", lambda: None)),
    ]
    names = {module: name for name, module in model.named_modules()}
    how_by_name = {}
    for how, end in ends:
        try:
            module = end()
        except NotImplementedError:
            continue
        kind = nn.Embedding if how == EMBEDDING else nn.Linear
        if isinstance(module, kind) and module.weight.shape[0] % parts == 0:
            how_by_name[names[module]] = how
    # A weight that modules share is split in all of them or in none, such as where one of them has adapters.
    shared = {name: module.get_parameter("weight") for name in how_by_name for module in [model.get_submodule(name)]}
    others = [module for name, module in model.named_modules() if name not in how_by_name]
    held = [parameter for module in others for parameter in module.parameters(recurse=False)]
    return {name: how for name, how in how_by_name.items() if not any(p is shared[name] for p in held)}
