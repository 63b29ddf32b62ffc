"""The beginning of a run's loop: its checkpoint is loaded, its record is opened, and its checks are set up."""

import time
from typing import Any, NamedTuple

from app.checkpoints.resume import Start, contents_everywhere
from app.checkpoints.retention import Retention
from app.config import BestMetric, RunConfig
from app.config.score_names import PLAIN, seems_lower
from app.data.rows import Rows
from app.distributed import collectives, deepspeed, layout
from app.distributed.accelerator import Accelerator
from app.distributed.desync import DesyncCheck
from app.distributed.layout_record import Layout
from app.errors import UserError
from app.launching import trust
from app.rundir import recipe_source
from app.rundir.run_record import Launch, RunRecord, Segment
from app.rundir.throughput import Cost, peak_flops
from app.sampling.batch_plan import BatchPlan
from app.training.loop.audit import Audit
from app.training.loop.diagnostics import Diagnostics
from app.training.loop.nonfinite import FirstNonfinite
from app.training.loop.opened import Opened
from app.training.loop.step_loop import Checks, StepLoop
from app.training.optim.averages import Averages
from app.training.optim.building import CHANGEABLE, check_change


class Asked(NamedTuple):
    """What a run is asked for."""

    name: str
    config: Any
    """The recipe's config, with the settings that follow from others filled in."""
    choices: list[str]
    """Lines that tell the user how they were filled in."""
    fields: dict[str, Any]
    """The config as plain values."""
    facts: dict[str, Any]
    """What the recipe adds to run.json."""


def begin(opened: Opened, asked: Asked, plan: BatchPlan, data: Rows, cost: Cost | None) -> StepLoop:
    """Resume, open the logger, and return the loop over the remaining steps. Every rank takes part.

    Args:
        plan: of a run that begins at step 0.
        cost: what a sample costs; None if it is not known.
    """
    services, settings = opened.services, opened.settings
    logger, ours, optimizers = services.logger, services.accelerator, opened.optimizers
    services.checkpoint_store.retention = Retention(settings.keep, settings.best)  # by now the recipe has chosen
    _check_best(settings, services.averages)
    if settings.nonfinite == "skip":
        deepspeed.refuse("--run.nonfinite skip", ours.distributed_type)
    order = f"{plan.fingerprint} {plan.seed} {plan.sizes} {plan.micro_batch} {plan.steps} {plan.order.mix}"
    drift = None if collectives.alone() else DesyncCheck(ours.models, services.buffers, order)
    for line in (*layout.header(plan, ours), *services.averages.header(), *asked.choices):
        logger.progress.say(line)
    if doubt := _doubt_of(BestMetric.parse(settings.best)):
        logger.progress.warn(doubt)
    here = layout.layout(ours)
    if here.is_bound:
        logger.progress.say("DeepSpeed checkpoints fit this layout only; with an fsdp profile, they fit all")
    options = optimizers.options(CHANGEABLE)  # the checkpoint has others, if they were changed
    start, plan = services.checkpoint_manager.resume(plan, contents_everywhere(data), settings)
    check_change(asked.config, start.changed)
    optimizers.check_points(plan.steps)
    optimizers.set_options(options, {name.rpartition(".")[2] for name in start.changed})
    services.buffers.begin(start.buffers, plan)
    services.averages.begin(plan.steps, start)

    def write() -> None:
        record = _record(asked, plan, start, here, services.gradients.arithmetic())
        trust.remember(recipe_source.source_of(asked.config), record.recipe_folder)
        evaluates = start.unevaluated or (settings.eval_first and not start.step)
        logger.open(record, settings, asked.fields, evaluates)

    collectives.from_main(write, long=True)  # trackers may take long to start
    peak = peak_flops(here.device, here.precision)
    logger.start(plan, start.step, cost, peak and peak * ours.num_processes)
    faults = FirstNonfinite(ours.device)
    audit = Audit(ours, services.folder.path, start.step, logger.progress.warn, logger.logs) if settings.audit else None
    diagnostics = Diagnostics(ours, settings, services.folder.path, start.step, logger.progress.warn, logger.logs)
    return StepLoop(opened, plan, start, Checks(faults, drift, audit, diagnostics))


def unbegun(asked: Asked, accelerator: Accelerator) -> RunRecord:
    """Return what run.json says of a run that is stopped before it has read its data: not how long it will be."""
    folder, commit = recipe_source.origin_of(asked.config)
    return RunRecord(
        status="preempted",
        step=0,
        steps=0,
        samples=0,
        recipe=asked.name,
        layout=layout.layout(accelerator),
        versions=layout.versions(),
        recipe_folder=folder,
        commit=commit,
        launches=(),
        unknown=dict(asked.facts),
    )


def _record(asked: Asked, plan: BatchPlan, start: Start, here: Layout, arithmetic: dict[str, Any]) -> RunRecord:
    """Return what run.json says of this launch.

    Args:
        here: the layout.
        arithmetic: in exact mode, the settings of libraries; else empty.
    """
    folder, commit = recipe_source.origin_of(asked.config)
    began = time.strftime("%Y-%m-%d %H:%M:%S")
    return RunRecord(
        status="running",
        step=start.step,
        steps=plan.steps,
        samples=plan.samples,
        recipe=asked.name,
        layout=here,
        versions=layout.versions(),
        recipe_folder=folder,
        commit=commit,
        launches=(Launch(start.step, began, str(here)),),
        segments=(Segment(start.step, start.changed),) if start.changed else (),
        arithmetic=arithmetic or None,
        unknown=dict(asked.facts),
    )


def _doubt_of(best: BestMetric) -> str:
    """Return a warning if the highest value counts as the best of a score that seems to be better if it is lower."""
    if best.lower or not seems_lower(best.name):
        return ""
    return (
        f"warning: of {best.name} the highest counts as the best; for the lowest, give --run.best=-{best.name}, or "
        f'write run.keep_best("-{best.name}") in the recipe'
    )


def _check_best(settings: RunConfig, averages: Averages) -> None:
    """Refuse what needs a score that decides, without one; and a score of an average that has none.

    Raises:
        UserError: there is none.
    """
    best = BestMetric.parse(settings.best).of_average
    if best and (averages.settings is None or averages.replaces):
        plain = str(best._replace(kind=PLAIN))
        raise UserError(
            f"--run.best {settings.best}: "
            + (
                f"with --ema.use instead, {plain} is the score of the average: name that, or give --ema.use also"
                if averages.replaces
                else "there is no average of the weights: give --ema.decay and --ema.use also"
            )
        )
    asked = [f"--run.patience {settings.patience}"] * bool(settings.patience)
    asked += ["--run.model best"] * (settings.model == "best")
    if asked and not BestMetric.parse(settings.best).name:
        raise UserError(
            f"{asked[0]} has no score to go by: name one, for example --run.best eval/accuracy, or, where lower is "
            "better, --run.best=-eval/loss"
        )
