"""Packages that are not installed cost a warning, or one message that names them; never a traceback."""

import json
import re
import sys
import tomllib

import pytest
from support.launching import ROOT, run
from support.run_records import record

from app.errors import MODULES, mendable
from laws.small import SMALL

WITHOUT = ROOT / "tests" / "laws" / "without.py"
OPTIONAL = ["wandb", "tensorboard", "tensorboardX", "monai", "plotly", "matplotlib", "torchmetrics", "peft", "nibabel"]


def without(hidden, folder, *words):
    """Run Python without some packages in a folder; return its status and all that it prints."""
    env = {"ACCELERATE_USE_CPU": "true", "PYTHONPATH": str(ROOT)}
    result = run([sys.executable, WITHOUT, hidden, *words], cwd=folder, timeout=300, env=env)
    assert "Traceback" not in result.output, result.output
    return result.status, result.output


def a_run(folder):
    """Write what a short run leaves."""
    folder.mkdir(parents=True)
    (folder / "run.json").write_text(json.dumps(record(1, status="finished", steps=1).to_json()))
    (folder / "metrics.jsonl").write_text('{"step": 1, "loss": 1.0}\n')


def test_a_run_goes_on_without_what_is_optional(tmp_path, rows):
    """Its trackers cost a line each; and what looks at runs works."""
    small = [*map(str, SMALL["cls"].flags(rows)), "--run.steps", 2, "--run.global-batch", 4, "--run.micro-batch", 2]
    flags = [*small, "--run.dir", tmp_path / "runs/a", "--run.trackers", "wandb", "tensorboard"]
    status, output = without(" ".join(OPTIONAL), tmp_path, ROOT / "recipes/cls.py", *flags)
    assert status == 0, output
    for name in ("wandb", "tensorboard"):
        assert output.count(f"{name} is not installed") == output.count(f"pip install {name}") == 1, output
    assert json.loads((tmp_path / "runs/a/run.json").read_text())["status"] == "finished"
    plan = ["plan", *map(str, [ROOT / "recipes/cls.py", *flags])]
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
        pytest.param("tyro", [ROOT / "recipes/cls.py"], marks=pytest.mark.exhaustive),
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
    asked = [line for name in ("plot", "lora", "qlora", "seg", "s2s", "buckets", "streams") for line in extras[name]]
    needed = [*project["dependencies"], *asked]
    assert {re.match(r"[\w-]+", line)[0] for line in needed} <= set(MODULES.values())
    assert mendable(ModuleNotFoundError("No module named 'own'", name="own")) is None
    assert mendable(ModuleNotFoundError("No module named 'torch.gone'", name="torch.gone")) is None
