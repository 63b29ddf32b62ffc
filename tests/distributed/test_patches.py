"""Canaries: the private names of other packages that app uses are there, and do what app relies on.

Each test is on real objects. Where one fails, its message names the package, its version here, and the private name.
"""

import ast
import functools
import importlib.metadata
import inspect
import json
import sys
from collections import defaultdict
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from support.launching import PROFILES, ROOT, launch, python, run
from torch import nn

from app.distributed import accelerate_patches

# By file of app: the private names of other packages that it uses. A new one needs a line here, and a canary below or
# in the test that is named.
PRIVATE = {
    "distributed/accelerate_patches.py": {
        *("_models", "_optimizers", "_schedulers", "_custom_objects", "_is_package_available", "_shared_state"),
        *("_validate_accelerator", "_clip_grad_norm_dtensor_aware", "_rebuild_buckets", "_get_fsdp_state"),
        *("_lazy_init", "_spec", "_is_in_bad_fork", "_get_default_store", "_world", "_set_pg_timeout"),
        *("_C", "_distributed_c10d", "_dump_fr_trace", "_dump_nccl_trace", "_validate_launch_command"),
        *("_check_reducer_finalized", "_prepare_tp", "_fsdp_param_group", "_all_gather_comm", "_param_fqn"),
        *("_training_state", "_engine_run_backward"),
    },
    "commands/tokenize/sources.py": {"_fingerprint"},  # as app/data, see DATASETS
    "distributed/batch_norm.py": {"_BatchNorm"},
    "distributed/fsdp_autocast.py": {"_parameters"},
    "distributed/fsdp_calls.py": {"_parameters"},
    "distributed/inner_gradients.py": {"_pytree"},
    "distributed/regional_compilation.py": {"_dynamo", "_inductor"},  # and tests/laws/test_regions.py
    "distributed/tensor_parallel/layers.py": {"_parameters"},
    "distributed/running_statistics.py": {"_foreach_zero_", "_foreach_copy_"},
    "training/optim/averages.py": {"_foreach_copy_", "_foreach_sub", "_foreach_mul_", "_foreach_add_"},
    "training/exact/grid.py": {"_parameters", "_scale"},
    "training/exact/gradients.py": {"_foreach_mul_"},
    "training/exact/layer_inputs.py": {"_pytree"},
    "training/optim/odd_parameters.py": {"_parameters"},
    "training/scores/torchmetrics_adapter.py": {"_defaults", "_reductions", "_to_sync", "_update_count"},
    "training/loop/recompiles.py": set(),  # torch._dynamo.utils by its text; tests/training/test_recompiles.py
    "training/loop/before_step.py": {"_buffers", "_non_persistent_buffers_set", "_parameters"},
    # tests/distributed/test_reader.py
    "distributed/state/safe_reader.py": {"_MEM_FORMAT_ENCODING", "_StorageInfo", "_get_metadata_path"},
    "commands/plan/writing_nothing.py": {"_open_zipfile_writer"},
    "commands/plan/meta_tensors.py": {"_parameters", "_buffers"},
    "commands/plan/live_storage.py": {"_cdata", "_python_dispatch"},
    # tests/commands/test_footprint.py compares all that these do with real tensors.
    "commands/plan/simulated_device.py": {
        *("_C", "_IncludeDispatchKeyGuard", "_ExcludeDispatchKeyGuard", "_destroy", "_is_view", "_schema"),
        *("_dispatch_has_kernel_for_dispatch_key", "_scaled_dot_product_attention_math"),
        *("_scaled_dot_product_efficient_attention", "_scaled_dot_product_flash_attention"),
        *("_scaled_dot_product_flash_attention_for_cpu", "_to_copy"),
    },
    # The same tests count what these keep, on the host and here.
    "tasks/activation_checkpointing.py": {
        *("_gradient_checkpointing_func", "_flash_attention_forward", "_scaled_dot_product_flash_attention"),
        *("_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_efficient_attention"),
        "_scaled_dot_product_cudnn_attention",
    },
    "tasks/language/attention.py": {"_attn_implementation", "_dynamo"},
    "tasks/language/attention_functions.py": {"_attn_implementation"},
}
DATASETS = {"_fingerprint", "_indices"}  # of a datasets.Dataset; throughout app/data


