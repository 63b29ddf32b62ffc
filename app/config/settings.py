"""The settings that every recipe has: dataclasses with defaults, whose docstrings are the help of their flags."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal, NamedTuple

from app.config.score_names import AVERAGE, ScoreName


class OnResume(Enum):
    """What happens to a run that is resumed with another value of a setting."""

    REFUSE = "refuse"  # the setting decides what the run computes
    ACCEPT = "accept"  # the setting does not change what the run computes
    IF_ACCEPTED = "if accepted"  # refused, unless --run.changed accept lets the rest of the run have it
    LENGTH = "length"  # accepted, and the user is told: the learning rate follows the new length


def setting(
    default: Any,
    *,
    at_least: float | None = None,
    finite: bool = True,
    on_resume: OnResume = OnResume.REFUSE,
    help: str = "",
    when_begun: Callable[[], Any] | None = None,
) -> Any:
    """Declare a field of a config, here or in a recipe; the docstring below the field is the help of its flag.

    Args:
        default: its value where the flag is not given.
        at_least: the smallest number that is accepted.
        finite: whether NaN and infinities are refused, as they are of all fields that are declared without `setting`.
        on_resume: whether a run that is resumed may have another value. Fields that are declared without `setting`
            may not.
        help: in place of the docstring, of a field that several configs have.
        when_begun: gives its value where it is empty when a run begins. A run that is resumed keeps what it had.
    """
    metadata: dict[str, Any] = {
        "at_least": at_least,
        "finite": finite,
        "on_resume": on_resume,
        **({"help": help} if help else {}),
    }
    metadata |= {"when_begun": when_begun} if when_begun else {}
    return dataclasses.field(default=default, metadata=metadata)


@dataclass
class RunConfig:
    """Settings of every run: folder, length, batch, and when it logs, evaluates and saves."""

    dir: str = setting("", on_resume=OnResume.ACCEPT)
    """Folder of the run, on a disk or in a bucket (s3://, gs:// or az://). Default: runs/ and the name of the recipe.
    The same command again resumes the run in it."""
    seed: int = setting(0, at_least=0)
    """Seed of the initial weights, the order of samples, dropout and augmentation."""
    epochs: float = setting(1.0, on_resume=OnResume.LENGTH)
    """Length of the run: how many times every sample is seen. Ignored if --run.steps is given."""
    steps: int = setting(0, at_least=0, on_resume=OnResume.LENGTH)
    """Length of the run in optimizer steps. 0: as many as --run.epochs needs."""
    global_batch: int = setting(64, at_least=1)
    """Samples in one optimizer step, over all processes. It does not depend on the hardware."""
    batch_ramp: tuple[str, ...] = setting(())
    """Smaller global batches at the beginning, as STEP:SAMPLES: 100:16 200:32 takes 16 samples until step 100, 32 until
    step 200, and --run.global-batch from then on."""
    micro_batch: int = setting(16, at_least=1)
    """Samples in one forward and backward pass on one process. Make it smaller if memory runs out."""
    eval_every: int = setting(0, at_least=0, on_resume=OnResume.ACCEPT)
    """Steps between two evaluations; the last step is always evaluated. 0: evaluate after every epoch."""
    save_every: int | Literal["auto"] = setting(0, at_least=0, on_resume=OnResume.ACCEPT)
    """Steps between two checkpoints; the last step is always saved. 0: save after every epoch. auto: as far apart as
    costs least at --run.mtbf, by the measured time of a checkpoint and of a step."""
    mtbf: float = setting(24.0, at_least=1e-6, on_resume=OnResume.ACCEPT)
    """Mean hours between two failures of any of the run's hardware, for --run.save-every auto."""
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
    patience: int = setting(0, at_least=0, on_resume=OnResume.ACCEPT)
    """Early stopping: how many evaluations in a row may pass without a better value of --run.best. The run is then
    finished; 0 lets it go on. 0: never stop early."""
    min_change: float = setting(0.0, at_least=0, on_resume=OnResume.ACCEPT)
    """By how much a value must be better than the best one before it to count as better, for --run.patience."""
    model: Literal["last", "best"] = setting("last", on_resume=OnResume.ACCEPT)
    """The weights of the finished model: those of the last step, or of the best checkpoint by --run.best."""
    eval_first: bool = setting(False, on_resume=OnResume.ACCEPT)
    """Also evaluate before the first step. Its scores are logged as those of step 0."""
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
    whole step, with all that it changed in the model, name the samples, and count it in skipped_steps. Such a run holds
    buffers and frozen weights twice."""
    check_every: int = setting(0, at_least=0, on_resume=OnResume.ACCEPT)
    """Steps between two comparisons of all ranks' weights and buffers, whose copies must agree in every bit. The first
    step is always checked. 0: compare at the end of every epoch."""
    timeout: float = setting(1800.0, at_least=0, on_resume=OnResume.ACCEPT)
    """Seconds without progress after which a rank counts as hung: all ranks then show their stacks and end with status
    1. Progress is a step, a micro-batch of an evaluation, or bytes of a checkpoint or of the finished model, read or
    written. 0: wait forever."""
    grace: float = setting(25.0, at_least=0, on_resume=OnResume.ACCEPT)
    """Seconds from a notice (SIGTERM, SIGINT, SIGUSR1, --run.notice, or the end of a Slurm job) in which the run saves
    and stops. What takes longer is given up: the run says what the newest checkpoint is, and ends. 0: it takes the time
    that it needs."""
    notice: str = setting("", on_resume=OnResume.ACCEPT)
    """Command for the shell that tells whether this machine is to be taken away, asked on each machine every 5 seconds.
    Its status 0 stops the run as SIGTERM does; its output may say when the machine ends. Empty: none."""
    inspect_every: int = setting(0, at_least=0, on_resume=OnResume.ACCEPT)
    """Steps between two lines of diagnostics.jsonl: of every weight its norm, the norm and a histogram of its gradient
    before clipping, the norm of its update, and the ratio of update to weight. In such a step the weights are held
    twice. 0: never."""
    exact: bool = setting(False)
    """Compute the same bits on every layout: gradients are summed in a way that does not depend on their order. Costs
    time, and 8 bytes of memory for each parameter."""
    slices: int = setting(0, at_least=0)
    """With --run.exact: into how many slices layers are cut, a power of two. Each slice is computed by itself, and they
    are added in a fixed order, so tensor parallelism over 1, 2, up to this many processes gives the same bits. 0: none,
    without tensor parallelism."""
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
    """Class of the optimizer, by its name in torch.optim: AdamW, SGD, Adam, Adafactor, RMSprop and others. Muon updates
    the matrices of hidden layers, and AdamW the rest. AdamW8bit keeps its averages in 8 bits. One of another package
    goes by its import path: lion_pytorch.Lion or schedulefree.AdamWScheduleFree."""
    implementation: Literal["auto", "foreach", "fused", "for-loop"] = setting("auto", on_resume=OnResume.IF_ACCEPTED)
    """Kernels of the optimizer, in torch's words. fused: one for all that an update does. foreach: one for each
    operation, over many weights. for-loop: weight by weight. auto: fused for Adam and AdamW where that is right, and
    torch's choice for the others."""
    updates: Literal["plain", "stochastic", "kahan"] = setting("plain")
    """stochastic, kahan: keep weights in bf16, in half the memory, for AdamW and AdamW8bit. Each update is computed in
    fp32, and rounded up or down at random (stochastic), or what rounding cuts off is kept for the next one (kahan, 2
    bytes a weight). They need a profile with mixed_precision bf16. plain: weights stay as they are."""
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
    rates: tuple[str, ...] = setting(())
    """Factors of the learning rate for weights by their names, as PATTERN=FACTOR: 'classifier.*=10' 'bert.*=0.5'. In a
    pattern, * stands for anything; where several fit, the last one counts."""
    decays: tuple[str, ...] = setting(())
    """Weight decay for weights by their names, as PATTERN=DECAY: '*embed*=0'."""
    layer_decay: float = setting(1.0)
    """Factor of the learning rate from each layer to the one below it, for models with a list of blocks. 1: all layers
    have the same rate. Fine-tuning takes 0.65 to 0.95."""
    freeze: tuple[str, ...] = setting(())
    """Weights that are frozen, by their names: PATTERN, for the whole run; PATTERN@:200, until step 200; or
    PATTERN@500:, from step 500 on (fractions of the run if below 1)."""
    schedule: Literal[
        "linear", "cosine", "constant", "multistep", "wsd", "inverse_sqrt", "one_cycle", "swa", "points"
    ] = setting("linear", on_resume=OnResume.IF_ACCEPTED)
    """Shape of the learning rate after the warm-up. wsd: warm-up, stable, decay. swa: a cosine, then constant at
    min-lr. points: straight lines between --optim.points. docs/methods.md has the formulas."""
    warmup: float = setting(0.0, on_resume=OnResume.IF_ACCEPTED)
    """Length of the warm-up: a fraction of the run if below 1, else a number of steps. 0: none."""
    min_lr: float = setting(0.0, on_resume=OnResume.IF_ACCEPTED)
    """Learning rate at which linear, cosine, wsd, swa and one_cycle end, as a fraction of the peak; inverse_sqrt does
    not fall below it."""
    decay: float = setting(0.2, on_resume=OnResume.IF_ACCEPTED)
    """Length of the decay at the end of wsd, or of the constant end of swa: a fraction of the run if below 1, else a
    number of steps."""
    cycles: int = setting(1, at_least=1, on_resume=OnResume.IF_ACCEPTED)
    """How many times cosine falls; it restarts at the peak after each."""
    points: tuple[str, ...] = setting((), on_resume=OnResume.IF_ACCEPTED)
    """Points of the schedule `points`, as STEP:FACTOR or PERCENT%:FACTOR, such as 0:0 10%:1 100%:0.1; or a file with
    one in each line. 1 is the peak. There is no other warm-up."""
    milestones: tuple[float, ...] = setting((), on_resume=OnResume.IF_ACCEPTED)
    """Points at which multistep lowers the learning rate: fractions of the run if below 1, else steps."""
    gamma: float = setting(0.1, on_resume=OnResume.IF_ACCEPTED)
    """Factor by which multistep multiplies the learning rate at each milestone."""
    base_batch: int = setting(0, at_least=0, on_resume=OnResume.IF_ACCEPTED)
    """Global batch for which --optim.lr was chosen; see --optim.batch-scaling. 0: the run's own."""
    batch_scaling: Literal["none", "sqrt", "linear"] = setting("none", on_resume=OnResume.IF_ACCEPTED)
    """How the learning rate grows with global-batch / base-batch: not at all, by its square root, or in proportion."""


@dataclass
class EMAConfig:
    """An average of the weights over the steps, kept next to them."""

    decay: float = setting(0.0, on_resume=OnResume.IF_ACCEPTED)
    """Exponential moving average: how much of the average stays at each update, for example 0.999. The rest comes from
    the weights. 0: no average."""
    uniform: bool = setting(False, on_resume=OnResume.IF_ACCEPTED)
    """Stochastic weight averaging: average the weights of all updates alike, from --ema.start on. It replaces
    --ema.decay."""
    warmup: bool = setting(True, on_resume=OnResume.IF_ACCEPTED)
    """Begin with a small decay, at most (1 + n) / (10 + n) at update n, so that the first weights are soon
    forgotten."""
    every: int = setting(1, at_least=1, on_resume=OnResume.IF_ACCEPTED)
    """Steps between two updates of the average. Only steps that have updated weights count, here and for start."""
    start: float = setting(0.0, at_least=0, on_resume=OnResume.IF_ACCEPTED)
    """When the average begins: a fraction of the run if below 1, else a step. Until then it is equal to the weights."""
    use: Literal["instead", "also"] = setting("instead", on_resume=OnResume.ACCEPT)
    """instead: scores, the best checkpoint and the finished model are those of the average. also: they are those of
    the weights, and the average has scores of its own, such as ema/accuracy, which --run.best may name."""

    @property
    def on(self) -> bool:
        """Tell whether an average is kept."""
        return self.decay > 0 or self.uniform


class BestMetric(NamedTuple):
    """The metric that --run.best names; its minus sign says that lower is better."""

    name: str
    lower: bool = False

    @classmethod
    def parse(cls, text: str) -> "BestMetric":
        """Read `eval/accuracy` or `-eval/loss`; an empty text, and `auto`, name no metric."""
        return cls("" if text == "auto" else text.removeprefix("-"), text.startswith("-"))

    @property
    def of_average(self) -> ScoreName | None:
        """Return its name in parts if it is a score of the average of the weights; else None."""
        score = ScoreName.parse(self.name)
        return score if score and score.kind == AVERAGE else None

    def rank(self, value: float) -> float:
        """Return a number that is the larger, the better a value is."""
        return -value if self.lower else value
