"""Classes of texts and images, by transformers' pipelines, and how many are what a column of true labels says."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from datasets import Dataset

LIKELY = 0.5  # from this probability on, a label of several is predicted


def classes_of(task: str, model: str, inputs: Iterator[Any], batch: int) -> Iterator[dict[str, Any]]:
    """Yield what the model says of each input: the predicted class and a probability for each; or an amount."""
    import torch
    import transformers

    from app.tasks.vocabulary import check_vocabulary

    device = 0 if torch.cuda.is_available() else -1
    transformers.utils.logging.disable_progress_bar()
    pipeline: Any = transformers.pipeline  # whose types know each task's name alone
    run = pipeline(task, model, device=device, trust_remote_code=False)
    if run.tokenizer is not None:
        check_vocabulary(model, run.model.config, run.tokenizer)
    # All classes: pipelines of texts understand None, those of images (5.23) a number.
    more = {"truncation": True, "top_k": None} if task.startswith("text") else {"top_k": run.model.config.num_labels}
    names = [label for _, label in sorted(run.model.config.id2label.items())]
    for answer in run(inputs, batch_size=batch, **more):
        yield _line(answer, names, run.model.config.problem_type)


def _line(answer: list[dict[str, Any]], names: list[str], kind: str | None) -> dict[str, Any]:
    """Return the line of a table for what a pipeline says of an input: `label` and `score` of each class, best first.

    Args:
        names: of the classes, in the order of the model's outputs.
        kind: the problem_type of the model's config.
    """
    if kind == "regression":
        values = [each["score"] for each in answer]
        return {"prediction": values[0] if len(values) == 1 else values}
    score_of = {each["label"]: each["score"] for each in answer}
    scores = {f"p/{name}": score_of[name] for name in names}
    if kind == "multi_label_classification":
        return {"prediction": [each["label"] for each in answer if each["score"] >= LIKELY], **scores}
    return {"prediction": answer[0]["label"], "probability": answer[0]["score"], **scores}


class Right:
    """Count how often the prediction is what a kept column of true labels says."""

    def __init__(self, rows: "Dataset", columns: Any, keep: tuple[str, ...]):
        """Find the column: the one that was trained on, or `label`."""
        trained_on = [columns] if isinstance(columns, str) else list(columns)
        self.column = trained_on[0] if len(trained_on) == 1 and trained_on[0] in keep else ""
        self.names = getattr(rows.features[self.column], "names", None) if self.column else None
        self.right = self.rows = self.of_a_class = 0

    def count(self, row: dict[str, Any], line: dict[str, Any]) -> None:
        """Count a row of the data, and its line of the table."""
        if not self.column or "probability" not in line:
            return
        label, classes = row[self.column], [name[2:] for name in line if name.startswith("p/")]
        label = self.names[label] if self.names and isinstance(label, int) and label >= 0 else label
        if isinstance(label, int) and str(label) not in classes and 0 <= label < len(classes):
            label = classes[label]  # the number of a class
        self.rows += 1
        self.of_a_class += str(label) in classes
        self.right += str(label) == line["prediction"]

    def __str__(self) -> str:
        """Say the accuracy; nothing where there is no such column."""
        if not self.rows:
            return ""
        unknown = self.rows - self.of_a_class
        of_none = f"; {unknown:,} have a {self.column} that is no class of the model" if unknown else ""
        return f", accuracy {self.right / self.rows:.4f} (by {self.column}{of_none})"
