"""The finished model, in the form that others load."""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from accelerate.utils import DistributedType, clean_state_dict_for_safetensors, extract_model_from_parallel
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import FSDPModule

from app.accelerator import Accelerator


class Card:
    """What a network's class, which knows no `from_pretrained`, must be told to be built again: network.json."""

    def __init__(self, **fields: Any):
        """Take the fields of network.json."""
        self.fields = fields

    def save_pretrained(self, folder: Path) -> None:
        """Write network.json into a folder."""
        (folder / "network.json").write_text(json.dumps(self.fields, indent=2) + "\n")


def save_model(accelerator: Accelerator, model: nn.Module, folder: Path, *parts: Any, shard: str = "5GB") -> None:
    """Write a model in Hugging Face form, whole, whatever wraps it. Every rank takes part; the main process writes.

    Args:
        parts: tokenizer, processor and the like, anything with `save_pretrained`.
        shard: largest file of weights, of a model that can be cut into several.
    """
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        weights = accelerator.get_state_dict(model)
    else:
        weights = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if not accelerator.is_main_process:
        return
    plain = extract_model_from_parallel(model, keep_fp32_wrapper=True, keep_torch_compile=False)
    draft = folder.with_name(folder.name + ".tmp")
    shutil.rmtree(draft, ignore_errors=True)
    if hasattr(plain, "save_pretrained"):
        from transformers.utils import logging

        logging.disable_progress_bar()
        with _own_class(plain):
            plain.save_pretrained(draft, state_dict=weights, max_shard_size=shard)
    else:
        from safetensors.torch import save_file

        draft.mkdir(parents=True)
        save_file(clean_state_dict_for_safetensors(weights), draft / "model.safetensors")
    for part in parts:
        part.save_pretrained(draft)
    shutil.rmtree(folder, ignore_errors=True)
    draft.rename(folder)


@contextmanager
def _own_class(model: nn.Module) -> Iterator[None]:
    """Have a model be of its own class, not of the one that FSDP2 makes of it, whose source is torch's."""
    sharded = type(model)
    model.__class__ = next(kind for kind in sharded.__mro__ if not issubclass(kind, FSDPModule))
    try:
        yield
    finally:
        model.__class__ = sharded
