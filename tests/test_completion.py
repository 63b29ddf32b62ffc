"""A shell completes the program's commands and options."""

import subprocess
import sys

from app.__main__ import summaries
from launching import ROOT


def completed(*words: str) -> list[str]:
    """Ask bash what it would offer for the last of the words."""
    script = subprocess.run(
        [sys.executable, "-m", "app", "completion"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout
    ask = f'COMP_WORDS=(samestep "$@"); COMP_CWORD={len(words)}; _samestep; printf "%s\\n" "${{COMPREPLY[@]}}"'
    shell = ["bash", "-c", f"{script}\n{ask}", "bash", *words]
    return subprocess.run(shell, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split()


def test_commands_options_and_files():
    assert completed("") == list(summaries())
    assert completed("pl") == ["plan", "plot"]
    assert completed("export", "--") == ["--step", "--to", "--shard", "--push", "--private", "--dry-run", "--help"]
    assert completed("plan", "--pr") == ["--profile"]
    assert completed("plan", "recipes/c") == ["recipes/cls.py"]
