"""The card of a model: what it is, what it was trained on and how good it is, as its run has recorded it."""

import math
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from app import storage
from app.config import as_flag, flatten
from app.config.score_names import PLAIN, ScoreName
from app.rundir import foreign
from app.rundir.foreign import section
from app.rundir.history import History
from app.tasks.kinds import kind_of

if TYPE_CHECKING:
    from huggingface_hub import ModelCardData

_NAME = re.compile(r"[\w-]{1,64}")  # of a recipe


def write(
    run: History, folder: Path, step: int, scores: dict[str, Any], kind: str, use: str, weights: str = ""
) -> None:
    """Write README.md, the recipe, its settings and, if matplotlib is installed, the curves into a model's folder.

    Args:
        scores: of the checkpoint, by name.
        kind: the model's class.
        use: a command that uses the model.
        weights: what they are, if they are not simply those of the step; a sentence.
    """
    from huggingface_hub import ModelCard

    recipe = run.record.recipe if _NAME.fullmatch(run.record.recipe) else "recipe"  # it becomes the name of a file
    length = f"{step:,} of {run.record.steps} steps"
    (folder / "training_config.yaml").write_text(yaml.safe_dump(_without_place(run.config), sort_keys=False))
    (folder / f"{recipe}.py").write_bytes(storage.at(run.folder).read("recipe.py"))
    parts = [
        f"---\n{_metadata(run, recipe, scores, kind).to_yaml()}\n---",
        f"# {_text(run.name)}",
        f"{kind}, trained by `{recipe}.py` with Samestep for {length}. {weights}".rstrip(),
        f"## Use it\n\n```{'python' if use.startswith('from ') else 'bash'}\n{use}\n```" if use else "",
        _scores(scores),
        _curves(run, folder),
        _settings(run),
        f"## Repeat it\n\n```bash\naccelerate launch {recipe}.py --config training_config.yaml\n```",
        _history(run),
    ]
    ModelCard("\n\n".join(part for part in parts if part) + "\n").save(folder / "README.md")


def _without_place(config: dict[str, Any]) -> dict[str, Any]:
    left_out = ("dir", "notice")  # the place of this run; a command, which is not taken from a file
    return {**config, "run": {name: value for name, value in section(config, "run").items() if name not in left_out}}


def _metadata(run: History, recipe: str, scores: dict[str, Any], kind: str) -> "ModelCardData":
    """Describe the model to the Hub, which shows the scores of a model whose task it knows."""
    from huggingface_hub import EvalResult, ModelCardData

    model_kind = kind_of([kind])
    task = model_kind.task if model_kind else None
    # A user's own recipe may mean anything by these names.
    base, data = run.config.get("model"), run.config.get("data")
    mix = data.get("mix") if isinstance(data, dict) else None
    paths = mix or (data.get("path") if isinstance(data, dict) else None)  # the path is a default next to a mixture
    paths = [paths] if isinstance(paths, str) else paths or []
    named = {ScoreName.parse(name): value for name, value in scores.items()}
    metrics = {n.metric: v for n, v in named.items() if n and n[:2] == (PLAIN, "") and not n.is_count}
    evaluated = str((data.get("eval_path") if isinstance(data, dict) else None) or next(iter(paths), recipe))
    results = [
        EvalResult(task_type=task, dataset_type=evaluated, dataset_name=evaluated, metric_type=name, metric_value=value)
        for name, value in metrics.items()
        if task and isinstance(value, int | float) and math.isfinite(value)
    ]
    return ModelCardData(
        model_name=run.name if results else None,  # heads the results
        tags=["samestep", recipe],
        library_name="transformers" if task else None,
        pipeline_tag=task,
        base_model=base if isinstance(base, str) and base and not _there(base) else None,
        datasets=[path for path in paths if not mix and _on_hub(path)] or None,
        metrics=list(metrics) or None,
        eval_results=results or None,
    )


def _on_hub(path: object) -> bool:
    if not isinstance(path, str):
        return False
    return path.count("/") == 1 and not path.startswith(("builtin:", ".", "/")) and not _there(path)


def _text(value: Any) -> str:
    """Return a value as text of the card: in one line, in one cell of a table, and without HTML or links."""
    return re.sub(r"([|`\[\]<>*])", r"\\\1", foreign.text(value))


def _there(path: str) -> bool:
    try:
        return Path(path).exists()
    except (OSError, ValueError):  # no such name can be
        return False


def _scores(scores: dict[str, Any]) -> str:
    if not scores:
        return ""
    rows = [
        f"| {_text(name)} | {value:.4g} |" if isinstance(value, float) else f"| {_text(name)} | {_text(value)} |"
        for name, value in scores.items()
    ]
    return "\n".join(["## Results", "", "| score | value |", "| --- | --- |", *rows])


def _curves(run: History, folder: Path) -> str:
    from app.commands import curves
    from app.errors import UserError

    try:
        curves.draw([run], folder / "curves.png")
    except UserError:  # nothing logged, or no matplotlib
        return ""
    return "![curves of the training](curves.png)"


def _settings(run: History) -> str:
    fields = {n: v for n, v in flatten(run.config).items() if v not in ("", None, []) and n != "run.dir"}
    rows = [f"| `{_text(as_flag(name))}` | {_text(value)} |" for name, value in fields.items()]
    return "\n".join(["## Settings", "", "| setting | value |", "| --- | --- |", *rows])


def _history(run: History) -> str:
    launches = "; ".join(f"from step {launch.step} on {_text(launch.layout)}" for launch in run.launches)
    versions = ", ".join(f"{_text(name)} {_text(version)}" for name, version in run.record.versions.items())
    if run.record.commit:
        versions += f"; git commit {_text(run.record.commit)}"
    parts = [
        "## How it was trained",
        f"{launches[:1].upper()}{launches[1:]}." if launches else "",
        f"With {versions}." if versions else "",
    ]
    return "\n\n".join(part for part in parts if part)
