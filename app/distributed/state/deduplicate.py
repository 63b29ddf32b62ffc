"""Which process saves which of the tensors that several processes have equal copies of."""

from collections import defaultdict

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from app.distributed import collectives, placements
from app.sampling.hashing import hash_of


def divide(sizes: list[int], parts: int, taken: int = 0) -> tuple[list[int], list[int]]:
    """Divide items among `parts` nearly evenly: the largest first, each to the part that has least (Graham, 1969).

    Args:
        taken: the size that the first part has already.

    Returns:
        The part of each item; and the size of each part, which exceeds the mean by the largest item at most.
    """
    totals, owners = [taken] + [0] * (parts - 1), [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        owners[index] = totals.index(min(totals))
        totals[owners[index]] += sizes[index]
    return owners, totals


def share_of_this_rank(tensors: dict[str, Tensor], mains: set[str], tied: dict[str, str]) -> dict[str, Tensor]:
    """Choose what this process saves, so that each tensor or shard is saved by one process. Every rank takes part.

    Where ranks do not have the same tensors, each saves all of its own; `mains` are still saved only once.

    Args:
        mains: names of the tensors that only the main process saves.
        tied: from each further name of a tensor to its first name; one process saves them together.
    """
    if collectives.alone():
        return tensors
    of_main = {n: tensor for n, tensor in tensors.items() if n in mains and collectives.rank() == 0}
    shared = {n: tensor for n, tensor in tensors.items() if n not in mains}
    digest = hash_of([[n, str(t.dtype), list(t.shape)] for n, t in shared.items()])
    of_ranks = collectives.gather((digest, sum(t.nbytes for t in of_main.values())))
    if len({digest for digest, _ in of_ranks}) > 1:
        return of_main | shared
    families = defaultdict(list)
    for name in shared.keys() - tied.keys():
        families[_copies(shared[name])].append(name)
    saved_here = set()
    for (sharded, count, which), names in families.items():
        names.sort()
        # All ranks know the sizes of whole tensors; the shards of one tensor have nearly equal sizes.
        sizes = [shared[name].numel() * shared[name].element_size() for name in names]
        owners, _ = divide(sizes, count, 0 if sharded else of_ranks[0][1])
        saved_here |= {name for name, owner in zip(names, owners, strict=True) if owner == which}
    return of_main | {n: tensor for n, tensor in shared.items() if tied.get(n, n) in saved_here}


def _copies(tensor: Tensor) -> tuple[bool, int, int]:
    """Return whether a tensor is sharded, how many processes have this process's part, and which of them it is."""
    everywhere = False, dist.get_world_size(), dist.get_rank()
    if not isinstance(tensor, DTensor):
        return everywhere
    count, which = placements.copies(tensor)
    return everywhere if count == dist.get_world_size() else (True, count, which)
