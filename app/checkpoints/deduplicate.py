"""Who keeps what of the tensors that several processes have alike."""

from collections import defaultdict

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from app.distributed import collectives
from app.sampling.hashing import hash_of


def divide(sizes: list[int], parts: int, taken: int = 0) -> tuple[list[int], list[int]]:
    """Give each item to one of `parts`, nearly evenly: the largest first, always to who has least (Graham, 1969).

    Args:
        taken: what the first part has already.

    Returns:
        For each item the part that it goes to; and what each part then has, the fullest at most a largest item more
        than the mean.
    """
    totals, owners = [taken] + [0] * (parts - 1), [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        owners[index] = totals.index(min(totals))
        totals[owners[index]] += sizes[index]
    return owners, totals


def own(tensors: dict[str, Tensor], mains: set[str], tied: dict[str, str]) -> dict[str, Tensor]:
    """Choose what this process saves, so that each tensor, or shard of one, is saved by one process. All take part.

    Ranks that do not have the same tensors keep all of their own, but `mains`.

    Args:
        mains: what the main process alone saves.
        tied: further names of a tensor, each with its first; they stay together.
    """
    if collectives.alone():
        return tensors
    kept = {n: tensor for n, tensor in tensors.items() if n in mains and collectives.rank() == 0}
    shared = {n: tensor for n, tensor in tensors.items() if n not in mains}
    found = hash_of([[n, str(t.dtype), list(t.shape)] for n, t in shared.items()])
    everywhere = collectives.gather((found, sum(t.nbytes for t in kept.values())))
    if len({there for there, _ in everywhere}) > 1:
        return kept | shared
    families = defaultdict(list)
    for name in shared.keys() - tied.keys():
        families[_copies(shared[name])].append(name)
    owned = set()
    for (sharded, count, which), names in families.items():
        names.sort()
        # By whole sizes, which all ranks know: shards of one tensor are nearly alike.
        sizes = [shared[name].numel() * shared[name].element_size() for name in names]
        owners, _ = divide(sizes, count, 0 if sharded else everywhere[0][1])
        owned |= {name for name, owner in zip(names, owners, strict=True) if owner == which}
    return kept | {n: tensor for n, tensor in shared.items() if tied.get(n, n) in owned}


def _copies(tensor: Tensor) -> tuple[bool, int, int]:
    """Tell whether a tensor is sharded, how many processes have this process's part, and which of them this one is."""
    if not isinstance(tensor, DTensor):
        return False, dist.get_world_size(), dist.get_rank()
    count, which = 1, 0
    mesh = tensor.device_mesh
    for size, placement, place in zip(mesh.shape, tensor.placements, mesh.get_coordinate(), strict=True):
        if placement.is_replicate():
            count, which = count * size, which * size + place
    return True, count, which
