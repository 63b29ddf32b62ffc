"""The card of a model: what it is, what it was trained on and how well it does, written from its run."""

from pathlib import Path
from typing import Any

import yaml

from app.config import as_flag, flatten
from app.rundir.history import History

# The task of the Hub by the suffix of a model class.
_TASKS = {
    "ForSequenceClassification": "text-classification",
    "ForCausalLM": "text-generation",
    "LMHeadModel": "text-generation",
    "ForImageClassification": "image-classification",
    "ForSemanticSegmentation": "image-segmentation",
}


def write(run: History, folder: Path, step: int, scores: dict[str, Any], kind: str, use: str) -> None:
    """Write README.md, and beside it the recipe, its settings and, where matplotlib is installed, the curves.

    Args:
        scores: those of the checkpoint.
        kind: the model's class.
        use: a command that uses the model.
    """
    recipe = str(run.info.get("recipe", "recipe"))
    (folder / "training_config.yaml").write_text(yaml.safe_dump(_without_place(run.config), sort_keys=False))
    (folder / f"{recipe}.py").write_bytes((run.folder / "recipe.py").read_bytes())
    parts = [
        f"---\n{yaml.safe_dump(_front(run, recipe, scores, kind), sort_keys=False)}---",
        f"# {run.name}",
        f"{kind}, trained by `{recipe}.py` with Samestep for {step:,} of {run.info.get('steps', '?')} steps.",
        f"## Use it\n\n```bash\n{use}\n```" if use else "",
        _scores(scores),
        _curves(run, folder),
        _settings(run),
        f"## Repeat it\n\n```bash\naccelerate launch {recipe}.py --config training_config.yaml\n```",
        _history(run),
    ]
    (folder / "README.md").write_text("\n\n".join(part for part in parts if part) + "\n", encoding="utf-8")


def _without_place(config: dict[str, Any]) -> dict[str, Any]:
    return {**config, "run": {name: value for name, value in config.get("run", {}).items() if name != "dir"}}


def _front(run: History, recipe: str, scores: dict[str, Any], kind: str) -> dict[str, Any]:
    """Make what the Hub reads at the top of a card."""
    found: dict[str, Any] = {"tags": ["samestep", recipe]}
    task = next((task for suffix, task in _TASKS.items() if kind.endswith(suffix)), None)
    if task:
        found |= {"library_name": "transformers", "pipeline_tag": task}
    # A recipe of somebody's own may mean anything by these names.
    base, data = run.config.get("model"), run.config.get("data")
    if isinstance(base, str) and base and not Path(base).exists():
        found["base_model"] = base
    paths = data.get("path") if isinstance(data, dict) else None
    sets = [path for path in ([paths] if isinstance(paths, str) else paths or []) if _on_hub(path)]
    if sets:
        found["datasets"] = sets
    metrics = [name.removeprefix("eval/") for name in scores if name.startswith("eval/") and name != "eval/samples"]
    return found | ({"metrics": metrics} if metrics else {})


def _on_hub(path: object) -> bool:
    if not isinstance(path, str):
        return False
    return path.count("/") == 1 and not path.startswith(("builtin:", ".", "/")) and not Path(path).exists()


def _scores(scores: dict[str, Any]) -> str:
    if not scores:
        return ""
    rows = [
        f"| {name} | {value:.4g} |" if isinstance(value, float) else f"| {name} | {value} |"
        for name, value in scores.items()
    ]
    return "\n".join(["## Results", "", "| score | value |", "| --- | --- |", *rows])


def _curves(run: History, folder: Path) -> str:
    from app.commands import charts
    from app.errors import UserError

    try:
        charts.draw([run], folder / "curves.png")
    except UserError:  # nothing logged, or no matplotlib
        return ""
    return "![curves of the training](curves.png)"


def _settings(run: History) -> str:
    fields = {n: v for n, v in flatten(run.config).items() if v not in ("", None, []) and n != "run.dir"}
    rows = [f"| `{as_flag(name)}` | {value} |" for name, value in fields.items()]
    return "\n".join(["## Settings", "", "| setting | value |", "| --- | --- |", *rows])


def _history(run: History) -> str:
    launches = "; ".join(f"from step {launch['step']} on {launch['layout']}" for launch in run.launches)
    versions = ", ".join(f"{name} {version}" for name, version in run.info.get("versions", {}).items())
    if run.info.get("commit"):
        versions += f"; git commit {run.info['commit']}"
    parts = [
        "## How it was trained",
        f"{launches[:1].upper()}{launches[1:]}." if launches else "",
        f"With {versions}." if versions else "",
    ]
    return "\n\n".join(part for part in parts if part)
