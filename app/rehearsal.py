"""A recipe run without its loop and its run folder: up to the loop, for a plan; to its end, for the model it makes."""

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
_to_end = False


class Reached(BaseException):
    """Leave a rehearsed recipe where its loop would begin; no `except Exception` of a recipe's holds it back."""

    def __init__(self, run: Any, plan: Any):
        super().__init__("the loop would begin")
        self.run, self.plan = run, plan


class Finished(BaseException):
    """Leave a rehearsed recipe where it would write its finished model."""

    def __init__(self, run: Any, model: Any, parts: tuple, use: str):
        super().__init__("the model would be written")
        self.run, self.model, self.parts, self.use = run, model, parts, use


def at_loop(run: Any, plan: Any) -> None:
    """Leave the recipe, or have it go on as if there were no steps."""
    if not _to_end:
        raise Reached(run, plan)


def rehearse(recipe: Path, flags: list[str]) -> tuple[Any, Any]:
    """Run a recipe's file, as one process on the CPU, and return its Run and its BatchPlan when the loop would begin.

    Nothing is claimed or written in the run folder, and no tracker starts.

    Raises:
        UserError: there is no such file, the run would refuse to begin, or no loop begins.
    """
    reached = _play(recipe, flags, Reached)
    if reached is None:
        raise UserError(f"{recipe} ended and never asked for run.batches: its loop is what a plan is about")
    return reached.run, reached.plan


def rehearse_to_end(recipe: Path, flags: list[str], beside: str = "") -> Finished:
    """Run a recipe's file as `rehearse` does, leave out its loop, and return what it hands to run.finish.

    Args:
        beside: a further folder in which it finds modules: where it lay when it was run.

    Raises:
        UserError: there is no such file, the run would refuse to begin, or run.finish is not called.
    """
    global _to_end
    _to_end = True
    try:
        finished = _play(recipe, flags, Finished, beside)
    finally:
        _to_end = False
    if finished is None:
        raise UserError(f"{recipe} ended and never called run.finish(model, ...): it has no model to export")
    return finished


def _play(recipe: Path, flags: list[str], awaited: type[BaseException], beside: str = "") -> Any:
    if not recipe.is_file():
        raise UserError(f"{recipe}: there is no such file; give a recipe such as recipes/cls.py")
    with _as_a_program(recipe, flags):
        sys.path[1:1] = [beside] if beside else []
        try:
            runpy.run_path(str(recipe), run_name="__main__")
        except awaited as left:
            return left
    return None


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
