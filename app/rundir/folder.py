"""The run folder: who holds it, its settings, and run.json. Only the main process writes it."""

import dataclasses
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from app import storage
from app.config import OnResume, RunConfig, defaults, diff, finite, on_resume
from app.errors import UserError, printable
from app.rundir import contents, recipe_source
from app.rundir.foreign import bounded, read_bytes
from app.rundir.lock import FolderLock
from app.rundir.run_record import RUN, RunRecord
from app.storage.addresses import BUCKETS, address
from app.storage.records import NewerFormat


class Effect(Enum):
    """What a changed setting does to a run that is resumed, in words for the user."""

    NONE = "none"
    TAKEN = "taken as it is now"
    FROM_HERE = "accepted from here on (--run.changed)"
    LENGTH = "the learning rate follows the new length from here on"
    REFUSED = "refused"


# The effects that a run's record tells, as what follows differs from what it would have been.
LASTING = (Effect.FROM_HERE, Effect.LENGTH)
_ITSELF = ""  # the name of the folder in its own storage


class Change(NamedTuple):
    """A setting that differs from that of the run in a folder, and its effect."""

    name: str
    before: Any
    now: Any
    effect: Effect


class RunFolder:
    """One run's folder, held for as long as the run uses it."""

    def __init__(self, path: Path, source: str, config: Any):
        """Look after a folder.

        Args:
            source: the recipe's source, kept next to its settings; empty where it has no file.
            config: the recipe's config, whose fields say which of them may change.
        """
        self.path, self.source, self._files = path, source, storage.at(path)
        self.is_remote = self._files.is_remote
        self._on_resume = on_resume(config)
        self._defaults = defaults(config)  # what a run had before a setting existed
        self.record: RunRecord | None = None
        """What run.json says; None before a run begins, and where it is damaged."""
        self.trackers: dict[str, str] = {}
        """The trackers' names for the run."""
        self.config: dict = {}
        self._settings: RunConfig | None = None
        self._unread = False  # there is a run, and its settings cannot be read
        self._lock = FolderLock(path)
        self._made: list[str] = []  # what this run made, and removes again if it never begins
        self._known: set[str] = set()  # files that are there, for sure

    def claim(self, config: dict, settings: RunConfig, has_checkpoint: bool) -> list[str]:
        """Take the folder for this run.

        Returns:
            Lines for the user: fields that change what the rest of the run computes, and damaged files.

        Raises:
            UserError: it cannot be written, is in use, holds another run, or --run.resume does not allow it.
        """
        try:
            contents.check(self.path, has_checkpoint)
            there = self._files.exists()
            self._files.make()
            self._made = [] if there else [_ITSELF]
            self._files.probe()
            self._take()
            contents.sweep(self.path)
            notes = self._check(config, settings, has_checkpoint)
        except OSError as error:
            self.release(discard=True)
            raise self.cannot_write(error) from None
        except BaseException:
            self.release(discard=True)
            raise
        self.config, self._settings = config, settings
        return notes

    def check_place(self) -> None:
        """Refuse a URL of what is only read.

        Raises:
            UserError: it is one.
        """
        if (url := address(self.path)) and url.scheme not in BUCKETS:
            raise UserError(
                f"--run.dir {url}: a run is written there, and {url.scheme}: is only read: give a folder of a disk, or "
                "of a bucket, as s3://BUCKET/FOLDER, gs://... or az://..."
            )

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Say in one line why the folder cannot be read in this block.

        Raises:
            UserError: it cannot.
        """
        try:
            yield
        except OSError as error:
            raise UserError(f"--run.dir {self.path} cannot be read: {error.strerror or error}") from None

    def cannot_write(self, error: OSError) -> UserError:
        """Say that the folder cannot be written, and why."""
        return UserError(f"--run.dir {self.path}: {error.strerror}; give a folder that can be written")

    def _take(self) -> None:
        if not self._files.exists("lock"):
            self._made.append("lock")
        try:
            self._lock.take()
        except UserError:
            self._made = []
            raise

    def _check(self, config: dict, settings: RunConfig, has_checkpoint: bool) -> list[str]:
        notes = self._read_record() if self._files.exists(RUN) else []
        self.check_resume(settings, has_checkpoint)
        if not has_checkpoint:
            return notes
        before = self._read("config.yaml", yaml.safe_load)
        self._unread = before is None
        if before is None:
            notes.append(
                f"warning: {self.path / 'config.yaml'} is damaged or missing; the checkpoint's settings decide"
            )
        else:
            notes += self._compare(before, config, settings)
        return notes + self._check_recipe(settings)

    def _read_record(self) -> list[str]:
        """Read run.json, and return a line for the user if it is damaged.

        Raises:
            UserError: a newer version has written it.
        """
        file = self.path / RUN
        fields = self._read(RUN, json.loads)
        if fields is None:
            return [f"warning: {file} is damaged, and is written anew"]
        try:
            self.record = RunRecord.from_json(bounded(fields))
        except NewerFormat as newer:
            raise UserError(f"{file}: {newer}, or give another --run.dir to start a run") from None
        except ValueError as wrong:
            return [f"warning: {file} is damaged, and is written anew: {wrong}"]
        self.trackers = dict(self.record.trackers or {})
        return []

    def check_saved_settings(self, saved: dict) -> list[str]:
        """Compare the settings with those of a checkpoint, where config.yaml could not be read.

        Returns:
            Lines for the user.

        Raises:
            UserError: a setting differs that may not.
        """
        return self._compare(saved, self.config, self._settings) if self._unread and self._settings else []

    def _compare(self, before: dict, config: dict, settings: RunConfig) -> list[str]:
        changes = self._changes(before, config, settings)
        refused = [change for change in changes if change.effect is Effect.REFUSED]
        if refused:
            lines = "".join(f"\n  {name}: {old!r} before, {new!r} now" for name, old, new, _ in refused)
            mild = all(self._on_resume.get(change.name) is OnResume.IF_ACCEPTED for change in refused)
            accept = ", accept the new ones from here on with --run.changed accept" if mild else ""
            raise UserError(
                f"{self.path} holds a run with other settings:{lines}\n"
                f"give the settings of that run to go on with it{accept}, or another --run.dir to start one"
            )
        told = [change for change in changes if change.effect in LASTING]
        return [printable(f"{name} was {old}, is {new}: {effect.value}") for name, old, new, effect in told]

    def changed_since(self, saved: dict) -> dict[str, tuple[Any, Any]]:
        """List, by name, what a checkpoint's settings were and are now, for those that change what follows it.

        Whether a change was accepted has been checked; it may have been in an earlier launch, which saved nothing.
        """
        if self._settings is None:  # not on the main process
            return {}
        changes = self._changes(saved, self.config, dataclasses.replace(self._settings, changed="accept"))
        return {change.name: (change.before, change.now) for change in changes if change.effect in LASTING}

    def check_resume(self, settings: RunConfig, has_checkpoint: bool) -> None:
        """Refuse what --run.resume does not allow.

        Raises:
            UserError: there is a checkpoint and there must be none, or there is none and there must be one.
        """
        if settings.resume == "must" and not has_checkpoint:
            raise UserError(f"--run.resume must: {self.path} has no checkpoint; use --run.resume auto to start there")
        if settings.resume == "never" and has_checkpoint:
            raise UserError(f"--run.resume never: {self.path} holds a run; give another --run.dir, or move it away")

    def changes(self, config: dict, settings: RunConfig) -> list[Change]:
        """List the fields in which these settings differ from those of config.yaml; none where it cannot be read."""
        before = self._read("config.yaml", yaml.safe_load)
        return [] if before is None else self._changes(before, config, settings)

    def _changes(self, before: dict, now: dict, settings: RunConfig) -> list[Change]:
        by = "run.steps" if settings.steps else "run.epochs"  # the other one decides nothing

        def effect(name: str) -> Effect:
            match self._on_resume.get(name, OnResume.REFUSE):
                case OnResume.LENGTH:
                    return Effect.LENGTH if name == by else Effect.NONE
                case OnResume.ACCEPT:
                    return Effect.TAKEN
                case OnResume.IF_ACCEPTED:
                    return Effect.FROM_HERE if settings.changed == "accept" else Effect.REFUSED
                case OnResume.REFUSE:
                    return Effect.REFUSED

        differing = diff(before, now, self._defaults)
        return [Change(name, old, new, effect(name)) for name, (old, new) in differing.items()]

    def _check_recipe(self, settings: RunConfig) -> list[str]:
        copy, entry = self.path / "recipe.py", self._files.entry("recipe.py")
        if not self.source or not entry or not entry.size:
            return []
        try:
            lines = recipe_source.differences(read_bytes(copy).decode("utf-8"), self.source)
        except (SyntaxError, ValueError, RecursionError):
            return [f"warning: {copy} is damaged: the recipe was not compared with it"]
        shown = "".join(f"\n  {line}" for line in lines)
        if lines and settings.changed == "refuse":
            raise UserError(
                f"{self.path} holds a run of another recipe:{shown}\n"
                f"undo the change ({copy} is the recipe as it was), accept it with --run.changed accept, or give "
                "another --run.dir"
            )
        return [f"the recipe has changed, which is accepted (--run.changed):{shown}"] if lines else []

    def begin(self, record: RunRecord) -> None:
        """Write run.json, by which the folder is a run's, config.yaml and recipe.py."""
        self._write_record(record)
        self._write("config.yaml", yaml.safe_dump(self.config, sort_keys=False))
        if self.source:
            self._write("recipe.py", self.source)

    def update(self, **fields: Any) -> None:
        """Change fields of run.json, by their names in its record.

        Raises:
            UserError: another run has taken the folder.
        """
        if self.record is None:
            raise RuntimeError("run.json is changed before RunFolder.begin has written it")
        self._write_record(dataclasses.replace(self.record, **fields))

    def _write_record(self, record: RunRecord) -> None:
        self.check()
        self.record = record
        self._write(RUN, json.dumps(finite(record.to_json()), indent=1))

    def check(self, anew: bool = True) -> None:
        """Refuse to go on where another run has taken the folder; see `FolderLock.check`."""
        self._lock.check(anew)

    def _read(self, name: str, parse: Callable[[str], Any]) -> dict | None:
        """Read a file of fields; None where it is damaged or missing."""
        try:
            fields = parse(read_bytes(self.path / name).decode("utf-8"))
        except (ValueError, yaml.YAMLError, RecursionError, FileNotFoundError):
            return None
        return fields if isinstance(fields, dict) else None

    def _write(self, name: str, text: str) -> None:
        if name not in self._known and not self._files.exists(name):
            self._made.append(name)
        self._known.add(name)  # a store is not asked again each time
        self._files.write(name, text)

    def release(self, discard: bool = False) -> None:
        """Release the folder; `discard` removes what was made for a run that never began."""
        if discard:
            for name in reversed(self._made):
                if name == _ITSELF:
                    self._files.delete_if_empty()
                else:
                    self._files.delete(name)
        self._made = []
        self._lock.release()
