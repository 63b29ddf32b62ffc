"""How many predictions are what a column of true labels says."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from datasets import Dataset


class Right:
    """Count how often the prediction is what a kept column of true labels says."""

    def __init__(self, rows: "Dataset", columns: Any, keep: tuple[str, ...]):
        """Find the column: the one that was trained on, or `label`."""
        own = [columns] if isinstance(columns, str) else list(columns)
        self.column = own[0] if len(own) == 1 and own[0] in keep else ""
        self.names = getattr(rows.features[self.column], "names", None) if self.column else None
        self.right = self.rows = self.known = 0

    def count(self, row: dict[str, Any], found: dict[str, Any]) -> None:
        """Count a row of the table."""
        if not self.column or "probability" not in found:
            return
        label, classes = row[self.column], [name[2:] for name in found if name.startswith("p/")]
        label = self.names[label] if self.names and isinstance(label, int) and label >= 0 else label
        if isinstance(label, int) and str(label) not in classes and 0 <= label < len(classes):
            label = classes[label]  # the number of a class
        self.rows += 1
        self.known += str(label) in classes
        self.right += str(label) == found["prediction"]

    def __str__(self) -> str:
        """Say the accuracy; nothing where there is no such column."""
        if not self.rows:
            return ""
        unknown = f"; {self.rows - self.known:,} have a {self.column} that is no class of the model"
        return f", accuracy {self.right / self.rows:.4f} (by {self.column}{unknown if self.known < self.rows else ''})"
