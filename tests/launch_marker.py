"""Mark the tests that start processes which train, and hold the others to it: a pytest plugin.

`launches` is set by what a test's code and its fixtures' code refer to, so that no list is kept by hand. A test that
starts Python through `app` alone says so itself, with `@pytest.mark.launches`; without it, it fails.
"""

import functools
import inspect
import sys
from pathlib import Path
from types import CodeType

import pytest

TESTS = Path(__file__).parent
# Names in code that start a process: of the standard library, and of tests/support/launching.py.
STARTERS = {"subprocess", "run", "launch", "python", "Training"}
PROGRAMS = ("python", "accelerate", "torchrun", "bash", "sh")
MARK = "launches"

_now: list[pytest.Item] = []


def names_in(code: CodeType) -> set[str]:
    """List the names that a piece of code and the functions inside it refer to."""
    inside = (names_in(const) for const in code.co_consts if isinstance(const, CodeType))
    return {*code.co_names, *code.co_freevars}.union(*inside)


@functools.cache
def starts_processes(function) -> bool:
    """Tell whether a function of the tests, or one that it calls, refers to something that starts a process."""
    return _starts(function, set())


def _starts(function, seen: set) -> bool:
    function = inspect.unwrap(function)
    if function in seen or not inspect.isfunction(function) or TESTS not in Path(function.__code__.co_filename).parents:
        return False
    seen.add(function)
    for name in names_in(function.__code__):
        known = function.__globals__.get(name)
        known = inspect.unwrap(known) if callable(known) else known  # of functools.cache
        if name == "subprocess" or (name in STARTERS and getattr(known, "__module__", "") == "support.launching"):
            return True
        methods = [each for each in vars(known).values() if inspect.isfunction(each)] if inspect.isclass(known) else []
        if any(_starts(each, seen) for each in (known, *methods) if inspect.isfunction(each)):
            return True
    return False


def pytest_configure(config: pytest.Config) -> None:
    """Declare the markers."""
    config.addinivalue_line("markers", f"{MARK}: starts processes; `make check` leaves it out")
    config.addinivalue_line("markers", "long: takes seconds in this process; `make check` leaves it out")
    config.addinivalue_line("markers", "exhaustive: one more layout or size of what others test; `make laws` runs it")
    about = "needs packages that others must not see; `make test` runs it by itself (requirements-apart.lock)"
    config.addinivalue_line("markers", f"apart: {about}")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Set the marker, and put the files with launches first: what is short fills the gaps at the end."""
    launching = set()
    for item in items:
        fixtures = [each.func for found in item._fixtureinfo.name2fixturedefs.values() for each in found]
        if any(starts_processes(function) for function in (item.function, *fixtures)):
            item.add_marker(MARK)
        if item.get_closest_marker(MARK):
            launching.add(item.path)
    items.sort(key=lambda item: item.path not in launching)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item):
    """Remember which test runs."""
    _now.append(item)
    try:
        return (yield)
    finally:
        _now.pop()


def refuse(event: str, arguments: tuple) -> None:
    """Fail a test that starts a program without being marked."""
    if event == "subprocess.Popen" and _now and not _now[-1].get_closest_marker(MARK):
        words = arguments[1] if isinstance(arguments[1], list | tuple) else [arguments[1]]
        if Path(str(words[0])).name.startswith(PROGRAMS):
            raise RuntimeError(f"{_now[-1].nodeid} starts {words[0]}: mark it with @pytest.mark.{MARK}")


sys.addaudithook(refuse)
