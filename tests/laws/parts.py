"""Count the numbers of tensors that are cut in all ways over four processes."""

import itertools
import json
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from app.distributed import placements

WHOLE = torch.arange(64.0).reshape(8, 8)
MESHES = [(4,), (2, 2)]


def tensors():
    """Yield a name and a tensor for each mesh and placements; FSDP2 over tensor parallelism cuts rows twice."""
    for sizes in MESHES:
        mesh = init_device_mesh("cpu", sizes)
        for how in itertools.product((Replicate(), Shard(0), Shard(1)), repeat=len(sizes)):
            whole = DTensor.from_local(WHOLE, mesh, [Replicate()] * len(sizes), run_check=False)
            yield f"{sizes} {how}", whole.redistribute(mesh, how)
        if len(sizes) == 2:
            first, second = mesh.get_coordinate()
            rows = WHOLE.chunk(2)[second].chunk(2)[first]
            how = (_StridedShard(0, split_factor=2), Shard(0))
            yield f"{sizes} {how}", DTensor.from_local(rows, mesh, how, run_check=False, shape=(8, 8), stride=(8, 1))


def main(folder: Path) -> None:
    """Write how often each number is counted over all ranks, by mesh and placements; and what was refused."""
    counted = {}
    for name, tensor in tensors():
        counts, (ranks, which) = torch.zeros(64), placements.copies(tensor)
        if which == 0:
            counts[tensor.to_local().flatten().long()] += 1
        dist.all_reduce(counts)
        found = [None] * 4
        dist.all_gather_object(found, (placements.coordinates(tensor), tensor.to_local().flatten().tolist()))
        alike = all((a[0] == b[0]) == (a[1] == b[1]) for a, b in itertools.combinations(found, 2))
        counted[name] = [*sorted(set(counts.tolist())), ranks, alike]
    term = DTensor.from_local(WHOLE, init_device_mesh("cpu", (4,)), [Partial()], run_check=False)
    for ask in (placements.copies, placements.coordinates, placements.cut_along):
        try:
            ask(term)
        except ValueError as error:
            counted[ask.__name__] = str(error)
    if dist.get_rank() == 0:
        (folder / "counted.json").write_text(json.dumps(counted))
