"""The run folder: who holds it, what it was started with, how far it is. Written by the main process alone."""

import fcntl
import json
import os
import socket
import time
from pathlib import Path
from typing import Any

import yaml

from app.config import HARMLESS, LENGTH, RunConfig, diff
from app.errors import UserError

_held: set[Path] = set()  # file locks do not keep two runs of one process apart


class RunFolder:
    """One run's folder, held for as long as the run uses it."""

    def __init__(self, path: Path):
        self.path = path
        self.created = False
        self.info: dict[str, Any] = {}
        self._lock = None

    def claim(self, config: dict, settings: RunConfig, has_checkpoint: bool) -> list[str]:
        """Take the folder for this run, or refuse.

        Returns:
            What the user should know: fields that change what the rest of the run computes.

        Raises:
            UserError: it cannot be written, is in use, holds another run, or --run.resume does not allow it.
        """
        self.created = not self.path.exists()
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock_folder()
        except OSError as error:
            raise UserError(f"--run.dir {self.path}: {error.strerror}; give a folder that can be written") from None
        try:
            if (self.path / "run.json").exists():
                self.info = json.loads((self.path / "run.json").read_text())
            notes = self._check(config, settings, has_checkpoint)
            self._write("config.yaml", yaml.safe_dump(config, sort_keys=False))
        except BaseException:
            self.release(discard=self.created)
            raise
        return notes

    def _lock_folder(self) -> None:
        if self.path.resolve() in _held:
            raise UserError(
                f"{self.path} is in use by another run of this process: end that one, or give another --run.dir"
            )
        lock = open(self.path / "lock", "a+")  # noqa: SIM115 - held until the run ends
        try:
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            lock.seek(0)
            holder = lock.read().strip() or "another process"
            lock.close()
            raise UserError(
                f"{self.path} is in use by {holder}: wait for it, stop it, or give another --run.dir"
            ) from None
        lock.truncate(0)
        lock.write(f"process {os.getpid()} on {socket.gethostname()} since {time.strftime('%Y-%m-%d %H:%M:%S')}")
        lock.flush()
        self._lock = lock
        _held.add(self.path.resolve())

    def _check(self, config: dict, settings: RunConfig, has_checkpoint: bool) -> list[str]:
        if settings.resume == "must" and not has_checkpoint:
            raise UserError(f"--run.resume must: {self.path} has no checkpoint; use --run.resume auto to start there")
        if settings.resume == "never" and has_checkpoint:
            raise UserError(f"--run.resume never: {self.path} holds a run; give another --run.dir, or move it away")
        if not has_checkpoint or not (self.path / "config.yaml").exists():
            return []
        before = yaml.safe_load((self.path / "config.yaml").read_text())
        changed = {name: pair for name, pair in diff(before, config).items() if name not in HARMLESS}
        refused = {name: pair for name, pair in changed.items() if name not in LENGTH}
        if refused:
            lines = "".join(f"\n  {name}: {old!r} before, {new!r} now" for name, (old, new) in refused.items())
            raise UserError(
                f"{self.path} holds a run with other settings:{lines}\n"
                "give the settings of that run to go on with it, or another --run.dir to start one"
            )
        return [
            f"{name} was {old}, is {new}: the learning rate follows the new length from here on"
            for name, (old, new) in changed.items()
        ]

    def update(self, **fields: Any) -> None:
        """Change fields of run.json."""
        self.info |= fields
        self._write("run.json", json.dumps(self.info, indent=1))

    def _write(self, name: str, text: str) -> None:
        draft = self.path / f"{name}.tmp"
        draft.write_text(text)
        draft.rename(self.path / name)

    def release(self, discard: bool = False) -> None:
        """Give the folder back; `discard` removes what `claim` made where the run never began."""
        if self._lock is None:
            return
        if discard and self.created:
            for name in ("config.yaml", "run.json"):
                (self.path / name).unlink(missing_ok=True)
        if discard and self.created:
            (self.path / "lock").unlink(missing_ok=True)
            if not any(self.path.iterdir()):
                self.path.rmdir()
        else:
            self._lock.truncate(0)
        _held.discard(self.path.resolve())
        self._lock.close()
        self._lock = None
