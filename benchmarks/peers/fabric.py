"""Lightning Fabric's loop, as in its guide on gradient accumulation."""

from lightning_fabric import Fabric
from torch.utils.data import DataLoader

from benchmarks.gate import Gate
from benchmarks.jobs import Job


def train(job: Job, gate: Gate) -> None:
    """Train in one process."""
    fabric = Fabric(accelerator=job.device.type, devices=1, precision="bf16-mixed" if job.bf16 else "32-true")
    fabric.launch()
    model, optimizer = fabric.setup(job.model, job.optimizer())
    loader = DataLoader(job.rows, batch_size=job.run.micro_batch, collate_fn=job.collate, **job.loading)
    loader = fabric.setup_dataloaders(loader)
    gate.begin()
    count = step = 0
    for number, inputs in enumerate(loader, 1):
        accumulating = number % job.turns != 0
        with fabric.no_backward_sync(model, enabled=accumulating):
            loss = job.loss(model, inputs)
            fabric.backward(loss / job.turns)
        count += job.items(inputs)
        if not accumulating:
            fabric.clip_gradients(model, optimizer, max_norm=job.optim.clip)
            for group in optimizer.param_groups:
                group["lr"] = job.rate(step)
            optimizer.step()
            optimizer.zero_grad()
            gate(count)
            count, step = 0, step + 1
