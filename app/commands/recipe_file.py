"""Run a recipe's file for something else than training: to its run, its loop, or its end.

Its run has the settings, its loop is for a plan, and at its end it has a model.
"""

import os
import runpy
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from app.errors import UserError
from app.training.loop.purpose import Asking, Body, Exporting, Finished, Opening, Planning, Purpose, Reached, asking


def run_to_opening(recipe: Path, flags: list[str]) -> Any:
    """Run a recipe's file up to where its run would be opened, and return that Run: its settings are checked by then.

    Raises:
        UserError: there is no such file, a setting is wrong, or the recipe never opens a run.
    """
    opening = _play(recipe, flags, Opening, Asking())
    if opening is None:
        raise UserError(f"{recipe} ended and never opened a Run: it is no recipe, or has no main program")
    return opening.run


def run_to_loop(recipe: Path, flags: list[str], body: Body | None = None) -> tuple[Any, Any]:
    """Run a recipe's file up to its loop, as one process on the CPU, and return its Run and its BatchPlan.

    Nothing is locked or written in the run folder, and no tracker starts.

    Args:
        body: of the loop, which runs first; an error of it is kept in it and not raised.

    Raises:
        UserError: there is no such file, the run would refuse to begin, or the recipe never calls run.batches.
    """
    try:
        reached = _play(recipe, flags, Reached, Planning(body))
    except Exception as error:
        if body is None or body.reached is None:
            raise
        reached = body.left_by(error)
    if reached is None:
        raise UserError(f"{recipe} ended and never called run.batches: a plan is about its loop")
    return reached.run, reached.plan


def run_to_end(recipe: Path, flags: list[str], import_folder: str = "") -> Finished:
    """Run a recipe's file as `run_to_loop` does, leave out its loop, and return what it hands to run.finish.

    Args:
        import_folder: see `play`.

    Raises:
        UserError: there is no such file, the run would refuse to begin, or the recipe never calls run.finish.
    """
    finished = _play(recipe, flags, Finished, Exporting(), import_folder)
    if finished is None:
        raise UserError(f"{recipe} ended and never called run.finish(model, ...): it has no model to export")
    return finished


def _play(
    recipe: Path, flags: list[str], awaited: type[BaseException], purpose: Purpose, import_folder: str = ""
) -> Any:
    try:
        play(recipe, flags, purpose, import_folder)
    except awaited as left:
        return left
    return None


def play(recipe: Path, flags: list[str], purpose: Purpose, import_folder: str = "") -> None:
    """Run a recipe's file with something else in the place of training.

    Args:
        import_folder: the folder for its imports, where that is not the one in which it lies.

    Raises:
        UserError: there is no such file, or the run would refuse to begin.
    """
    if not recipe.is_file():
        raise UserError(f"{recipe}: there is no such file; give a recipe such as recipes/cls.py")
    with _as_a_program(recipe, flags, purpose, import_folder or str(recipe.resolve().parent)):
        runpy.run_path(str(recipe), run_name="__main__")


@contextmanager
def _as_a_program(recipe: Path, flags: list[str], purpose: Purpose, import_folder: str) -> Iterator[None]:
    """Set sys.argv, sys.path and the environment as if the recipe were started by itself."""
    before = sys.argv, sys.path, dict(os.environ)
    if purpose.on_cpu:
        os.environ |= {"ACCELERATE_USE_CPU": "true", "ACCELERATE_MIXED_PRECISION": "no"}
    sys.argv, sys.path = [str(recipe), *flags], [import_folder, *sys.path]
    try:
        with asking(purpose):
            yield
    finally:
        sys.argv, sys.path, environment = before
        os.environ.clear()
        os.environ.update(environment)
