"""Take a model out of a run: from any checkpoint of any layout, to a folder that others load, and to the Hub.

    python -m app export runs/cls
    python -m app export runs/cls --best
    python -m app export runs/cls --step 40 --to models/early
    python -m app export runs/cls --average 3
    python -m app export runs/cls --push me/my-classifier --dry-run

Runs on one machine without a GPU. The recipe kept in the run folder builds the model, so its data must still be where
the run found them. Nothing is trained, and the run folder is only read. Next to the weights, in safetensors, it writes
the tokenizer or the processor, the recipe with its settings, and a model card: scores, curves, and the command that
repeats the run.
"""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from app import storage
from app.checkpoints.record import Record
from app.commands import weights
from app.commands.output import size
from app.distributed.state import sharded
from app.errors import UserError, whole_urls
from app.launching import trust
from app.rundir import room

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    from app.checkpoints.store import CheckpointStore
    from app.rundir.history import History


@dataclass
class Options(weights.Options):
    """What to export, and where to write it."""

    average: str = ""
    """Export the mean of the weights of several checkpoints: of the newest N, as in --average 3, or of all from one
    step to another, as in --average 100:300. --run.keep decides how many a run keeps."""
    to: str = ""
    """Folder to write. Default: export/step-N in the run's folder; with --push alone, no folder is kept."""
    merge: bool = False
    """Merge adapters into the model that they are for, and write the whole model."""
    shard: str = "5GB"
    """Largest size of one file of weights; a larger model is split into several files."""
    push: str = ""
    """Also upload the model to this repository of the Hub: USER/NAME. Log in first, with `hf auth login`."""
    private: bool = False
    """Make the repository private, if it does not exist yet."""
    dry_run: bool = False
    """Only say what would be written and uploaded."""


def main(options: Options) -> int:
    """Export, and return the exit status.

    Raises:
        UserError: there is no such run, checkpoint or recipe; its data are gone; or the Hub refuses.
    """
    from app.checkpoints.store import CheckpointStore
    from app.commands.export import upload
    from app.rundir import history

    run = history.read(options.run)
    checkpoints = CheckpointStore(run.folder / "checkpoints", 0, 1, best=run.asked_best)
    chosen = _steps(options, checkpoints)
    saved = [checkpoints.at(step) for step in chosen]
    for state, record in saved:
        if record.layout.is_bound:
            raise UserError(f"{state}: only DeepSpeed can read its checkpoints; finish the run, which writes model/")
    if options.push:
        upload.check(options.push)
    name = f"step-{chosen[-1]:08d}" if len(chosen) == 1 else f"average-{chosen[0]:08d}-{chosen[-1]:08d}"
    target = Path(options.to) if options.to else run.folder / "export" / name
    stays_here = bool(options.to) or not options.push
    files = storage.at(target.parent)
    if stays_here and (files.exists(target.name) if files.is_remote else os.path.lexists(target)):
        raise UserError(f"{target} exists already: give another folder with --to, or move it away")
    averaged = weights.averaged(options, run.config)
    if options.dry_run:
        _say_what(options, chosen, saved[-1][0], target if stays_here else None)
        return 0
    code = trust.recipe_of(run.folder, run.record.recipe_folder, options.trust_code)
    place = target.parent if stays_here and not files.is_remote else Path(tempfile.gettempdir())
    with _explained(target if stays_here else place, _bytes_of(saved[-1][0]), place):
        place.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=place) as scratch:
            folder = Path(scratch, "model")
            _write(run, code, checkpoints, chosen, saved, averaged, folder, options)
            if options.push:
                print(upload.push(folder, options.push, options.private, f"{_in_words(chosen)} of {run.name}"))
            if stays_here:
                names = sorted(file.name for file in folder.iterdir())
                _put(folder, files, target)
                print(f"{whole_urls(str(target))}: {', '.join(names)}")
    return 0


def _put(folder: Path, files: storage.Storage, target: Path) -> None:
    """Give a written model its last name, in a bucket or on this disk."""
    if not files.is_remote:
        folder.rename(target)
        return
    with files.drafted(target.name) as draft:
        shutil.move(folder, draft)


@contextmanager
def _explained(target: Path, needed: int, place: Path) -> Iterator[None]:
    """Say in one line why nothing could be exported, and how much room there is on its disk.

    Raises:
        UserError: a file could not be written.
    """
    try:
        yield
    except OSError as error:
        if not room.why(error) or (error.filename is not None and not Path(str(error.filename)).is_relative_to(place)):
            raise  # of another file, such as one of the data
        raise UserError(f"{target}: nothing is exported: {room.why(error)}{room.lacking(needed, place)}") from None


