"""What a plan says: of the run on any layout, of each profile, and of the run folder; by name, and as JSON."""

from dataclasses import asdict, dataclass, field
from typing import Any

from app.commands import costs
from app.commands.plan.largest_micro_batch import Peak
from app.commands.plan.memory import Memory
from app.rundir.folder import Change
from app.rundir.time_spent import Account, Speed


@dataclass(frozen=True)
class Length:
    """How long a run is."""

    samples: int
    seen: int
    epochs: float
    steps: int
    steps_per_epoch: float
    global_batch: int
    batch_sizes: str
    micro_batches: int
    """A step."""
    stop_at: int
    tokens_per_step: float | None
    """None if lengths are not known."""
    padding: float | None
    """Share of what is computed."""


@dataclass(frozen=True)
class Chunks:
    """How a source is read by chunks, on any layout."""

    chunks: int
    stored: int
    """Bytes of all."""
    largest: int
    """Bytes of the largest one, as stored."""
    lanes: int
    window: int
    """Chunks for each micro-batch."""
    sort_over: int
    """Micro-batches that share a lane."""
    in_use: int
    """Chunks whose rows are mixed at one time: a window of each lane."""
    cache: int | None
    """Bytes that chunks may take on each machine; None: any number."""


@dataclass(frozen=True)
class Source:
    """What the run takes of a source of its data."""

    name: str
    """Empty for data that are no mixture."""
    rows: int
    samples: int
    epochs: float
    chunks: Chunks | None
    """None if it is not read by chunks."""


@dataclass(frozen=True)
class Fetching:
    """What a machine of a profile fetches of a source: the one that fetches most."""

    source: str
    lanes: int
    cache: int
    """Bytes that what is read at one time takes there."""
    an_epoch: int
    """Bytes that are fetched in an epoch of the source."""
    once: bool
    """Whether they are fetched in the first epoch only, because the cache holds them all."""


@dataclass(frozen=True)
class Model:
    """What is trained, and by which optimizers."""

    parameters: int
    trained: int
    optimizers: list[str]
    averaged: bool


@dataclass(frozen=True)
class Checkpoints:
    """How large checkpoints are, in bytes, and how many there are at most."""

    checkpoint: int
    checkpoints: int
    disk: int
    staged: int
    """On the disks of the machines, while a checkpoint is on its way to a bucket; 0 for a run on a disk."""


@dataclass(frozen=True)
class About:
    """What a run is on any layout."""

    length: Length
    model: Model
    checkpoints: Checkpoints
    sources: list[Source]
    """Of a mixture, or the one that is read by chunks; else empty."""

    def as_dict(self) -> dict[str, Any]:
        """Return it for JSON."""
        sources = [asdict(source) for source in self.sources]
        return {**asdict(self.length), **asdict(self.model), **asdict(self.checkpoints), "sources": sources}


@dataclass(frozen=True)
class Spread:
    """How a step is spread over the processes of a profile, and what one of them holds."""

    data_ranks: int
    accumulation: int
    rows: str
    """Of a micro-batch: one number, or two."""
    idle: float
    """Share of the turns."""
    note: str
    memory: Memory


@dataclass(frozen=True)
class Layout:
    """What a profile makes of a run."""

    profile: str
    processes: int
    wrapping: str
    layout: str
    precision: str
    trouble: str
    """Why it cannot work; empty if it can."""
    spread: Spread | None
    """None if it cannot work."""
    peak: Peak | None
    """None if activations could not be counted."""
    fetching: list[Fetching]
    """Of each source that is read by chunks."""

    @property
    def is_too_large(self) -> bool:
        """Tell whether a micro-batch of the run itself does not fit into the memory of a device."""
        return self.peak is not None and self.peak.too_much

    def as_dict(self) -> dict[str, Any]:
        """Return it for JSON."""
        fields, spread = asdict(self), self.spread
        del fields["spread"]
        if spread is not None:
            fields |= {**asdict(spread), "memory": {**spread.memory._asdict(), "total": spread.memory.total}}
        return fields


@dataclass(frozen=True)
class Resumed:
    """The checkpoint from which a run would go on."""

    step: int
    unevaluated: bool
    saved_on: str
    scores: dict[str, Any]


@dataclass(frozen=True)
class Measured:
    """What a run in the folder has measured of itself, as far as it is known, and the steps that are left."""

    spent: Account | None
    pace: Speed | None
    left: int


@dataclass
class Folder:
    """What resuming a run folder would restore, and what would change."""

    path: str
    resumed: Resumed | None = None
    changes: list[Change] = field(default_factory=list)
    trouble: str = ""
    """Why the run cannot be resumed; empty if it can."""
    warnings: list[str] = field(default_factory=list)
    measured: Measured = Measured(None, None, 0)

    def as_dict(self, price: float, mtbf: float) -> dict[str, Any]:
        """Return it for JSON.

        Args:
            price: of one device an hour; 0 for none.
            mtbf: mean hours between two failures of the run's hardware; 0 where it is not given.
        """
        pace = self.measured.pace
        time = costs.for_programs(self.measured.spent, pace, price, mtbf)
        time["left"] = pace and costs.ahead(pace, self.measured.left)._asdict()
        changes = [{**change._asdict(), "effect": change.effect.value} for change in self.changes]
        start = {"step": None, "unevaluated": False} if self.resumed is None else asdict(self.resumed)
        return {
            "path": self.path,
            **start,
            "changes": changes,
            "trouble": self.trouble,
            "warnings": self.warnings,
            "time": time,
        }
