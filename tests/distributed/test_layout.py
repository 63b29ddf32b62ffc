"""Where a process stands: data ranks, and checkpoints that are bound to a layout."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from app import RunConfig, UserError
from app.distributed.accelerator import Accelerator
from app.distributed.batch_norm import note, synchronised
from app.distributed.layout_record import Layout
from app.launching.profiles import Profile

FSDP = Layout(wrapping="FSDP2", processes=4, data_ranks=4, precision="bf16", device="cpu")
ZERO = replace(FSDP, wrapping="DeepSpeed ZeRO-2")


@pytest.mark.parametrize("per_data_rank, expected", [(1, [0, 1, 2, 3, 4, 5, 6, 7]), (2, [0, 0, 1, 1, 2, 2, 3, 3])])
def test_tensor_parallel_neighbours_are_one_data_rank(per_data_rank, expected):
    """accelerate's mesh puts tensor parallelism last, so its members are neighbours, and see the same samples."""
    mesh = SimpleNamespace(non_data_parallel_size=per_data_rank)
    places = [SimpleNamespace(process_index=i, num_processes=8, parallelism_config=mesh) for i in range(8)]
    for place in places:
        place.ranks_per_data_rank = Accelerator.ranks_per_data_rank.fget(place)
    assert [Accelerator.data_rank.fget(place) for place in places] == expected
    assert {Accelerator.data_ranks.fget(place) for place in places} == {8 // per_data_rank}


@pytest.mark.parametrize("name", ["cp", "sp"])
def test_a_mesh_that_splits_what_is_not_split_here_is_refused(monkeypatch, name):
    """By a run as by `plan`, `prove` and `doctor`, which ask the profile; accelerate would have words of its own."""
    monkeypatch.setenv("ACCELERATE_USE_PARALLELISM_CONFIG", "true")
    monkeypatch.setenv(f"PARALLELISM_CONFIG_{name.upper()}_SIZE", "2")
    with pytest.raises(UserError, match=f"{name}_size"):
        Accelerator()
    settings = {"parallelism_config": {f"parallelism_config_{name}_size": 2}}
    (trouble, fix), *_ = Profile(Path("p.yaml"), "p", 2, {"distributed_type": "MULTI_GPU", **settings}).troubles
    assert f"{name}_size 2" in trouble and fix == "set it to 1"


def test_checkpoints_of_deepspeed_are_bound():
    replace(FSDP, processes=2, wrapping="DDP").check_reads(FSDP)
    ZERO.check_reads(replace(ZERO))
    for saved, here in [(ZERO, FSDP), (FSDP, ZERO), (ZERO, replace(ZERO, processes=8))]:
        with pytest.raises(UserError, match="bound"):
            here.check_reads(saved)


def test_a_layout_in_short():
    assert str(FSDP) == "4 data ranks, FSDP2, bf16, cpu"


@pytest.mark.parametrize("ranks, micros, said", [(1, 4, True), (2, 4, True), (1, 1, False)])
def test_what_batchnorm_means_is_said(ranks, micros, said):
    place = SimpleNamespace(data_ranks=ranks, device=torch.device("cpu"))
    config = RunConfig(global_batch=4 * micros, micro_batch=4)
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.GroupNorm(1, 2))
    told = note(model, place, config)
    assert (told is not None and "1 is a BatchNorm: each micro-batch" in told.text) == said
    told = note(nn.SyncBatchNorm.convert_sync_batchnorm(model), place, config)
    assert (told is not None and told.warns and "1 is a SyncBatchNorm" in told.text) == said
    assert note(model[2], place, config) is None


def test_batchnorm_is_synchronised_on_gpus_alone():
    with pytest.raises(UserError, match=r"--run\.sync-bn.*GPUs alone.*GroupNorm"):
        synchronised(nn.BatchNorm2d(2), SimpleNamespace(device=torch.device("cpu")))
    model = synchronised(nn.Sequential(nn.BatchNorm2d(2)), SimpleNamespace(device=torch.device("cuda")))
    assert type(model[0]) is nn.SyncBatchNorm
