"""Writing models, optimizers and registered objects so that any layout can load them, and loading them."""

import json
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, cast

import accelerate
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.scheduler import AcceleratedScheduler
from accelerate.utils import DistributedType
from torch import nn
from torch.distributed.tensor import DTensor

from app import storage
from app.distributed import collectives, naming
from app.distributed.state import base_model, deduplicate, state_dict
from app.distributed.state.safe_reader import StateReader
from app.distributed.state.staging import Stager
from app.errors import UserError

OBJECTS = "objects.json"


class Holder(Protocol):
    """What has models, optimizers and other objects prepared: our Accelerator, which itself uses this module."""

    averages: dict[torch.Tensor, torch.Tensor]
    scaler: Any

    @property
    def models(self) -> list[nn.Module]: ...
    @property
    def optimizers(self) -> list[AcceleratedOptimizer]: ...
    @property
    def others(self) -> list[Any]: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def num_processes(self) -> int: ...
    @property
    def process_index(self) -> int: ...
    @property
    def data_ranks(self) -> int: ...
    @property
    def is_main_process(self) -> bool: ...
    @property
    def distributed_type(self) -> DistributedType: ...


def save(accelerator: Holder, folder: str) -> None:
    """Write all that an accelerator has prepared. Every rank takes part.

    DeepSpeed keeps accelerate's own format, which only its own layout reads.
    """
    writer(accelerator)(folder)


def writer(accelerator: Holder) -> Callable[[str], Any]:
    """Return what writes all that an accelerator has prepared into a folder. Every rank takes part in both.

    Raises:
        UserError: on every rank, where the state of one cannot be kept.
    """
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        return partial(accelerate.Accelerator.save_state, _deepspeeds(accelerator))
    return snapshot(accelerator).write


@dataclass(frozen=True)
class Snapshot:
    """What `save` writes of an accelerator, as this process has it: it can be written in any thread."""

    tensors: dict[str, torch.Tensor]
    """Those that this process writes."""
    objects: str
    """What is not a tensor, as JSON; the main process writes it."""
    is_main_process: bool
    from_gpu: bool
    """Whether tensors are still on a GPU."""

    def write(self, folder: str, group: dist.ProcessGroup | None = None) -> None:
        """Write it into a folder. Every rank takes part.

        Args:
            group: the process group in which the ranks talk; None: that of all ranks.
        """
        # Copies on the host are written directly; on a machine with a GPU, torch would use the GPU.
        ahead: dict[str, Any] = {} if self.from_gpu else {"per_thread_copy_ahead": 0}
        writer = dcp.FileSystemWriter(folder, single_file_per_rank=True, sync_files=True, **ahead)
        with _on_one_process_too():
            dcp.save(self.tensors, storage_writer=writer, process_group=group, no_dist=not dist.is_initialized())
        if self.is_main_process:
            storage.at(folder).fill(OBJECTS, self.objects)


def snapshot(accelerator: Holder, stager: Stager | None = None) -> Snapshot:
    """Collect what `save` writes. Every rank takes part.

    Args:
        stager: copies tensors to the host's memory, so that training may go on before they are written.

    Raises:
        UserError: on every rank, where the state of one cannot be kept.
    """
    tensors, objects = collectives.everywhere(lambda: collect(accelerator))  # what follows is collective
    # The main process writes buffers and the modules' extra state.
    buffers = naming.buffer_names(accelerator.models)
    mains = {n for n in tensors if n in buffers or n.startswith(("extras.", "objects."))}
    mains = {n for n in mains if not isinstance(tensors[n], DTensor)}
    # Chosen before they are copied, so that only one process has a copy of what all have.
    tensors = deduplicate.share_of_this_rank(tensors, mains, naming.tied_names(accelerator.models))
    from_gpu = stager is None and accelerator.device.type == "cuda"
    staged = tensors if stager is None else stager.stage(tensors)
    return Snapshot(staged, json.dumps(objects), accelerator.is_main_process, from_gpu)


def _deepspeeds(accelerator: Holder) -> accelerate.Accelerator:
    """Return an accelerator as the one that accelerate knows, whose own methods write and read DeepSpeed's state."""
    return cast(accelerate.Accelerator, accelerator)


