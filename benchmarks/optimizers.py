"""Compare what choices of --optim take: bytes of state for each parameter, and time of an update, on this machine.

    python -m benchmarks.optimizers [--layers 8] [--width 512] [--vocabulary 16384] [--turns 7]

One copy of a Transformer for each choice; their optimizers make an update each in turn, on one thread, so that what
else runs on the machine slows all of them. Times are medians of processor time.
"""

import argparse
import copy
import json
import statistics
import time

import torch
from torch import Tensor, nn

from app import OptimConfig
from app.training.optim import bf16
from app.training.optim.building import build_optimizer

CHOICES: dict[str, dict[str, str]] = {
    "AdamW": {},
    "AdamW, foreach": {"implementation": "foreach"},
    "AdamW8bit": {"name": "AdamW8bit"},
    "AdamW, kahan": {"updates": "kahan"},
    "AdamW, stochastic": {"updates": "stochastic"},
    "AdamW8bit, kahan": {"name": "AdamW8bit", "updates": "kahan"},
    "AdamW8bit, stochastic": {"name": "AdamW8bit", "updates": "stochastic"},
    "Adafactor": {"name": "Adafactor"},
    "Muon": {"name": "Muon"},
}


def main() -> None:
    """Print a line for each choice."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in {"layers": 8, "width": 512, "vocabulary": 16384, "turns": 7}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    torch.set_num_threads(1)
    layer = nn.TransformerEncoderLayer(options.width, 8, 4 * options.width, batch_first=True)
    whole = nn.ModuleList(
        [nn.Embedding(options.vocabulary, options.width), nn.TransformerEncoder(layer, options.layers)]
    )
    numbers = sum(p.numel() for p in whole.parameters())
    optimizers: dict[str, torch.optim.Optimizer] = {}
    for name, choice in CHOICES.items():
        model, settings = copy.deepcopy(whole), OptimConfig(lr=1e-3, **choice)  # type: ignore[arg-type]
        bf16.keep_weights(model, settings, None)
        optimizers[name] = build_optimizer(model, settings)
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter) / 100
    seconds: dict[str, list[float]] = {name: [] for name in CHOICES}
    for turn in range(options.turns + 1):
        for name, optimizer in optimizers.items():
            began = time.thread_time()
            optimizer.step()
            if turn:  # the first one makes the state
                seconds[name].append(time.thread_time() - began)
    print(f"{numbers:,} parameters\n{'choice':<24} state, bytes a parameter  update, ms")
    for name, optimizer in optimizers.items():
        held = sum(t.nbytes for state in optimizer.state.values() for t in state.values() if isinstance(t, Tensor))
        print(f"{name:<24} {held / numbers:24.2f} {1000 * statistics.median(seconds[name]):11,.0f}")
        print(json.dumps({"choice": name, "state": held / numbers, "seconds": seconds[name]}), flush=True)


if __name__ == "__main__":
    main()
