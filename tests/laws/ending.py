"""End a program, with or without an error, after a run that finished: `ending.py FOLDER well|badly`."""

import sys
from dataclasses import dataclass, field

from app import OptimConfig, Run, RunConfig, parse


@dataclass
class Config:
    """One step."""

    run: RunConfig = field(default_factory=lambda: RunConfig(steps=1, global_batch=4, micro_batch=1, trackers=()))


class Late:
    """Print whether the interpreter shuts down by itself."""

    def __del__(self):
        print("the interpreter ended")


if __name__ == "__main__":
    import torch

    folder, how = sys.argv[1:]
    late = Late()
    with Run(parse(Config, ["--run.dir", folder])) as run:
        model, optimizer = run.prepare(torch.nn.Linear(2, 1), OptimConfig())
        for batch in run.batches([torch.ones(2)] * 4, torch.stack):
            for micro in batch.micros(model):
                run.backward(model(micro.inputs).square().mean(), micro)
            run.step(optimizer)
    print("done")
    if how == "badly":
        raise RuntimeError("after the run")
