"""Time the ways to spread one job over two processes of a CPU: by hand, and by profiles.

    python -m benchmarks.layouts [--rounds 3] [--steps 24]

The job is the default model of recipes/cls.py on its own rows: 64 samples a step, as four micro-batches of 16, in fp32,
with one thread for each process. Each contestant is a launch of its own, and they take turns: one after the other in
each round. What is measured is the time of the steps after the first four: by the clock, and by the processor time of
all ranks together, which does not count what else the machine does. By the clock two processes seem faster than one on
a machine with other work, because each of them gets a share of it.

    one process         recipes/cls.py under the profile cpu
    nn.DataParallel     a plain loop around it. Without a GPU it hands on to the module: a loop on one process
    mp.spawn + DDP      the same loop in two processes of torch.multiprocessing.spawn, with DistributedDataParallel
    ddp_cpu, fsdp_cpu   recipes/cls.py under these profiles, on two processes

Horovod is left out: its newest release (0.28.1) has no wheels.
"""

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from benchmarks.results import describe, machine
from benchmarks.turns import ROOT

WARM_UP = 4
CLS = "--run.global-batch 64 --run.micro-batch 16 --run.threads 1 --run.trackers --run.quiet true --run.log-every 1000"
FLAGS = [*CLS.split(), "--run.eval-every", "1000000", "--run.save-every", "1000000"]
OURS = {"one process": "cpu", "ddp_cpu x 2": "ddp_cpu", "fsdp_cpu x 2": "fsdp_cpu"}
BY_HAND = ("nn.DataParallel", "mp.spawn + DDP")


def by_recipe(steps: int) -> None:
    """Train with the recipe in this process, one of a launch; rank 0 prints samples a second."""
    from app import Run, parse
    from recipes import cls

    times, step = [], Run.step

    def timed(run, optimizer):
        step(run, optimizer)
        times.append((time.perf_counter(), time.process_time()))

    Run.step = timed
    folder = Path(os.environ["LAYOUTS_FOLDER"])
    cls.main(parse(cls.Config, [*FLAGS, "--run.steps", str(steps), "--run.dir", str(folder)]))
    _report(times, int(os.environ.get("WORLD_SIZE", "1")))


def by_loop(rank: int, ranks: int, steps: int, port: int) -> None:
    """Train in a plain loop: alone around nn.DataParallel, or as one rank under DDP."""
    from benchmarks.jobs import job_of

    torch.set_num_threads(1)
    job = job_of("cls", [*FLAGS, "--run.steps", str(steps)], bf16=False)
    if ranks > 1:
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        torch.distributed.init_process_group("gloo", rank=rank, world_size=ranks)
        model = torch.nn.parallel.DistributedDataParallel(job.model)
    else:
        model = torch.nn.DataParallel(job.model)
    optimizer, times, turns = job.optimizer(), [], job.turns // ranks
    size = job.run.micro_batch
    for step in range(steps):
        for turn in range(turns):
            first = (step * job.turns + rank * turns + turn) * size
            inputs = job.collate([job.rows[i] for i in range(first, first + size)])
            if ranks > 1:
                model.require_backward_grad_sync = turn == turns - 1
            (job.loss(model, inputs).mean() / turns).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), job.optim.clip)
        for group in optimizer.param_groups:
            group["lr"] = job.rate(step)
        optimizer.step()
        optimizer.zero_grad()
        times.append((time.perf_counter(), time.process_time()))
    if not rank:
        _report(times, ranks)
    if ranks > 1:
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


def _report(times: list[tuple[float, float]], ranks: int) -> None:
    """Print samples a second, on rank 0. Other ranks take as much processor time as it does."""
    if os.environ.get("RANK", "0") == "0":
        wall, cpu = (last - first for first, last in zip(times[WARM_UP], times[-1], strict=True))
        samples = 64 * (len(times) - 1 - WARM_UP)
        print(json.dumps({"by_clock": samples / wall, "by_processor": samples / cpu / ranks}), flush=True)


def measure(name: str, steps: int, folder: Path) -> dict[str, float]:
    """Run one contestant to its end; return its samples a second."""
    program = [sys.executable, "-m", "benchmarks.layouts"]
    if name in OURS:
        profile = ROOT / "accelerate_configs" / f"{OURS[name]}.yaml"
        launcher = [sys.executable, "-m", "accelerate.commands.launch", "--quiet", "--config_file", str(profile)]
        program = [*launcher, "--main_process_port", "0", "-m", "benchmarks.layouts"]
    environment = {**os.environ, "LAYOUTS_FOLDER": str(folder), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [*program, "--one", name, "--steps", str(steps)]
    result = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, text=True, check=True, cwd=ROOT, timeout=900
    )
    line = next(line for line in result.stdout.splitlines() if line.startswith('{"by_clock"'))
    return json.loads(line)


def main() -> None:
    """Take turns, and print the median and the range of each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one in OURS:
        return by_recipe(options.steps)
    if options.one == "nn.DataParallel":
        return by_loop(0, 1, options.steps, 0)
    if options.one:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        torch.multiprocessing.spawn(by_loop, (2, options.steps, port), nprocs=2)
        return None
    names = (*OURS, *BY_HAND)
    speeds_by_name: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    for turn in range(options.rounds):
        for name in names[:: -1 if turn % 2 else 1]:
            with tempfile.TemporaryDirectory() as folder:
                speeds_by_name[name].append(measure(name, options.steps, Path(folder, "run")))
            print(turn, name, speeds_by_name[name][-1], flush=True)
    print(f"{time.strftime('%Y-%m-%d')}, {describe(machine())}")
    for name, turns in speeds_by_name.items():
        said = []
        for kind in turns[0]:
            speeds = [turn[kind] for turn in turns]
            said.append(f"{kind} {statistics.median(speeds):6.1f} ({min(speeds):.1f} to {max(speeds):.1f})")
        print(f"{name:16} {', '.join(said)} samples/s")


if __name__ == "__main__":
    main()
