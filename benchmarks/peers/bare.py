"""A bare torch loop: the same arithmetic with nothing around it, the upper limit of a trainer's speed."""

import os
from contextlib import nullcontext

import torch
from torch import nn
from torch.utils.data import DataLoader

from benchmarks.gate import Gate
from benchmarks.jobs import Job


def train(job: Job, gate: Gate, wrap: str = "", compiled: bool = False) -> None:
    """Train in one process, or on the CPU in several.

    Args:
        wrap: "ddp" for DDP; names of layer classes for FSDP2.
    """
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    model = _wrapped(job, wrap)
    if compiled:
        model = torch.compile(model)
    optimizer = job.optimizer()
    size, turns = job.run.micro_batch, job.turns // world
    micro_batches = [
        range(first := (step * job.turns + rank * turns + turn) * size, first + size)
        for step in range(job.steps)
        for turn in range(turns)
    ]
    loader = DataLoader(job.rows, batch_sampler=micro_batches, collate_fn=job.collate, **job.loading)
    gate.begin()
    batches = iter(loader)
    for step in range(job.steps):
        count = 0
        for turn in range(turns):
            inputs = next(batches)
            last = turn == turns - 1
            if wrap not in ("", "ddp"):
                model.set_requires_gradient_sync(last)
            with model.no_sync() if wrap == "ddp" and not last else nullcontext():
                with job.autocast():
                    loss = job.loss(model, job.placed(inputs))
                (loss / turns).backward()
            count += job.items(inputs)
        nn.utils.clip_grad_norm_(model.parameters(), job.optim.clip)
        for group in optimizer.param_groups:
            group["lr"] = job.rate(step)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        gate(count * world)


def _wrapped(job: Job, wrap: str) -> nn.Module:
    job.model.to(job.device)
    if wrap == "ddp":
        torch.distributed.init_process_group("gloo")
        return nn.parallel.DistributedDataParallel(job.model, gradient_as_bucket_view=True)
    if wrap:
        from torch.distributed.fsdp import fully_shard

        torch.distributed.init_process_group("gloo")
        mesh = torch.distributed.init_device_mesh("cpu", (torch.distributed.get_world_size(),))
        for module in job.model.modules():
            if type(module).__name__ in wrap.split(","):
                fully_shard(module, mesh=mesh)
        return fully_shard(job.model, mesh=mesh)
    return job.model
