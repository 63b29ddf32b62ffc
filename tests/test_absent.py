"""Packages that are not installed cost a warning, or one message that names them; never a traceback."""

import json
import os
import re
import subprocess
import sys
import tomllib

import pytest

from app.errors import MODULES, mendable
from launching import ROOT
from laws.small import SMALL

# Hides packages from imports and from importlib.metadata, as if they were not installed.
SITE = """
import os
import sys

HIDDEN = set(os.environ["HIDDEN"].split())


class Without:
    def __init__(self, finder):
        self.finder = finder

    def __getattr__(self, name):
        return getattr(self.finder, name)

    def find_spec(self, name, path=None, target=None):
        return None if name.partition(".")[0] in HIDDEN else self.finder.find_spec(name, path, target)

    def find_distributions(self, context):
        wanted = context.name and context.name.partition(".")[0].replace("-", "_").lower()
        found = getattr(self.finder, "find_distributions", lambda context: ())(context)
        return () if wanted in HIDDEN else (d for d in found if d.metadata["Name"].lower() not in HIDDEN)


sys.meta_path[:] = [Without(finder) for finder in sys.meta_path]
"""
OPTIONAL = ["wandb", "tensorboard", "tensorboardX", "monai", "plotly", "matplotlib", "torchmetrics", "peft", "nibabel"]


def without(hidden, tmp_path, *words):
    """Run Python without some packages, and return its status and all that it prints."""
    (tmp_path / "sitecustomize.py").write_text(SITE)
    path = os.pathsep.join([str(tmp_path), str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "HIDDEN": hidden, "PYTHONPATH": path, "ACCELERATE_USE_CPU": "true"}
    result = subprocess.run(
        [sys.executable, *map(str, words)], capture_output=True, text=True, env=environment, cwd=tmp_path, timeout=300
    )
    output = result.stdout + result.stderr
    assert "Traceback" not in output, output
    return result.returncode, output


def a_run(folder):
    """Write what a short run leaves."""
    folder.mkdir(parents=True)
    (folder / "run.json").write_text('{"status": "finished", "steps": 1, "launches": []}')
    (folder / "metrics.jsonl").write_text('{"step": 1, "loss": 1.0}\n')


def test_a_run_goes_on_without_what_is_optional(tmp_path, rows):
    """Its trackers cost a line each; and what looks at runs works."""
    small = [*map(str, SMALL["cls"].flags(rows)), "--run.steps", 2, "--run.global-batch", 4, "--run.micro-batch", 2]
    run = [*small, "--run.dir", tmp_path / "runs/a", "--run.trackers", "wandb", "tensorboard"]
    status, output = without(" ".join(OPTIONAL), tmp_path, ROOT / "recipes/cls.py", *run)
    assert status == 0, output
    for name in ("wandb", "tensorboard"):
        assert output.count(f"{name} is not installed") == output.count(f"pip install {name}") == 1, output
    assert json.loads((tmp_path / "runs/a/run.json").read_text())["status"] == "finished"
    plan = ["plan", *map(str, [ROOT / "recipes/cls.py", *run])]
    commands = f"""
import app, app.run
from app.__main__ import main
for words in (["runs", "runs"], {plan!r}, ["doctor"]):
    print(words[0], "gave", main(words))
"""
    status, output = without(" ".join(OPTIONAL), tmp_path, "-c", commands)
    assert status == 0 and "runs gave 0" in output and "plan gave 0" in output and "doctor gave" in output, output
    missing = [name for name in OPTIONAL if f"pip install {name}" not in output]
    assert missing == ["tensorboardX"]


@pytest.mark.parametrize("package, kind", [("plotly", "png"), ("matplotlib", "html")])
def test_plot_draws_what_it_can(tmp_path, package, kind):
    a_run(tmp_path / "runs/a")
    status, output = without(package, tmp_path, "-m", "app", "plot", "runs/a")
    assert status == 0 and f"left out: {package} is not installed: pip install {package}" in output, output
    assert [path.name for path in (tmp_path / "runs/a").glob("plot.*")] == [f"plot.{kind}"]


@pytest.mark.parametrize(
    "package, words",
    [
        ("matplotlib plotly", ["-m", "app", "plot", "runs/a"]),
        ("monai", [ROOT / "recipes/seg.py", "--run.dir", "runs/seg"]),
        ("peft", [ROOT / "recipes/lm.py", "--run.dir", "runs/lm", "--lora.rank", "2"]),
        ("datasets", [ROOT / "recipes/cls.py", "--run.dir", "runs/cls"]),
        ("tyro", [ROOT / "recipes/cls.py"]),
        ("tyro", ["-m", "app", "runs"]),
    ],
)
def test_what_needs_a_package_names_it(tmp_path, package, words):
    """And ends with status 2, as every mistake of the user's."""
    a_run(tmp_path / "runs/a")
    status, output = without(package, tmp_path, *words)
    assert status == 2, output
    assert all(f"{name} is not installed: pip install {name}" in output for name in package.split()), output
    assert len([line for line in output.splitlines() if "error" in line]) == 1, output


def test_every_dependency_can_be_named():
    """By the names under which pip knows it; a module of the user's own keeps its traceback."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    asked = [line for name in ("plot", "lora", "qlora", "seg", "s2s") for line in extras[name]]
    needed = [*project["dependencies"], *asked]
    assert {re.match(r"[\w-]+", line)[0] for line in needed} <= set(MODULES.values())
    assert mendable(ModuleNotFoundError("No module named 'own'", name="own")) is None
    assert mendable(ModuleNotFoundError("No module named 'torch.gone'", name="torch.gone")) is None
