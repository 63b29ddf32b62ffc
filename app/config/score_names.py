"""Names of scores: eval/loss; eval-hard/loss of another evaluation set; ema/loss of the average of the weights."""

from typing import NamedTuple

PLAIN, AVERAGE = "eval", "ema"
# What evaluations log of their size, next to their scores.
COUNTS = ("samples", "tokens", "images", "boxes")
# Parts of the names of scores that are better if they are lower.
_LOWER = ("loss", "mse", "mae", "error", "perplexity", "bits_per_byte", "frechet")


def seems_lower(name: str) -> bool:
    """Tell whether a score is better if it is lower, as far as its name says."""
    return any(part in name.rpartition("/")[2] for part in _LOWER)


class ScoreName(NamedTuple):
    """The parts of a score's name."""

    kind: str
    """PLAIN or AVERAGE."""
    set_name: str
    """Of the evaluation set; empty for the main one."""
    metric: str

    @classmethod
    def parse(cls, text: str) -> "ScoreName | None":
        """Read a name; None if it is not a score's."""
        head, slash, metric = text.partition("/")
        kind, _, set_name = head.partition("-")
        return cls(kind, set_name, metric) if slash and kind in (PLAIN, AVERAGE) else None

    @property
    def is_count(self) -> bool:
        """Tell whether it says how much was evaluated, and not how well."""
        return self.metric in COUNTS

    def __str__(self) -> str:
        """Write the name."""
        return f"{self.kind}{'-' * bool(self.set_name)}{self.set_name}/{self.metric}"
