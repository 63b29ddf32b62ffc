"""Write models with shared weights, as the end of a run does."""

import os
from pathlib import Path

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from app.checkpoints.export import save_model
from app.distributed.accelerator import Accelerator
from app.errors import UserError

LLAMA = {"vocab_size": 65, "hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2}
LLAMA |= {"num_key_value_heads": 1, "intermediate_size": 24, "tie_word_embeddings": True}


class Layer(nn.Linear):
    """A separate class, because FSDP shards layers by class."""


class Shared(nn.Module):
    """A model with a shared weight, a shared buffer, and rows that processes cannot share evenly."""

    def __init__(self, kind: type[nn.Module] = Layer):
        super().__init__()
        self.into, self.out = nn.Embedding(33, 7), nn.Linear(7, 33)
        self.out.weight = self.into.weight
        self.layers = nn.ModuleList(kind(7, 7) for _ in range(3))
        self.register_buffer("scale", torch.ones(5))
        self.layers[1].register_buffer("scale", self.scale)

    def forward(self, ids):
        x = self.into(ids)
        for layer in self.layers:
            x = layer(x)
        return self.out(x) * self.scale.mean()


def main(folder: Path) -> None:
    """Prepare each model as recipes do, and write it; one of them into several files. The group may read, not others.

    Under FSDP2, FOLDER-refused has the reason why a model was refused.
    """
    before = os.umask(0o027)
    try:
        accelerator = Accelerator()
        for name, make, shard in (
            ("whole", lambda: LlamaForCausalLM(LlamaConfig(**LLAMA)), "5GB"),
            ("cut", lambda: LlamaForCausalLM(LlamaConfig(**LLAMA)), "6KB"),
            ("plain", Shared, "5GB"),
        ):
            torch.manual_seed(3)
            model = make()
            model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
            save_model(accelerator, model, folder / name, shard=shard)
        if accelerator.is_fsdp2:
            refused = Shared(nn.Linear)
            try:
                accelerator.prepare(refused, torch.optim.SGD(refused.parameters(), 0.1))
            except UserError as error:
                folder.with_name(f"{folder.name}-refused").write_text(str(error))
    finally:
        os.umask(before)
