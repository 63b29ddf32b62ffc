"""Count what three steps do on this layout: collectives, and times that the host waits for a number.

counting.py FILE: the counts of a silent step and of a step that logs, written by the main process as JSON.
"""

import json
import sys
from collections import Counter
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from app import OptimConfig, Run, RunConfig

COLLECTIVE = ("c10d::", "_c10d_functional::")
NOT_COUNTED = ("c10d::wait", "_c10d_functional::wait_tensor")


@dataclass
class Config:
    """Four micro-batches of three, on any layout of up to four processes; only the sixth step is logged."""

    run: RunConfig = field(
        default_factory=lambda: RunConfig(
            dir=sys.argv[1] + ".run", global_batch=12, micro_batch=3, steps=8, log_every=6, save_every=100, trackers=()
        )
    )


class Model(nn.Module):
    """A stack that FSDP shards layer by layer, with a buffer that DDP would like to broadcast."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))
        self.out = nn.Linear(16, 1)
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x):
        for layer in self.layers:
            x = torch.relu(layer(x))
        return self.out(x).squeeze(-1).clone() * self.scale


def main(path: str, clip: float) -> None:
    """Profile steps 4 (silent) and 6 (logged)."""
    data = list(torch.randn(50, 16, generator=torch.Generator().manual_seed(0)))
    counts, profiler = {}, None
    with Run(Config()) as run:
        model, optimizer = run.prepare(Model(), OptimConfig(clip=clip))
        for batch in run.batches(data, torch.stack):
            # The body of a step, and what the Run does behind it until the next one begins.
            if profiler is not None:
                profiler.__exit__(None, None, None)
                counts[run.steps_done - 1] = tally(profiler)
                profiler = None
            if run.steps_done in (4, 6):
                profiler = profile(activities=[ProfilerActivity.CPU])
                profiler.__enter__()
            for micro in batch.micros(model):
                run.backward(model(micro.inputs).square().mean(), micro)
            run.step(optimizer)
        if run.accelerator.is_main_process:
            with open(path, "w") as file:
                json.dump({"silent": counts[4], "logged": counts[6]}, file)


def tally(profiler) -> dict[str, int]:
    """Count collectives by name, and reads of single numbers."""
    names = Counter(event.name for event in profiler.events())
    found = {name: n for name, n in names.items() if name.startswith(COLLECTIVE) and name not in NOT_COUNTED}
    return {**found, "item": names.get("aten::item", 0), "gloo": sum(n for k, n in names.items() if "gloo:" in k)}


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]))
