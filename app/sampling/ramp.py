"""A whole number that grows in steps at the beginning of a run, such as the global batch: declared ahead."""

import itertools
import re
from collections.abc import Sequence
from typing import NamedTuple

from app.errors import UserError

_PART = re.compile(r"(\d+):(\d+)")


class Ramp(NamedTuple):
    """Values of the first steps, and the value of all steps after them.

    `parts` are (end, value): steps before `end`, counted from 0, that no earlier part has.
    """

    final: int
    parts: tuple[tuple[int, int], ...] = ()

    @classmethod
    def parse(cls, words: Sequence[str], final: int, flag: str, final_flag: str, unit: str) -> "Ramp":
        """Read words such as `100:16`: 16 until step 100.

        Args:
            unit: what is counted, for errors: samples or tokens.
            flag: where the words are from, for errors.
            final_flag: where `final` is from, for errors.

        Raises:
            UserError: a word is something else, their steps do not rise, or a value is 0 or above `final`.
        """
        parts: list[tuple[int, int]] = []
        for word in words:
            if not (match := _PART.fullmatch(word)):
                like = f"100:{max(1, final // 2)}"
                raise UserError(f"{flag} {word}: give STEP:{unit.upper()}, in steps and not in %, for example {like}")
            end, value = map(int, match.groups())
            if not 1 <= value <= final:
                raise UserError(f"{flag} {word}: {value} must be at least 1 and at most {final_flag} {final}")
            if end <= (parts[-1][0] if parts else 0):
                raise UserError(f"{flag} {' '.join(words)}: each step must be later than the one before it, and not 0")
            parts.append((end, value))
        return cls(final, tuple(parts))

    def __str__(self) -> str:
        """Write `64`, or `64 (16 until step 100)`."""
        early = ", ".join(f"{value} until step {end}" for end, value in self.parts)
        return f"{self.final} ({early})" if early else str(self.final)

    def at(self, step: int) -> int:
        """Return the value in a step, counted from 0."""
        return next((value for end, value in self.parts if step < end), self.final)

    def before(self, step: int) -> int:
        """Add up the values of all steps before `step`."""
        ends = (0, *(min(end, step) for end, _ in self.parts), step)
        values = (*(value for _, value in self.parts), self.final)
        return sum((b - a) * value for (a, b), value in zip(itertools.pairwise(ends), values, strict=True))

    def steps(self, total: int) -> int:
        """Count the steps whose values add up to `total`, or more."""
        done = start = 0
        for end, value in self.parts:
            if done + (end - start) * value >= total:
                return start - (done - total) // value
            done, start = done + (end - start) * value, end
        return start - (done - total) // self.final
