"""The end of a run: the finished model, what the folder and the user are told, and everything closed."""

import itertools
import shlex
import time
from contextlib import nullcontext
from pathlib import Path

from torch import nn

from app import storage
from app.checkpoints import finite
from app.checkpoints.export import save_model
from app.distributed import collectives
from app.distributed.notice import Work
from app.distributed.state import manifest, sharded
from app.errors import UserError, mendable, printable
from app.launching import program
from app.rundir import room
from app.training.loop.services import Services
from app.training.loop.step_loop import StepLoop
from app.training.scores.base import TRY

EVALUATED = "eval/loss"
FALLS = 1e-3  # share of the first evaluation's loss by which a later one must be lower
PAUSE = 5.0  # seconds between two looks at how much room there is


def write_model(loop: StepLoop, model: nn.Module, parts: tuple, use: str) -> None:
    """Write the finished model and print a summary; if steps remain, do nothing. Every rank takes part."""
    services, settings = loop.services, loop.settings
    loop.finish_step()
    if not loop.finished:
        return
    folder = services.model_folder
    services.notice.work = Work.EXPORTING
    services.logger.clock.turn_to("ending")
    collectives.from_main(services.folder.check)
    keep_training(loop, waits=True)
    with services.watchdog.long_work():
        collectives.from_main(lambda: _keep_foreign(loop, folder), long=True)
        used = _choose_weights(loop)
        last = used == loop.steps_done  # of another step, the weights to export have been loaded
        with services.averages.in_place(_averaged(loop)) if last else nullcontext():
            manager = services.checkpoint_manager
            finite.check_model(services.accelerator, model, manager.constants, manager.newest_in_words())
            try:
                save_model(services.accelerator, model, folder, *parts)
            except UserError as error:
                raise UserError(
                    f"{error}. The training is kept, as {manager.newest_in_words()}: make room, and repeat the "
                    "command, which writes the model without training again"
                ) from None
        if services.accelerator.is_main_process:
            files = [entry.name for entry in storage.at(folder).files()]
            services.logger.note(model_files=manifest.entries(folder, files, services.watchdog.moved))
    if settings.log_model:
        with services.watchdog.unwatched():
            services.logger.log_model(folder)
    _tell(loop, use, used)


def keep_training(loop: StepLoop, waits: bool) -> None:
    """Have a checkpoint of the last step, also on a full disk, where older ones make room. Every rank takes part.

    Args:
        waits: until there is room, for up to --run.timeout seconds; if not, what is lost has been said.

    Raises:
        UserError: there is no room.
    """
    services, last, began = loop.services, loop.steps_done, time.monotonic()
    store, manager = services.checkpoint_store, services.checkpoint_manager
    for attempt in itertools.count():
        manager.wait()
        if not last or collectives.from_main(lambda: last in store.known_steps()):
            return
        if attempt > 1 and not waits:
            return
        if attempt > 1 and not _room_comes(loop, began):
            raise UserError(
                f"no checkpoint of step {last} could be saved{room.lacking(manager.needed, store.folder)}; "
                f"{manager.newest_in_words()}, from which the same command goes on: make room first"
            )
        if attempt:
            collectives.from_main(store.make_room)
        loop.save()


def _room_comes(loop: StepLoop, began: float) -> bool:
    """Wait until a checkpoint may have room; return False where the user or --run.timeout ends that."""
    services, limit = loop.services, loop.settings.timeout or float("inf")
    folder, needed = services.checkpoint_store.folder, services.checkpoint_manager.needed
    on_disk = f"there is room{room.lacking(needed, folder)}. Make some"
    until = "the store takes it. See to the store" if services.folder.is_remote else on_disk
    services.logger.progress.warn(
        f"waiting to save step {loop.steps_done} until {until}, or stop the run, which loses its last steps: "
        f"{services.checkpoint_manager.newest_in_words()}"
    )

    def comes() -> bool:
        while time.monotonic() - began < limit and not services.notice.asked:
            time.sleep(min(PAUSE, limit))
            if not room.lacking(needed, folder):
                return True
        return False

    with services.watchdog.unwatched():
        return collectives.from_main(comes, long=True)


def _keep_foreign(loop: StepLoop, folder: Path) -> None:
    """Put an earlier finished model aside where it holds anything that this run has not written, on the main process.

    Raises:
        UserError: another run has taken the folder.
    """
    services = loop.services
    services.folder.check()
    files = storage.at(folder.parent)
    if not files.exists(folder.name):
        return
    record = services.folder.record
    files_before = (record and record.model_files) or {}
    written = {name: entry for name, entry in files_before.items() if manifest.lies_inside(name)}
    more = manifest.foreign_to(folder, written)
    if not more:
        there = [name for name in written if files.is_file(f"{folder.name}/{name}")]
        now = manifest.entries(folder, there, services.watchdog.moved)
        more = next((name for name, entry in now.items() if entry != written[name]), "")
    if more:
        aside = folder.parent / files.put_aside(folder.name, seal="", why="kept")
        services.logger.progress.say(printable(f"{folder} has {more}, which this run did not write: kept in {aside}"))


