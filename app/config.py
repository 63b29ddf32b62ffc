"""Configuration: dataclasses with defaults, and what is asked of their fields."""

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal, NamedTuple

from app.errors import UserError


class OnResume(Enum):
    """What happens to a run that is resumed with another value of a setting."""

    REFUSE = "refuse"  # the setting decides what the run computes
    ACCEPT = "accept"  # the setting does not change what the run computes
    IF_ACCEPTED = "if accepted"  # refused, unless --run.changed accept lets the rest of the run have it
    LENGTH = "length"  # accepted, and the user is told: the learning rate follows the new length


def setting(default: Any, *, at_least: float | None = None, on_resume: OnResume = OnResume.REFUSE) -> Any:
    """Declare a field of a config, here or in a recipe; the docstring below the field is the help of its flag.

    Args:
        default: its value where the flag is not given.
        at_least: the smallest number that is accepted.
        on_resume: whether a run that is resumed may have another value. Fields that are declared without `setting`
            may not.
    """
    return dataclasses.field(default=default, metadata={"at_least": at_least, "on_resume": on_resume})


@dataclass
class RunConfig:
    """Settings of every run: folder, length, batch, and when it logs, evaluates and saves."""

    dir: str = setting("", on_resume=OnResume.ACCEPT)
    """Folder of the run. Default: runs/ and the name of the recipe. The same command again resumes the run in it."""
    seed: int = setting(0, at_least=0)
    """Seed of the initial weights, the order of samples, dropout and augmentation."""
    epochs: float = setting(1.0, on_resume=OnResume.LENGTH)
    """Length of the run: how many times every sample is seen. Ignored if --run.steps is given."""
    steps: int = setting(0, at_least=0, on_resume=OnResume.LENGTH)
    """Length of the run in optimizer steps. 0: as many as --run.epochs needs."""
    global_batch: int = setting(64, at_least=1)
    """Samples in one optimizer step, over all processes. It does not depend on the hardware."""
    micro_batch: int = setting(16, at_least=1)
    """Samples in one forward and backward pass on one process. Make it smaller if memory runs out."""
    eval_every: int = setting(0, at_least=0, on_resume=OnResume.ACCEPT)
    """Steps between two evaluations; the last step is always evaluated. 0: evaluate after every epoch."""
    save_every: int = setting(0, at_least=0, on_resume=OnResume.ACCEPT)
    """Steps between two checkpoints; the last step is always saved. 0: save after every epoch."""
    log_every: int = setting(10, at_least=1, on_resume=OnResume.ACCEPT)
    """Steps between two lines of losses and speeds in metrics.jsonl and in the trackers."""
    save_async: bool = setting(True, on_resume=OnResume.ACCEPT)
    """Write checkpoints while training goes on, from a copy of the state in the host's memory. false: training waits,
    and nothing is copied."""
    keep: int = setting(2, at_least=1, on_resume=OnResume.ACCEPT)
    """How many of the newest checkpoints to keep."""
    best: str = setting("auto", on_resume=OnResume.ACCEPT)
    """Also keep the checkpoint with the best value of this metric, for example eval/accuracy. Higher is better; with a
    minus sign lower is, as in --run.best=-eval/loss. auto: the metric that the recipe has chosen, if any. Empty: keep
    only the newest."""
    trackers: tuple[str, ...] = setting(("wandb",), on_resume=OnResume.ACCEPT)
    """Experiment trackers that get the numbers of metrics.jsonl as well, by their names in accelerate. Give the flag
    without a value to use none."""
    log_model: bool = setting(False, on_resume=OnResume.ACCEPT)
    """Also hand the finished model to trackers that store models: wandb does, as an artifact."""
    quiet: bool = setting(False, on_resume=OnResume.ACCEPT)
    """Print only warnings and errors."""
    resume: Literal["auto", "never", "must"] = setting("auto", on_resume=OnResume.ACCEPT)
    """auto: resume from the newest good checkpoint in the run folder, or start if there is none. never: refuse a folder
    that has a checkpoint. must: refuse a folder that has none."""
    changed: Literal["refuse", "accept"] = setting("refuse", on_resume=OnResume.ACCEPT)
    """What happens if something has changed since the run in the folder began: the recipe's code, the data (with the
    same number of rows), or settings of the optimizer. refuse: end before training and show the difference. accept: go
    on with what is there now; for settings, run.json says from which step on."""
    stop_at: int = setting(0, at_least=0, on_resume=OnResume.ACCEPT)
    """Save and leave after this step, as if preempted; the learning rate follows the whole run. 0: run to the end."""
    nonfinite: Literal["stop", "skip"] = setting("stop", on_resume=OnResume.ACCEPT)
    """What happens if a gradient has NaN or infinity in it. stop: end the run before the update. skip: leave out the
    update, name the samples, and count the step in skipped_steps."""
    check_every: int = setting(0, at_least=0, on_resume=OnResume.ACCEPT)
    """Steps between two comparisons of all ranks' weights and buffers, whose copies must agree in every bit. The first
    step is always checked. 0: compare at the end of every epoch."""
    timeout: float = setting(1800.0, at_least=0, on_resume=OnResume.ACCEPT)
    """Seconds without progress after which a rank counts as hung: all ranks then show their stacks and end with status
    1. Progress is a step, a micro-batch of an evaluation, or bytes of a checkpoint or of the finished model, read or
    written. 0: wait forever."""
    exact: bool = setting(False)
    """Compute the same bits on every layout: gradients are summed in a way that does not depend on their order. Costs
    time, and 8 bytes of memory for each parameter."""
    audit: bool = setting(False, on_resume=OnResume.ACCEPT)
    """After each step, write to audit.jsonl what the step was fed and a fingerprint of every weight, which `python -m
    app prove` compares. Slow: it reads all weights."""
    sync_bn: bool = setting(False)
    """On GPUs, turn BatchNorm into SyncBatchNorm: its statistics are those of the micro-batches that all processes
    compute at the same time. false: each micro-batch has its own."""
    workers: int = setting(-1, at_least=-1, on_resume=OnResume.ACCEPT)
    """Processes that load data for each training process. -1: none on a CPU, 4 for each GPU."""
    threads: int = setting(0, at_least=0, on_resume=OnResume.ACCEPT)
    """Threads with which each process computes on the CPU. 0: the machine's cores divided among its processes; 1 with
    --run.exact, because the bits depend on the number."""


