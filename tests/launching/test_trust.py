"""Which code of a folder is run: that of this installation and of this user, and no file that merely lies there."""

import ast
import json
import shutil
import sys
from pathlib import Path

import pytest
from support.evaluating import as_it_is
from support.launching import ROOT, run

from app import parse
from app.__main__ import main
from app.commands.evaluate import command, models
from app.errors import UserError
from app.launching import trust
from laws.many import load
from laws.small import SMALL

EVIL = "import pathlib; pathlib.Path({!r}).touch()\n"
# Modules that recipes and commands import; none of them may come from the folder that is looked at.
MODULES = ("app", "json", "torch", "transformers", "sitecustomize", "cls", "yaml", "numpy", "worker")


@pytest.fixture(scope="module")
def run_of_cls(tmp_path_factory, rows):
    folder = tmp_path_factory.mktemp("trust") / "cls"
    recipe = load(ROOT / "recipes" / "cls.py")
    words = [*SMALL["cls"].flags(rows), "--run.global-batch", 8, "--run.micro-batch", 4, "--run.steps", 2]
    recipe.main(parse(recipe.Config, list(map(str, [*words, "--run.trackers", "--run.dir", folder]))))
    return folder


@pytest.fixture
def poisoned(run_of_cls, tmp_path, rows):
    """Give a run's folder in which everything that could be run makes the file `owned`."""
    folder, owned = shutil.copytree(run_of_cls, tmp_path / "cls"), tmp_path / "owned"
    for place in (folder, folder / "model", tmp_path / "far"):
        place.mkdir(exist_ok=True)
        for name in MODULES:
            (place / f"{name}.py").write_text(EVIL.format(str(owned)))
    (folder / "app").mkdir()
    (folder / "app" / "__init__.py").write_text(EVIL.format(str(owned)))
    info = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps(info | {"recipe_folder": str(tmp_path / "far")}))
    return folder, owned


def asked(folder, words):
    """Run a command in the folder itself, whose files the working folder would offer to imports."""
    return safely(folder, "-m", "app", *words)


def safely(folder, *words):
    return run([sys.executable, "-P", *words], cwd=folder, env={"PYTHONPATH": str(ROOT)}, timeout=300)


@pytest.mark.launches
def test_no_file_that_lies_there_is_run(poisoned, rows):
    """By any command that takes the folder; the recipe is this installation's, and so needs no word of the user."""
    folder, owned = poisoned
    # One process for all of these: only the last one takes the recipe, and with it imports what no other one does.
    looking = [["runs", folder], ["runs", folder, "--verify"], ["watch", folder], ["plot", folder], ["export", folder]]
    calls = [list(map(str, words)) for words in looking]
    result = safely(folder, "-c", f"from app.__main__ import main\nassert [main(each) for each in {calls}] == [0] * 5")
    assert result.status == 0 and not owned.exists(), result.output
    for words in (["evaluate", folder], ["predict", folder, rows(11)]):
        result = asked(folder, words)
        assert result.status == 0 and not owned.exists(), (words, result.output)
    result = asked(folder, ["evaluate", folder / "model"])
    assert result.status == 0 and not owned.exists(), result.output


@pytest.mark.launches
def test_a_changed_recipe_is_refused_unless_it_is_trusted(poisoned):
    folder, owned = poisoned
    with (folder / "recipe.py").open("a") as file:
        file.write(EVIL.format(str(owned)))
    exported = shutil.copytree(folder / "model", folder.parent / "exported")
    for name in MODULES:
        (exported / f"{name}.py").unlink()
    (exported / "training_config.yaml").write_bytes((folder / "config.yaml").read_bytes())
    (exported / "cls.py").write_bytes((folder / "recipe.py").read_bytes())
    for words in (["evaluate", folder], ["export", folder], ["evaluate", folder / "model"], ["evaluate", exported]):
        with pytest.raises(UserError, match="--trust-code"):
            main(list(map(str, words)))
        assert not owned.exists(), words
    assert not (folder / "export").exists()
    shutil.rmtree(folder.parent / "far")
    assert main(["evaluate", str(exported), "--trust-code"]) == 0 and owned.exists()


def test_code_next_to_weights_is_never_run(run_of_cls, rows, tmp_path):
    model, owned = shutil.copytree(run_of_cls / "model", tmp_path / "model"), tmp_path / "owned"
    (model / "evil.py").write_text(EVIL.format(str(owned)))
    config = json.loads((model / "config.json").read_text())
    config |= {
        "model_type": "evil",
        "auto_map": {"AutoConfig": "evil.C", "AutoModelForSequenceClassification": "evil.M"},
    }
    (model / "config.json").write_text(json.dumps(config))
    for words in (["predict", model, rows(11), "--to", tmp_path / "x.jsonl"], ["evaluate", model, rows(11)]):
        with pytest.raises(UserError):
            main(list(map(str, words)))
        assert not owned.exists(), words


def test_a_recipe_that_this_user_has_trained_with_needs_no_word(tmp_path, monkeypatch):
    """From the folder it was in, and unchanged."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    (tmp_path / "mine").mkdir()
    copy = tmp_path / "recipe.py"
    copy.write_text("print('mine')\n")
    with pytest.raises(UserError, match="--trust-code"):
        trust.checked(copy, str(tmp_path / "mine"), False)
    trust.remember(copy.read_text(), str(tmp_path / "mine"))
    assert trust.checked(copy, str(tmp_path / "mine"), False) == trust.Code(copy, str(tmp_path / "mine"))
    for source, folder in ((copy.read_text(), tmp_path), ("print('other')\n", tmp_path / "mine")):
        copy.write_text(source)
        with pytest.raises(UserError, match="--trust-code"):
            trust.checked(copy, str(folder), False)
    (tmp_path / "state/samestep/recipes").chmod(0o777)
    copy.write_text("print('mine')\n")
    with pytest.raises(UserError, match="--trust-code"):
        trust.checked(copy, str(tmp_path / "mine"), False)


def test_a_recipe_in_the_working_folder_is_not_taken_for_ours(tmp_path, monkeypatch, run_of_cls, rows):
    monkeypatch.chdir(tmp_path)
    Path("recipes").mkdir()
    Path("recipes/cls.py").write_text("raise SystemExit(9)\n")
    model = shutil.copytree(run_of_cls / "model", tmp_path / "alone")
    found = models.of_model(command.Options(run=model, data=str(rows(11))), [])
    assert found.recipe == ROOT / "recipes" / "cls.py" and as_it_is(model, rows(11))["scores"]


def test_no_model_is_loaded_with_its_own_code():
    """Each call that could run it says that it must not."""
    wrong = []
    for file in [*ROOT.glob("app/**/*.py"), *ROOT.glob("recipes/*.py")]:
        for node in ast.walk(ast.parse(file.read_text())):
            name = getattr(node.func, "attr", getattr(node.func, "id", "")) if isinstance(node, ast.Call) else ""
            says = {word.arg: word.value for word in getattr(node, "keywords", [])}
            trusted = getattr(says.get("trust_remote_code"), "value", None)
            if name in ("from_pretrained", "pipeline") and trusted is not False:
                wrong.append(f"{file.relative_to(ROOT)}:{node.lineno}")
    assert not wrong
