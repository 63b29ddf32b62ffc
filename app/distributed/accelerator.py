"""accelerate's Accelerator, with what a layout-free run needs of it."""

import functools
import os
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import accelerate
import torch
from accelerate.utils import (
    DistributedDataParallelKwargs,
    DistributedType,
    DynamoBackend,
    InitProcessGroupKwargs,
)
from torch import nn

from app.distributed import (
    accelerate_patches,
    allocator,
    collectives,
    environment,
    fsdp,
    made_once,
    regional_compilation,
    rendezvous,
    supported,
)
from app.distributed.fsdp_autocast import LateCasts
from app.distributed.state import state_folder
from app.distributed.tensor_parallel.layers import cuts, split_model
from app.distributed.tensor_parallel.plan import check_slices, plan_of
from app.distributed.tensor_parallel.split import Split
from app.errors import UserError
from app.sampling.batch_plan import Turn, ranks_by_machine

_MESHED = "ACCELERATE_USE_PARALLELISM_CONFIG"


class Accelerator(accelerate.Accelerator):
    """Place devices and synchronise gradients as accelerate does, on any layout.

    It adds to accelerate 1.15: FSDP2 on CPU ranks; the same precision under FSDP as under DDP; no collectives for
    buffers; and no time limit while processes wait for the first one of their machine, whose failure ends them all.
    What `save_state` writes, any layout can load.
    """

    def __init__(
        self,
        threads: int = 0,
        timeout: float = 1800.0,
        slices: int = 0,
        broadcasts_buffers: bool = True,
        **of_accelerate: Any,
    ):
        """Join the launcher's process group. From here on, a UserError ends the program with one message and status 2.

        Args:
            threads: number of threads for arithmetic on CPU; 0 shares the machine's cores among its processes.
            timeout: seconds that a rank may hang before its stack is shown; collectives wait longer. 0: no limit.
            slices: in how many slices layers are computed, on any number of processes; 0: as tp_size asks.
            broadcasts_buffers: let DDP give all ranks the first one's buffers before each forward pass. A Run does
                without: it brings together those that training changes, once in a step.
            of_accelerate: arguments of accelerate's own Accelerator, all of which are refused.

        Raises:
            UserError: such an argument, or what the profile asks for cannot be had.
        """
        environment.report_user_errors()
        if of_accelerate:
            raise UserError(
                f"Accelerator({', '.join(of_accelerate)}): leave it out; precision, wrapping and devices come from the "
                "profile (accelerate launch --config_file, --mixed_precision), and the loop accumulates by itself"
            )
        self._broadcasts_buffers = broadcasts_buffers
        self._keeps_types = False  # whether accelerate is to leave the types of weights alone
        if accelerate_patches.forked_after_cuda():
            raise UserError(
                "this process was forked from one that has used the GPU, so it cannot use it: start the recipe by "
                "`from app import launch; launch(main, config, profile=...)`, or restart the notebook's kernel first"
            )
        environment.plain_thread_counts()
        environment.check_ranks()
        on_cpu = _on_cpu()
        supported.check(supported.of_environment(on_cpu))
        plugin = fsdp.read_plugin() if environment.is_on("ACCELERATE_USE_FSDP") else None
        ddp = DistributedDataParallelKwargs(gradient_as_bucket_view=True)
        # On CPU ranks, accelerate would check the mesh, and before `keep_fsdp` below has set FSDP again.
        meshed = on_cpu and environment.is_on(_MESHED)
        last_mesh = None
        if meshed:
            del os.environ[_MESHED]
            last_mesh = accelerate_patches.hide_mesh()
        limit = rendezvous.time_limit(timeout)
        group = _prepare_to_join(on_cpu, limit)
        accelerate_patches.remember_packages()
        super().__init__(cpu=on_cpu, fsdp_plugin=plugin, kwargs_handlers=[ddp, group])
        self._asked_layers = set((plugin and plugin.transformer_cls_names_to_wrap) or ())
        self._wrap_policy = plugin and plugin.auto_wrap_policy
        if plugin is not None:
            self.state.fsdp_plugin = plugin
            accelerate_patches.keep_fsdp(self.state)
        if meshed:
            os.environ[_MESHED] = "true"
            accelerate_patches.take_mesh(self, last_mesh)
        collectives.set_limit(limit)
        self.split = self._split(slices)
        """How layers are split over processes or slices; None if they are not."""
        self.averages: dict[torch.Tensor, torch.Tensor] = {}
        """The average of each parameter and buffer that has one, sharded as it is; checkpoints hold them."""
        if self.device.type == "cpu":
            torch.set_num_threads(threads or environment.cores_per_process())
            if plugin is None:  # a run that shards needs the memory more than the time
                allocator.keep_freed_memory()
        supported.check_accumulation(self.gradient_accumulation_steps)

    def _split(self, slices: int) -> Split | None:
        """Return how layers are split, as the mesh and the number of slices ask."""
        mesh = self.parallelism_config
        check_slices(slices, mesh.tp_size if mesh else 1)
        if mesh and mesh.tp_enabled:
            return Split(self.torch_device_mesh["tp"], slices)
        return Split(None, slices) if slices > 1 else None

    @property
    def mixed_precision(self) -> str:
        """Name the precision of passes; no while bf16 weights are sharded, which accelerate 1.15 would make fp32."""
        return "no" if self._keeps_types else super().mixed_precision

    @property
    def models(self) -> list[nn.Module]:
        """Return the prepared models, as they are wrapped."""
        return accelerate_patches.prepared(self).models

    @property
    def compiles(self) -> bool:
        """Tell whether the profile compiles models."""
        return self.state.dynamo_plugin.backend != DynamoBackend.NO

    @property
    def optimizers(self) -> list[accelerate.optimizer.AcceleratedOptimizer]:
        """Return the prepared optimizers."""
        return accelerate_patches.prepared(self).optimizers

    @property
    def others(self) -> list[Any]:
        """Return the prepared schedulers, then the registered objects."""
        prepared = accelerate_patches.prepared(self)
        return [*prepared.schedulers, *prepared.registered]

    @property
    def data_ranks(self) -> int:
        """Count the data ranks: groups of processes that see their own samples."""
        return self.num_processes // self.ranks_per_data_rank

    @property
    def data_rank(self) -> int:
        """Return the data rank of this process. Tensor-parallel processes share one."""
        return self.process_index // self.ranks_per_data_rank

    @property
    def ranks_per_data_rank(self) -> int:
        """Count the processes that see the same samples: the tensor-parallel ones."""
        # The data dimensions come first in accelerate's mesh, so neighbours share a data rank.
        return self.parallelism_config.non_data_parallel_size if self.parallelism_config else 1

    @property
    def data_ranks_by_machine(self) -> list[list[int]]:
        """Return the data ranks of each machine's processes; all machines have as many processes."""
        return ranks_by_machine(self.num_processes, environment.local_world_size(), self.ranks_per_data_rank)

    def counted_once(self, turn: Turn) -> Turn:
        """Set the weight of an evaluation's turn to 0 on all but one of the processes that share it."""
        return turn if self.process_index % self.ranks_per_data_rank == 0 else turn._replace(weight=0.0)

    @contextmanager
    def local_main_process_first(self):
        """Run the block on each machine's first process, then on the others; if the first one fails, they do."""
        with collectives.local_main_first():
            yield

    def prepare(self, *args, **kwargs):
        """Prepare as accelerate does. Also find the layers for FSDP2, autocast under FSDP2, and fix DDP's buckets."""
        if self.ddp_handler is not None and self.ddp_handler.static_graph:
            raise UserError(
                "ddp_handler.static_graph: DDP would not sum the first step's gradients over ranks if they accumulate; "
                "leave it False, and for weights that some micro-batches do not use set find_unused_parameters"
            )
        with ExitStack() as stack:
            if self.split is not None:
                self._split_layers(self.split, *args)
                stack.enter_context(accelerate_patches.split_already(self))
            if self.is_fsdp2:
                stack.enter_context(accelerate_patches.before_sharding(made_once.fill))
                if self.split is not None and self.split.mesh:
                    accelerate_patches.quieten_meshes()
                for optimizer in (arg for arg in args if isinstance(arg, torch.optim.Optimizer)):
                    fsdp.check_optimizer(optimizer, fsdp.offloads(self.state.fsdp_plugin))
                for model in (arg for arg in args if isinstance(arg, nn.Module)):
                    stack.enter_context(fsdp.shared_weights_kept(model))
                    # accelerate has replaced it by the layers of the model before this one.
                    self.state.fsdp_plugin.auto_wrap_policy = self._wrap_policy
                    fsdp.name_layers(self.state.fsdp_plugin, self._asked_layers, model)
                    stack.enter_context(fsdp.embeddings_known(model))
                    if self.native_amp:
                        model.forward = self._in_mixed_precision(model)
            if regional_compilation.is_asked_for(self.state.dynamo_plugin):
                stack.enter_context(self._compiled_by_region(arg for arg in args if isinstance(arg, nn.Module)))
            if any(p.is_meta for arg in args if isinstance(arg, nn.Module) for p in arg.parameters()):  # for a plan
                kwargs["device_placement"] = [False] * len(args)
            trained = [p for m in args if isinstance(m, nn.Module) for p in m.parameters() if p.requires_grad]
            self._keeps_types = self.is_fsdp2 and all(p.dtype == torch.bfloat16 for p in trained)
            stack.callback(setattr, self, "_keeps_types", False)
            result = super().prepare(*args, **kwargs)
        for item in result if isinstance(result, tuple | list) else (result,):
            fsdp.gather_to_generate(item)
            wrapper = getattr(item, "_orig_mod", item)  # torch.compile is outermost
            if isinstance(wrapper, nn.parallel.DistributedDataParallel):
                # torch 2.13 calls this forward_sync_buffers, and still accepts the name of 2.11.
                if not self._broadcasts_buffers:
                    wrapper.broadcast_buffers = False
                accelerate_patches.fix_buckets(wrapper)
        return result

    def _split_layers(self, split: Split, *args: Any) -> None:
        """Split the layers of models, and give optimizers the new parameters."""
        if self.compiles:
            raise UserError(
                "tp_size, or --run.slices: split layers cannot be compiled yet: take dynamo_config out of the profile"
            )
        new: dict[nn.Parameter, nn.Parameter] = {}
        optimizers = [arg for arg in args if isinstance(arg, torch.optim.Optimizer)]
        for model in (arg for arg in args if isinstance(arg, nn.Module)):
            plan = plan_of(model, split.count)
            for optimizer in optimizers:
                fsdp.check_split(optimizer, cuts(model, plan), split.processes)
            new |= split_model(model, plan, split)
        for optimizer in optimizers:
            if new:
                fsdp.check_optimizer(optimizer)
            for group in optimizer.param_groups:
                group["params"] = [new.get(parameter, parameter) for parameter in group["params"]]

    @contextmanager
    def _compiled_by_region(self, models: Iterable[nn.Module]) -> Iterator[None]:
        """Compile the blocks of models, and keep accelerate from compiling more while it prepares them."""
        plugin = self.state.dynamo_plugin
        for model in models:
            regional_compilation.compile_blocks(model, regional_compilation.options_of(plugin))
        backend, plugin.backend = plugin.backend, DynamoBackend.NO
        try:
            yield
        finally:
            plugin.backend = backend

    def _in_mixed_precision(self, model: nn.Module):
        """Wrap a forward pass to run under autocast and return fp32, as accelerate's prepare does outside FSDP2."""
        from accelerate.utils import convert_outputs_to_fp32

        forward = model.forward
        # A compiler makes its own casts, and cannot see these.
        casts = None if self.compiles else LateCasts(model, self.device.type)

        @functools.wraps(forward)
        def mixed(*args, **kwargs):
            with self.autocast(), casts.forward() if casts else nullcontext():
                return forward(*args, **kwargs)

        return convert_outputs_to_fp32(mixed)

    def save_state(
        self,
        output_dir: str | os.PathLike[str] | None = None,
        safe_serialization: bool = True,
        **save_model_func_kwargs: Any,
    ) -> str:
        """Write all that is prepared or registered into a folder, for any layout to load. Every rank takes part.

        Models, optimizers, schedulers, the scaler, averages, and the state of objects that were given to
        `register_for_checkpointing`, which may hold tensors, numbers, text, lists and dicts; never pickles. Each rank's
        generators of random numbers too, but not how far a data loader has come. The folder is there only when it is
        whole; one that this method has written before is replaced then. A run's checkpoints are written the same way.

        DeepSpeed's engine keeps its own format, which only its own layout reads.

        Returns:
            The folder.

        Raises:
            UserError: it was not written; the message says why on which rank.
        """
        if output_dir is None:
            raise UserError("save_state needs a folder: accelerator.save_state('state')")
        if not safe_serialization or save_model_func_kwargs:
            options = ["safe_serialization=False"] if not safe_serialization else list(save_model_func_kwargs)
            raise UserError(f"save_state: leave out {', '.join(options)}: there is one format, and it holds no pickles")
        if self.dataloader_config.use_stateful_dataloader:
            raise UserError(
                "use_stateful_dataloader: where a data loader stands belongs to one number of processes, and is not "
                "saved; leave it False, and go on with accelerator.skip_first_batches"
            )
        state_folder.save(self, Path(output_dir).expanduser().absolute())
        return str(output_dir)

    def load_state(
        self,
        input_dir: str | os.PathLike[str] | None = None,
        load_kwargs: dict[str, Any] | None = None,
        **load_model_func_kwargs: Any,
    ) -> None:
        """Read what `save_state` wrote on any layout, or a run's checkpoint. Every rank takes part, after `prepare`.

        Generators of random numbers are set only on as many ranks as wrote them.

        Raises:
            UserError: the folder is not there, damaged, not of this format, or of other models or optimizers.
        """
        if input_dir is None:
            raise UserError("load_state needs a folder: accelerator.load_state('state')")
        if load_kwargs or load_model_func_kwargs:
            options = [*(load_kwargs or {}), *load_model_func_kwargs]
            raise UserError(f"load_state: leave out {', '.join(options)}: there is one format")
        state_folder.load(self, Path(input_dir).expanduser().absolute())

    def register_save_state_pre_hook(self, hook: Any) -> NoReturn:
        """Refuse a hook that writes models in its own way: the state would not be layout-free."""
        raise UserError(
            "register_save_state_pre_hook: save_state writes every prepared model itself; give what else there is to "
            "register_for_checkpointing"
        )

    def register_load_state_pre_hook(self, hook: Any) -> NoReturn:
        """Refuse a hook that reads models in its own way."""
        raise UserError(
            "register_load_state_pre_hook: load_state reads every prepared model itself; give what else there is to "
            "register_for_checkpointing"
        )

    def end_training(self) -> None:
        """End the trackers; the process group is left when the program ends, as after a Run.

        It must not be left here. A model under DDP that outlives its process group frees the group while it holds
        Python's lock, and waits for threads of gloo that may wait for that lock: a deadlock (torch 2.13).
        """
        for tracker in self.trackers:
            tracker.finish()
        collectives.leave(clean=True)