def collect(accelerator: Holder) -> tuple[dict[str, torch.Tensor], dict]:
    """Split what is prepared into tensors by name, and the rest, which JSON can hold."""
    tensors, extras = state_dict.model_tensors(accelerator.models)
    base_model.leave_out(tensors, accelerator.models)
    names = naming.parameter_names(accelerator.models)
    objects: dict[str, Any] = {"optimizers": [], "objects": []}
    if base := base_model.describe(accelerator.models):
        objects["base"] = base
    for index, optimizer in enumerate(accelerator.optimizers):
        state_tensors, plain = state_dict.optimizer_state(index, optimizer.optimizer, names)
        tensors |= state_tensors
        objects["optimizers"].append(plain)
    objects["objects"] = [_split(item, f"objects.{index}", tensors) for index, item in enumerate(accelerator.others)]
    objects["extras"] = {
        name: state_dict.split_tensors(value, f"extras.{name}", tensors) for name, value in extras.items()
    }
    if accelerator.scaler is not None:
        objects["scaler"] = accelerator.scaler.state_dict()
    if accelerator.averages:
        names_of = _average_names(accelerator)
        tensors |= {names_of[tensor]: average for tensor, average in accelerator.averages.items()}
    for name, tensor in tensors.items():
        _check_can_be_kept(name, tensor)
    return tensors, objects


def _check_can_be_kept(name: str, tensor: torch.Tensor) -> None:
    """Refuse a tensor that torch writes so that nobody can read it again, or not at all.

    Raises:
        UserError: it is one.
    """
    part = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    faults = {
        "quantized": part.is_quantized,
        "sparse or nested": part.layout != torch.strided or part.is_nested,
        "one of a class with arithmetic of its own": type(part).__torch_dispatch__
        is not torch.Tensor.__torch_dispatch__,
        "without values, on the meta device": part.is_meta,
    }
    if fault := next((each for each, holds in faults.items() if holds), ""):
        raise UserError(
            f"{name} is a tensor that is {fault}: a checkpoint keeps dense ones; let state_dict() return one, such as "
            "its values as numbers, and load_state_dict() make the other of it"
        )


def _split(item: Any, name: str, tensors: dict[str, torch.Tensor]) -> Any:
    """Split the state of a schedule, or of a registered object, as `split_tensors` does.

    Raises:
        UserError: it cannot be kept; the message names the object as its author does.
    """
    try:
        return state_dict.split_tensors(item.state_dict(), name, tensors)
    except UserError as error:
        whose = f"{type(item.scheduler if isinstance(item, AcceleratedScheduler) else item).__name__}.state_dict()"
        raise UserError(str(error).replace(name, whose, 1)) from None


def _average_names(accelerator: Holder) -> dict[torch.Tensor, str]:
    """Map each weight to the name of its average in a checkpoint."""
    return {tensor: f"averages.{name}" for tensor, name in naming.tensor_names(accelerator.models).items()}


def load(accelerator: Holder, folder: str) -> None:
    """Read what `save` wrote, on any layout, into what an accelerator has prepared. Every rank takes part.

    DeepSpeed's engine reads its own files, and trusts them: its checkpoints are pickles that can run code.

    Raises:
        UserError: the checkpoint is of another model or has other optimizers, or holds more than tensors and JSON.
    """
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        accelerate.Accelerator.load_state(_deepspeeds(accelerator), folder)
        return
    objects = json.loads(storage.at(folder).read_text(OBJECTS, follow=True))
    _check_counts(folder, "optimizers", len(objects["optimizers"]), len(accelerator.optimizers))
    _check_counts(folder, "schedulers and registered objects", len(objects["objects"]), len(accelerator.others))
    names = naming.parameter_names(accelerator.models)

    def wanted(saved: dict) -> dict:
        targets: dict[str, Any] = {}
        for index, optimizer in enumerate(accelerator.optimizers):
            targets |= state_dict.optimizer_targets(index, optimizer.optimizer, names, saved)
        if accelerator.averages:
            targets |= _average_targets(accelerator, saved)
        return targets | _empty(saved, "objects.")

    tensors = _load_models(accelerator, folder, objects, wanted)
    for optimizer, content in zip(accelerator.optimizers, objects["optimizers"], strict=True):
        state_dict.restore_optimizer(optimizer.optimizer, names, tensors, content)
    _restore_averages(accelerator, tensors)
    for item, content in zip(accelerator.others, objects["objects"], strict=True):
        item.load_state_dict(state_dict.join_tensors(content, tensors))
    if accelerator.scaler is not None and "scaler" in objects:
        accelerator.scaler.load_state_dict(objects["scaler"])


def _check_counts(folder: str, what: str, there: int, here: int) -> None:
    """Refuse a state with more or fewer optimizers or other objects than there are to take it."""
    if there != here:
        raise UserError(
            f"{folder} has {there} {what}, this program has {here}: prepare and register the same ones, in the same "
            "order, before it is loaded"
        )


