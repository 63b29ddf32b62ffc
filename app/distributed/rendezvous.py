"""How ranks meet: for how long they wait for each other, and how they meet again after some were started again."""

import itertools
import os
import time
from datetime import timedelta

import torch
import torch.distributed as dist

# Longer than the watchdog takes to show all stacks, between machines too, whose clocks it starts one after the other.
_MARGIN = 120.0
_LEAST, _NEVER = timedelta(minutes=30), timedelta(days=7)


def time_limit(timeout: float) -> timedelta:
    """Return how long a collective may take: longer than a rank may hang, so that the watchdog shows its stack first.

    It is at least half an hour: before the first step, ranks wait for each other's data and nothing watches them.

    Args:
        timeout: --run.timeout in seconds; 0: a rank may hang for ever.
    """
    return max(_LEAST, timedelta(seconds=timeout + _MARGIN)) if timeout else _NEVER


def join_again(on_cpu: bool, limit: timedelta = _LEAST, device: torch.device | None = None) -> None:
    """Join the process group after some ranks were started again; the first time, accelerate does it.

    With several machines, this rank may be a new one although the launcher of this machine started it only once.

    Args:
        limit: of time, for collectives.
        device: this rank's GPU, if the process group may be bound to it.
    """
    if dist.is_initialized() or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return
    store, rank, world = next(dist.rendezvous("env://"))
    generation = _generation(store, rank, world)
    if generation == 0:
        return
    backend = (
        "gloo" if on_cpu else dist.get_default_backend_for_device(torch.accelerator.current_accelerator() or "cpu")
    )
    prefixed = dist.PrefixStore(f"samestep/generation/{generation}", store)
    dist.init_process_group(backend, store=prefixed, rank=rank, world_size=world, timeout=limit, device_id=device)


def _generation(store: dist.Store, rank: int, world: int) -> int:
    """Count how often the ranks of this run were restarted, the same number on every rank; wait until all are here.

    The launchers of torch 2.13 keep one store over all restarts, with the addresses of ranks that have died in it. Two
    machines may count their restarts differently, so the launchers' own count is of no use.
    """
    for generation in itertools.count():
        key = f"samestep/started/{generation}"
        if store.add(f"{key}/{rank}", 1) > 1:  # by one that has died
            store.compare_set(key, "", "broken")
            continue
        if store.add(f"{key}/here", 1) == world:
            store.compare_set(key, "", "whole")
        began, said = time.monotonic(), False
        while not store.check([key]):
            waited, here = time.monotonic() - began, store.add(f"{key}/here", 0)
            if waited > dist.default_pg_timeout.total_seconds():
                raise RuntimeError(f"{here} of {world} processes have come in {waited:.0f} s")
            if waited > 15 and not said and os.environ.get("LOCAL_RANK") == "0":
                print(f"waiting for the other processes of this run: {here} of {world} are here", flush=True)
                said = True
            time.sleep(0.1)
        if store.get(key) == b"whole":
            return generation
    raise AssertionError("not reached")
