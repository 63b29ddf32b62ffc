"""The project as `pip install` gives it: built, installed into a new environment, and used in an empty folder."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest
from support.launching import PROFILES, ROOT, metrics, run

import app
from app.commands import summaries

RECIPE = '''
"""Fit a line."""

from dataclasses import dataclass, field

import torch
from torch import nn

from app import OptimConfig, Run, RunConfig, parse


@dataclass
class Config:
    run: RunConfig = field(default_factory=lambda: RunConfig(global_batch=4, micro_batch=2, steps=4, trackers=()))
    optim: OptimConfig = field(default_factory=lambda: OptimConfig(lr=0.1))


def main(config: Config) -> dict:
    rows = list(torch.randn(16, 4, generator=torch.Generator().manual_seed(0)))
    with Run(config) as run:
        model, optimizer = run.prepare(nn.Linear(4, 1), config.optim)
        for batch in run.batches(rows, torch.stack):
            for micro in batch.micros(model):
                run.backward(model(micro.inputs).square().mean(), micro)
            run.step(optimizer)
        return run.finish(model)


if __name__ == "__main__":
    main(parse(Config))
'''
PROFILES_BY_NAME = """
from app import RunConfig, launch
from app.__main__ import main as command
from app.commands.doctor.command import fits
from app.launching import profiles
from recipe import Config, main
run = RunConfig(dir="launched", global_batch=4, micro_batch=2, steps=4, log_every=1, trackers=())
launch(main, Config(run), profile="ddp_cpu")
command(["plan", "recipe.py", "--profile", "fsdp_cpu"])
print(*fits(profiles.read("ddp_cpu:3")))
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """Build a wheel and install it into an environment that sees this one's packages, but not this copy of app."""
    root = tmp_path_factory.mktemp("wheel")
    for name in ("app", "accelerate_configs", "recipes"):
        shutil.copytree(ROOT / name, root / "source" / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, root / "source")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    build = ["wheel", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", str(root)]
    call([*pip, *build, str(root / "source")])
    venv.create(root / "environment", with_pip=False)
    python = root / "environment" / "bin" / "python"
    (wheel,) = root.glob("*.whl")
    call([*pip, "--python", str(python), "install", "--no-deps", "--no-index", str(wheel)])
    # Packages only: a .pth file inside another environment, such as that of an editable install, is not read.
    place = Path(call([str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]).strip())
    (place / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    (root / "empty").mkdir()
    (root / "empty" / "recipe.py").write_text(RECIPE)
    return place


def call(words: list[str], cwd: Path | None = None) -> str:
    done = subprocess.run(words, cwd=cwd, env=environment(), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def use(installed: Path, program: str, *words: str) -> str:
    """Run a program of the environment, in the folder that has nothing but a recipe."""
    folder = installed.parents[3] / "empty"
    result = run([installed.parents[2] / "bin" / program, *words], cwd=folder, env={"PYTHONPATH": ""})
    assert result.status == 0, result.output
    return result.output


def test_it_has_every_module_every_recipe_and_every_profile(installed):
    modules = {str(file.relative_to(ROOT)) for file in (ROOT / "app").rglob("*.py")}
    modules |= {f"app/recipes/{file.name}" for file in (ROOT / "recipes").glob("*.py")}
    assert {str(file.relative_to(installed)) for file in (installed / "app").rglob("*.py")} == modules
    profiles = {file.name for file in (installed / "app" / "accelerate_configs").iterdir()}
    assert profiles == {file.name for file in PROFILES.glob("*.yaml")}
    templates = Path("commands", "submit", "templates")
    job_files = {file.name for file in (installed / "app" / templates).iterdir()}
    assert job_files == {file.name for file in (ROOT / "app" / templates).iterdir()} != set()
    assert (installed / "app" / "py.typed").exists()  # or type checkers would not read its types


def test_a_recipe_trains_and_every_command_is_there(installed):
    where = use(installed, "python", "-c", "import app; from app import Run, launch, parse; print(app.__file__)")
    assert Path(where.strip()).is_relative_to(installed)
    use(installed, "python", "recipe.py", "--run.dir", "trained", "--run.log-every", "1")
    folder = installed.parents[3] / "empty" / "trained"
    assert [line["step"] for line in metrics(folder)] == [1, 2, 3, 4]
    assert json.loads((folder / "run.json").read_text())["status"] == "finished"
    listed = use(installed, "samestep")
    assert all(f"\n  {name} " in listed for name in summaries())


def test_profiles_are_known_by_name(installed):
    """To launch, to plan and to doctor."""
    printed = use(installed, "python", "-c", PROFILES_BY_NAME)
    info = json.loads((installed.parents[3] / "empty" / "launched" / "run.json").read_text())
    assert info["layout"]["processes"] == 2 and info["layout"]["wrapping"] == "DDP"
    assert "FSDP2 x2, fp32" in printed and "DDP x3, fp32" in printed


def test_a_recipe_is_begun_and_its_test_passes(installed):
    assert use(installed, "samestep", "--version") == f"samestep {app.__version__}\n"
    use(installed, "samestep", "new", "graph", "mine.py")
    assert "1 passed" in use(installed, "python", "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_mine.py")
