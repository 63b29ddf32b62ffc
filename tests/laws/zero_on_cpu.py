"""Run a recipe under DeepSpeed on CPU ranks, which accelerate 1.15 does not support: zero_on_cpu.py RECIPE FLAGS...

A lone `next` between flags ends those of one run; another one follows in the same processes.

Four functions are replaced: accelerate's choice of a backend, our choice of a device, what takes a GPU, and what
compiles DeepSpeed's sums in shared memory (a minute; sums are gloo's without). Nothing else is.
"""

import importlib
import itertools
import os
import sys

os.environ["DS_ACCELERATOR"] = "cpu"

import accelerate.state
from accelerate.utils import DistributedType

import app.distributed.accelerator
from app import parse
from app.distributed import environment
from laws.many import load

if __name__ == "__main__":
    accelerate.state.PartialState._prepare_backend = lambda *_: ("gloo", DistributedType.MULTI_CPU)
    app.distributed.accelerator._on_cpu = lambda: False
    # Its package's attribute of that name is torch itself.
    importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None
    environment.take_gpu = lambda: None
    environment.report_user_errors()
    recipe = load(sys.argv[1])
    for ends, flags in itertools.groupby(sys.argv[2:], lambda word: word == "next"):
        if not ends:
            recipe.main(parse(recipe.Config, list(flags)))
