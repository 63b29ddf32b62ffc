"""accelerate's Accelerator, with what a layout-free run needs of it."""

import functools
import json
import os
import warnings
from collections.abc import Callable
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path

import accelerate
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from accelerate.state import PartialState
from accelerate.utils import (
    DistributedDataParallelKwargs,
    DistributedType,
    DynamoBackend,
    InitProcessGroupKwargs,
    ParallelismConfig,
)
from accelerate.utils import imports as accelerate_imports
from torch import nn
from torch.distributed.tensor import DTensor

from app import allocator, fsdp, process, ranks, shares, state, zero
from app.batches import Turn
from app.casts import LateCasts
from app.errors import UserError
from app.reader import StateReader
from app.stager import Stager

OBJECTS = "objects.json"
# accelerate 1.15 looks for an optional package on disk at each backward pass and each update.
accelerate_imports._is_package_available = functools.cache(accelerate_imports._is_package_available)
_MESHED = "ACCELERATE_USE_PARALLELISM_CONFIG"


class Accelerator(accelerate.Accelerator):
    """Place devices and synchronise gradients as accelerate does, on any layout.

    Beyond accelerate 1.15: FSDP2 works on CPU ranks; checkpoints are read by any layout; FSDP computes in the
    precision that DDP computes in; no collective runs for buffers; the work of a machine's first process is waited
    for without a time limit, and its failure is everybody's.
    """

    def __init__(self, threads: int = 0, timeout: float = 1800.0):
        """Join the launcher's process group.

        Args:
            threads: of this process for arithmetic on CPU; 0 shares the machine's cores among its processes.
            timeout: seconds that a rank may hang before its stack is shown; collectives wait longer. 0: no limit.
        """
        if torch.cuda._is_in_bad_fork():
            raise UserError(
                "this process was forked from one that has used the GPU, so it cannot use it: start the recipe by "
                "`from app import launch; launch(main, config, profile=...)`, or restart the notebook's kernel first"
            )
        on_cpu = _on_cpu()
        zero.check(on_cpu)
        _check_mesh()
        plugin = fsdp.read_plugin() if os.environ.get("ACCELERATE_USE_FSDP", "false") == "true" else None
        ddp = DistributedDataParallelKwargs(gradient_as_bucket_view=True)
        # On CPU ranks accelerate would check the mesh before FSDP is put back in its place, below.
        meshed = on_cpu and plugin is not None and os.environ.pop(_MESHED, "false").lower() == "true"
        device = None
        if not on_cpu:
            process.record_collectives()
            device = process.take_gpu()
        process.settle_network()
        time_limit = ranks.limit(timeout)
        bound = device if _may_bind() else None
        ranks.join_anew(on_cpu, time_limit, bound)
        group = InitProcessGroupKwargs(timeout=time_limit)
        # NCCL then connects at once, and never asks which device is meant. accelerate 1.15 knows handlers by their very
        # class, which lacks this, and hands on what they give.
        given = group.to_kwargs() | ({"device_id": bound} if bound is not None else {})
        group.to_kwargs = lambda: given
        super().__init__(cpu=on_cpu, fsdp_plugin=plugin, kwargs_handlers=[ddp, group])
        if plugin is not None:
            self._asked_layers = set(plugin.transformer_cls_names_to_wrap or ())
            self._wrap_policy = plugin.auto_wrap_policy
            self.state.fsdp_plugin = plugin
            if self.distributed_type == DistributedType.MULTI_CPU:
                # accelerate 1.15 turns FSDP into DDP on CPU ranks, without a word.
                self.state.distributed_type = DistributedType.FSDP
                PartialState._shared_state["distributed_type"] = DistributedType.FSDP
        if meshed:
            os.environ[_MESHED] = "true"
            self.state.parallelism_config = ParallelismConfig()
            self.state.device_mesh = self.parallelism_config.get_device_mesh(self.device.type)
            self.parallelism_config._validate_accelerator(self)
        ranks.set_limit(time_limit)
        if self.device.type == "cpu":
            torch.set_num_threads(threads or process.cores_per_process())
            if plugin is None:  # who shards wants the memory
                allocator.keep_freed_memory()
            if self.mixed_precision == "fp16":
                raise UserError("mixed_precision fp16: needs a GPU; on CPU take bf16 or no")
        if self.gradient_accumulation_steps != 1:
            raise UserError(
                f"gradient_accumulation_steps {self.gradient_accumulation_steps} in the profile: leave it at 1; "
                "accumulation follows from --run.global-batch, --run.micro-batch and the number of processes"
            )

    @property
    def data_ranks(self) -> int:
        """Count the groups of processes that see their own samples."""
        return self.num_processes // self._per_data_rank

    @property
    def data_rank(self) -> int:
        """Tell which samples this process sees. Tensor-parallel processes share theirs."""
        return self.process_index // self._per_data_rank

    @property
    def _per_data_rank(self) -> int:
        # accelerate's mesh has the data dimensions first, so neighbours share a data rank.
        return self.parallelism_config.non_data_parallel_size if self.parallelism_config else 1

    def counted_once(self, turn: Turn) -> Turn:
        """Give an evaluation's turn weight 0 on all but one of the processes that share it."""
        return turn if self.process_index % self._per_data_rank == 0 else turn._replace(weight=0.0)

    @contextmanager
    def local_main_process_first(self):
        """Let each machine's first process run the block before its others do; its error is everybody's, at once."""
        with ranks.local_main_first():
            yield

    def prepare(self, *args, **kwargs):
        """Prepare as accelerate does, with FSDP2 layers found, autocast under FSDP2 too, and DDP's buckets settled."""
        with ExitStack() as stack:
            if self.is_fsdp2:
                for optimizer in (arg for arg in args if isinstance(arg, torch.optim.Optimizer)):
                    fsdp.check_optimizer(optimizer)
                for model in (arg for arg in args if isinstance(arg, nn.Module)):
                    stack.enter_context(fsdp.embeddings_known(model))
                    stack.enter_context(fsdp.shared_weights_kept(model))
                    # accelerate puts the layers of the model before this one in its place.
                    self.state.fsdp_plugin.auto_wrap_policy = self._wrap_policy
                    fsdp.name_layers(self.state.fsdp_plugin, self._asked_layers, model)
                    if self.native_amp:
                        model.forward = self._in_mixed_precision(model)
            result = super().prepare(*args, **kwargs)
        for item in result if isinstance(result, tuple) else (result,):
            wrapper = getattr(item, "_orig_mod", item)  # torch.compile is outermost
            if isinstance(wrapper, nn.parallel.DistributedDataParallel):
                # It would broadcast all of them in each step, most for nothing; app/buffers.py has those that change.
                # torch 2.13 says forward_sync_buffers, and takes the name that 2.11 has.
                wrapper.broadcast_buffers = False
                _settle_buckets(wrapper)
        return result

    def _in_mixed_precision(self, model: nn.Module):
        """Run a forward pass under autocast and return fp32, as accelerate's prepare does outside FSDP2."""
        from accelerate.utils import convert_outputs_to_fp32

        forward = model.forward
        # A compiler makes casts of its own, and does not look into these.
        compiled = self.state.dynamo_plugin.backend != DynamoBackend.NO
        casts = None if compiled else LateCasts(model, self.device.type)

        @functools.wraps(forward)
        def mixed(*args, **kwargs):
            with self.autocast(), casts.forward() if casts else nullcontext():
                return forward(*args, **kwargs)

        return convert_outputs_to_fp32(mixed)

    def end_training(self) -> None:
        """End the trackers; the processes part when the program ends, as they do after a Run.

        A model under DDP that outlives its process group frees it while it holds Python's lock, and waits for threads
        of gloo that may themselves wait for that lock, for ever (torch 2.13).
        """
        for tracker in self.trackers:
            tracker.finish()
        ranks.leave(clean=True)

    def save_state(self, output_dir: str | None = None, safe_serialization: bool = True, **kwargs):
        """Write models, optimizers and registered objects so that any layout can load them. Every rank takes part.

        DeepSpeed keeps accelerate's own format, which only its own layout reads.
        """
        if self.distributed_type == DistributedType.DEEPSPEED:
            return super().save_state(output_dir, safe_serialization, **kwargs)
        self.snapshot_state()(output_dir)
        return output_dir

    def snapshot_state(self, stager: Stager | None = None) -> Callable[..., None]:
        """Collect what `save_state` writes. Every rank takes part.

        Args:
            stager: copies tensors to the host's memory, so that training may go on before they are written.

        Returns:
            What writes it into a folder, in any thread. Every rank calls it; a second argument is the process group.
        """
        tensors, extras = state.model_tensors(self._models)
        names = state.parameter_names(self._models)
        objects = {"optimizers": [], "objects": []}
        for index, optimizer in enumerate(self._optimizers):
            found, plain = state.optimizer_state(index, optimizer.optimizer, names)
            tensors |= found
            objects["optimizers"].append(plain)
        for index, item in enumerate([*self._schedulers, *self._custom_objects]):
            objects["objects"].append(state.split_tensors(item.state_dict(), f"objects.{index}", tensors))
        objects["extras"] = {
            name: state.split_tensors(value, f"extras.{name}", tensors) for name, value in extras.items()
        }
        if self.scaler is not None:
            objects["scaler"] = self.scaler.state_dict()
        # Buffers and what modules keep beside them are the main process's, and written once.
        own = state.buffer_names(self._models)
        mains = {n for n in tensors if n in own or n.startswith(("extras.", "objects."))}
        mains = {n for n in mains if not isinstance(tensors[n], DTensor)}
        # Before they are copied: what processes have alike is held, and written, by one of them.
        tensors = shares.own(tensors, mains, state.tied_names(self._models))
        text, alone = json.dumps(objects), not dist.is_initialized()
        staged = tensors if stager is None else stager.stage(tensors)

        def write(folder: str, group: dist.ProcessGroup | None = None) -> None:
            # What is on the host is written as it is; torch would ask the GPU of a machine that has one.
            ahead = {} if stager is None and self.device.type == "cuda" else {"per_thread_copy_ahead": 0}
            writer = dcp.FileSystemWriter(folder, single_file_per_rank=True, sync_files=True, **ahead)
            with _on_one_process_too():
                dcp.save(staged, storage_writer=writer, process_group=group, no_dist=alone)
            if self.is_main_process:
                Path(folder, OBJECTS).write_text(text)

        return write

    def load_state(self, input_dir: str | None = None, load_kwargs: dict | None = None, **kwargs):
        """Read what `save_state` wrote, on any layout, into the prepared models and optimizers. Every rank takes part.

        DeepSpeed's engine reads its own files, and trusts them: its checkpoints are pickles that can run code.

        Raises:
            UserError: the checkpoint is of another model or has other optimizers, or holds more than tensors and JSON.
        """
        if self.distributed_type == DistributedType.DEEPSPEED:
            return super().load_state(input_dir, load_kwargs, **kwargs)
        objects = json.loads(Path(input_dir, OBJECTS).read_text())
        others = [*self._schedulers, *self._custom_objects]
        for what, count in {"optimizers": len(self._optimizers), "objects": len(others)}.items():
            if len(objects[what]) != count:
                raise UserError(f"{input_dir} has {len(objects[what])} {what}, this recipe prepares {count}")
        names = state.parameter_names(self._models)

        def wanted(saved: dict) -> dict:
            found = {}
            for index, optimizer in enumerate(self._optimizers):
                found |= state.optimizer_targets(index, optimizer.optimizer, names, saved)
            return found | _empty(saved, "objects.")

        tensors = self._load_models(input_dir, objects, wanted)
        for optimizer, content in zip(self._optimizers, objects["optimizers"], strict=True):
            state.restore_optimizer(optimizer.optimizer, names, tensors, content)
        for item, content in zip(others, objects["objects"], strict=True):
            item.load_state_dict(state.join_tensors(content, tensors))
        if self.scaler is not None and "scaler" in objects:
            self.scaler.load_state_dict(objects["scaler"])

    def load_models(self, input_dir: str) -> None:
        """Read the weights of what `save_state` wrote on any layout but DeepSpeed's, and nothing else of it.

        Raises:
            UserError: the checkpoint is of another model, or holds more than tensors and JSON.
        """
        self._load_models(input_dir, json.loads(Path(input_dir, OBJECTS).read_text()), lambda saved: {})

    def _load_models(self, folder: str, objects: dict, wanted: Callable[[dict], dict]) -> dict:
        """Read the models' tensors, and those that are wanted besides; return all that were read."""
        reader = StateReader(folder)
        saved = {
            name: (entry.size, entry.properties.dtype)
            for name, entry in reader.read_metadata().state_dict_metadata.items()
        }
        tensors, _ = state.model_tensors(self._models)
        _compare(folder, saved, tensors)
        tensors |= wanted(saved) | _empty(saved, "extras.")
        with _on_one_process_too():
            dcp.load(tensors, storage_reader=reader, no_dist=not dist.is_initialized())
        extras = {name: state.join_tensors(content, tensors) for name, content in objects["extras"].items()}
        state.restore_extras(self._models, extras)
        return tensors