@dataclass
class OptimConfig:
    """The optimizer, and its learning rate as a function of the step."""

    name: str = "AdamW"
    """Class of the optimizer, by its name in torch.optim: AdamW, SGD, Adam, Adafactor, RMSprop and others."""
    lr: float | None = setting(5e-4, on_resume=OnResume.IF_ACCEPTED)
    """Peak learning rate, reached at the end of the warm-up. None: the recipe chooses what suits a model from scratch,
    a pretrained one, or adapters, and says so."""
    weight_decay: float = setting(0.01, on_resume=OnResume.IF_ACCEPTED)
    """Decay of weights with two or more dimensions. Biases and norms, which have one, do not decay."""
    betas: tuple[float, float] = setting((0.9, 0.999), on_resume=OnResume.IF_ACCEPTED)
    """Coefficients of the running averages of the gradient and of its square, for optimizers that have them."""
    eps: float = setting(1e-8, on_resume=OnResume.IF_ACCEPTED)
    """Number added to the denominator of the update, for optimizers that have it."""
    momentum: float = setting(0.9, on_resume=OnResume.IF_ACCEPTED)
    """Momentum, for optimizers that have it."""
    clip: float = setting(1.0, on_resume=OnResume.IF_ACCEPTED)
    """Largest norm of the gradient: a gradient with a larger norm is scaled down to this one. 0: no clipping."""
    schedule: Literal["linear", "cosine", "constant", "multistep", "wsd"] = setting(
        "linear", on_resume=OnResume.IF_ACCEPTED
    )
    """Shape of the learning rate after the warm-up. wsd: warm-up, stable, decay."""
    warmup: float = setting(0.0, on_resume=OnResume.IF_ACCEPTED)
    """Length of the warm-up: a fraction of the run if below 1, else a number of steps. 0: none."""
    min_lr: float = setting(0.0, on_resume=OnResume.IF_ACCEPTED)
    """Learning rate at which linear, cosine and wsd end, as a fraction of the peak."""
    decay: float = setting(0.2, on_resume=OnResume.IF_ACCEPTED)
    """Length of the decay at the end of wsd: a fraction of the run if below 1, else a number of steps."""
    milestones: tuple[float, ...] = setting((), on_resume=OnResume.IF_ACCEPTED)
    """Points at which multistep lowers the learning rate: fractions of the run if below 1, else steps."""
    gamma: float = setting(0.1, on_resume=OnResume.IF_ACCEPTED)
    """Factor by which multistep multiplies the learning rate at each milestone."""
    base_batch: int = setting(0, on_resume=OnResume.IF_ACCEPTED)
    """Global batch for which --optim.lr was chosen; see --optim.batch-scaling. 0: the run's own."""
    batch_scaling: Literal["none", "sqrt", "linear"] = setting("none", on_resume=OnResume.IF_ACCEPTED)
    """How the learning rate grows with global-batch / base-batch: not at all, by its square root, or in proportion."""


