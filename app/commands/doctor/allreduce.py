"""Two processes that sum a tensor over both, as ranks do: whether they reach each other, and how fast they are.

python -m app.commands.doctor.allreduce BACKEND PORT RANK
"""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import app
from app.commands.doctor.findings import TROUBLE, Finding
from app.commands.output import size

SECONDS = 90.0
_NUMBERS = 16 << 20  # 64 MB of float32
_ROUNDS = 5


def two_ranks(seconds: float = SECONDS) -> Iterator[Finding]:
    """Have two processes all-reduce over gloo, and over NCCL if there are two GPUs."""
    import torch

    yield _try("gloo", seconds)
    if torch.cuda.is_available() and torch.cuda.device_count() > 1:
        yield _try("nccl", seconds)


def _try(backend: str, seconds: float) -> Finding:
    what = f"all-reduce, {backend} x2"
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    root = str(Path(app.__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])}
    words = [sys.executable, "-m", "app.commands.doctor.allreduce", backend, str(port)]
    pipe = subprocess.PIPE
    pair = [
        subprocess.Popen([*words, str(rank)], stdout=pipe, stderr=pipe, text=True, env=environment) for rank in (0, 1)
    ]
    fix = "GLOO_SOCKET_IFNAME=lo (or the network card's name), and no firewall between local ports"
    if backend == "nccl":
        fix = "NCCL_DEBUG=INFO says why; NCCL_P2P_DISABLE=1 or a newer driver often helps"
    end = time.monotonic() + seconds
    try:
        outputs = [process.communicate(timeout=max(0.1, end - time.monotonic())) for process in pair]
    except subprocess.TimeoutExpired:
        return Finding(what, f"no answer within {seconds:.0f} s", TROUBLE, fix)
    finally:
        for process in pair:
            with suppress(OSError):
                process.kill()
            process.wait()
    if any(process.returncode for process in pair):
        lines = [line for _, text in outputs for line in text.strip().splitlines()[-1:]]
        return Finding(what, " / ".join(lines) or "ended without a word", TROUBLE, fix)
    rate = json.loads(outputs[0][0].splitlines()[-1])
    return Finding(what, f"{size(rate)}/s ({size(4 * _NUMBERS)} of float32)")


def _rank(backend: str, port: str, rank: str) -> None:
    """Sum a tensor over both ranks a few times; the first one prints the best rate in bytes a second."""
    import torch
    import torch.distributed as dist

    device = torch.device("cuda", int(rank)) if backend == "nccl" else torch.device("cpu")
    dist.init_process_group(backend, init_method=f"tcp://127.0.0.1:{port}", rank=int(rank), world_size=2)
    times = []
    for _ in range(_ROUNDS):
        tensor = torch.full((_NUMBERS,), 1.0 + int(rank), device=device)
        dist.barrier()
        began = time.perf_counter()
        dist.all_reduce(tensor)
        right = bool((tensor == 3.0).all())  # also waits for a GPU
        times.append(time.perf_counter() - began)
        if not right:
            raise ValueError("the sum over both ranks is wrong")
    dist.barrier()
    if rank == "0":
        print(json.dumps(tensor.nbytes / min(times)), flush=True)
    sys.stdout.flush()
    os._exit(0)  # gloo's threads can abort the interpreter while it ends


if __name__ == "__main__":
    _rank(*sys.argv[1:])
