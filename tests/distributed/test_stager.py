"""app.distributed.state.staging: copies that training cannot change, in memory that is kept."""

import subprocess
import sys

import torch
from torch import nn

from app.distributed.state.staging import Stager


def test_copies_stay_as_they_were_in_memory_that_is_kept():
    """Of parameters, views, other types, empty tensors and other strides; to the bit, not-a-number too."""
    stager, wide = Stager(), torch.randn(6, 8)
    tensors = {
        "weight": nn.Parameter(torch.randn(5, 3)),
        "view": wide[1:4, ::2],
        "half": torch.randn(7).bfloat16(),
        "count": torch.tensor(3.0),
        "flags": torch.tensor([True, False]),
        "none": torch.empty(0, 4),
        "lost": torch.tensor([torch.nan, torch.inf, -0.0]),
        "image": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    }
    places = []
    for turn in range(3):
        before = {name: tensor.detach().clone() for name, tensor in tensors.items()}
        copies = stager.stage(tensors)
        with torch.no_grad():
            for tensor in tensors.values():
                tensor.fill_(turn)
        assert list(copies) == list(tensors)
        for name, copy in copies.items():
            assert copy.dtype == before[name].dtype and not copy.requires_grad
            assert copy.equal(before[name]) or (name == "lost" and copy.isnan().equal(before[name].isnan()))
            # torch writes the whole memory of a tensor.
            assert copy.untyped_storage().nbytes() == copy.nbytes
        assert copies["image"].is_contiguous(memory_format=torch.channels_last)
        places.append({name: copy.data_ptr() for name, copy in copies.items()})
    assert places[0] == places[1] == places[2]


def test_tied_tensors_are_copied_once_and_parted_when_they_part():
    stager, shared = Stager(), torch.ones(4)
    copies = stager.stage({"in": shared, "out": shared.view(4), "part": shared[:2]})
    assert copies["in"].data_ptr() == copies["out"].data_ptr() != copies["part"].data_ptr()
    copies = stager.stage({"in": shared, "out": torch.zeros(4), "part": shared[:2]})
    assert copies["in"].tolist() == [1.0] * 4 and copies["out"].tolist() == [0.0] * 4
    copies = stager.stage({"out": shared, "in": shared})
    assert copies["in"].tolist() == copies["out"].tolist() == [1.0] * 4


def test_what_changes_its_shape_or_type_gets_other_memory_and_what_is_gone_has_none():
    stager = Stager()
    stager.stage({"a": torch.ones(4), "b": torch.ones(2)})
    copies = stager.stage({"a": torch.ones(5), "c": torch.ones(2, dtype=torch.int64)})
    assert copies["a"].shape == (5,) and copies["c"].dtype == torch.int64
    assert set(stager._copies) == {"a", "c"}


def test_a_shard_of_a_gpu_is_written_from_the_host(tmp_path):
    """A copy keeps the mesh of its original, which is of GPUs; what writes it must not ask for one."""
    script = """
import sys
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import DeviceMesh, DTensor, Shard, distribute_tensor
from app.distributed.state.staging import Stager
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
whole = torch.arange(12.0).view(4, 3)
sharded = distribute_tensor(whole, DeviceMesh("cpu", [0]), [Shard(0)])
sharded._spec.mesh = DeviceMesh("cuda", [0], _init_backend=False)
staged = Stager().stage({"x": sharded})
whole.zero_(), sharded._local_tensor.zero_()
assert isinstance(staged["x"], DTensor) and staged["x"].device_mesh.device_type == "cuda"
dcp.save(staged, storage_writer=dcp.FileSystemWriter(sys.argv[1], per_thread_copy_ahead=0))
found = {"x": torch.zeros(4, 3)}
dcp.load(found, storage_reader=dcp.FileSystemReader(sys.argv[1]))
assert found["x"].flatten().tolist() == list(range(12)), found
"""
    result = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
