"""The learning rate as a function of the step, without a scheduler's state."""

import itertools
import math

from app.config import OptimConfig
from app.config.points import Point
from app.errors import UserError
from app.sampling.triggers import as_steps

# A cycle begins at this fraction of the peak (as in torch's OneCycleLR).
_CYCLE_START = 1 / 25


def learning_rate(config: OptimConfig, step: int, total_steps: int, global_batch: int) -> float:
    """Return the learning rate of step `step`, counted from 0, of a run of `total_steps`.

    Warm-up rises from peak / warmup_steps at step 0 to the peak at step warmup_steps - 1; one_cycle has another way up,
    and points have none. Then linear and cosine fall
    towards min_lr * peak at step `total_steps`, one after the last. wsd stays at the peak and falls in its last part;
    swa falls first and is constant in its last part.
    """
    assert config.lr is not None  # Run.prepare fills in the run's own
    peak = config.lr * _batch_factor(config, global_batch)
    warmup_steps = as_steps(config.warmup, total_steps)
    if config.schedule == "points":
        return peak * _between(config.points, step, total_steps)
    if config.schedule == "one_cycle":
        return peak * _cycle(step, warmup_steps, total_steps, config.min_lr)
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    if config.schedule == "constant":
        return peak
    if config.schedule == "multistep":
        return peak * config.gamma ** sum(step >= as_steps(m, total_steps) for m in config.milestones)
    if config.schedule == "inverse_sqrt":
        return peak * max(config.min_lr, math.sqrt(max(1, warmup_steps) / (step + 1)))

    start, end, last = max(0, warmup_steps - 1), total_steps, as_steps(config.decay, total_steps)
    if config.schedule == "wsd":
        start = max(start, total_steps - last)
    elif config.schedule == "swa":
        end = max(start, total_steps - last)
    progress = min(1.0, max(0, step - start) / max(1, end - start))
    if config.schedule == "cosine" and progress < 1:
        progress = progress * config.cycles % 1
    left = (1 + math.cos(math.pi * progress)) / 2 if config.schedule in ("cosine", "swa") else 1 - progress
    return peak * (config.min_lr + (1 - config.min_lr) * left)


def check_points(config: OptimConfig, total_steps: int) -> None:
    """Refuse points that are not in order, or end before the run does.

    Raises:
        UserError: they do; it names the points.
    """
    if config.schedule != "points":
        return
    points = [Point.parse(text) for text in config.points]
    for before, after in itertools.pairwise(points):
        if before.step(total_steps) >= after.step(total_steps):
            raise UserError(
                f"--optim.points {before.text} {after.text}: each must be later than the one before it, in a run of "
                f"{total_steps} steps"
            )
    if points[-1].step(total_steps) < total_steps - 1:
        raise UserError(
            f"--optim.points end with {points[-1].text}, and the run has {total_steps} steps: add a point at the end, "
            f"for example 100%:{points[-1].factor:g}"
        )


def _between(points: tuple[str, ...], step: int, total_steps: int) -> float:
    """Return the factor at a step, on straight lines between points."""
    parsed = [Point.parse(text) for text in points]
    places = [(point.step(total_steps), point.factor) for point in parsed]
    before = [place for place in places if place[0] <= step] or places[:1]
    after = [place for place in places if place[0] > step] or places[-1:]
    (start, low), (end, high) = before[-1], after[0]
    return low if end <= step or start > step else low + (high - low) * (step - start) / (end - start)


def _cycle(step: int, top: int, total_steps: int, end: float) -> float:
    """Return the factor at a step of one cycle, which rises to 1 at step top - 1 (Smith and Topin, 2017)."""
    if step < top:
        first, last, done = _CYCLE_START, 1.0, step / (top - 1) if top > 1 else 1.0
    else:
        first, last, done = 1.0, end, (step - top + 1) / max(1, total_steps - top)
    return last + (first - last) * (1 + math.cos(math.pi * min(1.0, done))) / 2


def _batch_factor(config: OptimConfig, global_batch: int) -> float:
    ratio = global_batch / config.base_batch if config.base_batch else 1.0
    return {"none": 1.0, "sqrt": math.sqrt(ratio), "linear": ratio}[config.batch_scaling]
