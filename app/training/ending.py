"""The end of a run: the finished model, what the folder and the user are told, and everything closed."""

import shlex
from contextlib import nullcontext
from pathlib import Path

from torch import nn

from app.checkpoints import sharded
from app.checkpoints.export import save_model
from app.distributed import collectives
from app.errors import UserError, mendable
from app.training.step_loop import StepLoop


def write_model(loop: StepLoop, model: nn.Module, parts: tuple, use: str) -> None:
    """Write the finished model and print a summary; if steps remain, do nothing. Every rank takes part."""
    services, settings = loop.services, loop.settings
    loop.check_begun("run.finish")
    loop.finish_step()
    if not loop.finished:
        return
    folder = services.model_folder
    collectives.from_main(services.folder.check)
    with services.watchdog.long_work():
        used = _choose_weights(loop)
        last = used == loop.steps_done  # of another step, the weights to export have been loaded
        with services.averages.in_place(_averaged(loop)) if last else nullcontext():
            save_model(services.accelerator, model, folder, *parts)
    if settings.log_model:
        with services.watchdog.unwatched():
            services.logger.log_model(folder)
    _tell(loop, use, used)


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
    services.logger.summary(loop.steps_done, loop.scores, services.model_folder, ", ".join(weights), use, go_on, told)


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
    return f"{told}: python -m app export {shlex.quote(str(run))} --best"


def close(loop: StepLoop, error: BaseException | None) -> None:
    """Close what a run has opened, and record how it ended.

    Args:
        error: ends the run; None where it is finished or stopped.
    """
    services = loop.services
    try:
        before = collectives.failed_before(error)  # first: other ranks fail too once this one closes its connections
        services.stop_fetching()  # watched: a stage may hang
        services.watchdog.close()
        services.gradients.calls.close()
        main = services.accelerator.is_main_process
        if mendable(error):
            # Read where the error is reported: by each rank whose error the main process does not have.
            heard = collectives.heard_on_main(error)  # the main process tells the others
            error.audible = main or not heard  # type: ignore[union-attr]
        services.logger.close()
        if main and loop.begun:
            _record(loop, error, before)
    finally:
        services.preemption.close()  # last: another Ctrl-C must not end the record in its middle


def _record(loop: StepLoop, error: BaseException | None, before: str) -> None:
    """Write the run's status into run.json: finished, preempted or failed; and tell the user how to go on.

    Args:
        before: the error of another rank that came first; empty if there is none.
    """
    services, logger = loop.services, loop.services.logger
    if compiled := loop.recompiles.facts(services.accelerator.compiles):
        logger.note(**compiled)
    if error is None and loop.finished and not loop.stopped_in_evaluation:
        logger.note(status="finished", step=loop.steps_done, metrics=loop.scores)
    elif error is None or isinstance(error, KeyboardInterrupt):
        logger.note(status="preempted")
        asked = error is None and 0 < loop.settings.stop_at <= loop.steps_done
        logger.stopped(loop.steps_done, services.checkpoint_store.steps(), asked, loop.stopped_in_evaluation)
    else:
        logger.failed(before or f"{type(error).__name__}: {error}")
