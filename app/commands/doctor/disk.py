"""Whether a folder can hold runs: free space, speed, and locks that keep two runs apart."""

import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from app.commands.doctor.findings import NOTE, TROUBLE, Finding
from app.commands.output import size
from app.launching import program

_ROOM = 10 * 10**9
_WRITTEN = 64 * 10**6
_SLOW = 20 * 10**6  # bytes a second
_TRY = """
import fcntl, sys
try:
    fcntl.flock(open(sys.argv[1]), fcntl.LOCK_EX | fcntl.LOCK_NB)
except OSError:
    sys.exit(7)
"""


def folder(path: Path) -> Iterator[Finding]:
    """Try to write into a folder for runs, or into the folder where it would be made; clean up afterwards."""
    there = next(parent for parent in [path.absolute(), *path.absolute().parents] if parent.is_dir())
    name = f"disk of {path}"
    try:
        place = tempfile.TemporaryDirectory(prefix=".doctor-", dir=there)
    except OSError as error:
        yield Finding(name, f"{there}: {error.strerror}", TROUBLE, "give --run.dir a folder that can be written")
        return
    with place as inside:
        free = shutil.disk_usage(inside).free
        little = free < _ROOM
        fix = f"{program.typed('plan')} says what a run's checkpoints need; --run.keep 1 halves it" if little else ""
        yield Finding(name, f"{size(free)} free", NOTE if little else "ok", fix)
        yield _speed(Path(inside, "speed"), free)
        yield _locks(Path(inside, "lock"))


def _speed(file: Path, free: int) -> Finding:
    written = min(_WRITTEN, free // 10)
    block = os.urandom(1 << 20)
    began = time.perf_counter()
    with file.open("wb") as target:
        for _ in range(max(1, written // len(block))):
            target.write(block)
        target.flush()
        os.fsync(target.fileno())
    rate = file.stat().st_size / (time.perf_counter() - began)
    slow = rate < _SLOW
    fix = "use a local disk for --run.dir, or save less often (--run.save-every)" if slow else ""
    return Finding("write and fsync", f"{size(rate)}/s over {size(file.stat().st_size)}", NOTE if slow else "ok", fix)


def _locks(file: Path) -> Finding:
    """Lock a file, then try to lock it from another process, which must be refused."""
    fix = "use a disk with locks (NFS: mount it without nolock), or make sure that no two runs share a folder"
    with file.open("w") as held:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            return Finding("flock", f"does not work here: {error.strerror}", TROUBLE, fix)
        status = subprocess.run([sys.executable, "-S", "-c", _TRY, str(file)], timeout=20, check=False).returncode
    if status == 7:
        return Finding("flock", "keeps a second process out")
    return Finding("flock", "does not keep a second process out", TROUBLE, fix)
