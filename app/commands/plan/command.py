"""Say what a run will be before anything trains: steps, batches, memory, checkpoints, what resuming would change.

    python -m app plan recipes/cls.py
    python -m app plan recipes/cls.py --run.global-batch 256 --profile accelerate_configs/fsdp.yaml ddp_cpu.yaml:4

The recipe comes first, and its own flags may follow. Its main() really runs, on this machine's CPU, up to where its
loop would begin: data are loaded and the model is built. The run folder is only read. The exit status is 0 if every
profile can work and the run in the folder can be resumed, 1 if not, and 2 if the run itself would refuse to begin.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from app import storage
from app.commands.output import write_json
from app.errors import UserError, whole_urls

if TYPE_CHECKING:
    from collections.abc import Generator

    from app.commands.plan import described
    from app.commands.plan.memory import Weight
    from app.data.rows import Rows
    from app.data.streams.chunk_cache import ReadByChunks
    from app.launching.profiles import Profile
    from app.run import Run
    from app.sampling.batch_plan import BatchPlan
    from app.training.loop.step import Batch

_LOOKED_AT = 100  # steps in which padding is counted


@dataclass
class Options:
    """What to plan, and for which hardware."""

    recipe: Annotated[Path, tyro.conf.Positional]
    """The recipe's file."""
    profile: tuple[str, ...] = ()
    """Profiles to plan for; FILE:4 means 4 processes, whatever the file says. Default: profiles that this machine can
    run. Those are cpu, ddp_cpu and fsdp_cpu; with GPUs, gpu, ddp and fsdp with one process for each GPU."""
    memory: float = 0.0
    """Memory of one device in GB (10**9 bytes), to find the largest micro-batch for. 0: what this machine has."""
    price: float = 0.0
    """What one device costs an hour, in any currency. If the folder holds a run, the plan says what it has cost and
    what the rest will cost. 0: no money."""
    mtbf: float = 0.0
    """Mean hours between two failures of all the run's hardware together. If the folder holds a run, the plan says how
    often to save, and what saving and failures cost. 0: not told."""
    json: str = ""
    """Also write all numbers to this file, in bytes."""


def main(options: Options, flags: list[str]) -> int:
    """Plan, and return the exit status.

    Args:
        flags: of the recipe.

    Raises:
        UserError: the run itself would refuse to begin.
    """
    from app.commands import costs, recipe_file
    from app.commands.plan import described, display, footprint, largest_micro_batch, memory, sources
    from app.launching import profiles
    from app.training.loop.purpose import Body

    costs.check(options.price, options.mtbf)
    if options.memory < 0:
        raise UserError(f"--memory {options.memory:g}: give the GB of one device, for example 24")
    chosen = [profiles.read(text) for text in options.profile or _usual()]
    print(f"{options.recipe}: loading data and building the model, as the run would", flush=True)
    peaks = largest_micro_batch.MicroBatchSearch(chosen, options.memory)
    read: list[ReadByChunks | None] = []

    def batches(run: "Run", plan: "BatchPlan", data: "Rows", *others: Any) -> "Generator[Batch, None, None]":
        read.extend(sources.read_by_chunks(data))
        return footprint.batches(peaks.asking(run, plan), run, plan, data, *others)

    body = Body(batches)
    run, plan = recipe_file.run_to_loop(options.recipe, flags, body)
    weights, buffers = memory.weigh(run.accelerator.models, _plain_optimizers(run), run.accelerator.averages)
    folder, plan = _folder(run, plan)
    plan.check_stop(run.config)
    from_sources = sources.described(plan, read)
    about = described.About(_length(run, plan), _model(run, weights), _checkpoints(run, weights), from_sources)
    layouts = []
    for profile in chosen:
        spread, trouble = _spread(run, plan, profile, weights, buffers)
        fetching: list[described.Fetching] = []
        try:
            fetching = [] if trouble else sources.fetched(plan, read, profile)
        except UserError as error:
            spread, trouble = None, str(error)
        peak = peaks.found.get(largest_micro_batch.key(profile))
        wrapping = profile.wrapping or "one process"
        layout = profile.name, profile.processes, wrapping, profile.in_short, profile.precision, trouble
        layouts.append(described.Layout(*layout, spread, peak, fetching))
    display.show(about, layouts, folder, body.failed, options.price, options.mtbf)
    if any(weight.remembered is None for weight in weights):
        print("the state of the optimizer could not be found out, and is not counted in any number")
    write_json(
        options.json,
        {
            "recipe": str(options.recipe),
            **about.as_dict(),
            "layouts": [layout.as_dict() for layout in layouts],
            "folder": folder.as_dict(options.price, options.mtbf),
            "uncounted": body.failed,
        },
    )
    return int(bool(folder.trouble) or any(layout.trouble or layout.is_too_large for layout in layouts))


