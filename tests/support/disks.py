"""Small disks of a test's own."""

import subprocess
from contextlib import contextmanager

import pytest


@contextmanager
def mounted(folder, *options):
    """Mount a disk of memory of 1 MB, or skip."""
    folder.mkdir(exist_ok=True)
    command = ["mount", *(options or ("-t", "tmpfs", "-o", "size=1m", "none")), str(folder)]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        pytest.skip(f"a disk of our own cannot be mounted here: {result.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)
