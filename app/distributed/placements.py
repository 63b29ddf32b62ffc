"""Which part of a DTensor this rank has, and whether other ranks have the same: asked of its placements only here.

torch 2.13's `is_shard` denies the placements of FSDP2 over tensor parallelism, which cut rows twice.
"""

from torch.distributed.tensor import DTensor, Placement


def cut_dimension(placement: Placement) -> int | None:
    """Return the dimension of a tensor that a placement cuts over ranks; None where each of them has a copy.

    Raises:
        ValueError: it is neither, as where each rank has a term of a sum.
    """
    if placement.is_replicate():
        return None
    dimension = getattr(placement, "dim", None)
    if dimension is None:
        raise ValueError(f"a tensor with the placement {placement} is neither cut nor copied: sum it first")
    return dimension


def cut_along(tensor: DTensor) -> list[int]:
    """Return the dimensions of the mesh over which a tensor is cut."""
    return [place for place, each in enumerate(tensor.placements) if cut_dimension(each) is not None]


def _coordinate(tensor: DTensor) -> tuple[int, ...]:
    """Return where this rank is in the tensor's mesh, of which it is a part."""
    here = tensor.device_mesh.get_coordinate()
    assert here is not None
    return tuple(here)


def coordinates(tensor: DTensor) -> list[int]:
    """Return where this rank's part is in the whole; ranks with the same coordinates have copies of each other."""
    here = _coordinate(tensor)
    return [here[place] for place in cut_along(tensor)]


def copies(tensor: DTensor) -> tuple[int, int]:
    """Return how many ranks have the part that this rank has, and which of them it is; the first one is 0."""
    cut, (count, which) = cut_along(tensor), (1, 0)
    for place, (size, here) in enumerate(zip(tensor.device_mesh.shape, _coordinate(tensor), strict=True)):
        if place not in cut:
            count, which = count * size, which * size + here
    return count, which
