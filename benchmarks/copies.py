"""Check that a run copies the next step's inputs to the GPU while the current step is computed.

    python -m benchmarks.copies

Images of 38 MB a step go through a few convolutions; torch's profiler records when the GPU copies and computes.
"""

import json
import tempfile
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from app import OptimConfig, Run, RunConfig

SHAPE, BATCH, STEPS = (3, 224, 224), 64, 20
ROWS = list(torch.randn(256, *SHAPE, generator=torch.Generator().manual_seed(0)))


@dataclass
class Config:
    """A config with no field but `run`."""

    run: RunConfig = field(default_factory=RunConfig)


def record(folder: str) -> list:
    """Train some steps in a run; return the profile of the last ones."""
    settings = RunConfig(
        dir=folder, global_batch=BATCH, micro_batch=BATCH, steps=STEPS, log_every=100, save_every=100, trackers=()
    )
    network = nn.Sequential(nn.Conv2d(3, 64, 7, 2), nn.ReLU(), nn.Conv2d(64, 128, 3), nn.AdaptiveAvgPool2d(1))
    with Run(Config(settings)) as run:
        model, optimizer = run.prepare(network, OptimConfig())
        seen = profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA])
        for batch in run.batches(ROWS, torch.stack):
            for micro in batch.micros(model):
                run.backward(model(micro.inputs).square().mean(), micro)
            run.step(optimizer)
            if run.steps_done == STEPS // 2:
                torch.cuda.synchronize()
                seen.start()
        torch.cuda.synchronize()
        seen.stop()
    return list(seen.events())


def covered(copies: list[tuple[float, float]], kernels: list[tuple[float, float]]) -> float:
    """Return the share of the copies' time in which a kernel also ran; both as (start, end)."""
    merged: list[list[float]] = []
    for start, end in sorted(kernels):
        if merged and start <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], end)
        else:
            merged.append([start, end])
    shared = sum(max(0.0, min(end, to) - max(start, since)) for start, end in copies for since, to in merged)
    return shared / sum(end - start for start, end in copies)


def main() -> None:
    """Print the time of the copies, and the share of it in which the GPU also computed."""
    if not torch.cuda.is_available():
        print("no GPU: nothing is copied")
        return
    with tempfile.TemporaryDirectory() as folder:
        events = record(folder)
    on_device = [event for event in events if event.device_type == torch.autograd.DeviceType.CUDA]
    spans = {
        kind: [(e.time_range.start, e.time_range.end) for e in on_device if ("HtoD" in e.name) == kind]
        for kind in (True, False)
    }
    copies = [(start, end) for start, end in spans[True] if end - start > 100]  # microseconds: not single numbers
    if not copies:
        print("the profiler saw no copies to the GPU")
        return
    total = sum(end - start for start, end in copies) / 1000
    print(json.dumps({"copies": len(copies), "milliseconds": total, "hidden": covered(copies, spans[False])}))


if __name__ == "__main__":
    main()
