"""Train one recipe on several layouts and print the last loss and a hash of all weights of each.

    python benchmarks/layouts.py recipes/cls.py --run.steps 50
    python benchmarks/layouts.py --exact false recipes/cls.py --run.steps 50    # the ordinary mode, to compare

On CPU ranks, over gloo; takes some minutes.
"""

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from safetensors.torch import load_file

ROOT = Path(__file__).parent.parent
LAYOUTS = {
    "1 process": ("cpu", 1),
    "DDP x2": ("ddp_cpu", 2),
    "DDP x3": ("ddp_cpu", 3),
    "DDP x4": ("ddp_cpu", 4),
    "FSDP2 x2": ("fsdp_cpu", 2),
    "FSDP2 x3": ("fsdp_cpu", 3),
    "FSDP2 x4": ("fsdp_cpu", 4),
}


def train(profile: str, processes: int, options: argparse.Namespace, folder: Path) -> tuple[str, str]:
    """Run a recipe to its end; returns the last loss, as logged, and the SHA-256 of its weights by name."""
    count = ["--num_processes", str(processes)] if processes > 1 else []
    command = [sys.executable, "-m", "accelerate.commands.launch", "--main_process_port", "0"]
    command += ["--config_file", str(ROOT / "accelerate_configs" / f"{profile}.yaml"), *count]
    command += ["--mixed_precision", options.precision, *options.recipe]
    command += ["--run.exact", options.exact, "--run.dir", str(folder), "--run.log-every", "1", "--run.trackers"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stdout + done.stderr)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    digest = hashlib.sha256()
    for name, tensor in sorted(load_file(folder / "model" / "model.safetensors").items()):
        digest.update(name.encode() + tensor.numpy().tobytes())
    return repr([line["loss"] for line in lines if "loss" in line][-1]), digest.hexdigest()


def main() -> None:
    """Print a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--exact", default="true", choices=["true", "false"])
    parser.add_argument("--precision", default="no", choices=["no", "bf16"])
    parser.add_argument("recipe", nargs=argparse.REMAINDER, help="a recipe and its flags")
    options = parser.parse_args()
    print("| layout | last loss | SHA-256 of the weights |\n| --- | --- | --- |")
    with tempfile.TemporaryDirectory() as root:
        for name, (profile, processes) in LAYOUTS.items():
            loss, digest = train(profile, processes, options, Path(root, name.replace(" ", "-")))
            print(f"| {name} | {loss} | `{digest[:16]}` |", flush=True)


if __name__ == "__main__":
    main()
