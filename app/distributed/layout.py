"""The layout and the versions of a run, for run.json and for its header."""

import functools
import importlib.metadata
import platform
from contextlib import suppress

import torch
from accelerate.utils import DistributedType

from app.distributed import regional_compilation
from app.distributed.accelerator import Accelerator
from app.distributed.layout_record import Layout
from app.sampling.batch_plan import BatchPlan

_OF_BITS = ("device", "kernels", "precision", "threads")
_PACKAGES_OF_BITS = ("torch", "transformers")


def layout(accelerator: Accelerator) -> Layout:
    """Return the layout of this launch."""
    return Layout(
        data_ranks=accelerator.data_ranks,
        processes=accelerator.num_processes,
        wrapping=wrapping(accelerator),
        precision=precision(accelerator),
        device=device(accelerator),
        threads=torch.get_num_threads(),
        kernels=torch.backends.cpu.get_cpu_capability(),
        deterministic=torch.are_deterministic_algorithms_enabled(),
        compile=compiler(accelerator),
    )


@functools.cache
def versions() -> dict[str, str]:
    """Return the versions of the installed packages that a run's results depend on."""
    packages = ("torch", "accelerate", "transformers", "datasets")
    version_by_name = {"python": platform.python_version()}
    for name in packages:
        with suppress(importlib.metadata.PackageNotFoundError):
            version_by_name[name] = importlib.metadata.version(name)
    return version_by_name


def wrapping(accelerator: Accelerator) -> str:
    """Name what the model is wrapped in, and over how many processes its layers are split; empty on one process."""
    split = accelerator.ranks_per_data_rank
    kinds = [] if split > 1 and accelerator.distributed_type != DistributedType.FSDP else [_wrapper(accelerator)]
    return ", ".join([*filter(None, kinds), *([f"TP x{split}"] if split > 1 else [])])


def _wrapper(accelerator: Accelerator) -> str:
    if accelerator.distributed_type == DistributedType.FSDP:
        return (
            "HSDP"
            if accelerator.parallelism_config and accelerator.parallelism_config.dp_replicate_enabled
            else "FSDP2"
        )
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        return f"DeepSpeed ZeRO-{accelerator.state.deepspeed_plugin.zero_stage}"
    return "" if accelerator.distributed_type == DistributedType.NO else "DDP"


def precision(accelerator: Accelerator) -> str:
    """Name the precision: fp32, bf16, fp16 or fp8."""
    return "fp32" if accelerator.mixed_precision == "no" else accelerator.mixed_precision


def device(accelerator: Accelerator) -> str:
    """Name the hardware."""
    return (
        torch.cuda.get_device_name(accelerator.device) if accelerator.device.type == "cuda" else accelerator.device.type
    )


def compiler(accelerator: Accelerator) -> str:
    """Name the backend of torch.compile, and whether it compiles block by block; no: nothing is compiled."""
    plugin = accelerator.state.dynamo_plugin
    return plugin.backend.value.lower() + ", by block" * regional_compilation.is_asked_for(plugin)


def changes_bits(saved: Layout, saved_versions: dict[str, str], here: Layout) -> list[str]:
    """List the differences between two layouts, or their versions, that can change the bits of one micro-batch."""
    layouts = ((name, getattr(saved, name), getattr(here, name)) for name in _OF_BITS)
    ours = versions()
    packages = ((name, saved_versions.get(name, "absent"), ours.get(name, "absent")) for name in _PACKAGES_OF_BITS)
    return [f"{name} was {before}, is {now}" for name, before, now in (*layouts, *packages) if before != now]


def header(plan: BatchPlan, accelerator: Accelerator) -> list[str]:
    """Describe how a step is spread: `64 samples/step = 2 data ranks x 2 accumulation x 16, FSDP2, fp32, cpu`.

    Returns:
        One line, and more where the global batch never gets to its full size, and where the model is compiled.
    """
    ranks = accelerator.data_ranks
    turns = plan.accumulation(ranks)
    split = f"{ranks} data rank{'s' * (ranks > 1)} x {turns} accumulation x {plan.rows}"
    line = f"{plan.sizes} samples/step = {split}"
    kind = [wrapping(accelerator)] if wrapping(accelerator) else []
    line = ", ".join([line, *kind, precision(accelerator), device(accelerator)])
    idle = plan.idle(ranks)
    if idle:
        line += f" ({idle:.0%} of the turns idle: {plan.micro_batches_per_step} micro-batches)"
    lines = [line]
    if until := plan.idle_until(ranks):
        lines.append(f"--run.batch-ramp: until step {until}, there are fewer micro-batches than data ranks")
    if plan.ramp and plan.ramp[-1][0] >= plan.steps:
        lines.append(f"--run.batch-ramp: the run ends after {plan.steps} steps, before its last part does")
    slow = f"compiling ({compiler(accelerator)}): the first step with inputs of a new shape takes longer"
    return [*lines, slow] if accelerator.compiles else lines
