"""What the documents say can be typed: recipes run, flags are known, links lead somewhere, messages are real."""

import ast
import importlib
import inspect
import itertools
import re
import sys
from pathlib import Path

import pytest
from support.launching import PROFILES, ROOT, run
from support.typed_commands import APP, COMMANDS, DOCUMENTS, RECIPES, named

from app.commands import load, summaries
from app.launching.flags import parse, parse_command

sys.path.insert(0, str(ROOT))


@pytest.mark.parametrize(
    ("document", "words"), RECIPES, ids=lambda value: named(value) if isinstance(value, list) else ""
)
def test_flags_of_recipes_are_known(document, words):
    place = next(i for i, word in enumerate(words) if word.startswith("recipes/"))
    module = importlib.import_module(words[place].removesuffix(".py").replace("/", "."))
    if "--help" not in words:
        parse(module.Config, words[place + 1 :])
    for flag, value in itertools.pairwise(words):
        if flag == "--config_file":
            assert (ROOT / value).is_file()


@pytest.mark.parametrize(("document", "words"), APP, ids=lambda value: named(value) if isinstance(value, list) else "")
def test_options_of_commands_are_known(document, words):
    name, *rest = words
    if name == "COMMAND":
        return
    assert name in summaries()
    recipe = next((word for word in rest if word.startswith("recipes/")), None)
    if name == "launch":  # which reads its own words as accelerate launch does
        assert recipe
        parse(config_of(recipe), rest[rest.index(recipe) + 1 :])
        return
    command = load(name)
    takes_flags = len(inspect.signature(command.main).parameters) > 1
    _, flags = parse_command(command.Options, rest, "", takes_flags)
    if flags and recipe:
        parse(config_of(recipe), flags)
    assert all((ROOT / word.partition(":")[0]).is_file() for word in rest if word.startswith("accelerate_configs/"))


def config_of(recipe):
    """Return the class of a recipe's settings."""
    return importlib.import_module(recipe.removesuffix(".py").replace("/", ".")).Config


def test_modules_and_targets_are_there():
    makefile = (ROOT / "Makefile").read_text()
    for _, words in COMMANDS:
        if words[0] == "make":
            assert f"\n{words[1]}:" in makefile
        if words[:2] == ["python", "-m"] and words[2].startswith("benchmarks"):
            assert importlib.util.find_spec(words[2])


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: document.name)
def test_links_lead_somewhere(document):
    for link in re.findall(r"\]\(([^)#]+)", document.read_text()):
        assert link.startswith("https://") or (document.parent / link).exists(), link


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: document.name)
def test_files_of_the_project_are_there(document):
    """Those that stand in backticks, from the root; in docs/architecture.md also those below app/."""
    text = document.read_text()
    named = re.findall(r"`((?:app|tests|benchmarks|recipes|notebooks|accelerate_configs)/[\w./-]+\.\w+)`", text)
    if document.name == "architecture.md":
        named += [f"app/{path}" for path in re.findall(r"[| ,]([a-z_]+/[a-z_]+\.py) ", text)]
        assert len(named) > 20
    assert [path for path in named if not (ROOT / path).is_file()] == []


def test_messages_are_those_of_the_program():
    """Each message in a table of symptoms stands in the source, but for what is filled in."""
    source = re.sub(r'["\']\n\s*f?["\']', "", "".join(path.read_text() for path in (ROOT / "app").rglob("*.py")))
    source = source.replace("the {what} of step", "the gradient of step")
    # Said by torch and by accelerate.
    known = {"address already in use", "The following values were not passed to ..."}
    for row in re.findall(r"^\| (`[^|]+) \|", (ROOT / "docs/troubleshooting.md").read_text(), re.MULTILINE):
        for message in re.findall(r"`([^`]+)`", row):
            parts = [part.strip() for part in re.split(r"\.\.\.|\b[A-Z]\b|RUN|\b\d\b|\bnan\b", message)]
            for part in parts:
                assert len(part) < 4 or part in source or message in known, part


def test_the_recipe_of_the_documents_is_the_same_everywhere(tmp_path):
    """It stands in docs/recipe.md, and is run from there."""
    (code,) = re.findall(r"```python\n(\"\"\"Tell two spirals.*?)```", (ROOT / "docs/recipe.md").read_text(), re.DOTALL)
    (tmp_path / "spirals.py").write_text(code)
    words = [
        sys.executable,
        "-m",
        "app",
        "prove",
        tmp_path / "spirals.py",
        "--steps",
        4,
        "--report",
        tmp_path / "prove",
    ]
    result = run([*words, "--profiles", PROFILES / "cpu.yaml", PROFILES / "ddp_cpu.yaml"])
    assert "same: 2 profiles, 4 steps, to the last bit" in result.output


def test_every_document_is_reached_from_the_readme():
    text = (ROOT / "README.md").read_text()
    assert all(f"docs/{path.name}" in text for path in Path(ROOT / "docs").glob("*.md"))


@pytest.mark.parametrize("recipe", sorted((ROOT / "recipes").glob("*.py")), ids=lambda file: file.stem)
def test_commands_of_a_recipes_help_are_on_lines_of_their_own(recipe):
    """Lines that are not indented become one paragraph. The linter takes indents away where no line ends with \\."""
    head, *lines = ast.get_docstring(ast.parse(recipe.read_text()), clean=False).splitlines()
    commands = [line for line in lines if "accelerate launch" in line]
    assert head and commands and all(line.startswith("    ") for line in commands)
