"""samestep new: every recipe is copied with a test that passes, and nothing that exists is replaced."""

import re
import sys

import pytest
from support.launching import ROOT, run

import app
from app import parse
from app.__main__ import main
from app.commands.new.command import SMALL, as_own
from app.errors import UserError
from app.launching import shipped
from laws.many import load

RECIPES = sorted(path.stem for path in (ROOT / "recipes").glob("*.py"))


def test_every_recipe_can_be_copied():
    assert sorted(SMALL) == RECIPES == sorted(path.stem for path in shipped.folder("recipes").glob("*.py"))


@pytest.mark.parametrize("name", RECIPES)
def test_a_copy_is_the_recipe_with_its_own_name(name, tmp_path, capsys):
    file = tmp_path / "deep" / "mine.py"
    assert main(["new", name, str(file)]) == 0
    original, copied = (ROOT / f"recipes/{name}.py").read_text().splitlines(), file.read_text().splitlines()
    changed = [(a, b) for a, b in zip(original, copied, strict=True) if a != b]
    assert 2 <= len(changed) <= 10 and all("accelerate launch" in a and "samestep launch" in b for a, b in changed)
    assert f"recipes/{name}.py" not in file.read_text() and str(file) in file.read_text()
    compile(file.with_name("test_mine.py").read_text(), "test_mine.py", "exec")
    assert f"python -m app launch {file}" in capsys.readouterr().out


def test_a_profile_in_a_command_goes_by_its_name():
    text = "    accelerate launch --config_file accelerate_configs/ddp_cpu.yaml recipes/cls.py --run.dir runs/ddp"
    assert (
        as_own(text, "cls", ROOT.relative_to(ROOT) / "my.py") == "    samestep launch ddp_cpu my.py --run.dir runs/ddp"
    )


@pytest.mark.parametrize("name", RECIPES)
def test_the_flags_that_make_it_small_are_the_recipes(name):
    parse(load(ROOT / f"recipes/{name}.py").Config, SMALL[name].split())


def outcome_of(folder):
    """Run the test of a copy."""
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", folder]
    return run(words, env={"PYTHONPATH": str(ROOT)}, timeout=300)


@pytest.mark.exhaustive  # tests/project/test_wheel.py has the one of another recipe
@pytest.mark.launches
def test_the_test_of_a_copy_passes(tmp_path):
    """Of the recipe with two models."""
    assert main(["new", "gan", str(tmp_path / "mine.py")]) == 0
    result = outcome_of(tmp_path)
    assert result.status == 0 and "1 passed" in result.output, result.output


@pytest.mark.launches
def test_the_test_of_a_copy_fails_where_a_run_is_not_repeated(tmp_path):
    assert main(["new", "graph", str(tmp_path / "mine.py")]) == 0
    recipe = (tmp_path / "mine.py").read_text()
    assert "run.backward(" in recipe
    spoilt = recipe.replace("run.backward(", "import time; run.backward(time.time() % 7 * ", 1)
    (tmp_path / "mine.py").write_text(spoilt)
    result = outcome_of(tmp_path)
    assert result.status == 1 and "1 failed" in result.output
    assert "> " in result.output and 'losses(tmp_path / "stopped", "--run.stop-at", 2) ==' in result.output


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["cils", "mine.py"], "cils: there is no such recipe; there are cls, .*did you mean cls"),
        (["cls", "mine"], "mine: the name of a recipe is that of a module"),
        (["cls", "my-recipe.py"], "my-recipe.py: the name of a recipe is that of a module"),
        (["cls", "class.py"], "class.py: the name of a recipe is that of a module"),
        (["cls", "app.py"], "app.py: it would hide the module app .*: name it my_recipe.py"),
        (["cls", "torch.py"], "torch.py: it would hide the module torch"),
        (["cls", "deep/random.py"], "random.py: it would hide the module random"),
        (["cls", "test_a.py"], "test_a.py: pytest would take this recipe for one of its own files: name it my_recipe"),
        (["cls", "a_test.py"], "a_test.py: pytest would take"),
        (["cls", "conftest.py"], "conftest.py: pytest would take"),
        (["cls", "here.py"], "here.py exists already"),
        (["cls", "free.py"], "test_free.py exists already"),
        (["cls", "here.py/mine.py"], "here.py: cannot be written: File exists"),
    ],
)
def test_what_is_refused(words, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("here.py", "test_free.py"):
        (tmp_path / name).write_text("mine\n")
    with pytest.raises(UserError, match=message):
        main(["new", *words])
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {
        "here.py": "mine\n",
        "test_free.py": "mine\n",
    }


def test_a_folder_with_another_app_in_it_is_refused(tmp_path, monkeypatch):
    """Its recipes would import that one; in another folder they do not. The app of this project is no other one."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "app").mkdir()
    with pytest.raises(UserError, match=r"^mine.py: the folder app would hide .* such as (recipes/mine\.py)$") as told:
        main(["new", "cls", "mine.py"])
    assert main(["new", "cls", re.search(r"\S+$", str(told.value))[0]]) == 0
    (tmp_path / "app").rmdir()
    (tmp_path / "app").symlink_to(ROOT / "app")
    assert main(["new", "cls", "mine.py"]) == 0


def test_a_name_that_only_files_here_have_hides_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.syspath_prepend("")
    (tmp_path / "poems").mkdir()
    assert main(["new", "lm", "poems.py"]) == 0


def test_the_version_is_said(capsys):
    assert re.fullmatch(r"\d+\.\d+\.\d+", app.__version__)
    result = run([sys.executable, "-m", "app", "--version"])
    assert (result.status, result.output) == (0, f"samestep {app.__version__}\n")
    assert main(["--help"]) == 0
    assert "\n  --version  Print the version of Samestep.\n" in capsys.readouterr().out
