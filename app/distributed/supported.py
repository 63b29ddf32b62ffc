"""What a profile may ask for: settings that no run can work under, each with its fix.

`plan`, `doctor` and `launch` ask before anything starts, of the profile's file; every process of a run asks again, of
its environment, because accelerate's own launcher starts ranks without asking.
"""

import importlib.util
import os
from dataclasses import dataclass
from typing import Any, NamedTuple

from app.distributed import environment
from app.errors import UserError

# FSDP1's strategies that FSDP2 has, by name and by number, and whether they free weights after each layer.
SHARDING = {"FULL_SHARD": True, "1": True, "SHARD_GRAD_OP": False, "2": False}
# The packages of the backends that accelerate 1.15 computes in fp8 with.
_FP8 = {
    "TE": ["transformer_engine"],
    "AO": ["torchao"],
    "TORCHAO": ["torchao"],
    "MSAMP": ["msamp"],
    "MS-AMP": ["msamp"],
}

_SKIPS = "engine skips steps by itself"


def of_deepspeed_file(name: str, settings: dict[str, Any]) -> list[tuple[str, str]]:
    """Find what DeepSpeed's own settings in a file rule out."""
    fp16 = (settings.get("fp16") or {}).get("enabled")
    sections = [section for section in ("optimizer", "scheduler") if section in settings]
    ruled_out = [(f"{section} in {name}: --optim chooses it", "take it out of that file") for section in sections]
    if fp16 is True:
        ruled_out.append((f"fp16 in {name}: DeepSpeed's {_SKIPS}", "take bf16 or no"))
    return ruled_out


class Mesh(NamedTuple):
    """The sizes of parallelism_config."""

    dp_replicate: int = 1
    dp_shard: int = 1
    tp: int = 1
    cp: int = 1
    sp: int = 1

    @property
    def size(self) -> int:
        """Count the processes that it is for."""
        return self.dp_replicate * self.dp_shard * self.tp * self.cp * self.sp


@dataclass(frozen=True)
class Asked:
    """What a profile asks for.

    Args:
        engine: FSDP, DEEPSPEED, MEGATRON_LM, or empty.
        precision: no, bf16, fp16 or fp8.
        fp8_backend: of fp8; empty: any.
        sharding: FSDP1's strategy; empty under FSDP2.
    """

    processes: int
    on_cpu: bool
    engine: str
    precision: str
    mesh: Mesh
    fp8_backend: str = ""
    sharding: str = ""


def of_environment(on_cpu: bool) -> Asked:
    """Read what the launcher has put into this process's environment."""
    engines = {"FSDP": "FSDP", "DEEPSPEED": "DEEPSPEED", "MEGATRON_LM": "MEGATRON_LM"}
    engine = next((kind for name, kind in engines.items() if environment.is_on(f"ACCELERATE_USE_{name}")), "")
    mesh = Mesh()
    if environment.is_on("ACCELERATE_USE_PARALLELISM_CONFIG"):
        mesh = Mesh(*(int(os.environ.get(f"PARALLELISM_CONFIG_{name.upper()}_SIZE", "1")) for name in Mesh._fields))
    first = engine == "FSDP" and os.environ.get("FSDP_VERSION", "1") != "2"
    return Asked(
        processes=environment.world_size(),
        on_cpu=on_cpu,
        engine=engine,
        precision=os.environ.get("ACCELERATE_MIXED_PRECISION", "no").lower(),
        mesh=mesh,
        fp8_backend=os.environ.get("ACCELERATE_FP8_BACKEND", ""),
        sharding=os.environ.get("FSDP_SHARDING_STRATEGY", "") if first else "",
    )


def check_accumulation(turns: int) -> None:
    """Refuse turns of accelerate's own, which a process knows when its Accelerator is made.

    Raises:
        UserError: there are several.
    """
    if turns != 1:
        raise UserError(
            f"gradient_accumulation_steps {turns} in the profile: leave it at 1; "
            "accumulation follows from --run.global-batch, --run.micro-batch and the number of processes"
        )


def of_accumulation(turns: Any) -> list[tuple[str, str]]:
    """Find turns of accelerate's own in a profile's file, which may leave them to DeepSpeed: auto."""
    fine = turns in (1, "1", "auto")
    return [] if fine else [(f"gradient_accumulation_steps {turns}: follows from the batch", "set it to 1")]


def check(asked: Asked) -> None:
    """Refuse what no run can work under.

    Raises:
        UserError: it asks for something of the kind.
    """
    for trouble, fix in troubles(asked):
        raise UserError(f"the profile: {trouble}: {fix}")


