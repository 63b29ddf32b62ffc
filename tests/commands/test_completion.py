"""A shell completes the program's commands and options."""

import functools
import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
import time

import pytest
from support.launching import ROOT

from app.commands import summaries


@functools.cache
def script(shell: str) -> str:
    """Return what `samestep completion` prints for a shell."""
    words = [sys.executable, "-m", "app", "completion", "--shell", shell]
    return subprocess.run(words, cwd=ROOT, check=True, capture_output=True, text=True).stdout


def completed(*words: str) -> list[str]:
    """Ask bash what it would offer for the last of the words."""
    ask = f'COMP_WORDS=(samestep "$@"); COMP_CWORD={len(words)}; _samestep; printf "%s\\n" "${{COMPREPLY[@]}}"'
    shell = ["bash", "-c", f"{script('bash')}\n{ask}", "bash", *words]
    return subprocess.run(shell, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split()


def test_commands_options_and_files():
    assert completed("") == list(summaries())
    assert completed("pl") == ["plan", "plot"]
    options = [
        "--step",
        "--best",
        "--weights",
        "--trust-code",
        "--average",
        "--to",
        "--merge",
        "--shard",
        "--push",
        "--private",
        "--dry-run",
        "--help",
    ]
    assert completed("export", "--") == options
    assert completed("plan", "--prof") == ["--profile"]
    assert completed("plan", "recipes/c") == ["recipes/cls.py"]
    assert completed("launch", "ddp_") == ["ddp_2nodes", "ddp_cpu"]
    assert completed("launch", "ddp_cpu", "recipes/c") == ["recipes/cls.py"]


def test_fish_is_told_the_same():
    lines = script("fish").splitlines()
    assert lines[0] == f"complete -c samestep -n __fish_use_subcommand -f -a '{' '.join(summaries())}'"
    for name in summaries():
        assert f"complete -c samestep -n '__fish_seen_subcommand_from {name}' -l help" in lines
    assert "complete -c samestep -n '__fish_seen_subcommand_from export' -l dry-run -r" in lines


@pytest.mark.skipif(not shutil.which("fish"), reason="fish is not installed")
def test_fish_completes_what_is_typed():
    def completed(line: str) -> list[str]:
        words = ["fish", "--no-config", "-c", f"{script('fish')}\ncomplete -C '{line}'"]
        shown = subprocess.run(words, cwd=ROOT, check=True, capture_output=True, text=True).stdout.splitlines()
        return [text.partition("\t")[0] for text in shown]

    assert completed("samestep pl") == ["plan", "plot"]
    assert completed("samestep export --st") == ["--step"]
    assert completed("samestep plan recipes/c") == ["recipes/cls.py"]


@pytest.mark.skipif(not shutil.which("zsh"), reason="zsh is not installed")
def test_zsh_completes_what_is_typed(tmp_path):
    """Typed on a terminal, with Tab: a program reads it instead."""
    (tmp_path / "samestep").write_text('#!/bin/sh\necho "typed: $*"\n')
    (tmp_path / "samestep").chmod(0o755)
    (tmp_path / "script").write_text(script("zsh"))
    child, terminal = pty.fork()
    if child == 0:
        os.chdir(ROOT)
        path = f"{tmp_path}:{os.environ['PATH']}"
        os.execvpe("zsh", ["zsh", "-f", "-i"], {"PATH": path, "HOME": str(tmp_path), "TERM": "dumb"})
    try:
        os.write(terminal, f"source {tmp_path}/script; echo sour''ced\n".encode())
        printed = until(terminal, "sourced")
        os.write(terminal, b"samestep export --st\t recipes/c\t\n")
        assert "typed: export --step recipes/cls.py" in (said := until(terminal, "typed: ")), printed + said
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(terminal)


def until(terminal: int, text: str) -> str:
    """Read what a terminal shows up to the end of the line with a text; at most 20 seconds."""
    found, end = "", time.monotonic() + 20
    while not re.search(f"{re.escape(text)}.*\n", found) and time.monotonic() < end:
        if select.select([terminal], [], [], 0.2)[0]:
            found += os.read(terminal, 4096).decode(errors="replace")
    return found