class BestMetric(NamedTuple):
    """The metric that --run.best names; its minus sign says that lower is better."""

    name: str
    lower: bool = False

    @classmethod
    def parse(cls, text: str) -> "BestMetric":
        """Read `eval/accuracy` or `-eval/loss`; an empty text, and `auto`, name no metric."""
        return cls("" if text == "auto" else text.removeprefix("-"), text.startswith("-"))

    def rank(self, value: float) -> float:
        """Return a number that is the larger, the better a value is."""
        return -value if self.lower else value


def each_field(config: Any, prefix: str = "") -> Iterator[tuple[str, dataclasses.Field, Any]]:
    """Yield every field of a config and of the configs in it: its dotted name, its declaration, its value."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            yield from each_field(value, f"{prefix}{field.name}.")
        else:
            yield f"{prefix}{field.name}", field, value


def on_resume(config: Any) -> dict[str, OnResume]:
    """List what happens when a field has changed since the run began, by dotted name."""
    return {name: field.metadata.get("on_resume", OnResume.REFUSE) for name, field, _ in each_field(config)}


def check(config: Any) -> None:
    """Refuse numbers that no run can have, in a recipe's config.

    Raises:
        UserError: it names the first such field.
    """
    for name, field, value in each_field(config):
        least = field.metadata.get("at_least")
        if least is not None and value < least:
            raise UserError(f"{as_flag(name)} {value}: must be at least {least}")
    if not config.run.steps and not 0 < config.run.epochs < math.inf:
        raise UserError(f"--run.epochs {config.run.epochs}: must be a number above 0, or give --run.steps")


def chosen(config: Any) -> tuple[Any, list[str]]:
    """Fill in the settings that follow from others.

    Returns:
        A config, and lines that tell the user what was chosen and why.

    Raises:
        UserError: there is no learning rate, and the recipe does not choose one.
    """
    config = dataclasses.replace(config, run=dataclasses.replace(config.run))  # the caller's own stays as it is
    for field in dataclasses.fields(config):
        if isinstance(value := getattr(config, field.name), OptimConfig) and value.lr is None and field.name != "optim":
            raise UserError(f"{as_flag(field.name)}.lr is missing: give it")
    optim, notes = getattr(config, "optim", None), []
    if isinstance(optim, OptimConfig) and optim.lr is None:
        if not hasattr(config, "default_lr"):
            raise UserError("--optim.lr is missing, and the recipe's Config has no default_lr(): give it, or write one")
        rate, why = config.default_lr()
        config = dataclasses.replace(config, optim=dataclasses.replace(optim, lr=rate))
        notes.append(f"learning rate {rate:g}, for {why}; --optim.lr gives another")
    elif isinstance(optim, OptimConfig) and hasattr(config, "default_lr"):
        rate, why = config.default_lr()
        if optim.lr >= 10 * rate:  # as where the config.yaml of a run from scratch is given to fine-tune
            notes.append(f"learning rate {optim.lr:g} as given; for {why} it would be {rate:g} without --optim.lr")
    batch, micro = config.run.global_batch, config.run.micro_batch
    if micro > batch:
        notes.append(f"--run.micro-batch {micro} is larger than --run.global-batch {batch}: a step is one micro-batch")
    return config, notes


def as_flag(name: str) -> str:
    """Write a field's dotted name as the flag that sets it."""
    return "--" + name.replace("_", "-")


def flatten(fields: dict, prefix: str = "") -> dict[str, Any]:
    """Turn nested fields into dotted names."""
    flat: dict[str, Any] = {}
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
    """List the defaults of a config's fields, by dotted name; fields without a default are left out.

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
    parts = {k: v for k, v in found.items() if dataclasses.is_dataclass(v) and not isinstance(v, type)}
    return flatten(_plain(found | {k: dataclasses.asdict(v) for k, v in parts.items()}))


def diff(before: dict, after: dict, default: dict[str, Any] | None = None) -> dict[str, tuple[Any, Any]]:
    """List the fields in which two configs differ, by dotted name, as (before, after).

    Args:
        default: by dotted name; what a field was that `before` lacks, because the setting did not exist then.
    """
    before, after = flatten(before), flatten(after)
    before |= {name: value for name, value in (default or {}).items() if name in after and name not in before}
    names = [*before, *(name for name in after if name not in before)]
    return {name: (before.get(name), after.get(name)) for name in names if before.get(name) != after.get(name)}
