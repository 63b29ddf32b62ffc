"""The commit protocol: a checkpoint folder that is present is whole, and the last good one is never given up first."""

import contextlib
import json
import math
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
import xxhash
from torch.distributed.checkpoint.api import CheckpointException

from app import ranks
from app.errors import UserError

MANIFEST, RECORD, STATE = "manifest.json", "record.json", "state"
_NAME = re.compile(r"step-(\d{8,})")


class Checkpoints:
    """The checkpoints of one run: written by all ranks together, committed by renaming a finished folder."""

    def __init__(self, folder: Path, rank: int, world_size: int, keep: int = 2, best: str = ""):
        """Look after `folder`.

        Args:
            keep: how many of the newest to keep.
            best: a metric whose best checkpoint is kept too; a leading minus sign means that lower is better.
        """
        self.folder, self.rank, self.world_size = folder, rank, world_size
        self.keep, self.best = keep, best

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
        known = [self._value(saving), *(self._score(other) for other in self.steps() if other < step)]
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
        if ranks.from_main(lambda: self._is_good(step), group):
            return []
        target = self.path(step)
        draft = target.with_name(target.name + ".tmp")
        problem: BaseException | None = None
        sums: dict[str, dict] = {}
        try:
            ranks.from_main(lambda: self._start(draft), group)
            write(str(draft / STATE))
            own = self._own_files(draft)
            for file in own:
                _flush(file)
            sums = _checksums(draft, own)
        except (Exception, CheckpointException) as error:  # torch's is a BaseException
            problem = _cause(error)
        problems = ranks.agree(problem, group)
        if not problems:
            sums = {name: entry for part in ranks.gather(sums, group) for name, entry in part.items()}
            try:
                if self.rank == 0:
                    self._commit(draft, target, {**record, "step": step}, sums)
            except Exception as error:
                problem = error
            problems = ranks.agree(problem, group)
        if self.rank == 0:
            shutil.rmtree(draft, ignore_errors=True)
            if not problems:
                self._prune(step)
        if problems and any(ranks.gather(isinstance(problem, UserError), group)):
            raise UserError("; ".join(problems))
        return problems

    def newest(self, warn: Callable[[str], Any]) -> tuple[Path, dict[str, Any]] | None:
        """Find the newest checkpoint that verifies, as its state's folder and its record. Every rank takes part.

        Raises:
            UserError: there are checkpoints and none of them is good.
        """
        steps = ranks.from_main(self.steps)
        bad = []
        for step in reversed(steps):
            folder = self.path(step)
            problem = None
            try:
                self._verify(folder)
            except (OSError, ValueError) as error:
                problem = UserError(str(error))
            problems = ranks.agree(problem)
            if not problems:
                record = json.loads((folder / RECORD).read_text())
                return folder / STATE, record
            bad.append(problems[0])
            warn(f"warning: checkpoint {folder.name} is damaged and left out: {problems[0]}")
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
            self._verify(self.path(step), every_file=True)
        except (OSError, ValueError) as error:
            raise UserError(f"the checkpoint of step {step} is damaged: {error}; take another step") from None
        return self.path(step) / STATE, json.loads((self.path(step) / RECORD).read_text())

    def _is_good(self, step: int) -> bool:
        """Tell whether a step already has a checkpoint that is whole."""
        try:
            self._verify(self.path(step), every_file=True)
        except (OSError, ValueError):
            return False
        return True

    def _start(self, draft: Path) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        for leftover in self.folder.glob("step-*.tmp"):
            shutil.rmtree(leftover, ignore_errors=True)
        draft.mkdir()

    def _own_files(self, draft: Path) -> list[Path]:
        """Choose the files that this rank vouches for: its own, and on the main process those of no other rank."""
        files = sorted(path for path in draft.rglob("*") if path.is_file())
        owners = [re.match(r"__(\d+)_", path.name) for path in files]
        return [f for f, owner in zip(files, owners, strict=True) if (int(owner[1]) if owner else 0) == self.rank]

    def _commit(self, draft: Path, target: Path, record: dict, sums: dict) -> None:
        away = [name for name in sums if not (draft / name).is_file()]
        if away:
            raise UserError(
                f"{draft} does not have {away[0]}, which another process wrote: --run.dir must be on a disk that all "
                "machines share"
            )
        (draft / RECORD).write_text(json.dumps(record))
        sums = {**sums, **_checksums(draft, [draft / RECORD])}
        (draft / MANIFEST).write_text(json.dumps({"hash": "xxh3_128", "files": sums}, indent=1))
        for name in (RECORD, MANIFEST):
            _flush(draft / name)
        for folder in sorted({(draft / name).parent for name in sums}):
            _flush(folder)
        if target.exists():  # damaged, or it would not be written again
            shutil.rmtree(target)
        draft.rename(target)
        _flush(self.folder)

    def _verify(self, folder: Path, every_file: bool = False) -> None:
        """Check this rank's share of a checkpoint's files against its manifest, or all of them."""
        try:
            files = json.loads((folder / MANIFEST).read_text())["files"]
            files = {name: (entry["size"], entry["xxh3"]) for name, entry in files.items()}
        except (ValueError, KeyError, TypeError, AttributeError):
            raise ValueError(f"{folder / MANIFEST} is not the list of files that was written") from None
        for name in sorted(files) if every_file else sorted(files)[self.rank :: self.world_size]:
            path, (size, checksum) = folder / name, files[name]
            if not path.is_file():
                raise ValueError(f"{path} is missing")
            if path.stat().st_size != size:
                raise ValueError(f"{path} has {path.stat().st_size} bytes of {size}")
            if _checksum(path) != checksum:
                raise ValueError(f"{path} does not have the contents that were written")

    def _prune(self, newest: int) -> None:
        # What lies behind the newest was found damaged when this run went on from before it.
        steps = [step for step in self.steps() if step <= newest]
        wanted = set(steps[-self.keep :])
        if self.best:
            scores = {step: self._score(step) for step in steps}
            known = {step: score for step, score in scores.items() if score is not None}
            if known:
                wanted.add(max(known, key=lambda step: (known[step], step)))
        for step in set(self.steps()) - wanted:
            # Renamed first: a folder with a checkpoint's name is never half deleted.
            gone = self.path(step).with_name(self.path(step).name + ".tmp")
            with contextlib.suppress(OSError):  # the next save tries again
                self.path(step).rename(gone)
            shutil.rmtree(gone, ignore_errors=True)

    def _score(self, step: int) -> float | None:
        try:
            return self._value(json.loads((self.path(step) / RECORD).read_text())["metrics"])
        except (OSError, ValueError, KeyError):
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


def _checksum(path: Path) -> str:
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()


def _checksums(root: Path, files: list[Path]) -> dict[str, dict]:
    return {str(f.relative_to(root)): {"size": f.stat().st_size, "xxh3": _checksum(f)} for f in files}


def _flush(path: Path) -> None:
    """Wait until a file, or a folder's list of names, is on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
