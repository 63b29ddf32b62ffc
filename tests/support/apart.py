"""Processes that tests start, by fork or, where what they use does not survive one, by spawn."""

import multiprocessing
import sys
from collections.abc import Callable
from typing import Any

import cloudpickle

FORK, SPAWN = multiprocessing.get_context("fork"), multiprocessing.get_context("spawn")


def start(context: Any, work: Callable, *args: Any) -> multiprocessing.Process:
    """Start a process that calls `work`, which may be a closure; `args` may hold barriers and queues."""
    if context is FORK:
        process = context.Process(target=work, args=args, daemon=True)
    else:
        module = sys.modules[work.__module__]
        cloudpickle.register_pickle_by_value(module)  # the new process need not import pytest's modules
        try:
            process = context.Process(target=_call, args=(cloudpickle.dumps(work), *args), daemon=True)
        finally:
            cloudpickle.unregister_pickle_by_value(module)
    process.start()
    return process


def _call(pickled: bytes, *args: Any) -> None:
    cloudpickle.loads(pickled)(*args)
