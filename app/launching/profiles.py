"""Profiles: the files for `accelerate launch`, found by name, and the layouts that they describe."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from app.distributed import supported
from app.errors import UserError, did_you_mean
from app.launching import shipped
from app.launching.flags import read_yaml

FOLDER = shipped.folder("accelerate_configs")
# Sections of a profile, and what accelerate puts before a key of theirs that begins otherwise.
_SECTIONS = {"fsdp_config": "fsdp_", "fp8_config": "fp8_", "dynamo_config": "dynamo_"}
_SECTIONS |= dict.fromkeys(("deepspeed_config", "parallelism_config", "mpirun_config"), "")
# Keys that accelerate accepts on a command line only, and those of old files, which it converts.
_OLD = {"dynamo_backend", "fp16"}
# Values that accelerate would fail on with a traceback; its own names for each.
_CHOICES = {
    "fsdp_auto_wrap_policy": ("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP"),
    "fsdp_version": ("1", "2"),
    "zero_stage": ("0", "1", "2", "3"),
}
# What the model is wrapped in, by distributed_type.
_KINDS = {"NO": "", "MULTI_GPU": "DDP", "MULTI_CPU": "DDP", "FSDP": "FSDP2"}


@dataclass(frozen=True)
class Profile:
    """One profile, and the number of processes to start under it."""

    file: Path
    name: str
    processes: int
    settings: dict[str, Any]

    @property
    def on_cpu(self) -> bool:
        """Tell whether it trains on CPU only."""
        return bool(self.settings.get("use_cpu"))

    @property
    def machines(self) -> int:
        """Return the number of machines."""
        return int(self.settings.get("num_machines") or 1)

    @property
    def precision(self) -> str:
        """Name the precision: fp32, bf16, fp16 or fp8."""
        old = "fp16" if self.settings.get("fp16") else "no"
        asked = str(self.settings.get("mixed_precision") or old).lower()
        return "fp32" if asked in ("no", "false") else asked

    @property
    def zero_stage(self) -> int:
        """Return the stage of DeepSpeed's ZeRO; 0 without DeepSpeed."""
        if self.settings.get("distributed_type") != "DEEPSPEED":
            return 0
        return int(self.section("deepspeed_config").get("zero_stage", 2))

    @property
    def wrapping(self) -> str:
        """Name what the model is wrapped in, and over how many processes its layers are split; empty on one process."""
        split = self.mesh("tp")
        kind = "" if split > 1 and not self.is_fsdp else self._wrapper
        return ", ".join([*filter(None, [kind]), *([f"TP x{split}"] if split > 1 else [])])

    @property
    def in_short(self) -> str:
        """Name the layout: FSDP2 x4, TP x2."""
        split = self.mesh("tp")
        if split > 1:
            return f"{self._wrapper} x{self.processes // split}, TP x{split}" if self.is_fsdp else f"TP x{split}"
        return f"{self.wrapping} x{self.processes}" if self.processes > 1 else self.wrapping or "one process"

    @property
    def is_fsdp(self) -> bool:
        """Tell whether FSDP2 shards the weights."""
        return self._wrapper in ("FSDP2", "HSDP")

    @property
    def _wrapper(self) -> str:
        if self.zero_stage:
            return f"DeepSpeed ZeRO-{self.zero_stage}"
        kind = _KINDS.get(self.settings.get("distributed_type", "NO"), "DDP")
        if kind == "FSDP2" and self.mesh("dp_replicate") > 1:
            return "HSDP"
        return "" if self.processes == 1 and kind == "DDP" else kind

    @property
    def shards(self) -> int:
        """Return the number of processes that hold one copy of the model together; 1 if nothing is sharded."""
        if self.zero_stage:
            return self.processes
        if not self.is_fsdp:
            return 1
        return max(1, self.processes // (self.mesh("dp_replicate") * self.mesh("tp")))

    @property
    def data_ranks(self) -> int:
        """Return the number of data ranks: groups of processes that see their own samples."""
        return max(1, self.processes // self.mesh("tp"))

    @property
    def compiled(self) -> bool:
        """Tell whether it uses torch.compile."""
        backend = str(self.section("dynamo_config").get("dynamo_backend") or "no")
        return backend.lower() != "no"

    @property
    def compiled_whole(self) -> bool:
        """Tell whether it compiles a model as one, and not its repeated blocks."""
        return self.compiled and not self.section("dynamo_config").get("dynamo_use_regional_compilation")

    @property
    def offloads(self) -> bool:
        """Tell whether part of a GPU's state is kept in the host's memory."""
        deepspeed = self.section("deepspeed_config")
        places = [deepspeed.get(f"offload_{what}_device") for what in ("optimizer", "param")]
        asked = any(place not in (None, "none") for place in places) if self.zero_stage else False
        return asked or bool(self.section("fsdp_config").get("fsdp_offload_params"))

    def section(self, name: str) -> dict[str, Any]:
        """Return a nested section, with keys as accelerate completes them; empty if there is none."""
        start, fields = _SECTIONS.get(name, ""), self.settings.get(name) or {}
        return {key if key.startswith(start) else start + key: value for key, value in fields.items()}

    def mesh(self, dimension: str) -> int:
        """Return the size of one dimension of the mesh of processes, such as dp_replicate or tp."""
        return int(self.section("parallelism_config").get(f"parallelism_config_{dimension}_size") or 1)

    @property
    def asked(self) -> supported.Asked:
        """Return what it asks for, as every process of a run reads it from its environment."""
        fsdp, kind = self.section("fsdp_config"), self.settings["distributed_type"]
        first = kind == "FSDP" and str(fsdp.get("fsdp_version", "1")) != "2"
        return supported.Asked(
            processes=self.processes,
            on_cpu=self.on_cpu,
            engine=kind if kind in ("FSDP", "DEEPSPEED", "MEGATRON_LM") else "",
            precision="no" if self.precision == "fp32" else self.precision,
            mesh=supported.Mesh(*map(self.mesh, supported.Mesh._fields)),
            fp8_backend=str(self.section("fp8_config").get("fp8_backend") or ""),
            sharding=str(fsdp.get("fsdp_sharding_strategy") or "") if first else "",
        )

    @cached_property
    def troubles(self) -> list[tuple[str, str]]:
        """List the settings that cannot work, each with its fix: no run begins under one."""
        troubles = [*_of_kind(self)]
        troubles += [(f"{key}: accelerate does not know it", "remove it or correct its name") for key in _unknown(self)]
        return [*troubles, *supported.troubles(self.asked), *_of_processes(self), *_of_values(self)]

    def over(self, machines: int, processes: int = 0) -> "Profile":
        """Return this profile for another number of machines.

        Args:
            processes: their number on all machines together; 0: as it is.
        """
        count = processes or self.processes
        name = f"{self.file.stem}:{processes}" if processes else self.name
        return replace(self, name=name, processes=count, settings={**self.settings, "num_machines": machines})

    def check(self) -> None:
        """Refuse it if it has a setting that cannot work.

        Raises:
            UserError: it has one.
        """
        for trouble, fix in self.troubles:
            raise UserError(f"{self.file}: {trouble}: {fix}")


def names() -> list[str]:
    """List our profiles by name."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def find(name: str) -> Path:
    """Return the file of a profile by its path, or by its name if it is one of ours, such as `ddp_cpu`."""
    file = Path(name)
    ours = FOLDER / file.with_suffix(".yaml").name
    may_be_ours = file.suffix in ("", ".yaml") and file.parent in (Path(), Path(FOLDER.name))
    return ours if may_be_ours and not file.is_file() and ours.is_file() else file


def read(text: str, flag: str = "--profile") -> Profile:
    """Read `FILE`, or `FILE:PROCESSES` for another number of processes. FILE may be the name of one of our profiles.

    Args:
        flag: what errors call it.

    Raises:
        UserError: there is no such file, or it is not a profile.
    """
    name, colon, count = text.rpartition(":")
    if not (colon and count.isdigit()):
        name, count = text, ""
    file = find(name)
    ours = ", ".join(names())
    meant = did_you_mean(name, names()) if not file.exists() else ""
    settings = read_yaml(
        flag, str(file), f"; give a file that `accelerate config` writes, or one of ours: {ours}{meant}"
    )
    if not isinstance(settings, dict) or "distributed_type" not in settings:
        raise UserError(f"{flag} {name} has no distributed_type: give a file that `accelerate config` writes")
    # YAML reads an unquoted NO as false.
    settings["distributed_type"] = str(settings["distributed_type"] or "NO").upper()
    stated = settings.get("num_processes")
    processes = count or (1 if stated in (None, -1) else stated)
    if not str(processes).isdigit() or int(processes) < 1:
        raise UserError(f"{flag} {text}: {processes} processes: at least 1 must train")
    return Profile(file, file.stem + (f":{count}" if count else ""), int(processes), settings)


def _of_kind(profile: Profile) -> Iterator[tuple[str, str]]:
    """Find what the kind of profile rules out."""
    from accelerate.utils import DistributedType

    kind = profile.settings["distributed_type"]
    if str(profile.settings.get("compute_environment") or "LOCAL_MACHINE") != "LOCAL_MACHINE":
        where = profile.settings["compute_environment"]
        yield f"compute_environment {where}: processes start on this machine only", "write LOCAL_MACHINE"
    if kind == "TP":
        fix = "write MULTI_GPU, and parallelism_config_tp_size in parallelism_config, as tp.yaml does"
        yield "distributed_type TP: accelerate 1.15 has no such type", fix
    elif kind == "XLA":
        yield "distributed_type XLA: TPUs have no float64, which exact sums need", "take GPUs or CPUs"
    elif kind not in set(DistributedType):
        yield f"distributed_type {kind}: accelerate does not know it", "write NO, MULTI_GPU, FSDP or DEEPSPEED"
    elif kind == "NO" and profile.processes > 1:
        fix = f"take ddp_cpu:{profile.processes} or ddp, for example"
        yield f"distributed_type NO: starts one process, not {profile.processes}", fix
    elif kind == "MULTI_CPU" and profile.processes > 1:
        yield "distributed_type MULTI_CPU: starts one process", "write MULTI_GPU and use_cpu: true"
    by = profile.section("deepspeed_config").get("deepspeed_multinode_launcher") or "pdsh"  # accelerate's own choice
    if profile.zero_stage and profile.machines > 1 and by != "standard":
        yield f"deepspeed_multinode_launcher {by}: would start the processes", "write standard, below deepspeed_config"
    if profile.section("mpirun_config").get("mpirun_hostfile"):
        yield "mpirun_hostfile: mpirun would start the processes", "write MULTI_GPU, as ddp_2nodes.yaml does"


def _of_processes(profile: Profile) -> Iterator[tuple[str, str]]:
    """Find what does not fit the number of processes."""
    here = -(-profile.processes // profile.machines)
    missing = profile.settings.get("num_processes") in (None, -1) and ":" not in profile.name
    if missing and profile.settings["distributed_type"] != "NO":
        yield "num_processes is missing", "write it, or give the profile as FILE:8"
    if profile.processes % profile.machines:
        yield f"{profile.processes} processes on {profile.machines} machines", "give each machine as many"
    gpus = profile.settings.get("gpu_ids")
    if gpus is not None and not isinstance(gpus, str):
        yield f"gpu_ids {gpus}: is not a text", f"write gpu_ids: '{gpus}', or all"
    elif not profile.on_cpu and gpus not in (None, "all") and len(gpus.split(",")) < here:
        yield f"gpu_ids {gpus}: {here} processes are for each machine", "write all, or as many as processes"


def _of_values(profile: Profile) -> Iterator[tuple[str, str]]:
    """Find values that accelerate would fail on, or take for others."""
    if profile.settings.get("mixed_precision") is False:
        yield "mixed_precision no: without quotes, YAML reads false", "write mixed_precision: 'no'"
    every = {key: value for name in _SECTIONS for key, value in profile.section(name).items()}
    for key, choices in _CHOICES.items():
        if every.get(key) is not None and str(every[key]).upper() not in choices:
            yield f"{key} {every[key]}: there is none", f"write {', '.join(choices[:-1])} or {choices[-1]}"
    if str(every.get("fsdp_version")) == "2" and not _is_boolean(every.get("fsdp_reshard_after_forward", True)):
        yield f"fsdp_reshard_after_forward {every['fsdp_reshard_after_forward']}: FSDP2 has two ways", "true or false"
    recomputes = _is_true(every.get("fsdp_activation_checkpointing"))
    if _is_true(every.get("fsdp_activation_checkpointing_offload")) and not recomputes:
        yield "fsdp_activation_checkpointing_offload alone", "set fsdp_activation_checkpointing: true too"
    synced = "fsdp_sync_module_states" not in every or _is_true(every["fsdp_sync_module_states"])
    if not synced and _is_true(every.get("fsdp_cpu_ram_efficient_loading", True)):
        yield "fsdp_sync_module_states false", "set fsdp_cpu_ram_efficient_loading: false too"
    yield from supported.of_accumulation(every.get("gradient_accumulation_steps", 1))
    yield from _of_deepspeed_file(profile, every.get("deepspeed_config_file"))
    backend = str(every.get("dynamo_backend") or profile.settings.get("dynamo_backend") or "no").upper()
    if backend not in _compilers():
        yield f"dynamo_backend {backend.lower()}: there is none", "write inductor or 'no'"


def _of_deepspeed_file(profile: Profile, name: str | None) -> Iterator[tuple[str, str]]:
    """Find what a file of DeepSpeed's own settings rules out."""
    if not name or profile.settings["distributed_type"] != "DEEPSPEED":
        return
    try:
        settings = json.loads(Path(name).read_text(encoding="utf-8"))
        yield from supported.of_deepspeed_file(name, settings)
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        yield f"deepspeed_config_file {name}: cannot be read ({error})", "correct its path, which is from here"


def _compilers() -> set[str]:
    from accelerate.utils import DynamoBackend

    return {name.upper() for name in DynamoBackend.list()}


def _is_boolean(value: Any) -> bool:
    return str(value).lower() in ("true", "false", "yes", "no", "1", "0", "on", "off", "y", "n", "t", "f")


def _is_true(value: Any) -> bool:
    return str(value).lower() in ("true", "yes", "1", "on", "y", "t")


def _unknown(profile: Profile) -> list[str]:
    """List keys that accelerate would refuse, or ignore without a warning."""
    from accelerate.commands.config.config_args import ClusterConfig
    from accelerate.commands.launch import launch_command_parser

    flags = vars(launch_command_parser().parse_args(["script.py"]))
    top = set(ClusterConfig.__dataclass_fields__) | _OLD
    inner = [key for name in _SECTIONS for key in profile.section(name) if key not in flags]
    return [*(key for key in profile.settings if key not in top), *inner]
