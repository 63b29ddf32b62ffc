"""A recipe run up to where its loop would begin, without its run folder: what a plan is made from."""

import os
import runpy
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from app.errors import UserError

# Asked by app/run.py: true while a recipe is rehearsed.
on = False


class Reached(BaseException):
    """Leave a rehearsed recipe where its loop would begin; no `except Exception` of a recipe's holds it back."""

    def __init__(self, run: Any, plan: Any):
        super().__init__("the loop would begin")
        self.run, self.plan = run, plan


def rehearse(recipe: Path, flags: list[str]) -> tuple[Any, Any]:
    """Run a recipe's file, as one process on the CPU, and return its Run and its BatchPlan when the loop would begin.

    Nothing is claimed or written in the run folder, and no tracker starts.

    Raises:
        UserError: there is no such file, the run would refuse to begin, or no loop begins.
    """
    if not recipe.is_file():
        raise UserError(f"{recipe}: there is no such file; give a recipe such as recipes/cls.py")
    with _as_a_program(recipe, flags):
        try:
            runpy.run_path(str(recipe), run_name="__main__")
        except Reached as reached:
            return reached.run, reached.plan
    raise UserError(f"{recipe} ended and never asked for run.batches: its loop is what a plan is about")


@contextmanager
def _as_a_program(recipe: Path, flags: list[str]) -> Iterator[None]:
    """Have the recipe find what it would find when started by itself, on a machine without a GPU."""
    global on
    before = sys.argv, sys.path, dict(os.environ)
    os.environ |= {"ACCELERATE_USE_CPU": "true", "ACCELERATE_MIXED_PRECISION": "no"}
    sys.argv, sys.path = [str(recipe), *flags], [str(recipe.resolve().parent), *sys.path]
    on = True
    try:
        yield
    finally:
        on = False
        sys.argv, sys.path, environment = before
        os.environ.clear()
        os.environ.update(environment)