def _empty(saved: dict, kind: str) -> dict[str, torch.Tensor]:
    """Make room for the tensors of a kind."""
    return {name: torch.zeros(saved[name][0], dtype=saved[name][1]) for name in saved if name.startswith(kind)}


def _on_cpu() -> bool:
    """Decide between CPU and accelerator; refuse a profile that asks for more GPUs than this machine has."""
    profile = process.launcher_profile()
    if os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true") or (profile and profile.settings.use_cpu):
        return True
    here = process.gpus_here()
    wanted = process.local_world_size()
    if here and wanted > here:
        raise UserError(
            f"the profile starts {wanted} processes on this machine, which has {here} GPUs: use --num_processes "
            f"{here}, or a profile for CPU such as accelerate_configs/ddp_cpu.yaml"
        )
    # A saved default of one process says no more than that nobody ruled a GPU out.
    if not here and profile and (profile.named or profile.settings.distributed_type != DistributedType.NO):
        raise UserError(
            f"the profile wants a GPU for each of {wanted} processes here, and this machine has no GPU: use a profile "
            "for CPU such as accelerate_configs/cpu.yaml, ddp_cpu.yaml or fsdp_cpu.yaml"
        )
    return here == 0


def _may_bind() -> bool:
    """Tell whether the process group may know its device: DeepSpeed takes none; groups of a mesh would be split off."""
    asked = (os.environ.get(name, "false").lower() == "true" for name in ("ACCELERATE_USE_DEEPSPEED", _MESHED))
    return not any(asked)


