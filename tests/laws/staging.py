"""Stage and write states on any layout, and count what each process staged: staging.py FOLDER [COMMANDS].

COMMANDS: of four processes, recipes to run then, in a file as for many.py; and the numbers of parts.py are counted.
"""

import json
import sys
from pathlib import Path

import many
import parts
import torch
from torch import nn

from app.distributed import collectives
from app.distributed.accelerator import Accelerator
from app.distributed.naming import local_shard
from app.distributed.state import sharded


class Layer(nn.Linear):
    """A separate class, because FSDP shards layers by class."""


class Model(nn.Module):
    """Layers with rows that two processes cannot share evenly, a shared weight, statistics, and one number."""

    def __init__(self):
        super().__init__()
        self.into, self.out = nn.Embedding(35, 13), nn.Linear(13, 35, bias=False)
        self.out.weight = self.into.weight
        self.layers = nn.ModuleList(Layer(13, 13) for _ in range(8))
        self.norm = nn.BatchNorm1d(13)
        self.scale = nn.Parameter(torch.tensor([1.5]))

    def forward(self, ids):
        x = self.into(ids)
        for layer in self.layers:
            x = x + layer(x)
        return self.out(self.norm(x) * self.scale)


class Counting:
    """A stager that copies, and counts each storage once."""

    def stage(self, tensors):
        """Copy tensors by name."""
        storages = {
            local_shard(t).data_ptr(): local_shard(t).nbytes for t in tensors.values() if local_shard(t).numel()
        }
        self.names, self.bytes = sorted(tensors), sum(storages.values())
        return {name: tensor.clone() for name, tensor in tensors.items()}


class Own:
    """A registered object, of another size on each rank."""

    def __init__(self, rows: int):
        self.table = torch.arange(rows)

    def state_dict(self):
        """Return the table."""
        return {"table": self.table}

    def load_state_dict(self, found):
        """Take a table."""
        self.table = found["table"]


def main(folder: Path, commands: str = "") -> None:
    """Write a state after a step, change it, and read it again; then with a state that only one rank has."""
    accelerator = Accelerator()
    torch.manual_seed(3)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    own = Own(5 + accelerator.process_index)
    accelerator.register_for_checkpointing(own)
    torch.manual_seed(4 + accelerator.process_index)
    ids = torch.randint(35, (9,))
    accelerator.backward(nn.functional.cross_entropy(model(ids), ids))
    optimizer.step()
    report = {}
    for name in ("alike", "apart"):
        if name == "apart" and accelerator.process_index == accelerator.num_processes - 1:
            next(iter(optimizer.state.values()))["more"] = torch.full((1,), 7.0)
        stager = Counting()
        snapshot = sharded.snapshot(accelerator, stager)
        before = [local_shard(p).clone() for p in model.parameters()]
        moments = [local_shard(s["exp_avg"]).clone() for s in optimizer.state.values()]
        snapshot.write(str(folder / name))
        with torch.no_grad():
            for p in (*model.parameters(), *(s["exp_avg"] for s in optimizer.state.values())):
                p.zero_()
        collectives.gather(None)
        sharded.load(accelerator, str(folder / name))
        same = all(a.equal(local_shard(b)) for a, b in zip(before, model.parameters(), strict=True))
        again = (local_shard(s["exp_avg"]) for s in optimizer.state.values())
        same = same and all(a.equal(b) for a, b in zip(moments, again, strict=True))
        report[name] = {"bytes": stager.bytes, "names": stager.names, "same": same, "table": own.table.tolist()}
    (folder / f"rank{accelerator.process_index}.json").write_text(json.dumps(report))
    if commands:
        parts.main(folder)
        many.main(json.loads(Path(commands).read_text()))
    accelerator.end_training()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
