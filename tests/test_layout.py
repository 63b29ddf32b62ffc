"""Where a process stands: data ranks, and checkpoints that are bound to a layout."""

from types import SimpleNamespace

import pytest

from app import UserError
from app.accelerator import Accelerator
from app.layout import check_bound, in_short

FSDP = {"wrapping": "FSDP2", "processes": 4, "data_ranks": 4, "precision": "bf16", "device": "cpu"}
ZERO = {**FSDP, "wrapping": "DeepSpeed ZeRO-2"}


@pytest.mark.parametrize("per_data_rank, expected", [(1, [0, 1, 2, 3, 4, 5, 6, 7]), (2, [0, 0, 1, 1, 2, 2, 3, 3])])
def test_tensor_parallel_neighbours_are_one_data_rank(per_data_rank, expected):
    """accelerate's mesh puts tensor parallelism last, so its members are neighbours, and see the same samples."""
    mesh = SimpleNamespace(non_data_parallel_size=per_data_rank)
    places = [SimpleNamespace(process_index=i, num_processes=8, parallelism_config=mesh) for i in range(8)]
    for place in places:
        place._per_data_rank = Accelerator._per_data_rank.fget(place)
    assert [Accelerator.data_rank.fget(place) for place in places] == expected
    assert {Accelerator.data_ranks.fget(place) for place in places} == {8 // per_data_rank}


def test_checkpoints_of_deepspeed_are_bound():
    check_bound(FSDP, {**FSDP, "processes": 2, "wrapping": "DDP"})
    check_bound(ZERO, dict(ZERO))
    for saved, here in [(ZERO, FSDP), (FSDP, ZERO), (ZERO, {**ZERO, "processes": 8})]:
        with pytest.raises(UserError, match="bound"):
            check_bound(saved, here)


def test_a_layout_in_short():
    assert in_short(FSDP) == "4 data ranks, FSDP2, bf16, cpu"