def _tell(loop: StepLoop, use: str, used: int) -> None:
    """Print the summary.

    Args:
        used: the step whose weights the finished model has.
    """
    services, settings = loop.services, loop.settings
    go_on = f"with a larger {'--run.steps' if settings.steps else '--run.epochs'}"
    if loop.patience.over and loop.steps_done < loop.plan.steps:
        services.logger.note(stopped_early=str(loop.patience))
        where = f"stopped early, after step {loop.steps_done} of {loop.plan.steps}"
        services.logger.progress.say(f"{where}: {loop.patience}")
        go_on = "with --run.patience 0"
    weights = ["the average of the weights (--ema)"] if _averaged(loop) else []
    weights += [f"after step {used}"] if used != loop.steps_done else []
    best = services.checkpoint_manager.best() if services.accelerator.is_main_process else None
    told = _best_in_words(loop, best, used)
    if services.folder.is_remote:  # where no library finds the model
        place = shlex.quote(str(services.folder.path))
        use = f"{program.typed('export')} {place} --to FOLDER, which takes it to a disk"
    about = services.model_folder, ", ".join(weights), use, go_on, told
    services.logger.summary(loop.steps_done, loop.opened.scores, *about, services.remarks.meanings, _faults(loop))


def _faults(loop: StepLoop) -> list[str]:
    """Say what makes the result worth little: what was left out, what the metrics saw, a loss that did not fall."""
    faults = loop.services.remarks.lines()
    if loop.missing:
        faults.append(f"{loop.missing:,} samples were left out, as they could not be read, or were too long")
    losses = loop.services.logger.column(EVALUATED)
    if len(losses) > 1 and losses[0] - min(losses) < FALLS * abs(losses[0]):
        faults.append(f"{EVALUATED} did not fall: {losses[0]:.4f} in the first evaluation, {losses[-1]:.4f} now: {TRY}")
    return faults


def _choose_weights(loop: StepLoop) -> int:
    """Load the weights of the best checkpoint, if the finished model is to have those. Every rank takes part.

    Returns:
        The step whose weights the model has.
    """
    services, last = loop.services, loop.steps_done
    if loop.settings.model == "last":
        return last
    services.checkpoint_manager.wait()
    step, state, problem = collectives.from_main(lambda: _best_state(loop))
    if problem:
        services.logger.progress.warn(f"warning: --run.model best: {problem}; the model is that of the last step")
    if step != last:
        sharded.load_weights(services.accelerator, str(state), _averaged(loop))
    return step


def _averaged(loop: StepLoop) -> bool:
    """Tell whether the finished model has the average of the weights."""
    averages, by_average = loop.services.averages, bool(loop.services.checkpoint_store.retention.metric.of_average)
    return averages.replaces or (loop.settings.model == "best" and averages.settings is not None and by_average)


def _best_state(loop: StepLoop) -> tuple[int, Path | None, str]:
    """Find the best checkpoint.

    Returns:
        Its step and the folder of its state; or the last step, and what is wrong.
    """
    store, last = loop.services.checkpoint_store, loop.steps_done
    best = store.best({})
    if best is None:
        return last, None, f"no checkpoint has {store.retention.metric.name}"
    try:
        return best[0], store.at(best[0])[0], ""
    except (UserError, OSError) as error:
        return last, None, str(error)


def _best_in_words(loop: StepLoop, best: tuple[int, float] | None, used: int) -> str:
    """Say which step was the best, and how to get its model; empty if no checkpoint is kept as the best.

    Args:
        used: the step whose weights the model has; 0 for the last.
    """
    if best is None:
        return ""
    (step, value), run, services = best, loop.services.folder.path, loop.services
    told = f"{services.checkpoint_store.retention.metric.name} {value:.4f} after step {step}"
    if step == used and (_averaged(loop) or not services.checkpoint_store.retention.metric.of_average):
        return f"{told}{', the last' * (step == loop.steps_done)}: it is the model above"
    return f"{told}: {program.typed('export')} {shlex.quote(str(run))} --best"


def close(services: Services, loop: StepLoop | None, error: BaseException | None) -> None:
    """Close what a run has opened, and record how it ended.

    Args:
        loop: None where no step was to be made: there is nothing to record.
        error: ends the run; None where it is finished or stopped.
    """
    try:
        before = collectives.failed_before(error)  # first: other ranks fail too once this one closes its connections
        services.stop_fetching()  # watched: a stage may hang
        services.watchdog.close()
        services.gradients.calls.close()
        main = services.accelerator.is_main_process
        if error is not None and mendable(error):
            # Read where the error is reported: by each rank whose error the main process does not have.
            heard = collectives.heard_on_main(error)  # the main process tells the others
            error.audible = main or not heard  # type: ignore[attr-defined]
        services.logger.close()
        services.notice.settle()
        if main and loop is not None:
            _record(loop, error, before)
    finally:
        services.notice.close()  # last: another Ctrl-C must not end the record in its middle


def preempted(loop: StepLoop) -> bool:
    """Tell whether a signal has made a run leave early, with a checkpoint; --run.stop-at does not count."""
    reached = 0 < loop.settings.stop_at <= loop.steps_done
    early = loop.stopped_in_evaluation or (loop.services.preemption.happened and not loop.finished)
    return early and not reached


def _record(loop: StepLoop, error: BaseException | None, before: str) -> None:
    """Write the run's status into run.json: finished, preempted or failed; and tell the user how to go on.

    Args:
        before: the error of another rank that came first; empty if there is none.
    """
    services, logger = loop.services, loop.services.logger
    logger.over = True
    if compiled := loop.opened.recompiles.facts(services.accelerator.compiles):
        logger.note(compiled=compiled)
    if error is None and loop.finished and not loop.stopped_in_evaluation:
        logger.note(status="finished", step=loop.steps_done, metrics=loop.opened.scores)
    elif error is None or isinstance(error, KeyboardInterrupt):
        logger.note(status="preempted")
        asked = error is None and 0 < loop.settings.stop_at <= loop.steps_done
        logger.stopped(loop.steps_done, services.checkpoint_store.known_steps(), asked, loop.stopped_in_evaluation)
    else:
        logger.failed(before or f"{type(error).__name__}: {error}")
