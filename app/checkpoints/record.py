"""What a checkpoint holds besides its state: its record, and the scores that were measured after it was committed."""

import contextlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from app import storage
from app.distributed.layout_record import Layout
from app.storage.records import IF_ANY, JsonRecord, NewerFormat

RECORD = "record.json"
SCORES = "scores.json"  # replaces some fields of the record; in no manifest
FORMAT = "2026-11"  # of record.json: the month in which a field last changed its meaning
_LATER = ("metrics", "scores", "unevaluated", "patience")  # the fields that scores.json replaces


@dataclass(frozen=True)
class Counts(JsonRecord):
    """What has happened in the steps so far, which their number does not tell."""

    made: int = 0
    """The steps that have updated weights: those that were left out do not count."""
    averaged: tuple[int, ...] = ()
    """For each model with an average, how many weights it has of steps after its beginning."""
    missing: int | None = field(default=None, metadata=IF_ANY)
    """Samples that could not be read, and were left out; None for none."""


@dataclass(frozen=True)
class MixPart(JsonRecord):
    """The mix of sources from one sample of the run on; see app/sampling/mixture.py."""

    start: int
    weights: tuple[float, ...]
    """Of each source."""
    caps: tuple[int | None, ...]
    """The most samples of each source in the whole run."""


@dataclass(frozen=True)
class MixRecord(JsonRecord):
    """What a checkpoint knows of a mixture of sources."""

    sources: tuple[str, ...]
    """Their names, in order."""
    parts: tuple[MixPart, ...]
    """The mixes that its run had so far, and that are planned ahead."""
    lanes: int
    """In how many lanes the sources are mixed; see app/sampling/lanes.py."""


@dataclass(frozen=True)
class DataRecord(JsonRecord):
    """What a checkpoint knows of the data that its run was trained on."""

    rows: int = 0
    fingerprint: str = ""
    """Hash of their lengths and weights."""
    contents: dict[str, Any] = field(default_factory=dict)
    """Digest of what stands in them, see app/data/fingerprint.py."""
    mix: MixRecord | None = field(default=None, metadata=IF_ANY)
    """Of data that are a mixture."""


@dataclass(frozen=True)
class Record(JsonRecord):
    """The record of a checkpoint, record.json."""

    step: int
    metrics: dict[str, Any] = field(default_factory=dict)
    """The scores that were measured at this very step; they decide which checkpoint is best."""
    scores: dict[str, Any] = field(default_factory=dict)
    """The last value of each score."""
    unevaluated: bool = False
    """Whether the run stopped inside this step's evaluation."""
    patience: dict[str, Any] = field(default_factory=dict)
    """How long ago the best score was measured."""
    losses: dict[str, Any] = field(default_factory=dict)
    """Sums of the losses of the last steps, from which the means that are logged next are formed."""
    counts: Counts = field(default_factory=Counts)
    seen: int = 0
    """Samples that were seen."""
    layout: Layout = field(default_factory=Layout)
    versions: dict[str, str] = field(default_factory=dict)
    data: DataRecord = field(default_factory=DataRecord)
    config: dict[str, Any] = field(default_factory=dict)
    """The run's settings."""
    trackers: dict[str, str] = field(default_factory=dict)
    """The trackers' names for the run."""
    buffers: list[str] = field(default_factory=list)
    """Names of the buffers that are known to change in training."""
    nonfinite: dict[str, Any] = field(default_factory=dict)
    """What was not finite in the models before the first step."""
    format: str = FORMAT


def write(draft: Path, record: Record) -> str:
    """Write a checkpoint's record into its draft, where it is yet to be kept, and return its name."""
    storage.at(draft).fill(RECORD, json.dumps(record.to_json()))
    return RECORD


def read(folder: Path) -> Record:
    """Read a checkpoint's record, with what was measured later.

    Raises:
        NewerFormat: a newer version has written it.
        OSError, ValueError: the record cannot be read, or is damaged. Damaged later scores are left out.
    """
    fields = _fields(folder, RECORD)
    with contextlib.suppress(FileNotFoundError, ValueError):
        later = _fields(folder, SCORES)
        fields |= {name: later[name] for name in _LATER if name in later}
    try:
        return Record.from_json(fields)
    except NewerFormat as newer:
        raise NewerFormat(f"{folder / RECORD}: {newer}") from None
    except ValueError as error:
        raise ValueError(f"{folder / RECORD} is not the record that was written: {error}") from None


def _fields(folder: Path, name: str) -> dict[str, Any]:
    try:
        fields = json.loads(storage.at(folder).read_text(name, follow=True))
    except RecursionError:
        fields = None
    if not isinstance(fields, dict):
        raise ValueError(f"{folder / name} is not the record that was written")
    return fields


def later_fields(folder: Path, record: Record) -> dict[str, Any]:
    """Return the fields for scores.json that make a checkpoint agree with `record`; empty if it already does."""
    before = read(folder)
    now = {name: getattr(record, name) for name in _LATER}
    now["metrics"] = {**before.metrics, **record.metrics}
    return now if any(getattr(before, name) != value for name, value in now.items()) else {}


def write_later(folder: Path, fields: dict[str, Any]) -> None:
    """Write the fields that replace those of the record."""
    storage.at(folder).write(SCORES, json.dumps(fields), durable=True)
