"""What a run needs of its data and its model: everything to train, and less for what else a recipe is run for."""

from dataclasses import dataclass
from typing import Protocol

from app.errors import UserError


class NothingToTrainOn(UserError):
    """The data to train on are asked for, and --data.path names none."""


class EvaluatedData(Protocol):
    """Flags of data that may name a set to evaluate on."""

    @property
    def path(self) -> tuple[str, ...] | str: ...

    @property
    def eval_path(self) -> str: ...


@dataclass(frozen=True)
class Needs:
    """What a run needs. A recipe hands it on, as `run.needs`, to what loads its data and builds its model."""

    training_rows: bool = True
    """False: where only --data.eval-path is given, its rows are read, and none to train on."""
    only_set: str = ""
    """The one of --data.eval-sets that takes the place of all sets to evaluate on; empty: none does."""
    weights: bool = True
    """Whether the numbers in weights are read; False: their shapes are enough."""
    computing: bool = True
    """Whether anything is computed with the model; False: its weights are written as they are."""
    complete: bool = False
    """Whether the model that --model names is scored as it is, and so must lack no weights."""

    def skips_training_rows(self, data: EvaluatedData) -> bool:
        """Tell whether only the rows of --data.eval-path are read.

        Args:
            data: the recipe's flags of data.

        Raises:
            NothingToTrainOn: others are needed, and --data.path is empty.
        """
        if data.path:
            return False
        if self.training_rows or not data.eval_path:
            raise NothingToTrainOn("--data.path is empty: give builtin:NAME, a Hub data set id, a folder or files")
        return True

    @property
    def set_flag(self) -> str:
        """Return what messages call the flag of further sets to evaluate on.

        Where one set alone is scored, the user has not typed --data.eval-sets: `evaluate` has words of its own.
        """
        return "data" if self.only_set else "--data.eval-sets"

    @property
    def split_flag(self) -> str:
        """Return what messages call the flag that names a split of such a set."""
        return "--split" if self.only_set else "--data.eval-sets"


EVERYTHING = Needs()
