"""Measure memory and time of the loss over a large vocabulary: whole logits, chunks, and torch's own function.

    python -m benchmarks.logits [--vocabulary 131072] [--tokens 4096] [--width 512] [--times 3]

Each measurement is one process that computes the loss of the last layer forwards and backwards, after a pass over a few
tokens. The ways take turns. Memory is the rise of the process's peak above what it held before: of the resident set on
a CPU, of torch's allocator on a GPU. The gradient of the weight is there before. Time is that of the processor on a
CPU, with one thread, so that other programs change it little.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

from app.data.corpus.blocks import token_loss
from app.distributed.tensor_parallel.last_layer import LastLayer

WAYS = ["whole", "chunked"] + ["torch"] * hasattr(nn.functional, "linear_cross_entropy")
PRECISIONS = ["fp32", "bf16"]


def compute(way: str, layer: nn.Linear, x: Tensor, targets: Tensor) -> Tensor:
    """Return the mean loss."""
    if way == "torch":  # under autocast it would be in fp32
        dtype = torch.get_autocast_dtype(x.device.type) if torch.is_autocast_enabled(x.device.type) else x.dtype
        options = nn.LinearCrossEntropyOptions()
        inputs = x.flatten(0, 1).to(dtype), layer.weight.to(dtype), targets.flatten()
        each = nn.functional.linear_cross_entropy(*inputs, reduction="none", options=options)
        return token_loss(each.float().view(targets.shape), targets)
    if way == "whole":
        return token_loss(layer(x), targets)
    with layer.last_layer.told(targets, 0.0):
        return token_loss(layer(x), targets)


def measure(way: str, precision: str, vocabulary: int, tokens: int, width: int) -> dict:
    """Return the bytes, the seconds and the loss of one way."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_num_threads(1)
    torch.manual_seed(0)
    layer = nn.Linear(width, vocabulary, bias=False, device=device)
    if way == "chunked":
        LastLayer(layer, "chunked")
    x = torch.randn(4, tokens // 4, width, device=device, requires_grad=True)
    targets = torch.randint(0, vocabulary, (4, tokens // 4), device=device)
    for some in (slice(0, 1), slice(0, tokens // 4)):  # the first kernels of a process take longer
        layer.zero_grad(set_to_none=False)
        before, peak = _memory(device)
        start = time.process_time() if device == "cpu" else time.perf_counter()
        with torch.autocast(device, torch.bfloat16, enabled=precision == "bf16"):
            loss = compute(way, layer, x[:, some], targets[:, some])
        loss.backward()
        if device == "cuda":
            torch.cuda.synchronize()
        seconds = (time.process_time() if device == "cpu" else time.perf_counter()) - start
    return {"bytes": peak() - before, "seconds": seconds, "loss": loss.item()}


def _memory(device: str) -> tuple[int, Callable[[], int]]:
    """Return the bytes that are held now, and a function that returns the peak."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated
    return resident(), resident


def resident() -> int:
    """Return the largest resident set of this process so far, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    """Print a line for each precision and way."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("vocabulary", 131072), ("tokens", 4096), ("width", 512), ("times", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    shape = asked.vocabulary, asked.tokens, asked.width
    if asked.child:
        return print(json.dumps(measure(*asked.child, *shape)))
    sizes = [f"--{name}={value}" for name, value in zip(("vocabulary", "tokens", "width"), shape, strict=True)]
    for precision in PRECISIONS:
        measured_by_way: dict[str, list[dict]] = {way: [] for way in WAYS}
        for way in WAYS * asked.times:
            command = [sys.executable, "-m", "benchmarks.logits", "--child", way, precision, *sizes]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            measured_by_way[way].append(json.loads(done.stdout))
        for way, each in measured_by_way.items():
            seconds = sorted(one["seconds"] for one in each)
            memory = statistics.median(one["bytes"] for one in each) / 1e9
            print(f"{precision} {way:<8} {memory:6.2f} GB  {seconds[0]:6.2f} to {seconds[-1]:6.2f} s", end="")
            print(f"  loss {each[0]['loss']:.7f}", flush=True)


if __name__ == "__main__":
    main()