def canary(package: str, *names: str):
    """Have a test say, where it fails, which private names of which version of a package it is about."""

    def wrap(test):
        @functools.wraps(test)
        def told(*args, **kwargs):
            try:
                return test(*args, **kwargs)
            except Exception as error:
                version = importlib.metadata.version(package)
                pytest.fail(
                    f"{package} {version}: {', '.join(names)} is gone or does something else: "
                    f"{type(error).__name__}: {error}"
                )

        return told

    return wrap


def private_names() -> dict[str, set[str]]:
    """Find, by file of app, the private names that no file of app defines."""
    trees = {path: ast.parse(path.read_text()) for path in sorted((ROOT / "app").rglob("*.py"))}
    own = {path: _defined(tree) for path, tree in trees.items()}
    anywhere = set().union(*own.values())
    known = set().union(*PRIVATE.values())
    found = defaultdict(set)
    for path, tree in trees.items():
        names = {name for node in ast.walk(tree) for name in _used(node)} - own[path]
        found[str(path.relative_to(ROOT / "app"))] = {n for n in names if n in known or n not in anywhere}
    return {name: names for name, names in found.items() if names}


def _defined(tree: ast.AST) -> set[str]:
    named = {n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.ClassDef)}
    stored = [n for n in ast.walk(tree) if isinstance(getattr(n, "ctx", None), ast.Store)]
    named |= {n.id for n in stored if isinstance(n, ast.Name)}
    return named | {n.attr for n in stored if isinstance(n, ast.Attribute) and getattr(n.value, "id", "") == "self"}


def _used(node: ast.AST) -> list[str]:
    parts: list[str] = []
    if isinstance(node, ast.Attribute):
        parts = [node.attr]
    elif isinstance(node, ast.ImportFrom):
        parts = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
    elif isinstance(node, ast.Import):
        parts = [part for alias in node.names for part in alias.name.split(".")]
    public = {"_asdict", "_replace", "_exit", "_typeshed"}  # documented: of named tuples, os._exit, for type checkers
    return [p for p in parts if p.startswith("_") and not p.endswith("__") and p not in public]


def test_every_private_name_is_listed():
    found = private_names()
    data = {name: names for name, names in found.items() if name.startswith("data/")}
    assert set().union(*data.values()) == DATASETS
    rest = {name: names for name, names in found.items() if name not in data}
    assert rest == {name: names for name, names in PRIVATE.items() if names}


@pytest.fixture
def alone(tmp_path):
    """Give a process group of one rank, over gloo."""
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield store
    dist.destroy_process_group()


@canary("accelerate", "Accelerator._models", "_optimizers", "_schedulers", "_custom_objects")
def test_what_accelerate_has_prepared():
    from accelerate import Accelerator

    class Registered:
        def state_dict(self):
            return {}

        def load_state_dict(self, state):
            pass

    accelerator, model, extra = Accelerator(cpu=True), nn.Linear(2, 2), Registered()
    own = torch.optim.SGD(model.parameters())
    model, optimizer, schedule = accelerator.prepare(model, own, torch.optim.lr_scheduler.StepLR(own, 1))
    accelerator.register_for_checkpointing(extra)
    found = accelerate_patches.prepared(accelerator)
    assert found.models == [model] and found.optimizers == [optimizer]
    assert found.schedulers == [schedule] and found.registered == [extra]


@canary("accelerate", "Accelerator._prepare_tp", "AcceleratorState.parallelism_config")
def test_a_model_that_is_split_already_is_left_alone():
    from accelerate import Accelerator
    from accelerate.utils import ParallelismConfig

    accelerator = Accelerator(cpu=True)
    assert inspect.ismethod(accelerator._prepare_tp)
    mesh = accelerator.state.parallelism_config = ParallelismConfig(tp_size=2)
    model = nn.Linear(2, 2)
    with pytest.raises((NotImplementedError, AttributeError, ValueError)):
        accelerator.prepare(model)  # what the patch is for
    with accelerate_patches.split_already(accelerator):
        assert accelerator.prepare(model) is model
    assert accelerator.state.parallelism_config is mesh
    accelerator.state.parallelism_config = None


@canary("accelerate", "utils.imports._is_package_available")
def test_looking_for_a_package_is_remembered():
    from accelerate.utils import imports

    accelerate_patches.remember_packages()
    before = imports._is_package_available.cache_info().hits
    assert imports.is_tensorboard_available() == imports.is_tensorboard_available()
    assert imports._is_package_available.cache_info().hits > before


