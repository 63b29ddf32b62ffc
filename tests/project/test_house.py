"""The rooms of app: few enough to see at once, and each uses only those below it."""

import ast
import re
from pathlib import Path

import pytest
from support.launching import ROOT

APP = ROOT / "app"
# From the bottom up. `run` is the one that recipes open; commands may use all, and nothing uses commands.
ORDER = [
    *("errors", "storage", "config", "sampling", "distributed", "launching", "rundir", "data", "checkpoints"),
    *("training", "tasks", "run", "commands", "__main__"),
]
# Of the same, in app/data: tables are read; as streams, by chunks; in mixtures, several; and loading takes all three.
READING = ["tables", "streams", "mixtures", "loading"]


def modules() -> list[Path]:
    return sorted(path for path in APP.rglob("*.py") if path != APP / "__init__.py")


def room_of(name: str) -> str:
    """The room of `app.x.y`, which is x."""
    return name.split(".")[1] if "." in name else ""


def imported(path: Path) -> set[str]:
    """Names of what a module imports of app, inside functions too."""
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.module:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {name for name in names if name.startswith("app.")}


def test_a_dozen_entries_at_most():
    shown = {path.name for path in APP.iterdir() if not path.name.startswith("_") and path.suffix in ("", ".py")}
    assert {name.removesuffix(".py") for name in shown} == set(ORDER) - {"__main__"} and len(shown) <= 13


def test_every_room_is_in_contributing():
    text = "".join(line for line in (ROOT / "CONTRIBUTING.md").read_text().splitlines() if line.startswith("| `"))
    rooms = [name for name in ORDER if name != "__main__"]
    assert [name for name in rooms if not any(word in text for word in (f"`app/{name}/`", f"{name}.py`"))] == []


def test_files_that_contributing_names_are_in_their_rooms():
    rows = re.findall(r"^\| `(app/\w+)/` \|(.*)\|$", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE)
    named = [(ROOT / room, name) for room, text in rows for name in re.findall(r"`([\w/]+\.py)`", text)]
    assert len(named) > 12
    missing = [
        f"{room}/{name}" for room, name in named if not (room / name).is_file() and not [*room.glob(f"*/{name}")]
    ]
    assert missing == []


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(APP)))
def test_arrows_point_down(path):
    own = ORDER.index(path.relative_to(APP).parts[0].removesuffix(".py"))
    above = [name for name in imported(path) if (room := room_of(name)) in ORDER and ORDER.index(room) > own]
    assert above == []


@pytest.mark.parametrize("package", READING)
def test_arrows_point_down_in_reading(package):
    above = READING[READING.index(package) + 1 :]
    paths = [*(APP / "data" / package).glob("*.py"), *(APP / "data").glob(f"{package}.py")]
    names = {name for path in paths for name in imported(path) if name.startswith("app.data.")}
    assert paths and [name for name in names if name.split(".")[2] in above] == []


@pytest.mark.parametrize("room", ["data", "tasks", "sampling", "distributed"])
def test_data_and_tasks_know_nothing_of_commands(room):
    """They are handed what a run needs, as an argument; launching is for what starts runs."""
    paths = [path for path in modules() if room_of(f"app.{path.relative_to(APP).parts[0]}") == room]
    assert paths and not [name for path in paths for name in imported(path) if name.startswith("app.launching")]


def test_one_slot_holds_what_a_command_asks_for():
    """A run is told once what it is for, and hands it on: no module asks for it again."""
    asking = [path for path in modules() if re.search(r"purpose\.asked\(|import .*\basked\b", path.read_text())]
    assert [str(path.relative_to(APP)) for path in asking] == ["run.py"]


def test_tests_lie_where_the_code_does_that_they_test():
    """In a folder for each room of app, and in a few of which no room is the subject."""
    more = {"laws", "recipes", "benchmarks", "project"}
    for file in (ROOT / "tests").rglob("test_*.py"):
        folder = file.relative_to(ROOT / "tests").parts[0]
        assert folder in {*ORDER, *more}, f"{file.name} lies in tests/{folder}"


def test_no_test_imports_another():
    """What several tests use stands in a module whose name says what it gives."""
    tests = sorted((ROOT / "tests").rglob("*.py"))
    others = {path.stem for path in tests if path.stem.startswith("test_")}
    nodes = [(file, node) for file in tests for node in ast.walk(ast.parse(file.read_text()))]
    for file, node in nodes:
        if isinstance(node, ast.Import | ast.ImportFrom):
            modules = [getattr(node, "module", None) or "", *(alias.name for alias in node.names)]
            assert not others & {name.rpartition(".")[2] for name in modules}, f"{file.name}, line {node.lineno}"
