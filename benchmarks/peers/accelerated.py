"""accelerate's example loop: prepared loader, model, optimizer and scheduler, `accumulate`."""

import os

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader

from benchmarks.gate import Gate
from benchmarks.jobs import Job


def train(job: Job, gate: Gate) -> None:
    """Train as accelerate's complete_nlp_example does, with clipping as in its guide on accumulation."""
    turns = job.turns // int(os.environ.get("WORLD_SIZE", "1"))
    precision, on_cpu = "bf16" if job.bf16 else "no", job.device.type == "cpu"
    accelerator = Accelerator(gradient_accumulation_steps=turns, mixed_precision=precision, cpu=on_cpu)
    optimizer = job.optimizer()
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: job.rate(step) / job.optim.lr)
    loader = DataLoader(job.rows, batch_size=job.run.micro_batch, collate_fn=job.collate, **job.loading)
    model, optimizer, loader, scheduler = accelerator.prepare(job.model, optimizer, loader, scheduler)
    gate.begin()
    count = done = 0
    for inputs in loader:
        with accelerator.accumulate(model):
            loss = job.loss(model, inputs)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), job.optim.clip)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        count += job.items(inputs) * accelerator.num_processes
        if accelerator.sync_gradients:
            gate(count)
            count, done = 0, done + 1
            if done == job.steps:
                break


@torch.inference_mode()
def evaluate(job: Job, gate: Gate) -> None:
    """Evaluate accuracy repeatedly, as accelerate's nlp_example does."""
    accelerator = Accelerator(mixed_precision="bf16" if job.bf16 else "no", cpu=job.device.type == "cpu")
    loader = DataLoader(job.eval_rows, batch_size=job.run.micro_batch, collate_fn=job.collate, **job.loading)
    model, loader = accelerator.prepare(job.model, loader)
    model.eval()
    gate.begin()
    while gate.left >= 0:
        right = seen = 0
        for inputs in loader:
            predicted = model(**inputs).logits.argmax(dim=-1)
            predicted, labels = accelerator.gather_for_metrics((predicted, inputs["labels"]))
            right, seen = right + (predicted == labels).sum().item(), seen + len(labels)
        gate(seen)