def _usual() -> list[str]:
    """Name profiles that this machine can run."""
    from app.distributed.environment import gpus_here
    from app.launching.profiles import FOLDER

    gpus = gpus_here()
    names: tuple[str, ...] = ("cpu", "ddp_cpu", "fsdp_cpu")
    if gpus:
        names = ("gpu", f"ddp:{gpus}", f"fsdp:{gpus}") if gpus > 1 else ("gpu", "cpu")
    pairs = (name.partition(":") for name in names)
    return [f"{FOLDER / name}.yaml{colon}{count}" for name, colon, count in pairs]


def _length(run: "Run", plan: "BatchPlan") -> "described.Length":
    import numpy as np

    from app.commands.plan import described

    tokens, padding = None, None
    if plan.lengths is not None:
        looked_at = np.unique(np.linspace(0, plan.steps - 1, min(plan.steps, _LOOKED_AT)).astype(int))
        lengths = [plan.lengths[ids] for step in looked_at for ids, _ in plan.micro_batches(int(step))]
        padded = sum(len(each) * int(each.max()) for each in lengths)
        tokens = float(np.mean(plan.lengths)) * plan.global_batch
        padding = 1 - int(sum(each.sum() for each in lengths)) / max(padded, 1)
    return described.Length(
        samples=plan.samples,
        seen=plan.total,
        epochs=plan.total / plan.samples,
        steps=plan.steps,
        steps_per_epoch=plan.samples / plan.global_batch,
        global_batch=plan.global_batch,
        batch_sizes=str(plan.sizes),
        micro_batches=plan.micro_batches_per_step,
        stop_at=run.config.stop_at,
        tokens_per_step=tokens,
        padding=padding,
    )


def _model(run: "Run", weights: list["Weight"]) -> "described.Model":
    from app.commands.plan import described
    from app.tasks.language import four_bits

    return described.Model(
        parameters=sum(w.shape.numbers for w in weights) + (four_bits.unseen(run.accelerator.models) or 0),
        trained=sum(w.shape.numbers for w in weights if w.trained),
        optimizers=[type(optimizer).__name__ for optimizer in _plain_optimizers(run)],
        averaged=bool(run.accelerator.averages),
    )


def _checkpoints(run: "Run", weights: list["Weight"]) -> "described.Checkpoints":
    from app.commands.plan import described, memory
    from app.distributed.state import base_model, state_dict

    tensors, _ = state_dict.model_tensors(run.accelerator.models)
    base_model.leave_out(tensors, run.accelerator.models)
    one = memory.checkpoint(tensors.values(), weights)
    # Those that are kept, and one that is being written.
    most = run.config.keep + bool(run.config.best) + 1
    return described.Checkpoints(one, most, one * most, one if storage.at(run.dir).is_remote else 0)


def _spread(
    run: "Run", plan: "BatchPlan", profile: "Profile", weights: list["Weight"], buffers: int
) -> tuple["described.Spread | None", str]:
    """Spread the run under one profile; if that cannot work, say why."""
    from app.commands.plan import described, memory
    from app.commands.plan.pretended_split import cuts_of

    if profile.troubles:
        return None, "; ".join(f"{what}: {fix}" for what, fix in profile.troubles)
    try:
        turns = _agree(run, plan, profile)
    except UserError as error:
        return None, str(error)
    models = run.accelerator.models
    weights = memory.of_one_process(weights, models, cuts_of(models, profile.mesh("tp"), run.config.slices))
    held = memory.per_process(weights, buffers, profile, turns, run.config.exact, run.config.save_async)
    where = "weights and optimizer state" if profile.is_fsdp else "part of it"
    note = f"{where} on the host (offload)" if profile.offloads else ""
    return described.Spread(profile.data_ranks, turns, plan.rows, plan.idle(profile.data_ranks), note, held), ""


