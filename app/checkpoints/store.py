"""The commit protocol: a checkpoint folder that is present is whole, and the last good one is never given up first."""

import contextlib
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from app import storage
from app.checkpoints import record
from app.checkpoints.patience import Patience, at_once
from app.checkpoints.record import Record
from app.checkpoints.retention import Retention
from app.distributed import collectives
from app.distributed.state import manifest
from app.distributed.state.attempt import STATE, Attempt, SaveOutcome
from app.errors import UserError
from app.storage.records import FileSum, NewerFormat

_NOT_WHOLE = (FileNotFoundError, IsADirectoryError, NotADirectoryError)  # errors that show damage, not a failing disk
_NAME = re.compile(r"step-(\d{8,})")
_DRAFT = re.compile(_NAME.pattern + storage.DRAFT)


class CheckpointStore:
    """The checkpoints of one run: written by all ranks together, committed by renaming a finished folder."""

    def __init__(
        self,
        folder: Path,
        rank: int,
        world_size: int,
        keep: int = 2,
        best: str = "",
        check_owner: Callable[[], Any] = lambda: None,
        on_block: Callable[[], None] = lambda: None,
        before_commit: Callable[[], Any] = lambda: None,
        warn: Callable[[str], Any] = print,
    ):
        """Look after `folder`.

        Args:
            keep, best: see `Retention`.
            check_owner: raises UserError where another run has taken the folder; called before anything is written or
                deleted.
            on_block: called for every block of a file that is read.
            before_commit: called on the main process before a checkpoint is made visible: the lines of its steps must
                be kept first.
            warn: tells the user that a store is away.
        """
        self.folder, self.rank, self.world_size = folder, rank, world_size
        self._files, self._warn = storage.at(folder), warn
        self.is_remote = self._files.is_remote
        self.retention = Retention(keep, best)
        self.check_owner, self._on_block, self._before_commit = check_owner, on_block, before_commit
        # The checkpoints that this run passed over when it resumed: damaged, or not readable at that time.
        self._damaged: set[int] = set()
        self._unread: set[int] = set()
        self._best_seen: float | None = None  # in a store, which is not asked again at each score

    def steps(self) -> list[int]:
        """List the steps that have a committed checkpoint, oldest first."""
        matches = map(_NAME.fullmatch, self._files.published(manifest.MANIFEST))
        return sorted(int(match[1]) for match in matches if match)

    def known_steps(self) -> list[int]:
        """List them as `steps` does; none while a store is away."""
        try:
            return self.steps()
        except OSError:
            if not self.is_remote:
                raise
            return []

    def path(self, step: int) -> Path:
        """Return the folder of a step's checkpoint, whether it is there or not."""
        return self.folder / _name(step)

    def settings(self) -> dict[str, Any]:
        """Return the settings of the newest checkpoint whose record can be read; empty if there is none."""
        for step in reversed(self.steps()):
            with contextlib.suppress(OSError, ValueError):
                return record.read(self.path(step)).config
        return {}

    def improves(self, step: int, metrics: dict[str, float], saving: dict[str, float]) -> bool:
        """Tell whether a step's metrics are better than those of every checkpoint before it.

        Args:
            saving: the metrics of a checkpoint that is being written.
        """
        value, unsaved = self.retention.value(metrics), self.retention.value(saving)
        if value is None or (unsaved is not None and value <= unsaved):
            return False
        before = self._best_seen
        if before is None:
            before = self.retention.best_of(self.path(other) for other in self.steps() if other < step)
            self._best_seen = before if self.is_remote else None
        return value > before

    def best(self, unsaved: dict[int, dict[str, float]]) -> tuple[int, float] | None:
        """Find the checkpoint that is kept as the best one; see `Retention.best_step`."""
        return self.retention.best_step({step: self.path(step) for step in self.known_steps()}, unsaved)

    def save(
        self,
        about: Record,
        write: Callable[[str], Any],
        group: dist.ProcessGroup | None = None,
    ) -> SaveOutcome:
        """Write, verify, commit, and only then delete what is no longer wanted. Every rank takes part.

        A step whose checkpoint is already whole keeps it; its scores are brought up to date.

        Args:
            about: the record; its metrics, measured at this step, choose the best checkpoint.
            write: writes the state into the folder that it is given; collective.
            group: the process group in which the ranks talk; a thread next to training has one of its own.
        """
        step = about.step
        try:
            there, problem = collectives.from_main(lambda: self._is_there(about), group)
        except UserError as lost:
            return SaveOutcome([str(lost)], lasting=True)
        if there:
            self._note_best(about)
            return SaveOutcome([problem] if problem else [])
        patiently = self._patience(step)
        attempt = Attempt(self.rank, group, self.check_owner, self._on_block, patiently)
        outcome = attempt.make(
            lambda: patiently(lambda: self._start(step)),
            write,
            lambda draft, sums: self._finish(draft, about, sums, patiently),
        )
        if not outcome.problems:
            self._note_best(about)
        return outcome

    def _patience(self, step: int) -> Callable[[Callable[[], Any]], Any]:
        """Return what tries parts of a save again while a store is away; a disk is tried once."""
        if not self.is_remote:
            return at_once

        def tell(error: OSError) -> None:
            why = error.strerror or str(error)
            self._warn(f"warning: {self.folder}: {why}. The checkpoint of step {step} goes up once the store is back")

        return Patience(tell, self._on_block)

    def _note_best(self, saved: Record) -> None:
        value = self.retention.value(saved.metrics)
        if self._best_seen is not None and value is not None:
            self._best_seen = max(self._best_seen, value)

    def clear_staged(self) -> None:
        """Delete what launches that were killed have left on this machine on its way to a store."""
        self._files.unstage()

    def newest(self, warn: Callable[[str], Any]) -> tuple[Path, Record] | None:
        """Find the newest checkpoint that verifies, as its state's folder and its record. Every rank takes part.

        Raises:
            UserError: there are checkpoints and none of them is good.
        """
        steps = collectives.from_main(self.steps)
        bad = []
        for step in reversed(steps):
            folder, problem = self.path(step), None
            try:
                manifest.verify_patiently(folder, self.rank, self.world_size, self._on_block)
            except (OSError, ValueError) as error:
                problem = error
            problems = collectives.agree(problem and UserError(str(problem)))
            if problems and any(collectives.gather(isinstance(problem, NewerFormat))):
                raise UserError(f"{problems[0]}, or give another --run.dir to start a run")
            if not problems:
                about = collectives.from_main(partial(_record_or_why_not, folder))
                if isinstance(about, Record):
                    return folder / STATE, about
                problems = [about]
            unread = any(collectives.gather(isinstance(problem, OSError) and not isinstance(problem, _NOT_WHOLE)))
            (self._unread if unread else self._damaged).add(step)
            bad.append(problems[0])
            what = "cannot be read" if unread else "is damaged"
            warn(f"warning: checkpoint {folder.name} {what} and left out: {problems[0]}")
        if bad:
            raise UserError(
                f"no checkpoint in {self.folder} is good: {'; '.join(bad)}; move the folder away to start anew"
            )
        return None

    def at(self, step: int) -> tuple[Path, Record]:
        """Find one step's checkpoint, verify all its files, and return its state's folder and its record.

        Raises:
            UserError: there is none, or it is damaged.
        """
        if step not in self.steps():
            there = ", ".join(map(str, self.steps())) or "none"
            raise UserError(f"{self.folder} has no checkpoint of step {step}; there are {there}")
        try:
            manifest.verify(self.path(step), on_block=self._on_block)
        except NewerFormat as newer:
            raise UserError(f"{newer}, or take another step") from None
        except (OSError, ValueError) as error:
            raise UserError(f"the checkpoint of step {step} is damaged: {error}; take another step") from None
        about = _record_or_why_not(self.path(step))
        if not isinstance(about, Record):
            raise UserError(f"the checkpoint of step {step} cannot be used: {about}; take another step")
        return self.path(step) / STATE, about

    def _is_there(self, about: Record) -> tuple[bool, str]:
        """Tell whether a step already has a whole checkpoint, and bring its scores up to date.

        Returns:
            Also what went wrong with the scores; empty where nothing did.

        Raises:
            UserError: another run has taken the folder, or a newer version has written the checkpoint.
        """
        folder = self.path(about.step)
        try:
            manifest.verify(folder, on_block=self._on_block)
        except NewerFormat as newer:
            raise UserError(f"{newer}, or give another --run.dir") from None
        except (OSError, ValueError):
            return False, ""
        try:
            if later := record.later_fields(folder, about):
                self.check_owner()
                record.write_later(folder, later)
        except NewerFormat as newer:
            raise UserError(f"{newer}, or give another --run.dir") from None
        except OSError as error:
            return True, f"the one that is there keeps its earlier scores: {error}"
        except ValueError:  # whole, but not to be read: it is put aside, and not deleted
            self._unread.add(about.step)
            return False, ""
        return True, ""

    def _start(self, step: int) -> Path:
        """Make a draft's folder. Its name is new: a run that lost this folder may still be writing its own draft."""
        self.check_owner()
        self._files.make()
        for leftover in self._files.entries():
            if _DRAFT.fullmatch(leftover.name):
                self._files.delete(leftover.name)
        return self.folder / self._files.draft(_name(step))

    def _finish(
        self, draft: Path, about: Record, sums: dict[str, FileSum], patiently: Callable[[Callable[[], Any]], Any]
    ) -> None:
        """Commit a draft and delete what is no longer wanted."""
        patiently(lambda: self._commit(draft, about, sums))
        # What a store that is away keeps is deleted after the next save.
        with contextlib.suppress(*([OSError] if self.is_remote else [])):
            self._prune(about.step)

    def _commit(self, draft: Path, about: Record, sums: dict[str, FileSum]) -> None:
        step = about.step
        manifest.check_shared(draft, sums, "--run.dir")
        written = record.write(draft, about)
        manifest.write(draft, {**sums, **manifest.keep(draft, [written])})
        self._before_commit()
        self.check_owner()
        if self._files.exists(_name(step)):  # damaged, or it would not be written again
            self._remove(step)
        self._files.publish(draft.name, _name(step), manifest.MANIFEST)
        self._damaged.discard(step)

    def _prune(self, newest: int) -> None:
        """Delete what is no longer wanted: never what another run may have made, nor what cannot be read just now."""
        steps = self.steps()
        # A later step is another run's, unless this one passed over it when it resumed.
        before = [step for step in steps if step <= newest]
        passed_over = self._damaged | self._unread  # they take no good one's place
        wanted = self.retention.wanted({step: self.path(step) for step in before if step not in passed_over})
        for step in sorted({*before, *passed_over.intersection(steps)} - wanted):
            self.check_owner()
            self._remove(step)

    def make_room(self) -> None:
        """Delete all checkpoints but the newest and the best. The main process calls it."""
        steps = self.known_steps()
        wanted = Retention(1, self.retention.best).wanted({step: self.path(step) for step in steps})
        for step in sorted(set(steps) - wanted - self._unread):
            self.check_owner()
            self._remove(step)

    def _remove(self, step: int) -> None:
        """Delete a checkpoint; put aside one that could not be read, because it may be good, or that holds more."""
        name = _name(step)
        if step in self._unread:
            self._files.put_aside(name, manifest.MANIFEST, "unread")
            self._unread.discard(step)
        elif _holds_more(self.path(step)):
            self._files.put_aside(name, manifest.MANIFEST, "kept")
        else:
            self._files.retract(name, manifest.MANIFEST)  # where that fails, the next save tries again


def _record_or_why_not(folder: Path) -> Record | str:
    try:
        return record.read(folder)
    except NewerFormat as newer:
        raise UserError(f"{newer}, or give another --run.dir to start a run") from None
    except ValueError as error:
        return str(error)


def _name(step: int) -> str:
    return f"step-{step:08d}"


def _holds_more(folder: Path) -> bool:
    """Tell whether a folder holds something that no checkpoint has, such as a user's notes.

    A folder without a list of files is a damaged checkpoint if it has a record and a state, and nothing else.
    """
    try:
        listed = manifest.listed(folder)
    except (OSError, ValueError):
        names = {entry.name for entry in storage.at(folder).entries()}
        of_checkpoints = {STATE, record.RECORD, record.SCORES, manifest.MANIFEST}
        return not (names & {STATE, record.RECORD} and names <= of_checkpoints)
    later = [record.SCORES, *storage.at(folder).drafts(record.SCORES)]
    return bool(manifest.foreign_to(folder, [*listed, manifest.MANIFEST, *later]))