@canary("accelerate", "InitProcessGroupKwargs.to_kwargs")
def test_a_process_group_may_know_its_device():
    group = accelerate_patches.process_group(timedelta(seconds=7), torch.device("cuda", 1))
    assert group.to_kwargs() == {"timeout": timedelta(seconds=7), "device_id": torch.device("cuda", 1)}


FSDP = """
import os, sys
from datetime import timedelta
import accelerate, torch
from accelerate.utils import DistributedType
from app.distributed import accelerate_patches, fsdp
from torch import nn
from torch.distributed.tensor import DTensor

if os.environ.get("MESHED"):
    os.environ["PARALLELISM_CONFIG_DP_REPLICATE_SIZE"] = "1"
    os.environ["PARALLELISM_CONFIG_DP_SHARD_SIZE"] = "2"
plugin = fsdp.read_plugin()
accelerator = accelerate.Accelerator(cpu=True, fsdp_plugin=plugin)
rank = accelerator.process_index
# What the patch is for: without it, FSDP on CPU ranks is DDP.
assert accelerator.distributed_type == DistributedType.MULTI_CPU, accelerator.distributed_type
accelerator.state.fsdp_plugin = plugin
accelerate_patches.keep_fsdp(accelerator.state)
assert accelerator.distributed_type == accelerate.PartialState().distributed_type == DistributedType.FSDP
assert accelerator.is_fsdp2
if os.environ.get("MESHED"):
    accelerate_patches.take_mesh(accelerator, accelerate_patches.hide_mesh())
    assert accelerator.torch_device_mesh.size() == 2 and accelerator.parallelism_config.dp_shard_size == 2
model = nn.Linear(4, 4, bias=False)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
group = model._get_fsdp_state()._fsdp_param_group
assert not hasattr(group, "_reduce_dtype")  # not chosen yet
accelerate_patches.start_fsdp(model)
assert hasattr(group, "_reduce_dtype")
weight, told = model.weight, []
accelerate_patches.watch_fsdp(model, told.append)
assert isinstance(weight, DTensor) and weight.to_local().shape == (2, 4)
copy = accelerate_patches.sharded_like(weight, weight.to_local().detach().clone())
assert copy.placements == weight.placements and copy.shape == (4, 4) and not copy.requires_grad
assert torch.equal(copy.full_tensor(), weight.full_tensor())
model(torch.ones(1, 4)).sum().backward()
norm = accelerate_patches.clip_norm(accelerator, list(model.parameters()), 1.0)
assert torch.equal(norm, torch.tensor(4.0)), norm  # 16 gradients of 1
assert torch.allclose(weight.grad.full_tensor(), torch.full((4, 4), 0.25))
assert told == ["gathers", "reduces the gradients of"], told
weight.grad = None
model.set_requires_gradient_sync(False)
model(torch.ones(1, 4)).sum().backward()
accelerate_patches.take_gradients(model, reduce=False)
assert weight.grad is None and told == ["gathers", "reduces the gradients of", "gathers"]
accelerate_patches.take_gradients(model, reduce=True)
assert torch.equal(weight.grad.full_tensor(), torch.ones(4, 4)) and told[3:] == ["reduces the gradients of"], told
accelerate_patches.set_time_limit(timedelta(seconds=77), None)
print("seen", flush=True)
os._exit(0)  # gloo's threads may abort a Python that takes itself apart; a Run sees to it
"""


# With a mesh it asks for all that it asks for without one.
@pytest.mark.parametrize("meshed", [pytest.param("", marks=pytest.mark.exhaustive), "1"])
@canary(
    "accelerate",
    *("PartialState._shared_state", "ParallelismConfig._validate_accelerator", "_clip_grad_norm_dtensor_aware"),
    "Accelerator.state, or torch's FSDPModule._get_fsdp_state()._lazy_init, DTensor._spec",
)
def test_fsdp_on_cpu_ranks(tmp_path, meshed):
    script = tmp_path / "fsdp.py"
    script.write_text(FSDP)
    result = launch("fsdp_cpu", 2, script, env={"PYTHONPATH": str(ROOT), "MESHED": meshed})
    assert result.status == 0 and result.output.count("seen") == 2, result.output[-3000:]