def _check_mesh() -> None:
    """Refuse a profile whose mesh of processes splits what is not split here, before accelerate makes the mesh."""
    if os.environ.get(_MESHED, "false").lower() != "true":
        return
    mesh = ParallelismConfig()
    if mesh.cp_enabled or mesh.sp_enabled:
        raise UserError("cp_size, sp_size in the profile: sequences are not split over processes yet; set both to 1")
    if mesh.tp_enabled:
        raise UserError("tp_size in the profile: weights are not split inside a layer yet; set it to 1")


@contextmanager
def _on_one_process_too():
    """Keep torch from warning that one process saves alone, which is what was asked for."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        yield


def _settle_buckets(model: nn.parallel.DistributedDataParallel) -> None:
    """Make DDP arrange its buckets now.

    It does so after its first backward pass; sums over three or more ranks depend on the place in a bucket, so a
    resumed run's first step would differ in the last bit from the same step of a run that never stopped. One that looks
    for unused parameters keeps the buckets that it began with.
    """
    if model.find_unused_parameters:
        return
    model.reducer.prepare_for_backward([])
    total = sum((p * 0).sum() for p in model.module.parameters() if p.requires_grad)
    total.backward()
    model.reducer._rebuild_buckets()
    model.zero_grad(set_to_none=True)


def _compare(folder: str, saved: dict, tensors: dict) -> None:
    """Refuse a checkpoint whose model is not this one, naming the first differences."""
    there = {name: tuple(shape) for name, (shape, _) in saved.items() if name.startswith("models.")}
    here = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if there == here:
        return
    lines = [
        f"{n}: {there.get(n, 'absent')} there, {here.get(n, 'absent')} here"
        for n in {**there, **here}
        if there.get(n) != here.get(n)
    ]
    more = f" and {len(lines) - 5} more" if len(lines) > 5 else ""
    raise UserError(f"{folder} is a checkpoint of another model: {'; '.join(lines[:5])}{more}")