def _prepare_to_join(on_cpu: bool, limit: timedelta) -> InitProcessGroupKwargs:
    """Choose this process's GPU and network, join the process group if ranks were restarted, and describe the group.

    Args:
        limit: of time, for collectives.
    """
    device = None
    if not on_cpu:
        environment.record_collectives()
        device = environment.take_gpu()
    environment.choose_network()
    bound = device if _may_bind() else None
    rendezvous.join_again(on_cpu, limit, bound)
    return accelerate_patches.process_group(limit, bound)


def _on_cpu() -> bool:
    """Decide between CPU and accelerator; refuse a profile that asks for more GPUs than this machine has."""
    profile = environment.launcher_profile()
    if environment.is_on("ACCELERATE_USE_CPU") or (profile and profile.settings.use_cpu):
        return True
    here, wanted = environment.gpus_here(), environment.local_world_size()
    # A saved default of one process only says that nobody ruled out a GPU.
    insists = profile and (profile.named or profile.settings.distributed_type != DistributedType.NO)
    if insists or (here and wanted > here):
        environment.check_gpus(wanted)
    return here == 0


def _may_bind() -> bool:
    """Tell whether the process group may be bound to a device. Not under DeepSpeed, nor where a mesh would split it."""
    return not any(map(environment.is_on, ("ACCELERATE_USE_DEEPSPEED", _MESHED)))
