"""Trainings of two contestants over several seeds, each in a process of its own, by turns: scores and speed."""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

from benchmarks.results import machine

QUIET = "--run.threads 1 --run.trackers --run.eval-every 1000000 --run.save-every 1000000 --run.quiet true"
Contestant = Callable[[Any, str], dict[str, float]]
"""Trains by a recipe's settings in a folder, and returns scores and speeds."""


class Watch:
    """The time from the first step to the end of the last one, and the processor time of what came before."""

    def __init__(self):
        self.made = self.first = self.last = self._now()

    def begin(self) -> None:
        self.first = self._now()

    def note(self) -> None:
        self.last = self._now()

    def speeds(self, samples: float) -> dict[str, float]:
        """Return samples a second, by the clock and by processor time, and the processor time before the first step."""
        wall, cpu = (last - first for first, last in zip(self.first, self.last, strict=True))
        return {"by_clock": samples / wall, "by_processor": samples / cpu, "before": self.first[1] - self.made[1]}

    @staticmethod
    def _now() -> tuple[float, float]:
        return time.perf_counter(), time.process_time()


def recipe_run(recipe: ModuleType, config: Any, folder: str) -> dict[str, float]:
    """Train with a recipe; return its scores, and the speed of its steps."""
    from app import Run

    watch, batches, step = Watch(), Run.batches, Run.step

    def watched(run, *arguments, **named):
        for number, batch in enumerate(batches(run, *arguments, **named)):
            if not number:
                watch.begin()
            yield batch

    def noted(run, optimizer):
        step(run, optimizer)
        watch.note()

    config.run.dir = folder
    with patch.multiple(Run, batches=watched, step=noted):
        scores = recipe.main(config)
    lines = [json.loads(line) for line in Path(folder, "metrics.jsonl").read_text().splitlines()]
    return scores | watch.speeds(max(line.get("samples", 0) for line in lines))


def timed(watch: Watch) -> Any:
    """Return a callback for transformers' Trainer that notes the beginning of the first step and the end of each."""
    from transformers import TrainerCallback

    class Timed(TrainerCallback):
        def on_step_begin(self, args, state, control, **_):
            if not state.global_step:
                watch.begin()

        def on_step_end(self, *_, **__):
            watch.note()

    return Timed()


def trainer_settings(config: Any, steps: int, folder: str) -> dict[str, Any]:
    """Return what transformers' TrainingArguments call the settings of a recipe."""
    run, optim = config.run, config.optim
    return {
        "output_dir": folder, "max_steps": steps, "seed": run.seed, "use_cpu": True,
        "per_device_train_batch_size": run.micro_batch, "per_device_eval_batch_size": run.micro_batch,
        "gradient_accumulation_steps": run.global_batch // run.micro_batch,
        "learning_rate": optim.lr, "lr_scheduler_type": optim.schedule, "warmup_steps": round(optim.warmup * steps),
        "weight_decay": optim.weight_decay, "max_grad_norm": optim.clip, "optim": "adamw_torch_fused",
        "save_strategy": "no", "report_to": "none", "disable_tqdm": True, "dataloader_pin_memory": False,
    }  # fmt: skip


def compare(module: str, about: str | None, recipe: ModuleType, contestants: dict[str, Contestant], flags: str) -> None:
    """Alternate, and print mean and deviation over the seeds.

    Args:
        module: the import path of the caller, which each training's process runs anew.
        about: what --help says.
        flags: of the recipe, for all trainings.
    """
    words = sys.argv[1:]
    cut = words.index("--") if "--" in words else len(words)
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--only", choices=contestants, nargs="+", default=list(contestants))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--one", choices=contestants, help=argparse.SUPPRESS)
    options, more = parser.parse_args(words[:cut]), words[cut + 1 :]
    recipe_flags = [*flags.split(), *QUIET.split(), *more]
    if options.one:
        return _one(recipe, contestants[options.one], recipe_flags)
    scores_by_name: dict[str, list[dict]] = {name: [] for name in options.only}
    for seed in options.seeds:
        for name in options.only[:: -1 if seed % 2 else 1]:
            command = [sys.executable, "-m", module, "--one", name, "--", *recipe_flags, "--run.seed", str(seed)]
            with tempfile.TemporaryDirectory() as cache:  # so that each prepares its data itself
                environment = {**os.environ, "HF_DATASETS_CACHE": cache}
                result = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment)
            scores_by_name[name].append(json.loads(result.stdout.splitlines()[-1]))
            print(seed, name, scores_by_name[name][-1], flush=True)
    for name, runs in scores_by_name.items():
        said = []
        for score in runs[0]:
            values = [run[score] for run in runs]
            spread = statistics.stdev(values) if len(values) > 1 else 0.0
            said.append(f"{score} {statistics.mean(values):.4g} +- {spread:.2g}")
        print(f"{name:10} {', '.join(said)}")
    if options.out:
        told = {"date": time.strftime("%Y-%m-%d"), "machine": machine(), "flags": recipe_flags, "found": scores_by_name}
        options.out.write_text(json.dumps(told, indent=1) + "\n")


def _one(recipe: ModuleType, contestant: Contestant, flags: list[str]) -> None:
    """Train once, in this process, and print what was found as the last line."""
    import torch

    from app import parse

    config = parse(recipe.Config, flags)
    torch.set_num_threads(config.run.threads or 1)
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(contestant(config, f"{folder}/run")))
