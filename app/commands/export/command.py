"""Take a model out of a run: from any checkpoint of any layout, to a folder that others load, and to the Hub.

    python -m app export runs/cls
    python -m app export runs/cls --best
    python -m app export runs/cls --step 40 --to models/early
    python -m app export runs/cls --push me/my-classifier --dry-run

Runs on one machine without a GPU. The recipe kept in the run folder builds the model, so its data must still be where
the run found them. Nothing is trained, and the run folder is only read. Next to the weights, in safetensors, it writes
the tokenizer or the processor, the recipe with its settings, and a model card: scores, curves, and the command that
repeats the run.
"""

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from app.checkpoints import sharded
from app.commands.output import size
from app.errors import UserError

if TYPE_CHECKING:
    from app.checkpoints.store import CheckpointStore


@dataclass
class Options:
    """What to export, and where to write it."""

    run: Annotated[Path, tyro.conf.Positional]
    """The run's folder."""
    step: int = 0
    """Step of the checkpoint to export; 0: the newest one. `python -m app runs RUN` lists them."""
    best: bool = False
    """Export the checkpoint with the best value of the run's --run.best."""
    to: str = ""
    """Folder to write. Default: export/step-N in the run's folder; with --push alone, no folder is kept."""
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
    from app.distributed import layout
    from app.rundir import history

    run = history.read(options.run)
    checkpoints = CheckpointStore(run.folder / "checkpoints", 0, 1, best=run.asked_best)
    steps = checkpoints.steps()
    if not steps:
        raise UserError(f"{run.folder} has no checkpoint to export")
    step = _best_step(options, checkpoints) if options.best else options.step or steps[-1]
    state, record = checkpoints.at(step)
    if layout.is_bound(record["layout"]):
        raise UserError(f"{state}: only DeepSpeed can read its checkpoints; finish the run, which writes model/")
    if options.push:
        upload.check(options.push)
    target = Path(options.to) if options.to else run.folder / "export" / f"step-{step:08d}"
    kept = bool(options.to) or not options.push
    if kept and target.exists():
        raise UserError(f"{target} exists already: give another folder with --to, or move it away")
    if options.dry_run:
        _say_what(options, step, state, target if kept else None)
        return 0
    if kept:
        target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent if kept else None) as scratch:
        folder = Path(scratch, "model")
        _write(run, step, state, record, folder, options.shard)
        if options.push:
            print(upload.push(folder, options.push, options.private, f"Step {step} of {run.name}"))
        if kept:
            folder.rename(target)
            print(f"{target}: {', '.join(sorted(file.name for file in target.iterdir()))}")
    return 0


def _best_step(options: Options, checkpoints: "CheckpointStore") -> int:
    there = ", ".join(map(str, checkpoints.steps()))
    if options.step:
        raise UserError(f"--best and --step {options.step}: give one of the two")
    if not checkpoints.retention.best:
        raise UserError(
            f"--best: {options.run} was trained without --run.best, so none of its checkpoints is the best; take one "
            f"with --step, of {there}"
        )
    best = checkpoints.best({})
    if best is None:
        raise UserError(
            f"--best: no checkpoint of {options.run} was scored with {checkpoints.retention.metric.name}; "
            f"take one with --step, of {there}"
        )
    return best[0]


def _say_what(options: Options, step: int, state: Path, target: Path | None) -> None:
    from app.checkpoints.safe_reader import StateReader
    from app.commands.export import upload

    entries = StateReader(state).read_entries()
    weights = {name: entry for name, entry in entries.items() if name.startswith("models.0.")}
    count = sum(entry.size.numel() for entry in weights.values())
    amount = size(sum(entry.size.numel() * entry.properties.dtype.itemsize for entry in weights.values()))
    print(f"step {step} of {options.run}: {count:,} numbers in {len(weights)} tensors, {amount}")
    if target:
        print(f"would write {target}")
    if options.push:
        kind = "private" if options.private else "public"
        print(f"would upload it to {upload.address(options.push)}, made {kind} if it does not exist")


def _write(run, step: int, state: Path, record: dict, folder: Path, shard: str) -> None:
    """Build the model as the recipe does, load the checkpoint's weights into it, and write it with its card."""
    from app.checkpoints.export import save_model
    from app.commands.export import model_card
    from app.launching import dry_run

    recipe, flags = run.folder / "recipe.py", ["--config", str(run.folder / "config.yaml")]
    if not recipe.is_file():
        raise UserError(
            f"{recipe} is missing, and it builds the model. A run from a notebook has no recipe; its finished model is "
            "in model/. To export other checkpoints, put the recipe into a file"
        )
    print(f"{recipe}: loading data and building the model, as the run did", flush=True)
    found = dry_run.run_to_end(recipe, flags, import_folder=run.info.get("recipe_folder", ""))
    accelerator = found.run.accelerator
    try:
        sharded.load_weights(accelerator, str(state))
    except FileNotFoundError:
        raise UserError(
            f"{state} is gone: the run goes on and deletes old checkpoints; export again, or wait until it ends"
        ) from None
    save_model(accelerator, found.model, folder, *found.parts, shard=shard)
    plain = accelerator.unwrap_model(found.model)
    model_card.write(run, folder, step, record.get("scores", {}), type(plain).__name__, found.use.format(model="."))
