"""Profiles: the files for `accelerate launch`, found by name, and the layouts that they describe."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import app
from app.errors import UserError, did_you_mean
from app.launching.flags import read_yaml

# An installed package has the profiles inside `app`; a copy of the repository has them next to it.
_PLACES = [folder / "accelerate_configs" for folder in Path(app.__file__).parents[:2]]
FOLDER = next((place for place in _PLACES if place.is_dir()), _PLACES[-1])
_SECTIONS = ("fsdp_config", "deepspeed_config", "parallelism_config", "dynamo_config")
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
        asked = str(self.settings.get("mixed_precision") or "no").lower()
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
        """Return a nested section; empty if there is none."""
        return self.settings.get(name) or {}

    def mesh(self, dimension: str) -> int:
        """Return the size of one dimension of the mesh of processes, such as dp_replicate or tp."""
        return int(self.section("parallelism_config").get(f"parallelism_config_{dimension}_size") or 1)

    @cached_property
    def troubles(self) -> list[tuple[str, str]]:
        """List the settings that cannot work on any machine, each with its fix."""
        found = [(f"{key}: accelerate does not know it", "remove it or correct its name") for key in _unknown(self)]
        if self.settings.get("distributed_type") == "MULTI_CPU" and self.processes > 1:
            found.append(("distributed_type MULTI_CPU: starts one process", "write MULTI_GPU and use_cpu: true"))
        size = self.mesh("dp_replicate") * self.mesh("tp") * self.mesh("dp_shard")
        if self.section("parallelism_config") and size > 1 and size != self.processes:
            fix = f"start {size} processes, or change the sizes in parallelism_config"
            found.append((f"a mesh of {size} for {self.processes} processes", fix))
        turns = self.section("deepspeed_config").get("gradient_accumulation_steps", 1)
        if turns not in (1, "1"):
            found.append((f"gradient_accumulation_steps {turns}: follows from the batch", "set it to 1"))
        split = [f"{name}_size" for name in ("cp", "sp") if self.mesh(name) > 1]
        found += [(f"{name} {self.mesh(name[:2])}: sequences are not split yet", "set it to 1") for name in split]
        if self.on_cpu and self.zero_stage:
            found.append(("DeepSpeed on CPU", "take accelerate_configs/fsdp_cpu.yaml"))
        if self.on_cpu and self.precision == "fp16":
            found.append(("mixed_precision fp16 on CPU", "take bf16 or no"))
        return found


def names() -> list[str]:
    """List our profiles by name."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def find(name: str) -> Path:
    """Return the file of a profile by its path, or by its name if it is one of ours, such as `ddp_cpu`."""
    file = Path(name)
    ours = FOLDER / file.with_suffix(".yaml").name
    known = file.suffix in ("", ".yaml") and file.parent in (Path(), Path(FOLDER.name))
    return ours if known and not file.is_file() and ours.is_file() else file


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
    processes = count or settings.get("num_processes") or 1
    if not str(processes).isdigit() or int(processes) < 1:
        raise UserError(f"{flag} {text}: {processes} processes: at least 1 must train")
    return Profile(file, file.stem + (f":{count}" if count else ""), int(processes), settings)


def _unknown(profile: Profile) -> list[str]:
    """List keys that accelerate would refuse, or ignore without a warning."""
    from accelerate.commands.config.config_args import ClusterConfig
    from accelerate.commands.launch import launch_command_parser

    flags = vars(launch_command_parser().parse_args(["script.py"]))
    top = set(ClusterConfig.__dataclass_fields__)
    inner = [key for name in _SECTIONS for key in profile.section(name) if key not in flags]
    return [*(key for key in profile.settings if key not in top), *inner]
