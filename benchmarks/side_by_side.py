"""Whole trainings of a recipe and of a peer: they alternate over seeds, each in a process of its own; scores and speed.

Speed is samples a second of the steps alone, by the clock and by processor time, of which the second one does not count
what else the machine does.
"""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks.results import machine


class Watch:
    """The time from the first step to the end of the last one, and that before it."""

    def __init__(self):
        self.made = self.first = self.last = self._now()

    def begin(self) -> None:
        self.first = self._now()

    def note(self) -> None:
        self.last = self._now()

    def speeds(self, samples: float) -> dict[str, float]:
        """Return samples a second, by the clock and by processor time, and the processor time of what came before."""
        wall, cpu = (last - first for first, last in zip(self.first, self.last, strict=True))
        return {"by_clock": samples / wall, "by_processor": samples / cpu, "before": self.first[1] - self.made[1]}

    @staticmethod
    def _now() -> tuple[float, float]:
        return time.perf_counter(), time.process_time()


@contextlib.contextmanager
def watching(watch: Watch) -> Iterator[None]:
    """Note the steps of a recipe's run."""
    from app import Run

    batches, step = Run.batches, Run.step

    def watched(run, *arguments, **named):
        for number, batch in enumerate(batches(run, *arguments, **named)):
            if not number:
                watch.begin()
            yield batch

    def noted(run, optimizer):
        step(run, optimizer)
        watch.note()

    Run.batches, Run.step = watched, noted
    try:
        yield
    finally:
        Run.batches, Run.step = batches, step


def trainer_callback(watch: Watch):
    """Return what notes the steps of transformers' Trainer."""
    from transformers import TrainerCallback

    class Timed(TrainerCallback):
        """Notes the beginning of the first step and the end of each."""

        def on_step_begin(self, args, state, control, **_):
            if not state.global_step:
                watch.begin()

        def on_step_end(self, *_, **__):
            watch.note()

    return Timed()


def samples_of(folder: str) -> float:
    """Return how many samples a run has trained on."""
    lines = [json.loads(line) for line in Path(folder, "metrics.jsonl").read_text().splitlines()]
    return max(line.get("samples", 0) for line in lines)


def command_line(doc: str | None, both: dict[str, Callable], flags: str, recipe: str) -> None:
    """Run the command of a benchmark: alternate, and print mean and deviation over the seeds.

    Args:
        both: what trains once, by name; called with the recipe's config and the folder of a run.
        flags: of the recipe, for all.
        recipe: its name.
    """
    words = sys.argv[1:]
    cut = words.index("--") if "--" in words else len(words)
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--only", choices=tuple(both), nargs="+", default=list(both))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--one", choices=tuple(both), help=argparse.SUPPRESS)
    options, more = parser.parse_args(words[:cut]), words[cut + 1 :]
    if options.one:
        return _one(both[options.one], recipe, more)
    found: dict[str, list[dict]] = {name: [] for name in options.only}
    for seed in options.seeds:
        for name in options.only[:: -1 if seed % 2 else 1]:
            found[name].append(_started(name, [*flags.split(), *more, "--run.seed", str(seed)]))
            print(seed, name, found[name][-1], flush=True)
    for name, runs in found.items():
        print(f"{name:14} {', '.join(_spread(runs, score) for score in runs[0])}")
    if options.out:
        about = {"date": time.strftime("%Y-%m-%d"), "machine": machine(), "flags": [flags, *more], "found": found}
        options.out.write_text(json.dumps(about, indent=1) + "\n")


def _one(train: Callable, recipe: str, flags: list[str]) -> None:
    """Train once, in this process, and print what was found as the last line."""
    import importlib

    import torch

    from app import parse

    config = parse(importlib.import_module(f"recipes.{recipe}").Config, flags)
    torch.set_num_threads(config.run.threads or 1)
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(train(config, f"{folder}/run")))


def _started(name: str, flags: list[str]) -> dict[str, float]:
    """Train once in a process of its own, with a data cache of its own: what is prepared once is prepared in each."""
    module = f"benchmarks.{Path(sys.argv[0]).stem}"
    with tempfile.TemporaryDirectory() as cache:
        result = subprocess.run(
            [sys.executable, "-m", module, "--one", name, "--", *flags],
            stdout=subprocess.PIPE, text=True, check=True, env={**os.environ, "HF_DATASETS_CACHE": cache},
        )  # fmt: skip
    return json.loads(result.stdout.splitlines()[-1])


def _spread(runs: list[dict], score: str) -> str:
    values = [run[score] for run in runs]
    spread = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{score} {statistics.mean(values):.4g} +- {spread:.2g}"
