"""Commands that messages tell have the name by which the user started this program."""

import ast
import os
import sys

import pytest
from support.launching import ROOT, run

from app.__main__ import main
from app.errors import UserError
from app.launching import program


@pytest.mark.parametrize("words", [["--help"], ["launch", "--help"], ["evaluate", "--help"], ["plot"]])
@pytest.mark.parametrize(
    "started_as, name, other",
    [("/bin/samestep", "samestep", "python -m app"), ("app/__main__.py", "python -m app", "samestep")],
)
def test_what_is_printed_has_the_name_that_was_typed(monkeypatch, tmp_path, capsys, words, started_as, name, other):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "environ", {**os.environ})
    program.remember(started_as)
    told = ""
    try:
        main(words)
    except (SystemExit, UserError) as end:
        told = str(end)
    told += capsys.readouterr().out
    assert f"{name} " in told and f"{other} " not in told, told


def test_the_processes_of_a_launch_know_the_name(tmp_path):
    """Also where the recipe takes the place of the program."""
    (tmp_path / "samestep").write_text("from app.__main__ import run\nrun()\n")  # as pip writes it
    words = [sys.executable, tmp_path / "samestep", "launch", "cpu", ROOT / "recipes/cls.py", "--push-to-hub", "true"]
    result = run(words, env={"PYTHONPATH": str(ROOT)})
    assert result.status == 2 and "`samestep export RUN --push ORG/NAME`" in result.output, result.output


def test_one_module_owns_the_name():
    """Elsewhere in app it stands in documentation alone, or in a text whose name is put in by `as_typed`."""
    named = []
    for path in sorted((ROOT / "app").rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        documentation = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        texts = [node for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
        named += [path.name for text in texts if "python -m app" in text.value and id(text) not in documentation]
    assert sorted(named) == ["other_names.py", "other_names.py", "program.py"]
