"""Compute gradients in bf16 on any layout, and count the bytes alive after a forward pass: casting.py FOLDER."""

import json
import sys
import weakref
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from app.distributed.accelerator import Accelerator

WIDTH, LAYERS = 96, 12


class Layer(nn.Module):
    """What stays in fp32, what autocast casts, a layer that is used twice, and one that may be frozen."""

    def __init__(self, index: int):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.twice, self.conv = nn.Linear(WIDTH, WIDTH), nn.Conv1d(WIDTH, WIDTH, 1)
        self.up.requires_grad_(index != 3)
        self.again = index == 5  # computed again in the backward pass (activation checkpointing)

    def inner(self, x):
        y = self.down(nn.functional.gelu(self.up(self.norm(x))))
        y = self.twice(torch.tanh(self.twice(y)))
        return x + self.conv(y.transpose(1, 2)).transpose(1, 2)

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=False) if self.again else self.inner(x)


class Model(nn.Module):
    """Twelve layers between an embedding and a head that share a weight."""

    def __init__(self):
        super().__init__()
        self.into, self.out = nn.Embedding(35, WIDTH), nn.Linear(WIDTH, 35)
        nn.init.normal_(self.into.weight, std=0.1)
        self.out.weight = self.into.weight
        self.layers = nn.ModuleList(Layer(index) for index in range(LAYERS))

    def forward(self, ids):
        x = self.into(ids)
        for layer in self.layers:
            x = layer(x)
        return self.out(x)


class Storages(TorchDispatchMode):
    """Record the storages that operations make, by weak references."""

    def __init__(self):
        super().__init__()
        self.made = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Run an operation."""
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, torch.Tensor) and not isinstance(tensor, DTensor):
                storage = tensor.untyped_storage()
                self.made[storage._cdata] = weakref.ref(storage)
        return result

    def alive(self) -> int:
        """Return the bytes of the storages that are still alive."""
        return sum(storage.nbytes() for ref in self.made.values() if (storage := ref()) is not None)


def main(folder: Path) -> None:
    """Train two steps; count in the second one."""
    accelerator = Accelerator()
    torch.manual_seed(3)
    model = Model()
    whole = sum(p.nbytes for p in model.parameters())
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    ids = torch.randint(35, (2, 3), generator=torch.Generator().manual_seed(accelerator.process_index))
    for step in range(2):
        with Storages() as storages:
            loss = nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flip(0).flatten())
        held = storages.alive()
        accelerator.backward(loss)
        found = {n.removeprefix("module."): p.grad for n, p in model.named_parameters() if p.grad is not None}
        found = {n: g.full_tensor() if isinstance(g, DTensor) else g.clone() for n, g in found.items()}
        if accelerator.is_main_process:
            save_file(found, folder / f"gradients-{step}.safetensors")
        optimizer.step()
        optimizer.zero_grad()
    seen = []
    getattr(model, "module", model).layers[-1].register_forward_hook(lambda *_: seen.append(storages.alive()))
    with torch.no_grad(), Storages() as storages:
        model(ids)
    about = {"held": held, "evaluating": seen[0], "weights": whole, "loss": loss.item()}
    (folder / f"rank{accelerator.process_index}.json").write_text(json.dumps(about))
    accelerator.end_training()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
