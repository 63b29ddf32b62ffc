"""Prove every recipe in exact mode, on all layouts and across them: the whole promise in one table.

    make laws
    python -m benchmarks.laws --only img-batch seg-batch --steps 10 --seed 1

Each recipe is trained on one process, which nobody stops, then on every other layout, and once more from layout to
layout, where it stops at steps and resumes in an order that the seed draws. Every bit must be the reference's.
"""

import argparse
import datetime
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import yaml

from app.commands.output import table
from benchmarks.results import describe, machine

ROOT = Path(__file__).parent.parent
LAYOUTS = ("cpu", "ddp_cpu:2", "ddp_cpu:3", "fsdp_cpu:2", "fsdp_cpu:4")
RESULT = Path(__file__).parent / "results" / "laws.json"
# Five micro-batches a step, which no number of ranks here divides; models as small as they may be.
COMMON = "--run.global-batch 24 --run.micro-batch 5"
LM = "lm --scratch.layers 2 --scratch.width 32 --scratch.heads 2 --scratch.kv-heads 1 --scratch.tokenizer byte"
LM += " --scratch.dropout 0.1 --data.block 64 --sample-length 0"
CASES = {
    "cls": "cls --scratch.layers 2 --scratch.width 32 --scratch.vocab 300 --data.max-length 64 --optim.clip 0.3",
    "lm": LM,
    "img": "img --scratch.layers 1 --scratch.width 8 --augment.flip 0.5 --augment.erase 0.5",
    "img-batch": "img --scratch.layers 1 --scratch.width 8 --scratch.norm batch --augment.flip 0.5",
    "tag": "tag --scratch.layers 2 --scratch.width 32 --scratch.vocab 300 --data.max-length 64",
    "det": "det --scratch.width 8 --data.size 64 --augment.flip 0.5 --augment.rotate 10",
    "graph": "graph --scratch.width 16",
    "graph-gat": "graph --scratch.width 16 --scratch.kind gat",
    "dpo": "dpo --scratch.layers 2 --scratch.width 32 --scratch.heads 2 --scratch.dropout 0.1 --data.max-length 128",
    "s2s": "s2s --scratch.layers 2 --scratch.width 32 --scratch.vocab 300 --data.max-source 32 --generate.rows 32",
    "gan": "gan --width 8",
    "seg": "seg --data.patch 32 --data.patches-per-image 1 --scratch.channels 4 8",
    "cls-compiled": "cls --scratch.layers 2 --scratch.width 32 --scratch.vocab 300 --data.max-length 8",
    "lm-compiled": LM,
    "seg-batch": "seg --data.patch 32 --data.patches-per-image 1 --scratch.channels 4 8 --scratch.norm batch",
}


def compiling(folder: Path) -> list[str]:
    """Write the profiles of LAYOUTS into a folder, with compile by region; return them as `prove` takes them."""
    folder.mkdir(parents=True)
    profiles, how = [], {"dynamo_backend": "INDUCTOR", "dynamo_use_regional_compilation": True}
    for layout in LAYOUTS:
        name, colon, processes = layout.partition(":")
        file = folder / f"{name}.yaml"
        settings = yaml.safe_load((ROOT / f"accelerate_configs/{name}.yaml").read_text())
        file.write_text(yaml.safe_dump({**settings, "dynamo_config": how}))
        profiles.append(f"{file}{colon}{processes}")
    return profiles


def prove(name: str, steps: int, seed: int, folder: Path) -> dict:
    """Run `prove` over all layouts; return its report."""
    words = CASES[name]
    recipe, *flags = words.split()
    layouts = compiling(folder.with_name(f"{name}-profiles")) if name.endswith("-compiled") else LAYOUTS
    command = [sys.executable, "-m", "app", "prove", ROOT / f"recipes/{recipe}.py", "--profiles", *layouts]
    command += ["--across", *layouts, "--steps", steps, "--seed", seed, "--report", folder]
    done = subprocess.run([*map(str, command), *COMMON.split(), *flags], cwd=ROOT, capture_output=True, text=True)
    report = folder / "report.json"
    if not report.exists() or not report.stat().st_size:
        raise SystemExit(f"{words}: prove ended with status {done.returncode}\n{done.stdout}{done.stderr}")
    return json.loads(report.read_text())


def cells(report: dict) -> list[str]:
    """Say how each run of a report compares with the first."""
    rows = report["profiles"][1:]
    return [row["verdict"] + (f" in step {row['first']['step']}" if row["first"] else "") for row in rows]


def main() -> int:
    """Prove, print the table, and write it down; return 1 if a run differs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rows, proven = [], {}
    with tempfile.TemporaryDirectory() as folder:
        for name in options.only:
            began = time.monotonic()
            print(f"{name}: {CASES[name]}", flush=True)
            report = prove(name, options.steps, options.seed, Path(folder) / name)
            proven[name] = {"status": report["status"], "flags": CASES[name], "runs": cells(report)}
            rows.append([name, *cells(report), f"{time.monotonic() - began:.0f} s"])
    stops = 2 * len(LAYOUTS) - 1
    print(table(["recipe", *LAYOUTS[1:], f"across, {stops} stops", "took"], rows))
    about = {"date": f"{datetime.date.today()}", "machine": machine(), "steps": options.steps, "seed": options.seed}
    print(f"{about['date']}, {options.steps} steps, seed {options.seed}, {describe(about['machine'])}")
    if options.only == list(CASES):
        RESULT.write_text(json.dumps({**about, "recipes": proven}, indent=1) + "\n")
    return int(any(proof["status"] for proof in proven.values()))


if __name__ == "__main__":
    sys.exit(main())
