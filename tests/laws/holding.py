"""Count the bytes of the tensors that each process holds in the second step, and write them next to the run.

It reads private attributes of torch 2.13's FSDP2.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from app import OptimConfig, Run, RunConfig, parse


@dataclass
class Config:
    """Two steps of two or four micro-batches, on one process or two."""

    frozen: bool = False
    run: RunConfig = field(
        default_factory=lambda: RunConfig(steps=2, global_batch=8, micro_batch=4, save_every=100, trackers=())
    )
    optim: OptimConfig = field(default_factory=lambda: OptimConfig(warmup=0.0))


class Model(nn.Module):
    """A model with rows that two processes cannot share evenly, a parameter that may be frozen, and a buffer."""

    def __init__(self, frozen: bool = False):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(96, 97) for _ in range(3))
        self.back = nn.Linear(97, 96, bias=False)
        self.out = nn.Linear(96, 3).requires_grad_(not frozen)
        self.register_buffer("scale", torch.ones(33))

    def forward(self, x):
        for layer in self.layers:
            x = x + self.back(layer(x).relu()) * self.scale.mean()
        return self.out(x)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this process's shard."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def gradients(model: nn.Module) -> int:
    """Count the bytes of gradients, each storage once: under DDP, gradients are views of its buckets."""
    found = [p.grad for p in model.parameters() if p.grad is not None]
    for module in model.modules():
        group = module._get_fsdp_state()._fsdp_param_group if hasattr(module, "_get_fsdp_state") else None
        for parameter in group.fsdp_params if group else ():
            whole = getattr(parameter, "_unsharded_param", None)
            found += [parameter.unsharded_accumulated_grad, None if whole is None else whole.grad]
    storages = [local(gradient).untyped_storage() for gradient in found if gradient is not None]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


class Counting:
    """A stager that counts the bytes that it copies."""

    def __init__(self, stager):
        self.stager, self.bytes = stager, 0

    def stage(self, tensors):
        """Copy tensors by name."""
        self.bytes = sum(local(tensor).nbytes for tensor in tensors.values())
        return self.stager.stage(tensors)


def main(config: Config) -> dict[str, float]:
    with Run(config) as run:
        data = [torch.full((96,), i / 50) for i in range(50)]
        model, optimizer = run.prepare(Model(config.frozen), config.optim)
        run.services.checkpoint_manager._stager = Counting(run.services.checkpoint_manager._stager)
        log = getattr(model, "_get_ddp_logging_data", dict)()
        buckets = sum(map(int, str(log.get("rebuilt_bucket_sizes") or log.get("bucket_sizes") or 0).split(",")))
        for batch in run.batches(data, torch.stack):
            held = {"gradients": 0}
            for turn, micro in enumerate(batch.micros(model)):
                run.backward(model(micro.inputs).square().mean(), micro)
                last = turn == len(batch._step.turns) - 1
                beside = 0 if last and not config.run.exact else buckets
                held["gradients"] = max(held["gradients"], gradients(model) + beside)
            sums = getattr(run.gradients, "sums", {})
            held["sums"] = sum(s.flat.nbytes for s in sums.values())
            if config.run.exact:
                held["gradients"] = max(held["gradients"], gradients(model) + buckets)
            run.step(optimizer)
        state = [v for s in optimizer.state.values() for v in s.values() if isinstance(v, torch.Tensor)]
        held["optimizer"] = sum(local(v).nbytes for v in state)
        held["weights"] = sum(local(t).nbytes for t in [*model.parameters(), *model.buffers()])
        scores = run.finish(model)
        held["copy"] = run.services.checkpoint_manager._stager.bytes
        Path(f"{run.dir}-rank{run.accelerator.process_index}.json").write_text(json.dumps(held))
        return scores


if __name__ == "__main__":
    main(parse(Config))
