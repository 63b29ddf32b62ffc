"""Draw the curves of runs: a PNG picture, and a page for a browser where curves can be zoomed.

    python -m app plot runs/cls
    python -m app plot runs/one runs/two --to comparison

Shows loss, scores, learning rate, gradient norm and speed over the steps. Lines mark the steps after which a run was
resumed, its new layout, and the settings that changed there. Of runs with --run.inspect-every it shows update-to-weight
ratios and gradient norms by layer and the sizes of gradients, also in TO-layers.png. The page smooths curves with a
slider, and holds the last pictures and the settings in which the runs differ. It needs one file next to it,
plotly.min.js, which pages share.
"""

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from app import storage
from app.commands.output import check_local
from app.errors import UserError, is_installed, not_installed, printable
from app.launching import program

_BEGINNING = 2000  # bytes of a file that has the mark of its maker


@dataclass
class Options:
    """Which runs to draw, and where to write."""

    runs: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """Folders of runs."""
    to: str = ""
    """Name of the files: TO.png and TO.html are written, or plot.png and plot.html if TO is a folder. Default: plot, in
    the run's folder; for several runs, comparison, in the folder of the run that changed last. Of runs in a bucket, in
    the working folder."""


def main(options: Options) -> int:
    """Draw, and return the exit status.

    Raises:
        UserError: a folder holds no run, nothing has been logged yet, or the files cannot be written.
    """
    from app.commands import curves
    from app.commands.plot import layers, page
    from app.rundir import history

    if not options.runs:
        raise UserError(f"plot what? give the folders of runs; `{program.typed('runs')}` lists those in runs/")
    runs = [history.read(folder) for folder in options.runs]
    check_local("--to", options.to)
    newest = max(runs, key=lambda run: run.changed).folder
    folder = Path() if storage.at(newest).is_remote else newest
    stem = Path(options.to) if options.to else folder / ("plot" if len(runs) == 1 else "comparison")
    if not stem.name or stem.is_dir():
        stem = stem / "plot"
    kinds = {"png": ("matplotlib", curves.draw), "html": ("plotly", page.write)}
    missing = {kind: not_installed(package) for kind, (package, _) in kinds.items() if not is_installed(package)}
    if len(missing) == len(kinds):
        raise UserError("plot needs one of two packages: " + "; ".join(missing.values()))
    for kind, why in missing.items():
        print(f"warning: {stem.name}.{kind} is left out: {why}", file=sys.stderr)
    files = [stem.with_name(f"{stem.name}.{kind}") for kind in kinds if kind not in missing]
    _check_free([*files, stem.with_name(f"{stem.name}-layers.png")], stem.with_name(page.LIBRARY))
    if len(runs) > 1 and not options.to and folder == newest:
        there = printable(str(stem.parent))
        print(f"writing into {there}, the folder of the run that changed last; --to names another", file=sys.stderr)
    try:
        for file in files:
            kinds[file.suffix[1:]][1](runs, file)
        inspected = [run for run in runs if run.diagnostics]
        if inspected and "png" not in missing:
            files.insert(1, stem.with_name(f"{stem.name}-layers.png"))
            layers.draw(inspected, files[1])
    except OSError as error:
        raise UserError(f"--to {stem}: {error.strerror}; give a place that can be written") from None
    for file in files:
        print(printable(str(file)))
    return 0


def _check_free(files: list[Path], library: Path) -> None:
    """Refuse to replace what plot has not drawn; a link is none of its files.

    Raises:
        UserError: such a file is there.
    """
    from app.commands.curves import MARK

    for file, mark in [*((file, MARK) for file in files), (library, "plotly.js")]:
        if os.path.lexists(file) and not _starts_with(file, mark):
            raise UserError(f"{file} is there, and plot has not made it: move it away, or give another name with --to")


def _starts_with(file: Path, mark: str) -> bool:
    """Tell whether the beginning of a file has a mark."""
    try:
        return mark.encode() in storage.at(file.parent).read(file.name, length=_BEGINNING)
    except OSError:
        return False