def _weights_in(state: Path) -> list["TensorStorageMetadata"]:
    """Describe the weights in a checkpoint, without reading them."""
    from app.distributed.state.safe_reader import StateReader

    return [entry for name, entry in StateReader(state).read_entries().items() if name.startswith("models.0.")]


def _bytes_of(state: Path) -> int:
    """Return the size of the weights in a checkpoint."""
    return sum(entry.size.numel() * entry.properties.dtype.itemsize for entry in _weights_in(state))


def _steps(options: Options, checkpoints: "CheckpointStore") -> list[int]:
    """Choose the checkpoints to export, oldest first; of several, the mean is exported."""
    there = checkpoints.steps()
    if not options.average:
        return [weights.one_step(options, checkpoints)]
    if options.best or options.step:
        raise UserError(f"--average {options.average} and {'--best' if options.best else '--step'}: give one of them")
    start, colon, end = options.average.partition(":")
    try:
        first, last = int(start), int(end) if colon else 0
        if first < (0 if colon else 2):
            raise ValueError
    except ValueError:
        raise UserError(f"--average {options.average}: give 2 or more, or a range of steps (100:300)") from None
    chosen = [step for step in there if first <= step <= last] if colon else there[-first:]
    wanted = 2 if colon else first
    if len(chosen) < wanted:
        raise UserError(
            f"--average {options.average}: {checkpoints.folder} has {len(chosen)} such checkpoints, of steps "
            f"{', '.join(map(str, there))}; at least {wanted} are needed, and --run.keep says how many a run keeps"
        )
    return chosen


def _in_words(steps: list[int]) -> str:
    return f"Step {steps[0]}" if len(steps) == 1 else f"The mean of steps {', '.join(map(str, steps))}"


def _say_what(options: Options, steps: list[int], state: Path, target: Path | None) -> None:
    from app.commands.export import upload

    tensors = _weights_in(state)
    count, amount = sum(entry.size.numel() for entry in tensors), size(_bytes_of(state))
    what = f"{_in_words(steps).lower()} of {whole_urls(str(options.run))}"
    print(f"{what}: {count:,} numbers in {len(tensors)} tensors, {amount}")
    if target:
        print(f"would write {whole_urls(str(target))}")
    if options.push:
        kind = "private" if options.private else "public"
        print(f"would upload it to {upload.address(options.push)}, made {kind} if it does not exist")


def _write(
    run: "History",
    code: trust.Code,
    checkpoints: "CheckpointStore",
    steps: list[int],
    saved: list[tuple[Path, Record]],
    averaged: bool,
    folder: Path,
    options: Options,
) -> None:
    """Build the model as the recipe does, load the checkpoints' weights into it, and write it with its card."""
    from app.checkpoints import finite
    from app.checkpoints.export import save_model
    from app.commands import recipe_file
    from app.commands.export import model_card
    from app.tasks.language.merging import Merged

    recipe, imports = code
    flags = ["--config", str(storage.at(run.folder).down("config.yaml")), "--run.notice="]
    print(f"{recipe}: loading data and building the model, as the run did", flush=True)
    ended = recipe_file.run_to_end(recipe, flags, import_folder=imports)
    accelerator = ended.run.accelerator
    try:
        sharded.load_mean(accelerator, [str(state) for state, _ in saved], averaged)
    except FileNotFoundError as error:
        raise UserError(
            f"{error.filename} is gone: the run goes on and deletes old checkpoints; export again, or at its end"
        ) from None
    alternatives = f"the run has checkpoints of steps {', '.join(map(str, checkpoints.steps()))}"
    finite.check_model(accelerator, ended.model, saved[-1][1].nonfinite, alternatives)
    plain = accelerator.unwrap_model(ended.model)
    merged = Merged(plain) if options.merge else None
    plain = merged.model if merged else plain
    save_model(accelerator, plain, folder, *ended.parts, shard=options.shard)
    if merged:
        merged.check(folder)
    scores = weights.scores_of(saved[-1][1], run.config, averaged) if len(saved) == 1 else {}  # nobody measured a mean
    use = ended.use.format(model=".")
    model_card.write(run, folder, steps[-1], scores, type(plain).__name__, use, _about_weights(steps, averaged))


def _about_weights(steps: list[int], averaged: bool) -> str:
    """Say what the exported weights are, if not simply those of a step."""
    parts = ["their average over the steps (`--ema`)"] * averaged
    parts += [f"the mean of {len(steps)} checkpoints, of steps {', '.join(map(str, steps))}"] * (len(steps) > 1)
    return f"The weights are {' and '.join(parts)}." if parts else ""