def load_weights(accelerator: Holder, folder: str, averaged: bool = False) -> None:
    """Read the models' weights from what `save` wrote on any layout but DeepSpeed's, and nothing else of it.

    Where an optimizer trains with other weights than are scored (schedule-free), they are those that are scored.

    Args:
        averaged: read their averages instead.

    Raises:
        UserError: the checkpoint is of another model, or holds more than tensors and JSON; or it has no averages.
    """

    def wanted(saved: dict) -> dict:
        targets = _average_targets(accelerator, saved) if averaged else {}
        if averaged and not targets:
            raise UserError(f"{folder} has no average of the weights: its run was made without --ema.decay")
        for index, optimizer in switching:
            targets |= state_dict.optimizer_targets(index, optimizer, names, saved)
        return targets

    switching = [(i, o.optimizer) for i, o in enumerate(accelerator.optimizers) if state_dict.switches(o.optimizer)]
    names = naming.parameter_names(accelerator.models) if switching else {}
    objects = json.loads(storage.at(folder).read_text(OBJECTS, follow=True))
    tensors = _load_models(accelerator, folder, objects, wanted)
    for index, optimizer in switching:
        state_dict.restore_optimizer(optimizer, names, tensors, objects["optimizers"][index])
        optimizer.eval()
        optimizer.state.clear()  # so that these weights stay, whatever mode it is put into
    with torch.no_grad():
        for weight, average in _loaded_averages(accelerator, tensors).items():
            weight.copy_(average)


def load_mean(accelerator: Holder, folders: list[str], averaged: bool = False) -> None:
    """Read the models' weights from several checkpoints, and give the models their mean; of one, as it is.

    Numbers are summed in float64. What is not a floating-point number, such as a counter, is the last one's.

    Args:
        averaged: read the averages of weights instead.

    Raises:
        UserError: as `load_weights`.
    """
    sums: dict[str, torch.Tensor] = {}
    for folder in folders:
        load_weights(accelerator, folder, averaged)
        tensors, _ = state_dict.model_tensors(accelerator.models)
        if len(folders) > 1:
            floats = {name: tensor.double() for name, tensor in tensors.items() if tensor.is_floating_point()}
            sums = {name: sums[name] + tensor if sums else tensor for name, tensor in floats.items()}
    with torch.no_grad():
        for name, total in sums.items():
            tensors[name].copy_(total / len(folders))


def _average_targets(accelerator: Holder, saved: dict) -> dict[str, torch.Tensor]:
    """Make empty tensors for the averages in a checkpoint, sharded as the weights are."""
    return {
        name: torch.zeros_like(tensor, dtype=saved[name][1], requires_grad=False)
        for tensor, name in _average_names(accelerator).items()
        if name in saved
    }


def _restore_averages(accelerator: Holder, tensors: dict) -> None:
    """Take the averages that were read; one that the checkpoint lacks begins with its weight."""
    if not accelerator.averages:
        return
    loaded = _loaded_averages(accelerator, tensors)
    with torch.no_grad():
        for tensor in accelerator.averages.keys() - loaded.keys():
            accelerator.averages[tensor].copy_(tensor)
    accelerator.averages |= loaded


def _loaded_averages(accelerator: Holder, tensors: dict) -> dict[torch.Tensor, torch.Tensor]:
    """Find the averages among what was read: by the weight that each belongs to."""
    names = _average_names(accelerator)
    return {tensor: tensors[name] for tensor, name in names.items() if name in tensors}


def _load_models(accelerator: Holder, folder: str, objects: dict, wanted: Callable[[dict], dict]) -> dict:
    """Read the models' tensors, and those that `wanted` asks for; return all that were read."""
    reader = StateReader(folder)
    saved = {name: (entry.size, entry.properties.dtype) for name, entry in reader.read_entries().items()}
    tensors, _ = state_dict.model_tensors(accelerator.models)
    if "base" in objects:
        base_model.check(accelerator.models, objects["base"], folder)
        base_model.leave_out(tensors, accelerator.models)
    _compare(folder, saved, tensors)
    tensors |= wanted(saved) | _empty(saved, "extras.")
    with _on_one_process_too():
        dcp.load(tensors, storage_reader=reader, no_dist=not dist.is_initialized())
    extras = {name: state_dict.join_tensors(content, tensors) for name, content in objects["extras"].items()}
    state_dict.restore_extras(accelerator.models, extras)
    return tensors


def _empty(saved: dict, kind: str) -> dict[str, torch.Tensor]:
    """Make empty tensors for all whose names begin with `kind`."""
    return {name: torch.zeros(saved[name][0], dtype=saved[name][1]) for name in saved if name.startswith(kind)}


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
    raise UserError(f"{folder} is of another model: {'; '.join(lines[:5])}{more}; build the model as it was then")


@contextmanager
def _on_one_process_too() -> Iterator[None]:
    """Keep torch from warning that one process works without a process group, which is intended."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        yield
