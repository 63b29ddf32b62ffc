"""Run a script as if some packages were not installed: without.py "PACKAGES" SCRIPT|-m|-c ARGUMENTS..."""

import os
import runpy
import sys
from pathlib import Path


class Without:
    """A finder of modules and distributions that does not find some of them.

    Args:
        finder: what it asks.
        hidden: what it keeps to itself.
    """

    def __init__(self, finder, hidden: set[str]):
        self.finder, self.hidden = finder, hidden

    def __getattr__(self, name):
        return getattr(self.finder, name)

    def find_spec(self, name, path=None, target=None):
        """Find a module for Python's import."""
        return None if name.partition(".")[0] in self.hidden else self.finder.find_spec(name, path, target)

    def find_distributions(self, context):
        """Find distributions for importlib.metadata."""
        wanted = context.name and context.name.partition(".")[0].replace("-", "_").lower()
        found = getattr(self.finder, "find_distributions", lambda context: ())(context)
        return () if wanted in self.hidden else (d for d in found if d.metadata["Name"].lower() not in self.hidden)


def run(script: str, arguments: list[str]) -> None:
    """Run a file, or the argument of Python's -m or -c."""
    sys.path[0] = os.getcwd() if script.startswith("-") else str(Path(script).parent)
    sys.argv = list(arguments) if script.startswith("-") else [script, *arguments]
    if script == "-m":
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    elif script == "-c":
        exec(sys.argv[0], {"__name__": "__main__"})
    else:
        runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    packages, script, *arguments = sys.argv[1:]
    hidden = set(packages.split())
    assert not hidden & {name.partition(".")[0] for name in sys.modules}, "imported before it was hidden"
    sys.meta_path[:] = [Without(finder, hidden) for finder in sys.meta_path]
    run(script, arguments)
