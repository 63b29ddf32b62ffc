"""Configuration: dataclasses with defaults, and what is asked of them."""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, Literal

from app.errors import UserError


@dataclass
class RunConfig:
    """What every run has: its folder, its length, its batch, and when it does what."""

    dir: str = ""
    """Run folder. Default: runs/ and the name of the recipe. Repeating the command resumes the run in it."""
    seed: int = 0
    """Seed of initial weights, sample order, dropout and augmentation."""
    epochs: float = 1.0
    """Times that every sample is seen; ignored when --run.steps is given."""
    steps: int = 0
    """Optimizer steps of the run. 0: as many as --run.epochs needs."""
    global_batch: int = 64
    """Samples of one optimizer step, over all processes. It does not depend on the hardware."""
    micro_batch: int = 16
    """Samples of one forward and backward pass on one process: what must fit in memory."""
    eval_every: int = 0
    """Evaluate every so many steps, and after the last one. 0: after every epoch."""
    save_every: int = 0
    """Save a checkpoint every so many steps, and after the last one. 0: after every epoch."""
    log_every: int = 10
    """Log every so many steps."""
    save_async: bool = True
    """Write checkpoints while training goes on, from a copy in the host's memory; false: training waits, no copy."""
    keep: int = 2
    """How many of the newest checkpoints to keep."""
    best: str = ""
    """Also keep the checkpoint with the best value of this metric, for example eval/accuracy; lower is better with a
    minus sign, as in --run.best=-eval/loss."""
    trackers: tuple[str, ...] = ("wandb",)
    """Experiment trackers beside metrics.jsonl, by their names in accelerate. Nothing after the flag: none."""
    log_model: bool = False
    """Also hand the finished model to the trackers that keep some: wandb, as an artifact."""
    quiet: bool = False
    """Print warnings and errors, and nothing else."""
    resume: Literal["auto", "never", "must"] = "auto"
    """auto: go on where the run folder's newest good checkpoint is. never: refuse a folder that has one. must: refuse
    a folder that has none."""
    changed: Literal["refuse", "accept"] = "refuse"
    """What a recipe whose code has changed does to the run in the folder, and so do data with other contents in as many
    rows. refuse: end before anything is trained, and show what differs. accept: go on with what is here now."""
    stop_at: int = 0
    """Leave cleanly after this step, as if preempted; the schedule stays that of the whole run."""
    nonfinite: Literal["stop", "skip"] = "stop"
    """What a gradient with NaN or infinity does. stop: end the run before the update. skip: leave the update out, name
    the samples, and count the step as skipped_steps."""
    check_every: int = 0
    """Compare weights and buffers of all ranks every so many steps: copies of each other must have the same bits. 0: at
    the end of every epoch. The first step is always checked."""
    timeout: float = 1800.0
    """A rank counts as hung after this many seconds without progress: a step, a micro-batch of an evaluation, or bytes
    of a checkpoint or of the finished model read or written. All ranks then show their stacks and end with status 1.
    0: never."""
    exact: bool = False
    """Give every layout the same bits: order-free sums of gradients. Costs time and 8 bytes a parameter."""
    audit: bool = False
    """Write to audit.jsonl, after each step, what the step was fed and a fingerprint of every weight, as
    `python -m app prove` compares them. Slow: it reads all weights."""
    sync_bn: bool = False
    """Turn BatchNorm into SyncBatchNorm, on GPUs: statistics are of the micro-batches that all processes compute at a
    time, instead of each one's own."""
    workers: int = -1
    """Processes that load data, for each training process. -1: none on CPU, up to 4 beside a GPU."""
    threads: int = 0
    """Threads of each process for arithmetic on CPU. 0: the machine's cores, shared by its processes; with
    --run.exact one, because bits depend on their number."""