@canary("accelerate", "PartialState._shared_state", "Accelerator._prepare_tp")
def test_split_layers_are_not_wrapped_in_bf16_either():
    """Preparing for autocast, accelerate 1.15 makes its state again, with the kind of processes of PartialState."""
    script = """
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType
from app.distributed import accelerate_patches
ours = Accelerator(cpu=True, mixed_precision="bf16")
ours.state.parallelism_config = object()
accelerate_patches._set_kind(ours.state, DistributedType.MULTI_CPU)
with accelerate_patches.split_already(ours):
    AcceleratorState()
    assert ours.distributed_type == DistributedType.NO and ours.parallelism_config is None
AcceleratorState()
assert ours.distributed_type == DistributedType.MULTI_CPU and ours.parallelism_config is not None
"""
    result = python("-c", script)
    assert result.status == 0, result.output[-3000:]


@canary("torch", "Reducer._rebuild_buckets")
def test_buckets_of_ddp_are_arranged_before_the_first_step(alone):
    rows = torch.arange(8.0).reshape(4, 2)
    late, model = (nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))) for _ in "ab")
    late(rows).sum().backward()
    assert late.reducer._rebuild_buckets()  # what DDP does by itself, after its first backward pass
    accelerate_patches.fix_buckets(model)
    assert all(p.grad is None for p in model.parameters())
    model(rows).sum().backward()
    assert not model.reducer._rebuild_buckets()  # nothing is left to do
    there = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    model.module(rows).sum().backward()
    assert all(torch.equal(a, p.grad) for a, p in zip(there, model.parameters(), strict=True))


@canary("torch", "DistributedDataParallel._check_reducer_finalized")
def test_gradients_that_ddp_has_not_summed_are_named(alone):
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.frozen, self.one, self.two = nn.Linear(2, 2).requires_grad_(False), nn.Linear(2, 2), nn.Linear(2, 2)

        def forward(self, rows, both):
            return self.one(rows) + (self.two(rows) if both else 0)

    model, rows = nn.parallel.DistributedDataParallel(Two()), torch.ones(1, 2)
    model(rows, True).sum().backward()
    assert accelerate_patches.unreduced(model) is None
    model(rows, False).sum().backward()
    assert accelerate_patches.unreduced(model) == ["two.weight", "two.bias"]


@canary("torch", "distributed_c10d._get_default_store")
@canary("torch", "autograd._engine_run_backward")
def test_torch_asks_before_each_backward_pass():
    """By whichever name torch.autograd.grad was imported, and where Tensor.backward is given inputs."""
    grad, asked = torch.autograd.grad, []
    weight = torch.ones(3, requires_grad=True)
    with accelerate_patches.before_backward(lambda inputs: asked.extend(inputs)):
        (found,) = grad(weight.square().sum(), weight, create_graph=True)
        found.sum().backward(inputs=[weight])
        weight.sum().backward()
    assert len(asked) == 2 and all(each is weight for each in asked)
    grad(weight.sum(), weight)
    assert len(asked) == 2


def test_the_store_of_the_process_group(alone):
    accelerate_patches.store().set("canary", "sings")
    assert accelerate_patches.store().get("canary") == b"sings"
    assert accelerate_patches.store().check(["canary"]) and not accelerate_patches.store().check(["cat"])


@canary("torch", "distributed_c10d._world.pg_map", "_set_pg_timeout")
def test_time_limits_of_process_groups(alone):
    kept = dist.new_group(backend="gloo", timeout=timedelta(seconds=1234))
    world = dist.group.WORLD
    assert list(dist.distributed_c10d._world.pg_map) == [world, kept]
    accelerate_patches.set_time_limit(timedelta(seconds=77), without=kept)
    limits = [group._get_backend(torch.device("cpu")).options._timeout for group in (world, kept)]
    assert limits == [timedelta(seconds=77), timedelta(seconds=1234)]


RECORDED = """
import os, pickle
os.environ["TORCH_FR_BUFFER_SIZE"] = "100"
import torch, torch.distributed as dist
from app.distributed import accelerate_patches
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
dist.all_reduce(torch.ones(3))
found = accelerate_patches.last_collectives()
entries = pickle.loads(found)["entries"]
assert any("all_reduce" in entry["profiling_name"] for entry in entries), entries
"""