def _agree(run: "Run", plan: "BatchPlan", profile: "Profile") -> int:
    """Return the turns that each data rank takes in a step.

    Raises:
        UserError: the run itself would refuse this profile.
    """
    from app.commands.plan import memory
    from app.commands.plan.pretended_split import cuts_of
    from app.distributed import deepspeed, fsdp
    from app.distributed.tensor_parallel.plan import check_slices
    from app.training.exact import gradients as exact_gradients
    from app.training.optim import bf16

    turns, split = plan.accumulation(profile.data_ranks), profile.mesh("tp")
    check_slices(run.config.slices, split)
    memory.check_packed(run.accelerator.models, profile)
    cut = cuts_of(run.accelerator.models, split, run.config.slices)
    where: dict[Any, int] = {parameter: dim for parameter, (dim, _) in cut.items()}
    for optimizer in _plain_optimizers(run) if split > 1 else ():
        fsdp.check_split(optimizer, where, split)
    for _, settings in run.optimizers.known:
        if settings is not None and not profile.troubles:
            bf16.check(settings, profile.precision)
    unsliced = split if split > 1 and not run.config.slices else 0
    reason = exact_gradients.refusal(bool(profile.zero_stage), profile.compiled_whole, unsliced)
    if run.config.exact and reason:
        raise UserError(f"--run.exact: {reason}")
    for optimizer in _plain_optimizers(run):
        if profile.is_fsdp or split > 1:
            fsdp.check_optimizer(optimizer, profile.is_fsdp and profile.offloads)
        if profile.zero_stage:
            deepspeed.check_optimizer(optimizer)
    return turns


def _plain_optimizers(run: "Run") -> list:
    return [getattr(optimizer, "optimizer", optimizer) for optimizer, _ in run.optimizers.known]


def _folder(run: "Run", plan: "BatchPlan") -> tuple["described.Folder", "BatchPlan"]:
    """Describe what resuming the run folder would restore and what would change; return it with the plan from there."""
    from app.checkpoints.resume import fitting
    from app.commands.plan import described
    from app.rundir.folder import Effect

    folder = described.Folder(whole_urls(str(run.dir)))
    try:
        good = run.services.checkpoint_store.newest(folder.warnings.append)
        run.folder.check_resume(run.config, good is not None)
        if good is not None:
            saved = good[1]
            folder.resumed = described.Resumed(saved.step, saved.unevaluated, str(saved.layout), saved.scores)
            folder.measured = _measured(run, _left(run, plan, saved.step))
            if storage.at(run.dir).exists("config.yaml"):
                folder.changes = run.folder.changes(run.fields, run.config)
                if any(change.effect is Effect.REFUSED for change in folder.changes):
                    raise UserError(f"{run.dir} holds a run with other settings: give those, or another --run.dir")
            plan = fitting(saved, plan, run.config, run.dir)
            folder.measured = _measured(run, _left(run, plan, saved.step))  # a longer plan may have one step more
    except UserError as error:
        folder.trouble = str(error)
    return folder, plan


def _left(run: "Run", plan: "BatchPlan", step: int) -> int:
    """Return the number of steps after a step until the run ends or --run.stop-at stops it."""
    return max(0, min(plan.steps, run.config.stop_at or plan.steps) - step)


def _measured(run: "Run", left: int) -> "described.Measured":
    """Return what the run in the folder has measured of itself; nothing where its run.json is damaged.

    Args:
        left: how many steps are left.
    """
    from app.commands.plan import described
    from app.rundir import history
    from app.rundir.time_spent import speed

    try:
        before = history.read(run.dir)
    except UserError:
        return described.Measured(None, None, left)
    return described.Measured(before.account, speed(before.spent), left)
