"""Compare what activation checkpointing costs and saves: time and peak memory of a step, on this machine's device.

    python -m benchmarks.activations [--width 768] [--layers 12] [--block 512] [--rows 4] [--turns 5]

One Llama makes steps with each setting in turn, so that what else runs on the machine slows all of them. Times are
medians of steps, as ratios to the step without checkpointing of the same turn. The peak is what a plan predicts and
what three steps of recipes/lm.py took (benchmarks/predicted.py).
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import get_args

import torch

from app.tasks.activation_checkpointing import ActivationCheckpointing, checkpoint_activations
from benchmarks import predicted

KINDS = get_args(ActivationCheckpointing)
BF16 = "bf16" if torch.cuda.is_available() else "fp32"


def times(options: argparse.Namespace) -> dict[str, list[float]]:
    """Return the seconds of each turn's step, by setting."""
    from transformers import LlamaConfig, LlamaForCausalLM

    device = "cuda" if torch.cuda.is_available() else "cpu"
    shape = {"hidden_size": options.width, "num_hidden_layers": options.layers, "vocab_size": 4096}
    heads = {"num_attention_heads": options.width // 64, "intermediate_size": options.width * 8 // 3}
    model = LlamaForCausalLM(LlamaConfig(**shape, **heads, use_cache=False)).to(device).train()
    ids = torch.randint(4096, (options.rows, options.block), device=device)
    seconds: dict[str, list[float]] = {name: [] for name in KINDS}
    for turn in range(options.turns + 1):
        for name in KINDS:
            # transformers 5.17 knows only the older name.
            getattr(model, "activation_checkpointing_disable", model.gradient_checkpointing_disable)()
            checkpoint_activations(model, name)
            model.zero_grad()
            began = time.perf_counter()
            with torch.autocast(device, torch.bfloat16, enabled=BF16 == "bf16"):
                loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            loss.item()
            if device == "cuda":
                torch.cuda.synchronize()
            if turn:  # the first one warms up
                seconds[name].append(time.perf_counter() - began)
    return seconds


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in {"width": 768, "layers": 12, "block": 512, "rows": 4, "turns": 5}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    seconds = times(options)
    flags = (
        f"--scratch.width {options.width} --scratch.layers {options.layers} --scratch.heads {options.width // 64} "
        f"--data.block {options.block} --data.packing concat --run.micro-batch {options.rows} "
        f"--run.global-batch {2 * options.rows} --activation-checkpointing "
    )
    print("setting     time  predicted MB  measured MB")
    for name in KINDS:
        ratios = [took / none for took, none in zip(seconds[name], seconds["none"], strict=True)]
        with tempfile.TemporaryDirectory() as folder:
            device = "cuda" if torch.cuda.is_available() else "cpu"
            memory = predicted.compare(predicted.Row(name, "lm", flags + name, BF16), device, Path(folder))
        if "failed" in memory:
            raise SystemExit(memory["failed"])
        peak, measured = (memory[key] / 1e6 for key in ("peak", "measured"))
        print(f"{name:<10} {statistics.median(ratios):5.2f} {peak:13,.0f} {measured:12,.0f}", flush=True)
        print(json.dumps({"setting": name, "seconds": seconds[name], "peak": peak, "measured": measured}), flush=True)


if __name__ == "__main__":
    main()
