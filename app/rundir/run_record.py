"""run.json: what a run is, and how it stands."""

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from app.distributed.layout_record import Layout
from app.errors import UserError
from app.launching import program
from app.rundir.foreign import bounded, plain, raw_fields_of, text
from app.rundir.time_spent import Spent
from app.storage.records import IF_ANY, FileSum, JsonRecord, NewerFormat

RUN = "run.json"
MOST_FACTS = 50_000  # values that recipes note, lists and dictionaries included: half of what is read of a file
LARGEST_FACT = 1 << 24  # bytes
FORMAT = "2026-11"  # of run.json: the month in which a field last changed its meaning
Status = Literal["running", "finished", "preempted", "failed"]


@dataclass(frozen=True)
class Launch(JsonRecord):
    """One launch of a run."""

    step: int
    """After which it began or resumed the run."""
    began: str
    layout: str
    """In a few words."""


@dataclass(frozen=True)
class Segment(JsonRecord):
    """Settings that were changed in the middle of a run."""

    step: int
    """After which they were changed."""
    changed: dict[str, tuple[Any, Any]]
    """By name, as they were and as they became."""


@dataclass(frozen=True)
class Compiled(JsonRecord):
    """What torch.compile did inside steps."""

    graphs: int
    recompiles: int
    """Of these graphs, how many were made after the second step."""
    reasons: tuple[str, ...]


@dataclass(frozen=True)
class RunRecord(JsonRecord):
    """What run.json says. `unknown` holds what the recipe has noted, too."""

    status: Status
    step: int
    """Of the newest checkpoint; of a run that is finished, the last."""
    steps: int
    """Of the whole run."""
    samples: int
    """Of the training set."""
    recipe: str
    layout: Layout
    """Of the last launch."""
    versions: dict[str, str]
    recipe_folder: str
    commit: str
    launches: tuple[Launch, ...]
    segments: tuple[Segment, ...] = ()
    error: str | None = None
    """Why it has failed."""
    stopped_early: str | None = None
    """Why --run.patience has ended it."""
    trackers: dict[str, str] | None = field(default=None, metadata=IF_ANY)
    """The trackers' names for the run, once they are started."""
    arithmetic: dict[str, Any] | None = field(default=None, metadata=IF_ANY)
    """In exact mode: the settings of torch and CUDA's libraries."""
    compiled: Compiled | None = field(default=None, metadata=IF_ANY)
    metrics: dict[str, float | str | None] | None = field(default=None, metadata=IF_ANY)
    """Of a finished run: the last value of each score; None for one that is not finite."""
    model_files: dict[str, FileSum] | None = field(default=None, metadata=IF_ANY)
    """Of a finished run: the files of model/ as the run has written them, by name."""
    spent: tuple[Spent, ...] | None = field(default=None, metadata=IF_ANY)
    """Where the time of each launch went, of those too whose steps are lost."""
    format: str = field(default=FORMAT, kw_only=True)

    def after(self, before: "RunRecord | None") -> "RunRecord":
        """Return the record of a launch together with what earlier launches have said.

        Args:
            before: the record that they have left; its launches and segments stay, up to the step of this one.
        """
        if before is None:
            return self
        launches = [launch for launch in before.launches if self.step and launch.step <= self.step]
        segments = [segment for segment in before.segments if segment.step < self.step]
        optional = [each.name for each in dataclasses.fields(self) if "if_any" in each.metadata]
        return dataclasses.replace(
            self,
            launches=(*launches, *self.launches),
            segments=(*segments, *self.segments),
            unknown={**before.unknown, **self.unknown},
            **{name: getattr(before, name) for name in optional if getattr(self, name) is None},
        )


STATUSES: tuple[str, ...] = get_args(Status)
_NAMES = frozenset(each.name for each in dataclasses.fields(RunRecord)) - {"unknown"}


def check_facts(facts: dict[str, Any]) -> None:
    """Refuse facts of a recipe that run.json cannot hold, or with which it could not be read again.

    Raises:
        UserError: one has the name of a field, is nothing that JSON holds, or they are too many.
    """
    if taken := sorted(_NAMES & facts.keys()):
        raise UserError(f"run.note({taken[0]}=...): run.json has a field {taken[0]} of its own; take another name")
    for name, value in facts.items():
        try:
            words = json.dumps(value)
            bounded(value, MOST_FACTS)
        except (TypeError, ValueError, RecursionError) as error:
            raise _unfit(name, f"cannot be kept in run.json ({error})") from None
        if len(words) > LARGEST_FACT:
            raise _unfit(name, f"has {len(words):,} bytes as JSON, and {LARGEST_FACT:,} are the most")
    try:
        bounded(facts, MOST_FACTS)
    except ValueError:
        raise _unfit(next(reversed(facts)), f"makes the facts of this run more than {MOST_FACTS:,} values") from None


def _unfit(name: str, why: str) -> UserError:
    return UserError(
        f"run.note({name}=...): it {why}; note numbers, texts, and short lists and dictionaries of them, and write the "
        "rest into a file of your own"
    )


def is_a_runs(fields: dict[str, Any], locked: bool) -> bool:
    """Tell whether fields are a run's, damaged or not, and no other program's.

    Args:
        locked: whether the folder has a run's lock; without one, the fields alone must show it.
    """
    return fields.get("status") in STATUSES and (locked or {"recipe", "layout", "versions"} <= fields.keys())


def read(folder: Path) -> RunRecord:
    """Read run.json as texts to show, whoever wrote it. Only `recipe_folder`, which is compared, is as it stands there.

    Raises:
        UserError: there is none, or it is damaged or of a newer version.
    """
    fields = raw_fields_of(folder / RUN)
    if fields is None:
        raise UserError(
            f"{folder} holds no run: there is no run.json, or it is damaged; `{program.typed('runs')}` lists runs"
        )
    shown = plain(fields)
    if isinstance(error := fields.get("error"), str):
        shown["error"] = text(error, lines=True)
    if "recipe_folder" in fields:
        shown["recipe_folder"] = fields["recipe_folder"]
    try:
        return RunRecord.from_json(shown)
    except NewerFormat as newer:
        raise UserError(f"{folder / RUN}: {newer}") from None
    except ValueError as wrong:
        raise UserError(
            f"{folder / RUN} is damaged, or another program's: {wrong}. The run's own command writes it anew"
        ) from None