@dataclass
class OptimConfig:
    """The optimizer and its learning rate, as a function of the step."""

    name: str = "AdamW"
    """Optimizer: the name of a class in torch.optim, such as AdamW, SGD, Adam, Adafactor, RMSprop."""
    lr: float = 5e-4
    """Peak learning rate."""
    weight_decay: float = 0.01
    """Decay of weight matrices; biases, norms and embeddings of one dimension are left out."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Coefficients of the running averages, for optimizers that have them."""
    eps: float = 1e-8
    """Term added to the denominator, for optimizers that have it."""
    momentum: float = 0.9
    """Momentum, for optimizers that have it."""
    clip: float = 1.0
    """Largest norm of the gradient; longer ones are scaled down to it. 0: no clipping."""
    schedule: Literal["linear", "cosine", "constant", "multistep", "wsd"] = "linear"
    """Shape of the learning rate after warm-up; wsd is warm-up, stable, decay."""
    warmup: float = 0.0
    """Warm-up: a fraction of the run when below 1, else a number of steps."""
    min_lr: float = 0.0
    """Where linear, cosine and wsd end, as a fraction of the peak."""
    decay: float = 0.2
    """Length of the decay of wsd: a fraction of the run when below 1, else a number of steps."""
    milestones: tuple[float, ...] = ()
    """Where multistep drops: fractions of the run when below 1, else steps."""
    gamma: float = 0.1
    """Factor of each drop of multistep."""
    base_batch: int = 0
    """Global batch that lr was chosen for. 0: the run's own."""
    batch_scaling: Literal["none", "sqrt", "linear"] = "none"
    """How lr grows with global-batch / base-batch."""


# Fields that may change between two sittings of one run: they do not change what it computes. More steps or epochs
# are allowed as well, and said, because they change the learning rate from there on.
HARMLESS = {
    f"run.{name}"
    for name in (
        "dir",
        "eval_every",
        "save_every",
        "save_async",
        "log_every",
        "keep",
        "best",
        "trackers",
        "resume",
        "changed",
        "stop_at",
        "audit",
        "quiet",
        "log_model",
        "nonfinite",
        "check_every",
        "workers",
        "threads",
        "timeout",
    )
}
LENGTH = {"run.steps", "run.epochs"}


def as_flag(name: str) -> str:
    """Write a field's dotted name as the flag that sets it."""
    return "--" + name.replace("_", "-")


def flatten(fields: dict, prefix: str = "") -> dict[str, Any]:
    """Turn nested fields into dotted names."""
    flat = {}
    for name, value in fields.items():
        if isinstance(value, dict):
            flat |= flatten(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = value
    return flat


def to_dict(config: Any) -> dict:
    """Turn a config into plain values that YAML and JSON keep."""
    return _plain(dataclasses.asdict(config))


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


def finite(value: Any) -> Any:
    """Replace numbers that JSON does not have, NaN and infinities, by None."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def defaults(config: Any) -> dict[str, Any]:
    """List what the fields of a config are by default, by dotted name; those without a default are left out.

    Where a recipe's own defaults differ from those of a part, such as OptimConfig, the recipe's count.
    """
    found: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.default is not dataclasses.MISSING:
            found[field.name] = field.default
        elif field.default_factory is not dataclasses.MISSING:
            found[field.name] = field.default_factory()
        elif dataclasses.is_dataclass(value):
            found |= {f"{field.name}.{name}": default for name, default in defaults(value).items()}
    return flatten(_plain({k: dataclasses.asdict(v) if dataclasses.is_dataclass(v) else v for k, v in found.items()}))


def diff(before: dict, after: dict, default: dict[str, Any] | None = None) -> dict[str, tuple[Any, Any]]:
    """List the fields in which two configs differ, by dotted name, as (before, after).

    Args:
        default: by dotted name; a field that the first one lacks, because the setting did not exist then, had it.
    """
    before, after = flatten(before), flatten(after)
    before |= {name: value for name, value in (default or {}).items() if name in after and name not in before}
    names = [*before, *(name for name in after if name not in before)]
    return {name: (before.get(name), after.get(name)) for name in names if before.get(name) != after.get(name)}


def check(config: RunConfig) -> None:
    """Refuse numbers that no run can have."""
    at_least = {"global_batch": 1, "micro_batch": 1, "log_every": 1, "keep": 1, "steps": 0, "eval_every": 0}
    at_least |= {"save_every": 0, "stop_at": 0, "threads": 0, "workers": -1, "seed": 0, "timeout": 0, "check_every": 0}
    for name, least in at_least.items():
        value = getattr(config, name)
        if value < least:
            raise UserError(f"{as_flag(f'run.{name}')} {value}: must be at least {least}")
    if not config.steps and not 0 < config.epochs < math.inf:
        raise UserError(f"--run.epochs {config.epochs}: must be a number above 0, or give --run.steps")
