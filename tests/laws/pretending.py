"""Train recipes on torch's meta device, where everything that would make the host wait for a GPU raises.

pretending.py FILE: FILE is a JSON list with, for each run, the recipe's file, its flags, and the file for the number of
silent steps and the copies to the device outside the loader.

The meta device replaces the GPU: code takes the branches for a GPU, and tensors have no values, so that reading one,
counting true elements, or copying to the host raises.
"""

import json
import sys
import traceback
from collections import Counter
from contextlib import ExitStack, contextmanager
from pathlib import Path
from unittest.mock import patch

import torch
from accelerate.state import AcceleratorState, PartialState
from torch.utils._python_dispatch import TorchDispatchMode

import app.run
import app.tasks.language.attention as attention
from app import parse
from app.distributed.accelerator import Accelerator
from app.distributed.preemption import Preemption
from app.sampling.triggers import Triggers

SILENT = 3
META = torch.device("meta")


class Pretending(Accelerator):
    """Make runs train on the meta device."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.state.device = PartialState._shared_state["device"] = META


class Copies(TorchDispatchMode):
    """Count copies from the host to the device, by the project's line that makes them."""

    def __init__(self):
        super().__init__()
        self.lines: Counter[str] = Counter()
        self.in_step = False

    def __enter__(self):
        self.in_step = True
        return super().__enter__()

    def __exit__(self, *error):
        self.in_step = False
        return super().__exit__(*error)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        found = function(*args, **(kwargs or {}))
        if function in (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default):
            here = [each.device.type for each in args if isinstance(each, torch.Tensor)]
            if "cpu" in here and isinstance(found, torch.Tensor) and found.device == META:
                self.note()
        return found

    def note(self) -> None:
        """Remember the innermost line outside torch."""
        frames = [each for each in traceback.extract_stack() if "/torch/" not in each.filename]
        self.lines["; ".join(f"{Path(each.filename).name}:{each.name}" for each in frames[-3:-1])] += 1


@contextmanager
def pretending(copies: Copies):
    """Make runs train on the meta device, and log, save and evaluate nothing."""
    original, made = app.run.Run.batches, torch.tensor
    done = []

    class Done(BaseException):
        """Leave a run after enough silent steps."""

    def batches(run, *args, **kwargs):
        steps = original(run, *args, **kwargs)
        while True:
            # The loader copies to the device ahead of need: these copies are intended.
            batch = next(steps)
            done.append(run.steps_done)
            if run.steps_done > SILENT:
                raise Done
            with copies:
                yield batch

    def tensor(data, **kwargs):
        if copies.in_step and torch.device(kwargs.get("device") or "cpu") == META:
            copies.note()
        return made(data, **kwargs)

    changes = [
        patch.object(app.run, "Accelerator", Pretending),
        patch.object(AcceleratorState, "_check_initialized", lambda *known: None),  # the profile says CPU
        patch.object(app.run.Run, "batches", batches),
        patch.object(Triggers, "reads_losses", lambda due, step: False),
        patch.object(Preemption, "_hold_back", lambda stopping: 2),
        patch("app.training.optim.building.FUSED", ()),  # torch accepts only devices that its fused kernels know
        patch.object(torch, "tensor", tensor),
        patch.object(attention, "_lacks", lambda *known: ""),
        patch("app.tasks.language.attention_functions.varlen_attention", lambda: (like_varlen, True)),
    ]
    try:
        with ExitStack() as stack:
            for change in changes:
                stack.enter_context(change)
            yield done
    except Done:
        return
    finally:
        PartialState._shared_state["device"] = torch.device("cpu")


def like_varlen(query, key, value, starts, starts_k, longest, longest_k, *, scale, window_size, enable_gqa):
    """Replace torch's varlen_attn: same arguments, same shapes."""
    return query * scale + (key.sum() + value.sum() + starts.sum())


def main(commands: list) -> None:
    """Train each recipe for some silent steps."""
    from laws.many import load

    for path, flags, out in commands:
        recipe, copies = load(path), Copies()
        with pretending(copies) as done:
            recipe.main(parse(recipe.Config, flags))
        Path(out).write_text(json.dumps({"steps": len(done) - 1, "copies": dict(copies.lines)}))


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent.parent))
    main(json.loads(Path(sys.argv[1]).read_text()))