@canary("torch", "_C._distributed_c10d._dump_fr_trace")
def test_the_flight_recorder_knows_the_last_collectives():
    result = run([sys.executable, "-c", RECORDED], env={"PYTHONPATH": str(ROOT)})
    assert result.status == 0, result.output[-2000:]


@canary("torch", "cuda._is_in_bad_fork")
def test_a_process_that_was_not_forked():
    assert accelerate_patches.forked_after_cuda() is False
    assert "in_bad_fork" in inspect.getsource(torch.cuda._lazy_init)  # it is what torch itself asks


@canary("torch", "_foreach_zero_", "_foreach_copy_")
def test_many_tensors_are_set_at_once():
    tensors = [torch.ones(2), torch.ones((), dtype=torch.int64)]
    torch._foreach_zero_(tensors)
    assert [tensor.sum().item() for tensor in tensors] == [0, 0]
    torch._foreach_copy_(tensors, [torch.full((2,), 3.0), torch.tensor(5)])
    assert [tensor.sum().item() for tensor in tensors] == [6, 5]


@canary("torch", "nn.modules.batchnorm._BatchNorm")
def test_what_batch_norms_have_in_common():
    from app.distributed.batch_norm import is_batch_norm

    norms = [nn.BatchNorm1d(2), nn.BatchNorm2d(2), nn.BatchNorm3d(2), nn.SyncBatchNorm(2), nn.LazyBatchNorm2d()]
    assert all(map(is_batch_norm, norms))
    assert not any(map(is_batch_norm, (nn.GroupNorm(1, 2), nn.LayerNorm(2), nn.InstanceNorm2d(2))))


@canary("torch", "nn.Module._parameters", "nn.Module._buffers")
def test_a_module_computes_with_what_its_dictionaries_hold():
    layer, norm = nn.Linear(2, 2, bias=False), nn.BatchNorm1d(2)
    layer._parameters["weight"] = torch.eye(2)
    norm._buffers["running_mean"] = torch.ones(2)
    assert layer.weight is layer._parameters["weight"] and torch.equal(layer(torch.ones(1, 2)), torch.ones(1, 2))
    assert norm.running_mean is norm._buffers["running_mean"]


@canary("torch", "nn.Module._non_persistent_buffers_set")
def test_a_buffer_is_saved_unless_a_set_of_its_module_has_its_name():
    module = nn.Module()
    module.register_buffer("mark", torch.zeros(1), persistent=False)
    assert module._non_persistent_buffers_set == {"mark"} and not module.state_dict()
    module._non_persistent_buffers_set = set()
    assert list(module.state_dict()) == ["mark"]


@canary("torch", "amp.GradScaler._scale")
def test_the_scale_of_a_loss_is_a_tensor():
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.ones(()))
    assert torch.equal(scaler._scale, torch.tensor(8.0))


@canary("torch", "_dynamo.config")
def test_more_shapes_than_the_limit_are_an_error():
    def double(x):
        return x * 2

    import torch._dynamo

    limits = {"recompile_limit": 2, "accumulated_recompile_limit": 9, "fail_on_recompile_limit_hit": True}
    assert torch._dynamo.config.optimize_ddp
    compiled = torch.compile(double, backend="eager", dynamic=False)
    with torch._dynamo.config.patch(limits):
        for size in (2, 3):
            compiled(torch.ones(size))
        with pytest.raises(Exception, match="limit"):
            compiled(torch.ones(4))
    torch._dynamo.reset()


@canary("torch", "_foreach_mul_")
def test_many_tensors_are_multiplied_at_once():
    tensors = [torch.ones(2), torch.full((3,), 2.0)]
    torch._foreach_mul_(tensors, torch.tensor(0.5))
    assert [tensor[0].item() for tensor in tensors] == [0.5, 1.0]


@canary("torchmetrics", "Metric._update_count")
def test_a_metric_without_samples_may_be_computed(recwarn):
    from torchmetrics.aggregation import SumMetric

    metric = SumMetric()
    assert metric._update_count == 0
    metric._update_count = 1
    assert metric.compute() == 0 and not recwarn.list


