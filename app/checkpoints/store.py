"""The commit protocol: a checkpoint folder that is present is whole, and the last good one is never given up first."""

import contextlib
import json
import math
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from app.checkpoints import manifest
from app.distributed import collectives
from app.errors import UserError
from app.rundir import atomic

RECORD, STATE = "record.json", "state"
SCORES = "scores.json"  # what was measured at a step after its checkpoint was committed; in no manifest
_LATER = ("metrics", "scores", "unevaluated")  # fields of the record that it replaces
_DAMAGE = (FileNotFoundError, IsADirectoryError, NotADirectoryError)  # which a disk gives for what is not whole
_NAME = re.compile(r"step-(\d{8,})")


class Checkpoints:
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
    ):
        """Look after `folder`.

        Args:
            keep: how many of the newest to keep.
            best: a metric whose best checkpoint is kept too; a leading minus sign means that lower is better.
            check_owner: raises where another run has taken the folder; asked before anything is written or deleted.
            on_block: called for every block of a file that is read.
        """
        self.folder, self.rank, self.world_size = folder, rank, world_size
        self.keep, self.best, self.check_owner, self._on_block = keep, best, check_owner, on_block
        # What this run went on from before: found damaged, or not to be had from the disk.
        self._damaged: set[int] = set()
        self._unread: set[int] = set()

    def steps(self) -> list[int]:
        """List the steps that have a committed checkpoint, oldest first."""
        if not self.folder.is_dir():
            return []
        matches = (_NAME.fullmatch(path.name) for path in self.folder.iterdir())
        return sorted(int(match[1]) for match in matches if match)

    def path(self, step: int) -> Path:
        """Name the folder of a step's checkpoint."""
        return self.folder / f"step-{step:08d}"

    def improves(self, step: int, metrics: dict[str, float], saving: dict[str, float]) -> bool:
        """Tell whether a step's metrics are better than those of every checkpoint before it.

        Args:
            saving: the metrics of a checkpoint that is being written.
        """
        value = self._value(metrics)
        known = [self._value(saving)]
        for other in self.steps() if value is not None else ():
            if other < step:
                with contextlib.suppress(OSError):
                    known.append(self._score(other))
        return value is not None and all(value > other for other in known if other is not None)

    def save(
        self,
        step: int,
        record: dict[str, Any],
        write: Callable[[str], Any],
        group: dist.ProcessGroup | None = None,
    ) -> list[str]:
        """Write, verify, commit, and only then delete what is no longer wanted. Every rank takes part.

        Args:
            record: what to keep beside the state; its "metrics", measured at this step, choose the best checkpoint.
            write: writes the state into the folder that it is given; collective.
            group: that the ranks talk in; one of its own in a thread beside training.

        Returns:
            What went wrong, one line for each failing rank; nothing is committed then.
        """
        stands, problem = collectives.from_main(lambda: self._stands(step, record), group)
        if stands:
            return [problem] if problem else []
        draft: Path | None = None
        problem: BaseException | None = None
        sums: dict[str, dict] = {}
        try:
            draft = collectives.from_main(lambda: self._start(step), group)
            write(str(draft / STATE))
        except (Exception, CheckpointException) as error:  # torch's is a BaseException
            problem = self._reason(error)
        problems = collectives.agree(problem, group)  # from here on all files are there, whoever has written them
        if not problems:
            try:
                sums = manifest.vouch(draft, self.rank, self._on_block)
            except Exception as error:
                problem = self._reason(error)
            problems = collectives.agree(problem, group)
        if not problems:
            sums = {name: entry for part in collectives.gather(sums, group) for name, entry in part.items()}
            try:
                if self.rank == 0:
                    self._commit(draft, self.path(step), {**record, "step": step}, sums)
                    self._prune(step)
            except Exception as error:
                problem = self._reason(error)
            problems = collectives.agree(problem, group)
        if self.rank == 0 and draft:
            shutil.rmtree(draft, ignore_errors=True)
        if problems and any(collectives.gather(isinstance(problem, UserError), group)):
            raise UserError("; ".join(problems))
        return problems

    def _reason(self, error: BaseException) -> BaseException:
        """Name the loss of the folder, where that is why something failed: another run deletes drafts."""
        try:
            self.check_owner()
        except UserError as lost:
            return lost
        except OSError:
            pass
        return _cause(error)

    def newest(self, warn: Callable[[str], Any]) -> tuple[Path, dict[str, Any]] | None:
        """Find the newest checkpoint that verifies, as its state's folder and its record. Every rank takes part.

        Raises:
            UserError: there are checkpoints and none of them is good.
        """
        steps = collectives.from_main(self.steps)
        bad = []
        for step in reversed(steps):
            folder, problem = self.path(step), None
            try:
                _patiently(lambda folder=folder: manifest.verify(folder, self.rank, self.world_size, self._on_block))
            except (OSError, ValueError) as error:
                problem = error
            problems = collectives.agree(problem and UserError(str(problem)))
            if not problems:
                return folder / STATE, collectives.from_main(lambda step=step: self._record(step))
            unread = any(collectives.gather(isinstance(problem, OSError) and not isinstance(problem, _DAMAGE)))
            (self._unread if unread else self._damaged).add(step)
            bad.append(problems[0])
            what = "cannot be read" if unread else "is damaged"
            warn(f"warning: checkpoint {folder.name} {what} and left out: {problems[0]}")
        if bad:
            raise UserError(
                f"no checkpoint in {self.folder} is good: {'; '.join(bad)}; move the folder away to start anew"
            )
        return None

    def at(self, step: int) -> tuple[Path, dict[str, Any]]:
        """Find one step's checkpoint, all files of which are checked, as its state's folder and its record.

        Raises:
            UserError: there is none, or it is damaged.
        """
        if step not in self.steps():
            there = ", ".join(map(str, self.steps())) or "none"
            raise UserError(f"{self.folder} has no checkpoint of step {step}; there are {there}")
        try:
            manifest.verify(self.path(step), on_block=self._on_block)
        except (OSError, ValueError) as error:
            raise UserError(f"the checkpoint of step {step} is damaged: {error}; take another step") from None
        return self.path(step) / STATE, self._record(step)

    def _stands(self, step: int, record: dict) -> tuple[bool, str]:
        """Tell whether a step already has a checkpoint that is whole, and bring what was measured there up to date.

        Returns:
            Also what went wrong with the latter.
        """
        try:
            manifest.verify(self.path(step), on_block=self._on_block)
        except (OSError, ValueError):
            return False, ""
        try:
            self._bring_up_to_date(step, record)
        except OSError as error:
            return True, f"the one that is there keeps its earlier scores: {error}"
        return True, ""

    def _bring_up_to_date(self, step: int, record: dict) -> None:
        before = self._record(step)
        now = {name: record[name] for name in _LATER if name in record}
        now["metrics"] = {**before.get("metrics", {}), **now.get("metrics", {})}
        if any(before.get(name) != value for name, value in now.items()):
            self.check_owner()
            atomic.write_text(self.path(step) / SCORES, json.dumps(now), durable=True)

    def _record(self, step: int) -> dict[str, Any]:
        """Read what a step's checkpoint says of itself, with what was measured there later."""
        record, later = json.loads((self.path(step) / RECORD).read_text()), {}
        with contextlib.suppress(FileNotFoundError, ValueError):  # nothing was measured later, or it is damaged
            later = json.loads((self.path(step) / SCORES).read_text())
        return {**record, **{name: later[name] for name in _LATER if name in later}}

    def _start(self, step: int) -> Path:
        """Make a draft's folder. Its name is new: a run that lost this folder may still be writing its own."""
        self.check_owner()
        self.folder.mkdir(parents=True, exist_ok=True)
        for leftover in self.folder.glob("step-*.tmp"):
            shutil.rmtree(leftover, ignore_errors=True)
        draft = atomic.draft_of(self.path(step), unique=True)
        draft.mkdir()
        return draft

    def _commit(self, draft: Path, target: Path, record: dict, sums: dict) -> None:
        away = [name for name in sums if not (draft / name).is_file()]
        if away:
            raise UserError(
                f"{draft} does not have {away[0]}, which another process wrote: --run.dir must be on a disk that all "
                "machines share"
            )
        (draft / RECORD).write_text(json.dumps(record))
        atomic.flush(draft / RECORD)
        manifest.write(draft, {**sums, **manifest.entries(draft, [draft / RECORD])})
        self.check_owner()
        if target.exists():  # damaged, or it would not be written again
            self._remove(record["step"])
        atomic.publish(draft, target)
        self._damaged.discard(record["step"])

    def _prune(self, newest: int) -> None:
        """Delete what is no longer wanted: never what another run may have made, nor what cannot be read just now."""
        steps = self.steps()
        # A later step is another run's, unless this one found it damaged and went on from before it.
        before = [step for step in steps if step <= newest]
        wanted = set(before[-self.keep :])
        if self.best:
            known, unread = {}, set()
            for step in before:
                try:
                    known[step] = self._score(step)
                except OSError:
                    unread.add(step)
            known = {step: score for step, score in known.items() if score is not None}
            wanted |= unread | ({max(known, key=lambda step: (known[step], step))} if known else set())
        for step in sorted({*before, *(self._damaged | self._unread).intersection(steps)} - wanted):
            self.check_owner()
            self._remove(step)

    def _remove(self, step: int) -> None:
        """Delete a checkpoint; one that could not be read is put aside."""
        if step in self._unread:
            self.path(step).rename(atomic.draft_of(self.path(step), unique=True).with_suffix(".unread"))
            self._unread.discard(step)
        else:
            atomic.delete_folder(self.path(step))  # where that fails, the next save tries again

    def _score(self, step: int) -> float | None:
        """Read the metric that decides; None where there is none, or the record is damaged.

        Raises:
            OSError: it cannot be read just now.
        """
        try:
            return self._value(self._record(step)["metrics"])
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            return None

    def _value(self, metrics: dict[str, float]) -> float | None:
        """Return the metric that decides, so that higher is better; None where it is not among these, or not finite."""
        value = metrics.get(self.best.removeprefix("-"))
        if value is None or not math.isfinite(value):
            return None
        return -value if self.best.startswith("-") else value


def _cause(error: BaseException) -> BaseException:
    """Take the first of the errors that torch has put into one, whose text is all their tracebacks."""
    return next(iter(error.failures.values()))[0] if isinstance(error, CheckpointException) else error


def _patiently(read: Callable[[], Any], seconds: float = 1.0, tries: int = 3) -> Any:
    """Read, more than once where a disk says no: a network disk now and then does so for a moment (ESTALE)."""
    for _ in range(tries - 1):
        try:
            return read()
        except FileNotFoundError:
            raise
        except OSError:
            time.sleep(seconds)
    return read()
