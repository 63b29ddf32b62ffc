"""Examine this machine: versions, devices, disk, limits, the Hub, two ranks that talk; and whether a profile fits it.

    python -m app doctor
    python -m app doctor --profile accelerate_configs/fsdp.yaml --dir /data/runs

The exit status is 0 if nothing is in the way, 1 if there is trouble, and 2 if an option is wrong. A note is not
trouble. It takes some seconds, most of them for the two ranks.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from app.commands.doctor.findings import NOTE, TROUBLE, Finding, look
from app.commands.output import table, write_json

if TYPE_CHECKING:
    from app.launching.profiles import Profile


@dataclass
class Options:
    """What to examine in addition to the machine itself."""

    profile: str = ""
    """A profile to compare with this machine: a file, or a name such as ddp_cpu. FILE:4 means 4 processes, whatever the
    file says."""
    dir: str = "runs"
    """Folder for runs, perhaps in a bucket; its disk or store is tested."""
    json: str = ""
    """Also write the findings to this file."""


def main(options: Options) -> int:
    """Examine, and return the exit status.

    Raises:
        UserError: there is no such profile.
    """
    from app.commands.doctor import allreduce, disk, machine, store
    from app.launching import profiles
    from app.storage.addresses import address

    profile = profiles.read(options.profile) if options.profile else None
    checks: dict[str, Callable[[], Iterable[Finding]]] = {
        "versions": machine.versions,
        "devices": machine.devices,
        "backends": machine.backends,
        "port": machine.port,
        "cores": machine.cores,
        "limits": machine.limits,
        "disk": lambda: store.folder(options.dir) if address(options.dir) else disk.folder(Path(options.dir)),
        "hub": machine.hub,
        "all-reduce": allreduce.two_ranks,
    }
    if profile is not None:
        checks["profile"] = lambda: fits(profile)
    findings = []
    for number, (what, check) in enumerate(checks.items(), 1):
        print(f"[{number}/{len(checks)}] {what}", flush=True)
        findings += look(what, check)
    print("\n" + table(["what", "found", "verdict", "fix"], findings))
    troubles = sum(finding.verdict == TROUBLE for finding in findings)
    print(f"\n{troubles} trouble{'s' * (troubles != 1)}" if troubles else "\nnothing is in the way")
    write_json(options.json, {"troubles": troubles, "findings": [finding._asdict() for finding in findings]})
    return int(troubles > 0)


def fits(profile: "Profile") -> Iterator[Finding]:
    """Compare a profile with this machine."""
    import torch

    from app.distributed.environment import gpus_here

    name = f"profile {profile.name}"
    kind = f"{profile.in_short}, {profile.precision}"
    yield Finding(name, f"{kind}, {'CPU' if profile.on_cpu else 'GPU'}")
    for trouble, fix in profile.troubles:
        yield Finding(name, trouble, TROUBLE, fix)
    gpus = gpus_here()
    here = -(-profile.processes // profile.machines)
    if not profile.on_cpu and here > gpus:
        fix = f"--num_processes {gpus * profile.machines}, or " if gpus else ""
        fix += "a profile for CPU such as accelerate_configs/ddp_cpu.yaml"
        yield Finding(name, f"{here} processes for {gpus} GPUs", TROUBLE, fix)
    lacks = torch.cuda.is_available() and not torch.cuda.is_bf16_supported(including_emulation=False)
    if profile.precision == "bf16" and not profile.on_cpu and lacks:
        yield Finding(name, "bf16, and this GPU has none", TROUBLE, "mixed_precision: fp16, or no")
    if profile.machines > 1:
        address = str(profile.settings.get("main_process_ip") or "127.0.0.1")
        fix = "on each machine --machine_rank 0, 1, ...; --run.dir on a disk that all share, or in a bucket"
        if address in ("127.0.0.1", "localhost"):
            fix = f"--main_process_ip ADDRESS_OF_THE_FIRST; {fix}"
        yield Finding(name, f"{profile.machines} machines that meet at {address}", NOTE, fix)
