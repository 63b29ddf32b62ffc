"""The end of a run: the finished model, what the folder and the user are told, and everything closed."""

import shlex

from torch import nn

from app.checkpoints.export import save_model
from app.distributed import collectives
from app.errors import mendable
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
        save_model(services.accelerator, model, folder, *parts)
    if settings.log_model:
        with services.watchdog.unwatched():
            services.logger.log_model(folder)
    longer = "--run.steps" if settings.steps else "--run.epochs"
    best = services.checkpoint_manager.best() if services.accelerator.is_main_process else None
    services.logger.summary(loop.steps_done, loop.scores, folder, use, longer, _best_in_words(loop, best))


def _best_in_words(loop: StepLoop, best: tuple[int, float] | None) -> str:
    """Say which step was the best, and how to get its model; empty if no checkpoint is kept as the best."""
    if best is None:
        return ""
    (step, value), run, services = best, loop.services.folder.path, loop.services
    told = f"{services.checkpoint_store.retention.metric.name} {value:.4f} after step {step}"
    if step == loop.steps_done:
        return f"{told}, the last: it is the model above"
    return f"{told}: python -m app export {shlex.quote(str(run))} --best"


def close(loop: StepLoop, error: BaseException | None) -> None:
    """Close what a run has opened, and record how it ended.

    Args:
        error: ends the run; None where it is finished or stopped.
    """
    services = loop.services
    try:
        services.watchdog.close()
        main = services.accelerator.is_main_process
        if mendable(error):
            # Read where the error is reported: by each rank whose error the main process does not have.
            error.audible = main or not collectives.heard_on_main(error)  # type: ignore[union-attr]
        services.logger.close()
        if main and loop.begun:
            _record(loop, error)
    finally:
        services.preemption.close()  # last: another Ctrl-C must not end the record in its middle


def _record(loop: StepLoop, error: BaseException | None) -> None:
    """Write the run's status into run.json: finished, preempted or failed; and tell the user how to go on."""
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
        logger.failed(f"{type(error).__name__}: {error}")
