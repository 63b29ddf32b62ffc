"""Compare the peak memory that `python -m app plan` predicts with that of training, on this machine's device.

    python -m benchmarks.predicted [--only lm] [--out benchmarks/results/predicted.json]
    python -m benchmarks.predicted --small      # small shapes

On a GPU, the peak is torch.cuda.max_memory_allocated from the first step to the last; on a CPU, the most bytes that
torch's allocator had given out at once, by torch.profiler. Memory from before the model does not count. Each row is
predicted in one process and trained in another; each finished row is written to the file at once.
"""

import argparse
import dataclasses
import gc
import json
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.results import machine
from benchmarks.turns import ROOT, search_path
from benchmarks.works import QUIET

RECIPES = ROOT / "recipes"
LIMIT = 420  # seconds, for a row's training
_LM = (
    "--scratch.kv-heads {kv} --scratch.layers {layers} --scratch.width {width} --scratch.heads {heads} "
    "--data.block {block}"
)


@dataclasses.dataclass(frozen=True)
class Row:
    """One row: a recipe with flags, in a precision."""

    name: str
    recipe: str
    flags: str
    precision: str = "bf16"


def rows(small: bool) -> list[Row]:
    """List the rows; by default, each has several micro-batches a step."""
    lm = _LM.format(**({"layers": 2, "width": 64, "heads": 4, "kv": 2, "block": 64} if small else LM_LARGE))
    middle = _LM.format(**({"layers": 2, "width": 64, "heads": 4, "kv": 2, "block": 64} if small else LM_MIDDLE))
    bert = "--scratch.layers {} --scratch.width {} --scratch.heads {}".format(*((2, 64, 2) if small else (12, 768, 12)))
    vit, size = ("--scratch.layers 2 --scratch.width 64 --scratch.heads 2", 32) if small else (bert, 224)
    batch, images = (8, 8) if small else (64, 64)

    def of(micro: int, turns: int = 2) -> str:
        return f"--run.micro-batch {micro} --run.global-batch {micro * turns}"

    all_rows = [
        Row("lm 1.1B", "lm", f"{lm} --scratch.tokenizer byte --data.packing concat {of(2)}"),
        Row("lm, 4,096 tokens", "lm", f"{middle} --data.packing concat {of(batch // 4)}"),
        *(
            Row(f"lm, {how}", "lm", f"{middle} --data.packing concat --activation-checkpointing {how} {of(batch // 4)}")
            for how in ("block", "ops", "offload")
        ),
        Row("lm, one turn, exact", "lm", f"{middle} --data.packing concat --run.exact true {of(batch // 4, 1)}"),
        Row("cls BERT-base", "cls", f"{bert} {of(batch)}"),
        Row("cls BERT-base", "cls", f"{bert} {of(batch)}", "fp32"),
        Row("img ViT-B", "img", f"--scratch.kind vit {vit} --data.size {size} {of(images)}"),
        Row("img ResNet", "img", f"--scratch.kind resnet --scratch.norm batch --data.size {size} {of(images)}"),
        Row("gan", "gan", f"--data.size {16 if small else 64} --width {8 if small else 64} {of(batch)}"),
        Row("gan", "gan", f"--data.size {16 if small else 64} --width {8 if small else 64} {of(batch)}", "fp32"),
    ]
    if find_spec("monai"):
        all_rows.append(Row("seg", "seg", of(4 if small else 16)))
    return all_rows


KEPT = ("peak", "measured", "ratio", "reserved", "cublas", "failed")
LM_LARGE = {"layers": 24, "width": 2048, "heads": 16, "kv": 8, "block": 4096}
LM_MIDDLE = {"layers": 12, "width": 768, "heads": 12, "kv": 12, "block": 1024}


def predict(recipe: Path, flags: list[str], device: str, precision: str, memory: float = 0.0) -> dict[str, Any]:
    """Return the peak of one process in bytes, as a plan predicts it."""
    from app.commands import recipe_file
    from app.commands.plan import footprint, largest_micro_batch
    from app.launching import profiles
    from app.training.loop.purpose import Body

    profile = profiles.read(str(profiles.FOLDER / ("cpu.yaml" if device == "cpu" else "gpu.yaml")))
    settings = {**profile.settings, "mixed_precision": "no" if precision == "fp32" else precision}
    profile = dataclasses.replace(profile, settings=settings)
    search = largest_micro_batch.MicroBatchSearch([profile], memory)
    body = Body(lambda run, plan, *data: footprint.batches(search.asking(run, plan), run, plan, *data))
    recipe_file.run_to_loop(recipe, flags, body)
    if body.failed:
        raise SystemExit(f"{recipe} could not be counted: {body.failed}")
    return dataclasses.asdict(search.found[largest_micro_batch.key(profile)])


