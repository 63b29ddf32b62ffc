"""The run folder: who holds it, what it was started with, how far it is. Written by the main process alone."""

import fcntl
import json
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import yaml

from app.config import HARMLESS, LENGTH, RunConfig, diff, finite
from app.errors import UserError

_held: dict[Path, TextIO] = {}
_LONGER = "the learning rate follows the new length from here on"


class Change(NamedTuple):
    """A setting that differs from that of the run in a folder, and what comes of it."""

    name: str
    before: Any
    now: Any
    effect: str


def _close_in_child() -> None:
    """Keep a forked process, such as one that loads data, from holding on to a folder that its parent has lost."""
    for lock in _held.values():
        os.close(lock.fileno())


os.register_at_fork(after_in_child=_close_in_child)


class RunFolder:
    """One run's folder, held for as long as the run uses it."""

    def __init__(self, path: Path):
        self.path = path
        self.info: dict[str, Any] = {}
        self._config: dict = {}
        self._key: Path | None = None
        self._made: list[Path] = []  # what this run made, and takes away again if it never begins

    def claim(self, config: dict, settings: RunConfig, has_checkpoint: bool) -> list[str]:
        """Take the folder for this run, or refuse.

        Returns:
            What the user should know: fields that change what the rest of the run computes.

        Raises:
            UserError: it cannot be written, is in use, holds another run, or --run.resume does not allow it.
        """
        try:
            there = self.path.exists()
            self.path.mkdir(parents=True, exist_ok=True)
            self._made = [] if there else [self.path]
            self._lock()
            notes = self._check(config, settings, has_checkpoint)
        except OSError as error:
            self.release(discard=True)
            raise self.cannot_write(error) from None
        except BaseException:
            self.release(discard=True)
            raise
        self._config = config
        return notes

    def cannot_write(self, error: OSError) -> UserError:
        """Say that the folder cannot be written, and why."""
        return UserError(f"--run.dir {self.path}: {error.strerror}; give a folder that can be written")

    def _lock(self) -> None:
        key = self.path.resolve()
        if key in _held:
            raise self._in_use("another run of this process")
        if not (self.path / "lock").exists():
            self._made.append(self.path / "lock")
        # flock, not lockf: a lock of the latter kind is lost when anything in this process reads the file.
        lock = open(self.path / "lock", "a+")  # noqa: SIM115 - held until the run ends
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            taken = os.fstat(lock.fileno()).st_ino != (self.path / "lock").stat().st_ino  # by one who made it anew
        except (BlockingIOError, FileNotFoundError):
            taken = True
        if taken:
            lock.seek(0)
            holder = lock.read().strip() or "another process"
            lock.close()
            self._made = []
            raise self._in_use(holder)
        self._key = key
        _held[key] = lock
        lock.truncate(0)
        lock.write(f"process {os.getpid()} on {socket.gethostname()} since {time.strftime('%Y-%m-%d %H:%M:%S')}")
        lock.flush()

    def _in_use(self, holder: str) -> UserError:
        return UserError(f"{self.path} is in use by {holder}: wait for it, stop it, or give another --run.dir")

    def _check(self, config: dict, settings: RunConfig, has_checkpoint: bool) -> list[str]:
        if (self.path / "run.json").exists():
            self.info = self._read("run.json", json.loads)
        self.check_resume(settings, has_checkpoint)
        if not has_checkpoint or not (self.path / "config.yaml").exists():
            return []
        changes = self.changes(config, settings)
        refused = [change for change in changes if change.effect == "refused"]
        if refused:
            lines = "".join(f"\n  {name}: {old!r} before, {new!r} now" for name, old, new, _ in refused)
            raise UserError(
                f"{self.path} holds a run with other settings:{lines}\n"
                "give the settings of that run to go on with it, or another --run.dir to start one"
            )
        return [f"{name} was {old}, is {new}: {effect}" for name, old, new, effect in changes if effect == _LONGER]

    def check_resume(self, settings: RunConfig, has_checkpoint: bool) -> None:
        """Refuse what --run.resume does not allow.

        Raises:
            UserError: there is a checkpoint and must be none, or none and must be one.
        """
        if settings.resume == "must" and not has_checkpoint:
            raise UserError(f"--run.resume must: {self.path} has no checkpoint; use --run.resume auto to start there")
        if settings.resume == "never" and has_checkpoint:
            raise UserError(f"--run.resume never: {self.path} holds a run; give another --run.dir, or move it away")

    def changes(self, config: dict, settings: RunConfig) -> list[Change]:
        """List the fields in which these settings differ from those that the folder's run was started with.

        Raises:
            UserError: the folder's config.yaml is damaged.
        """
        by = "run.steps" if settings.steps else "run.epochs"  # the other one decides nothing

        def effect(name: str) -> str:
            if name in LENGTH:
                return _LONGER if name == by else "none"
            return "taken as it is now" if name in HARMLESS else "refused"

        found = diff(self._read("config.yaml", yaml.safe_load), config)
        return [Change(name, old, new, effect(name)) for name, (old, new) in found.items()]

    def begin(self, **fields: Any) -> None:
        """Write down the settings that the folder was claimed with, and the first fields of run.json."""
        self._write("config.yaml", yaml.safe_dump(self._config, sort_keys=False))
        self.update(**fields)

    def update(self, **fields: Any) -> None:
        """Change fields of run.json."""
        self.info |= fields
        self._write("run.json", json.dumps(finite(self.info), indent=1))

    def _read(self, name: str, parse: Callable[[str], Any]) -> dict:
        try:
            fields = parse((self.path / name).read_text())
        except (ValueError, yaml.YAMLError):
            fields = None
        if not isinstance(fields, dict):
            raise UserError(f"{self.path / name} is damaged: mend it, or give another --run.dir")
        return fields

    def _write(self, name: str, text: str) -> None:
        if not (self.path / name).exists():
            self._made.append(self.path / name)
        draft = self.path / f"{name}.tmp"
        try:
            draft.write_text(text)
            draft.rename(self.path / name)
        except OSError:
            draft.unlink(missing_ok=True)
            raise

    def release(self, discard: bool = False) -> None:
        """Give the folder back; `discard` removes what was made for a run that never began."""
        if discard:
            for path in reversed(self._made):
                if not path.is_dir():
                    path.unlink(missing_ok=True)
                elif not any(path.iterdir()):
                    path.rmdir()
        self._made = []
        if self._key is not None:
            lock = _held.pop(self._key)
            lock.truncate(0)
            lock.close()
            self._key = None
