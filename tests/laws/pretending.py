"""Train recipes on a device that has no numbers: whatever would make the host wait for one raises.

pretending.py FILE, where FILE holds a JSON list with, for each time, a recipe's file, its flags, and where to write how
many silent steps were made and what was copied to the device outside the loader.

torch's meta device stands for the GPU: code takes the branches of a GPU, and reading a value, finding out how many
elements are true, or copying to the host is impossible there.
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
    """Take the meta device for the one to train on."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.state.device = PartialState._shared_state["device"] = META


class Copies(TorchDispatchMode):
    """Count copies from the host to the device by the line of this project that makes them."""

    def __init__(self):
        super().__init__()
        self.lines: Counter[str] = Counter()

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
    """Have runs train on the meta device, and measure, save and evaluate nothing."""
    original, made = app.run.Run.batches, torch.tensor
    done = []

    class Done(BaseException):
        """Leave a run after enough silent steps."""

    def batches(run, *args, **kwargs):
        steps = original(run, *args, **kwargs)
        while True:
            # Copies to the device that are made ahead of need, by the loader, are what is meant to be.
            batch = next(steps)
            done.append(run.steps_done)
            if run.steps_done > SILENT:
                raise Done
            with copies:
                yield batch

    def tensor(data, **kwargs):
        if torch.device(kwargs.get("device") or "cpu") == META:
            copies.note()
        return made(data, **kwargs)

    changes = [
        patch.object(app.run, "Accelerator", Pretending),
        patch.object(AcceleratorState, "_check_initialized", lambda *known: None),  # the profile says CPU
        patch.object(app.run.Run, "batches", batches),
        patch.object(Triggers, "measures", lambda due, step: False),
        patch.object(Preemption, "_hold_back", lambda stopping: 2),
        patch("app.training.optimizer.FUSED", ()),  # torch's fused kernels know devices by their names
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
    """Take and give what torch's varlen_attn does."""
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
