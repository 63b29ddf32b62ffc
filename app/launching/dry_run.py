"""Dry runs: run a recipe without training or a run folder; to its loop, for a plan, or to its end, for its model."""

import functools
import os
import runpy
import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from app.errors import UserError

_closed = False  # whether writing files is refused
_CHANGES = {"open", "os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.link", "os.symlink", "os.truncate"}
_current: "DryRun | None" = None


class Reached(BaseException):
    """Leave a recipe where its loop would begin; a BaseException, which its `except Exception` does not catch."""

    def __init__(self, run: Any, plan: Any):
        super().__init__("the loop would begin")
        self.run, self.plan = run, plan


class Finished(BaseException):
    """Leave a recipe where it would write its finished model."""

    def __init__(self, run: Any, model: Any, parts: tuple, use: str):
        super().__init__("the model would be written")
        self.run, self.model, self.parts, self.use = run, model, parts, use


class Loop:
    """Run the body of a recipe's loop in a dry run, and remember its error if it fails."""

    def __init__(self, batches: Callable[..., Generator[Any, None, None]]):
        """Describe the batches that the body gets.

        Args:
            batches: called with the Run, the BatchPlan, and data, collate and augment of run.batches; yields a Batch
                for each time that the body is to run.
        """
        self.batches, self.failed = batches, ""
        self.reached: Reached | None = None
        self._going: Generator[Any, None, None] | None = None

    def begin(self, run: Any, plan: Any, *data: Any) -> Iterator[Any]:
        """Return the batches for the body."""
        self.reached = Reached(run, plan)
        self._going = self.batches(run, plan, *data)
        return self._going

    def left_by(self, error: Exception) -> "Reached":
        """Close the batches after the body has failed, and remember its error."""
        self.failed = f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:200]}"
        self._going.close()
        return self.reached


class DryRun:
    """Take the place of training in a Run."""

    def __init__(
        self,
        loop: Loop | None = None,
        to_end: bool = False,
        on_cpu: bool = True,
        evaluates_model: bool = False,
        scored_set: str = "",
    ):
        """Describe where the recipe is left.

        Args:
            loop: runs the loop's body first; without one, the body does not run.
            to_end: whether the recipe goes on after the loop until it would write its finished model; if not, it is
                left at the loop.
            on_cpu: whether it runs as one process on the CPU; if not, on the device and processes that there are.
            evaluates_model: whether the model that --model names is evaluated as it is.
            scored_set: the one of --data.eval-sets that takes the place of all sets to evaluate on; empty: none does.
        """
        self.loop, self.to_end, self.on_cpu, self.evaluates_model = loop, to_end, on_cpu, evaluates_model
        self.scored_set = scored_set

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
    """Return the dry run that is active; None if the recipe trains. A Run asks once, when it is made."""
    return _current


def evaluates_model() -> bool:
    """Tell whether the model that --model names is evaluated as it is, and so must lack no weights."""
    return _current is not None and _current.evaluates_model


def scored_set() -> str:
    """Return the one of --data.eval-sets that alone is scored; empty where all sets are."""
    return _current.scored_set if _current is not None else ""


def flags_of_sets() -> tuple[str, str]:
    """Return what messages call the flag of further sets to evaluate on, and that of their splits.

    Where one set alone is scored, the user has typed neither: `evaluate` has words of its own.
    """
    return ("data", "--split") if scored_set() else ("--data.eval-sets", "--data.eval-sets")


def needs_shapes_alone() -> bool:
    """Tell whether nothing reads weights, because this is a plan."""
    return _current is not None and _current.loop is not None and not _current.to_end


def needs_weights_alone() -> bool:
    """Tell whether nothing computes with the model, because this is an export."""
    return _current is not None and _current.to_end and _current.loop is None and _current.on_cpu


def needs_no_training_data(data: Any) -> bool:
    """Tell whether only the data of --data.eval-path are read, because a finished model is evaluated.

    Args:
        data: the recipe's flags of data.
    """
    return evaluates_model() and not data.path and bool(data.eval_path)


@contextmanager
def writing_nothing() -> Iterator[None]:
    """Raise PermissionError when this block would change a file: its tensors have no contents to write."""
    import torch

    global _closed
    zipped = torch.serialization._open_zipfile_writer

    def zip_to(place, *args):
        if isinstance(place, str | os.PathLike):
            _refuse(place)
        return zipped(place, *args)

    # torch.save opens files in C++, where no audit hook sees it (a private name of torch 2.11 to 2.13). safetensors
    # refuses such tensors itself.
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
    """Install an audit hook that sees every change of a file by Python; once, because it can never be removed."""

    def hear(event: str, args: tuple) -> None:
        if not _closed or event not in _CHANGES or isinstance(args[0], int):
            return
        if event != "open" or (args[2] & (os.O_WRONLY | os.O_RDWR) and not str(args[0]).startswith("/dev/")):
            _refuse(args[0])

    sys.addaudithook(hear)


def _refuse(place: Any) -> None:
    raise PermissionError(f"the loop would change {os.fsdecode(place)}, and a dry run changes no files")


def run_to_loop(recipe: Path, flags: list[str], loop: Loop | None = None) -> tuple[Any, Any]:
    """Run a recipe's file up to its loop, as one process on the CPU, and return its Run and its BatchPlan.

    Nothing is locked or written in the run folder, and no tracker starts.

    Args:
        loop: runs the loop's body first; an error of the body is kept in it and not raised.

    Raises:
        UserError: there is no such file, the run would refuse to begin, or the recipe never calls run.batches.
    """
    try:
        reached = _play(recipe, flags, Reached, DryRun(loop))
    except Exception as error:
        if loop is None or loop.reached is None:
            raise
        reached = loop.left_by(error)
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
    finished = _play(recipe, flags, Finished, DryRun(to_end=True), import_folder)
    if finished is None:
        raise UserError(f"{recipe} ended and never called run.finish(model, ...): it has no model to export")
    return finished


def _play(recipe: Path, flags: list[str], awaited: type[BaseException], dry: DryRun, import_folder: str = "") -> Any:
    try:
        play(recipe, flags, dry, import_folder)
    except awaited as left:
        return left
    return None


def play(recipe: Path, flags: list[str], dry: DryRun, import_folder: str = "") -> None:
    """Run a recipe's file with something else in the place of training.

    Args:
        import_folder: the folder for its imports, where that is not the one in which it lies.

    Raises:
        UserError: there is no such file, or the run would refuse to begin.
    """
    if not recipe.is_file():
        raise UserError(f"{recipe}: there is no such file; give a recipe such as recipes/cls.py")
    with _as_a_program(recipe, flags, dry, import_folder or str(recipe.resolve().parent)):
        runpy.run_path(str(recipe), run_name="__main__")


@contextmanager
def _as_a_program(recipe: Path, flags: list[str], dry: DryRun, import_folder: str) -> Iterator[None]:
    """Set sys.argv, sys.path and the environment as if the recipe were started by itself, on a CPU if `dry` says so."""
    global _current
    before = sys.argv, sys.path, dict(os.environ)
    if dry.on_cpu:
        os.environ |= {"ACCELERATE_USE_CPU": "true", "ACCELERATE_MIXED_PRECISION": "no"}
    sys.argv, sys.path = [str(recipe), *flags], [import_folder, *sys.path]
    _current = dry
    try:
        yield
    finally:
        _current = None
        sys.argv, sys.path, environment = before
        os.environ.clear()
        os.environ.update(environment)