def troubles(asked: Asked) -> list[tuple[str, str]]:
    """List the settings that no run can work under, each with its fix."""
    return [*_of_engine(asked), *_of_mesh(asked), *_of_precision(asked)]


def _of_engine(asked: Asked) -> list[tuple[str, str]]:
    ruled_out = []
    if asked.engine == "MEGATRON_LM":
        ruled_out.append(
            ("distributed_type MEGATRON_LM: its engine has loops of its own", "take fsdp.yaml or fsdp_tp.yaml")
        )
    if asked.engine == "DEEPSPEED" and asked.on_cpu:
        ruled_out.append(("DeepSpeed on CPU: it needs GPUs", "take accelerate_configs/fsdp_cpu.yaml"))
    if asked.engine == "DEEPSPEED" and importlib.util.find_spec("deepspeed") is None:
        ruled_out.append(("deepspeed is not installed", "pip install deepspeed, or use an fsdp profile"))
    if asked.sharding and asked.sharding.upper() not in SHARDING:
        fix = (
            "take ddp.yaml" if asked.sharding.upper() in ("NO_SHARD", "3") else "take hsdp.yaml, which says the groups"
        )
        ruled_out.append((f"fsdp_sharding_strategy {asked.sharding}: is not one of FSDP2", fix))
    return ruled_out


def _of_mesh(asked: Asked) -> list[tuple[str, str]]:
    mesh, ruled_out = asked.mesh, []
    split = [name for name in ("cp", "sp") if getattr(mesh, name) > 1]
    ruled_out += [(f"{name}_size {getattr(mesh, name)}: sequences are not split yet", "set it to 1") for name in split]
    if split or mesh.size == 1:
        return ruled_out
    if mesh.size != asked.processes:
        fix = f"start {mesh.size} processes, or change the sizes in parallelism_config"
        ruled_out.append((f"a mesh of {mesh.size} for {asked.processes} processes", fix))
    if asked.engine == "DEEPSPEED":
        ruled_out.append(("parallelism_config under DeepSpeed", "take it out, or take hsdp.yaml or fsdp_tp.yaml"))
    elif asked.engine == "FSDP" and mesh.dp_shard == 1:
        fix = "set dp_shard_size, or take ddp.yaml or tp.yaml"
        ruled_out.append(("dp_shard_size 1 under FSDP: nothing is sharded", fix))
    elif not asked.engine and mesh.dp_shard > 1:
        ruled_out.append(
            (f"dp_shard_size {mesh.dp_shard} without FSDP", "write distributed_type: FSDP and fsdp_version: 2")
        )
    elif not asked.engine and mesh.tp > 1 and mesh.dp_replicate > 1:
        fix = "take fsdp_tp.yaml, or tp_size or dp_replicate_size 1"
        ruled_out.append((f"tp_size {mesh.tp} with dp_replicate_size {mesh.dp_replicate} without FSDP", fix))
    return ruled_out


def _of_precision(asked: Asked) -> list[tuple[str, str]]:
    ruled_out, fix = [], "take bf16 or no"
    if asked.precision not in ("no", "bf16", "fp16", "fp8"):
        ruled_out.append((f"mixed_precision {asked.precision}: there is none", "write 'no', bf16 or fp16"))
    elif asked.precision in ("fp16", "fp8") and asked.on_cpu:
        ruled_out.append((f"mixed_precision {asked.precision} on CPU: it needs a GPU", fix))
    elif asked.precision == "fp8" and (lacks := _lacking(asked.fp8_backend)):
        ruled_out.append((f"mixed_precision fp8: {lacks} not installed", f"install it, or {fix}"))
    elif asked.precision == "fp16" and asked.engine == "DEEPSPEED":
        ruled_out.append((f"mixed_precision fp16 under DeepSpeed: its {_SKIPS}", fix))
    elif asked.precision == "fp16" and asked.mesh.tp > 1:
        ruled_out.append(("mixed_precision fp16 under tp_size: its loss scale does not work there yet", fix))
    return ruled_out


def _lacking(backend: str) -> str:
    """Say which package for fp8 is missing; empty if none is."""
    wanted = _FP8.get(backend.upper()) or sorted({name for names in _FP8.values() for name in names})
    there = any(importlib.util.find_spec(name) is not None for name in wanted)
    return "" if there else (f"{wanted[0]} is" if len(wanted) == 1 else f"none of {', '.join(wanted)} is")
