"""Run a recipe under DeepSpeed on CPU ranks, which accelerate 1.15 does not support: zero_on_cpu.py RECIPE FLAGS...

Two functions are replaced: accelerate's choice of a backend, and our choice of a device. Nothing else is.
"""

import os
import sys

os.environ["DS_ACCELERATOR"] = "cpu"

import accelerate.state
from accelerate.utils import DistributedType

import app.distributed.accelerator
from app import parse
from app.distributed.environment import report_user_errors
from laws.many import load

if __name__ == "__main__":
    accelerate.state.PartialState._prepare_backend = lambda *_: ("gloo", DistributedType.MULTI_CPU)
    app.distributed.accelerator._on_cpu = lambda: False
    report_user_errors()
    recipe = load(sys.argv[1])
    recipe.main(parse(recipe.Config, sys.argv[2:]))
