"""The finished model, in Hugging Face form."""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from accelerate.utils import DistributedType, clean_state_dict_for_safetensors
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import FSDPModule

from app import storage
from app.distributed import collectives, naming
from app.distributed.accelerator import Accelerator
from app.errors import UserError
from app.rundir import room

if TYPE_CHECKING:
    from transformers import PreTrainedModel


CARD = "network.json"
WEIGHTS = "model.safetensors"
LOADS = f'from safetensors.torch import load_model; load_model(network, "{{model}}/{WEIGHTS}")'
"""How a module of the user's own gets the weights of a model's folder, in Python."""


class Card:
    """network.json: what a model's own files do not say of it, such as how to build a network of MONAI's."""

    def __init__(self, **fields: Any):
        """Keep the fields of network.json."""
        self.fields = fields

    def save_pretrained(self, folder: Path) -> None:
        """Write network.json into a folder."""
        storage.at(folder).fill(CARD, json.dumps(self.fields, indent=2) + "\n")


def use_of(model: nn.Module, stated_use: str) -> str:
    """Return how a finished model is used: as the recipe says, or how a network of the recipe's own is loaded."""
    (plain,) = naming.plain([model])
    return stated_use or ("" if hasattr(plain, "save_pretrained") else f"{LOADS}  # network: built as in the recipe")


def save_model(accelerator: Accelerator, model: nn.Module, folder: Path, *parts: Any, shard: str = "5GB") -> None:
    """Write a whole model in Hugging Face form, whatever wraps it. Every rank takes part; the main process writes.

    Equal weights give equal files on every layout.

    Args:
        parts: tokenizer, processor and other objects with `save_pretrained`.
        shard: the largest size of a file of weights, for models that can be cut into several.

    Raises:
        UserError: on every rank; the folder cannot be written, as on a full disk. Nothing of it is left.
    """
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        weights = accelerator.get_state_dict(model)
    else:
        weights = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    collectives.from_main(lambda: _publish(model, weights, parts, folder, shard), long=True)


def _publish(model: nn.Module, weights: dict[str, Any], parts: tuple, folder: Path, shard: str) -> None:
    """Write a folder that is there whole or not at all, in place of an earlier one."""
    _share_as(model, weights)
    (plain,) = naming.plain([model])
    try:
        files = storage.at(folder.parent)
        with files.drafted(folder.name) as draft:
            _write(plain, weights, parts, draft, shard)
            files.open_to_readers(draft.name)
            files.retract(folder.name, seal="")
    except Exception as error:
        if not (why := room.why(error)):
            raise
        needed = sum(value.nbytes for value in weights.values() if isinstance(value, torch.Tensor))
        raise UserError(f"{folder}: the model is not written: {why}{room.lacking(needed, folder)}") from None


def _write(plain: nn.Module, weights: dict[str, Any], parts: tuple, draft: Path, shard: str) -> None:
    """Write the weights and what belongs to them into a folder."""
    if hasattr(plain, "save_pretrained"):
        from transformers.utils import logging

        logging.disable_progress_bar()
        with _own_class(plain):
            cast("PreTrainedModel", plain).save_pretrained(draft, state_dict=weights, max_shard_size=shard)
    else:
        from safetensors.torch import save_file

        storage.at(draft).make()
        tensors = {name: value for name, value in weights.items() if isinstance(value, torch.Tensor)}
        if tensors.keys() < weights.keys():
            rest = ", ".join(sorted(weights.keys() - tensors.keys()))
            print(f"warning: model.safetensors holds tensors alone, so {rest} is left out", file=sys.stderr)
        save_file(clean_state_dict_for_safetensors(tensors), draft / WEIGHTS)
    for part in parts:
        _forget_last_call(part)
        part.save_pretrained(draft)


def _forget_last_call(part: Any) -> None:
    """Have a tokenizer neither cut nor pad on its own: it keeps what its last call asked for, and would save it.

    What that was depends on whether this process tokenized the data or found them in the cache.
    """
    if (backend := getattr(part, "backend_tokenizer", None)) is not None:
        backend.no_truncation()
        backend.no_padding()


def _share_as(model: nn.Module, weights: dict[str, Any]) -> None:
    """Give names that share a parameter one tensor, and every other name a tensor and a storage of its own.

    The libraries that write files treat tensors with one storage as shared. Gathering shards, or copying to the host,
    makes two tensors of a shared parameter, whose storages may be padded.
    """
    further, seen = naming.shared_names(model), set()
    for name, value in weights.items():
        if isinstance(value, torch.Tensor) and name not in further:
            storage = value.untyped_storage()
            alone = storage.nbytes() == value.nbytes and storage.data_ptr() not in seen
            weights[name] = value if alone else value.clone()
            seen.add(storage.data_ptr())
    weights |= {name: weights[first] for name, first in further.items() if name in weights}


@contextmanager
def _own_class(model: nn.Module) -> Iterator[None]:
    """Give a model its own class back for a while: FSDP2 makes another, whose source would be found in torch."""
    sharded = type(model)
    unsharded = next(kind for kind in sharded.__mro__ if not issubclass(kind, FSDPModule))
    model.__class__ = cast(type[nn.Module], unsharded)
    try:
        yield
    finally:
        model.__class__ = sharded
