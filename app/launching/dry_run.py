"""A recipe run without its loop and its run folder: up to the loop, for a plan; to its end, for the model it makes."""

import functools
import os
import runpy
import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from app.errors import UserError

_closed = False  # to writing
_CHANGES = {"open", "os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.link", "os.symlink", "os.truncate"}
_current: "DryRun | None" = None


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


class Loop:
    """What goes through the body of a rehearsed recipe's loop, and how that failed, where it did."""

    def __init__(self, batches: Callable[..., Generator[Any, None, None]]):
        """Describe it.

        Args:
            batches: takes the Run, the BatchPlan, and data, collate and augment as run.batches does; gives a Batch for
                each time that the body is to be gone through.
        """
        self.batches, self.failed = batches, ""
        self.reached: Reached | None = None
        self._going: Generator[Any, None, None] | None = None

    def begin(self, run: Any, plan: Any, *data: Any) -> Iterator[Any]:
        """Go through the body."""
        self.reached = Reached(run, plan)
        self._going = self.batches(run, plan, *data)
        return self._going

    def left_by(self, error: Exception) -> "Reached":
        """End what the body has left by an error, and remember the error."""
        self.failed = f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:200]}"
        self._going.close()
        return self.reached


class DryRun:
    """What a Run does in place of training while its recipe is rehearsed."""

    def __init__(self, loop: Loop | None = None, to_end: bool = False):
        """Leave the recipe where its loop would begin, or after the loop.

        Args:
            loop: goes through the loop's body first.
            to_end: the recipe goes on as if there were no steps, until it would write its finished model.
        """
        self.loop, self.to_end = loop, to_end

    def at_loop(self, run: Any, plan: Any, *data: Any) -> Iterator[Any]:
        """Take the place of run.batches."""
        if self.loop is not None:
            yield from self.loop.begin(run, plan, *data)
        if not self.to_end:
            raise Reached(run, plan)

    def at_finish(self, run: Any, model: Any, parts: tuple, use: str) -> None:
        """Take the place of run.finish."""
        raise Finished(run, model, parts, use)


def current() -> DryRun | None:
    """Return the dry run that a recipe is run in; None where it trains. A Run asks once, when it is made."""
    return _current


@contextmanager
def writing_nothing() -> Iterator[None]:
    """Have whatever would change a file in this block end in a PermissionError: its tensors have no contents."""
    import torch

    global _closed
    zipped = torch.serialization._open_zipfile_writer

    def zip_to(place, *args):
        if isinstance(place, str | os.PathLike):
            _refuse(place)
        return zipped(place, *args)

    # It opens files outside Python (a private name of torch 2.11 to 2.13). safetensors refuses such tensors itself.
    torch.serialization._open_zipfile_writer = zip_to
    _watch_files()
    _closed = True
    try:
        yield
    finally:
        _closed = False
        torch.serialization._open_zipfile_writer = zipped


@functools.cache
def _watch_files() -> None:
    """Ask this program before Python changes a file; that can be begun and never ended, so it is begun once."""

    def hear(event: str, args: tuple) -> None:
        if not _closed or event not in _CHANGES or isinstance(args[0], int):
            return
        if event != "open" or (args[2] & (os.O_WRONLY | os.O_RDWR) and not str(args[0]).startswith("/dev/")):
            _refuse(args[0])

    sys.addaudithook(hear)


def _refuse(place: Any) -> None:
    raise PermissionError(f"the loop would change {os.fsdecode(place)}, and a rehearsed one changes no files")


def rehearse(recipe: Path, flags: list[str], loop: Loop | None = None) -> tuple[Any, Any]:
    """Run a recipe's file, as one process on the CPU, and return its Run and its BatchPlan when the loop would begin.

    Nothing is claimed or written in the run folder, and no tracker starts.

    Args:
        loop: goes through the loop's body first; that it fails is no error.

    Raises:
        UserError: there is no such file, the run would refuse to begin, or no loop begins.
    """
    try:
        reached = _play(recipe, flags, Reached, DryRun(loop))
    except Exception as error:
        if loop is None or loop.reached is None:
            raise
        reached = loop.left_by(error)
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
    finished = _play(recipe, flags, Finished, DryRun(to_end=True), beside)
    if finished is None:
        raise UserError(f"{recipe} ended and never called run.finish(model, ...): it has no model to export")
    return finished


def _play(recipe: Path, flags: list[str], awaited: type[BaseException], dry: DryRun, beside: str = "") -> Any:
    if not recipe.is_file():
        raise UserError(f"{recipe}: there is no such file; give a recipe such as recipes/cls.py")
    with _as_a_program(recipe, flags, dry):
        sys.path[1:1] = [beside] if beside else []
        try:
            runpy.run_path(str(recipe), run_name="__main__")
        except awaited as left:
            return left
    return None


@contextmanager
def _as_a_program(recipe: Path, flags: list[str], dry: DryRun) -> Iterator[None]:
    """Have the recipe find what it would find when started by itself, on a machine without a GPU."""
    global _current
    before = sys.argv, sys.path, dict(os.environ)
    os.environ |= {"ACCELERATE_USE_CPU": "true", "ACCELERATE_MIXED_PRECISION": "no"}
    sys.argv, sys.path = [str(recipe), *flags], [str(recipe.resolve().parent), *sys.path]
    _current = dry
    try:
        yield
    finally:
        _current = None
        sys.argv, sys.path, environment = before
        os.environ.clear()
        os.environ.update(environment)