def measure(recipe: Path, flags: list[str], device: str, precision: str) -> dict[str, Any]:
    """Train a recipe to its end, and return the peak of its loop in bytes."""
    from app import Run
    from app.distributed.naming import local_shard

    os.environ |= {"ACCELERATE_MIXED_PRECISION": "no" if precision == "fp32" else precision}
    os.environ |= {"ACCELERATE_USE_CPU": "true"} if device == "cpu" else {}
    byte_counts: dict[str, Any] = {}
    batches = Run.batches

    def watched(run, *args, **options) -> Iterator:
        models = [local_shard(t) for m in run.accelerator.models for t in (*m.parameters(), *m.buffers())]
        with (_on_cpu if device == "cpu" else _on_gpu)(byte_counts, models):
            yield from batches(run, *args, **options)

    Run.batches = watched
    Run.due = lambda run, every: False  # the prediction leaves evaluations out
    sys.argv = [str(recipe), *flags]
    sys.path[0] = str(recipe.parent)
    runpy.run_path(str(recipe), run_name="__main__")
    return byte_counts


@contextmanager
def _on_gpu(byte_counts: dict[str, Any], models: list) -> Iterator[None]:
    import torch

    before = torch.cuda.memory_allocated() - sum(t.nbytes for t in models)
    torch.cuda.reset_peak_memory_stats()
    yield
    torch.cuda.synchronize()
    byte_counts["measured"] = torch.cuda.max_memory_allocated() - before
    byte_counts["reserved"] = torch.cuda.max_memory_reserved()
    held = torch.cuda.memory_allocated()
    if clear := getattr(torch._C, "_cuda_clearCublasWorkspaces", None):  # in torch 2.11 to 2.13
        clear()
        byte_counts["cublas"] = held - torch.cuda.memory_allocated()  # in the measurement, but not in the prediction


@contextmanager
def _on_cpu(byte_counts: dict[str, Any], models: list) -> Iterator[None]:
    import torch

    from app.commands.plan.live_storage import LiveStorages

    gc.collect()  # what an earlier run in this process left in cycles would be counted, and freed in between
    with _allocations() as now:
        torch.empty(1)
    storages = LiveStorages()
    storages.add(models)
    with _allocations() as total, storages:
        yield
    byte_counts["measured"] = max(total) - (max(now) - sum(t.nbytes for t in models))
    byte_counts["tensors"] = max(storages.most.values())  # without memory that kernels allocate inside


@contextmanager
def _allocations() -> Iterator[list[int]]:
    """Yield a list; after the block it has the bytes in use by torch's CPU allocator after each change."""
    from torch.profiler import ProfilerActivity, profile

    totals: list[int] = []

    def collect(events) -> None:
        for event in events:
            if event.name == "[memory]" and event.extra_fields.device.type == "cpu":
                totals.append(event.extra_fields.total_allocated)
            collect(event.children)

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        yield totals
    collect(profiler.profiler.kineto_results.experimental_event_tree())


def child(words: list[str]) -> None:
    """Predict or measure in a separate process: predict|measure FILE DEVICE PRECISION RECIPE FLAGS..."""
    what, out, device, precision, recipe, *flags = words
    numbers = {"predict": predict, "measure": measure}[what](Path(recipe), flags, device, precision)
    Path(out).write_text(json.dumps(numbers))


def compare(row: Row, device: str, folder: Path) -> dict[str, Any]:
    """Predict and train one row; a failure is in the result with its error."""
    flags = [*row.flags.split(), *QUIET.split(), "--run.steps", "3", "--optim.warmup", "0"]
    flags += ["--sample-length", "0"] if row.recipe == "lm" else []
    result: dict[str, Any] = {"flags": " ".join(flags), "precision": row.precision, "device": device}
    environment = {**os.environ, "PYTHONPATH": search_path(), "HF_HUB_OFFLINE": "1"}
    for what in ("predict", "measure"):
        file, run = folder / f"{what}.json", folder / "run"
        words = [sys.executable, "-m", "benchmarks.predicted", "child", what, str(file), device, row.precision]
        words += [str(RECIPES / f"{row.recipe}.py"), *flags, "--run.dir", str(run)]
        try:
            done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=LIMIT)
        except subprocess.TimeoutExpired:
            return {**result, "failed": f"{what}: not ended after {LIMIT} s"}
        if done.returncode:
            return {**result, "failed": f"{what}: {(done.stdout + done.stderr)[-2000:]}"}
        result |= json.loads(file.read_text())
    return {**result, "ratio": result["peak"] / result["measured"]}


def main() -> None:
    """Compare all rows."""
    if sys.argv[1:2] == ["child"]:
        return child(sys.argv[2:])
    import torch

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[], help="rows whose names contain one of these")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "predicted.json")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    report: dict[str, Any] = {"machine": machine(), "small": options.small, "rows": {}}
    print(f"{'row':<28} {'predicted':>12} {'measured':>12} {'ratio':>6}   bytes, on {device}")
    for row in rows(options.small):
        if options.only and not any(part in row.name for part in options.only):
            continue
        name = f"{row.name}, {row.precision}"
        with tempfile.TemporaryDirectory() as folder:
            result = report["rows"][name] = compare(row, device, Path(folder))
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(report, indent=1) + "\n")
        print(json.dumps({"row": name, **{key: result[key] for key in KEPT if key in result}}), flush=True)
        if "failed" in result:
            print(f"{name:<28} {result['failed']}", flush=True)
        else:
            print(f"{name:<28} {result['peak']:>12,} {result['measured']:>12,} {result['ratio']:>6.3f}", flush=True)
    if any("failed" in result for result in report["rows"].values()):
        sys.exit("some rows failed")


if __name__ == "__main__":
    main()