@canary("torchmetrics", "Metric._defaults")
def test_a_metric_says_which_of_its_states_are_sums():
    from torchmetrics import PearsonCorrCoef
    from torchmetrics.classification import BinaryAUROC
    from torchmetrics.text import Perplexity
    from torchmetrics.utilities import dim_zero_cat, dim_zero_sum

    assert {*Perplexity()._reductions.values()} == {dim_zero_sum}
    assert {*BinaryAUROC()._reductions.values()} == {dim_zero_cat}
    assert {*PearsonCorrCoef()._reductions.values()} == {None}
    assert Perplexity()._defaults.keys() == Perplexity()._reductions.keys() == {"total_log_probs", "count"}


@canary("torchmetrics", "Metric._to_sync")
def test_a_metric_can_be_computed_without_other_ranks():
    from torchmetrics.aggregation import SumMetric

    metric = SumMetric(distributed_available_fn=lambda: True, dist_sync_fn=lambda *_, **__: [torch.ones(())] * 2)
    metric.update(torch.tensor(5.0))
    metric._to_sync = False
    assert metric.compute() == 5


@canary("torch", "serialization._open_zipfile_writer")
def test_torch_save_opens_its_file_by_the_name_that_is_closed(tmp_path):
    from app.commands.plan.writing_nothing import writing_nothing

    with writing_nothing(), pytest.raises(PermissionError):
        torch.save({}, str(tmp_path / "file"))
    assert not (tmp_path / "file").exists()
    torch.save({}, str(tmp_path / "file"))
    assert (tmp_path / "file").exists()


@canary("torch", "UntypedStorage._cdata", "utils._python_dispatch.TorchDispatchMode")
def test_a_storage_is_known_by_its_number():
    from app.commands.plan.live_storage import LiveStorages

    tensor = torch.empty(8, device="meta")
    assert tensor.untyped_storage()._cdata == tensor[2:].untyped_storage()._cdata
    assert tensor.untyped_storage()._cdata != torch.empty(8, device="meta").untyped_storage()._cdata
    with LiveStorages() as storages:
        made = tensor + 1
        assert storages.alive == made.nbytes
        del made
    assert storages.alive == 0


@canary("transformers", "PreTrainedConfig._attn_implementation")
def test_the_attention_that_a_model_was_built_with():
    from transformers import GPT2Config, GPT2LMHeadModel

    tiny = {"vocab_size": 8, "n_embd": 4, "n_layer": 1, "n_head": 1}
    for kind in ("eager", "sdpa"):
        assert GPT2LMHeadModel(GPT2Config(**tiny, attn_implementation=kind)).config._attn_implementation == kind


@canary("torch", "_dynamo.maybe_mark_dynamic")
def test_a_size_may_be_marked_as_one_that_changes():
    """Graphs of torch.compile are not made again for another size."""
    torch._dynamo.reset()
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    compiled = torch.compile(lambda x: x + 1, backend="eager")
    for size in (3, 4, 5):
        tensor = torch.ones(size)
        torch._dynamo.maybe_mark_dynamic(tensor, 0)
        compiled(tensor)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == before + 1


@canary("datasets", "Dataset._fingerprint", "Dataset._indices")
def test_a_table_knows_its_contents_and_its_selection():
    import datasets

    def table(*values):
        return datasets.Dataset.from_dict({"x": list(values)})

    one, chosen = table(1, 2, 3), table(1, 2, 3).select([2, 0])
    assert one._fingerprint == table(1, 2, 3)._fingerprint != table(1, 2, 4)._fingerprint
    assert one._indices is None and chosen._indices.column(0).to_pylist() == [2, 0]
    json.dumps(one._fingerprint)


@canary("accelerate", "commands.launch._validate_launch_command")
def test_arguments_of_the_launcher_are_completed():
    from accelerate.commands.launch import launch_command_parser

    arguments = launch_command_parser().parse_args(["--config_file", str(PROFILES / "cpu.yaml"), "script.py"])
    found = accelerate_patches.complete(arguments)
    assert (found.use_cpu, found.num_machines, found.mixed_precision) == (True, 1, "no")


def test_torch_takes_the_signals_that_its_launcher_handles():
    """Canary, torch 2.11 to 2.13: accelerate hands on what torch's parser knows by name."""
    from torch.distributed.run import get_args_parser

    assert "SIGTERM" in get_args_parser().parse_args(["script.py"]).signals_to_handle
