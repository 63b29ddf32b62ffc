"""Writing a folder with state so that it is whole or absent: every rank does its part, or none of it is kept."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, cast

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from app import storage
from app.distributed import collectives
from app.distributed.state import manifest
from app.errors import UserError
from app.storage.records import FileSum

STATE = "state"  # the folder with the tensors, next to the list of files

T = TypeVar("T")


@dataclass(frozen=True)
class SaveOutcome:
    """How an attempt to save ended, the same on every rank.

    Args:
        problems: what went wrong, one line for each failing rank; empty where the folder is there.
        lasting: the next attempt will fail too, until the user changes something.
    """

    problems: list[str] = field(default_factory=list)
    lasting: bool = False


class _NotSaved(Exception):
    """Leave an attempt to save; raised on every rank."""

    def __init__(self, outcome: SaveOutcome):
        super().__init__("; ".join(outcome.problems))
        self.outcome = outcome


@dataclass(frozen=True)
class Attempt:
    """One attempt to write a folder with state. Every rank makes it."""

    rank: int
    group: dist.ProcessGroup | None = None
    """The process group in which the ranks talk; a thread next to training has one of its own."""
    check_owner: Callable[[], Any] = lambda: None
    """Raises UserError where another run has taken the place of the folder."""
    on_block: Callable[[], None] = lambda: None
    """Called for every block of a file that is read."""
    patiently: Callable[[Callable[[], Any]], Any] = lambda act: act()
    """Calls what waits for the place of the folder, again where that may help."""

    def make(
        self, start: Callable[[], Path], write: Callable[[str], Any], finish: Callable[[Path, dict[str, FileSum]], None]
    ) -> SaveOutcome:
        """Write into a draft, list sizes and checksums, and commit.

        Args:
            start: makes the draft's folder; on the main process.
            write: writes the state into the folder that it is given; collective.
            finish: makes the draft visible, given the sizes and checksums of its files; on the main process.
        """
        draft: Path | None = None
        try:
            draft = self._agreed(lambda: collectives.from_main(start, self.group))
            # After this all files are there, whoever has written them.
            self._agreed(lambda: write(str(storage.at(draft).local(STATE))))
            mine = self._agreed(lambda: manifest.vouch(draft, self.rank, self.on_block, self.patiently))
            sums = {name: entry for part in collectives.gather(mine, self.group) for name, entry in part.items()}
            self._agreed(lambda: self._commit(draft, sums, finish))
        except _NotSaved as failed:
            return failed.outcome
        finally:
            if draft and self.rank == 0:
                storage.at(draft.parent).delete(draft.name)
            elif draft:
                storage.at(draft.parent).unstage(draft.name)
        return SaveOutcome()

    def _commit(
        self, draft: Path, sums: dict[str, FileSum], finish: Callable[[Path, dict[str, FileSum]], None]
    ) -> None:
        """Commit on the main process.

        Raises:
            OSError: no file of a state was found, for which the list of files could vouch.
        """
        if self.rank == 0:
            if not any(name.startswith(f"{STATE}/") for name in sums):
                raise OSError(f"{draft / STATE}: nothing that was written is there")
            finish(draft, sums)

    def _agreed(self, part: Callable[[], T]) -> T:
        """Do this rank's part of a save, and go on only when every rank has done its own.

        Raises:
            _NotSaved: on every rank, where one has failed.
        """
        problem, result = None, None
        try:
            result = part()
        except (Exception, CheckpointException) as error:  # torch's is a BaseException
            problem = self._reason(error)
        if problems := collectives.agree(problem, self.group):
            lasting = any(collectives.gather(isinstance(problem, UserError), self.group))
            raise _NotSaved(SaveOutcome(problems, lasting))
        return cast(T, result)  # no rank failed, this one included

    def _reason(self, error: BaseException) -> BaseException:
        """Return why a part failed: the loss of the folder, if another run has taken it, as that deletes our draft."""
        try:
            self.check_owner()
        except UserError as lost:
            return lost
        except OSError:
            pass
        # torch puts the errors of all ranks into one, whose text is all their tracebacks.
        return next(iter(error.failures.values()))[0] if isinstance(error, CheckpointException) else error
