"""Flags as other trainers call them, and what they are called here."""

import dataclasses
import typing

from app.config import as_flag
from app.errors import UserError
from app.launching import program

# By the name in other trainers, without dashes in front; a recipe may lack some of those on the right.
NAMES = {
    "--optim.lr": "learning-rate peak-lr base-lr",
    "--optim.name": "optimizer optim",
    "--optim.schedule": "lr-scheduler-type lr-scheduler lr-schedule scheduler",
    "--optim.warmup": "warmup-steps warmup-ratio num-warmup-steps warmup-iters lr-warmup-steps",
    "--optim.clip": "max-grad-norm grad-clip gradient-clip-val clip-grad-norm clip-grad",
    "--optim.weight-decay": "wd",
    "--run.dir": "output-dir out-dir save-dir output logging-dir default-root-dir",
    "--run.epochs": "num-train-epochs num-epochs max-epochs n-epochs",
    "--run.steps": "max-steps num-steps train-steps max-iters num-train-steps max-train-steps iterations",
    "--run.global-batch": "batch-size train-batch-size bs global-batch-size",
    "--run.micro-batch": "per-device-train-batch-size per-device-batch-size micro-batch-size device-batch-size",
    "--run.eval-every": "eval-steps eval-interval val-check-interval eval-strategy",
    "--run.save-every": "save-steps save-interval save-strategy checkpointing-steps ckpt-interval",
    "--run.log-every": "logging-steps log-interval log-every-n-steps print-freq",
    "--run.keep": "save-total-limit save-top-k checkpoints-total-limit",
    "--run.best": "metric-for-best-model monitor",
    "--run.model": "load-best-model-at-end save-best",
    "--run.patience": "early-stopping-patience early-stopping early-stop",
    "--run.min-change": "early-stopping-threshold min-delta",
    "--run.eval-first": "eval-on-start num-sanity-val-steps",
    "--loss.smoothing": "label-smoothing label-smoothing-factor smoothing",
    "--loss.weights": "class-weights class-weight",
    "--augment.mixup": "mixup-alpha",
    "--augment.cutmix": "cutmix-alpha",
    "--ema.decay": "ema use-ema model-ema model-ema-decay ema-max-decay",
    "--ema.every": "ema-interval ema-every-n-steps",
    "--optim.layer-decay": "llrd layerwise-lr-decay layer-wise-decay",
    "--optim.freeze": "freeze-layers freeze-backbone",
    "--optim.cycles": "num-cycles",
    "--run.resume": "resume-from-checkpoint ckpt-path",
    "--run.trackers": "report-to logger log-with",
    "--run.workers": "dataloader-num-workers num-workers",
    "--run.exact": "deterministic full-determinism",
    "--model": "model-name-or-path model-name pretrained pretrained-model-name-or-path",
    "--activation-checkpointing": "gradient-checkpointing",
    "--mask.rate": "mlm mlm-probability mask-prob masking-prob mask-probability",
    "--mask.span": "mean-noise-span-length mask-length",
    "--token-dropout": "word-dropout",
    "--data.path": "dataset dataset-name data data-dir train-file data-path train-data",
    "--data.eval-path": "validation-file eval-file test-file val-data",
    "--data.max-length": "max-seq-length max-seq-len model-max-length",
    "--data.block": "block-size seq-len seq-length context-length max-seq-length",
}
_OF_PROFILE = (
    "precision, processes, devices and sharding are the profile's: choose another one, such as "
    "`python -m app launch fsdp:8 ...`, or copy its file and change it"
)
_OF_BATCHES = "it follows from --run.global-batch, --run.micro-batch and the number of processes"
_OF_EXPORT = "a finished model goes to the Hub with `python -m app export RUN --push ORG/NAME`"
_ELSEWHERE = {
    **dict.fromkeys(["bf16", "fp16", "mixed-precision", "precision", "fsdp", "deepspeed", "strategy"], _OF_PROFILE),
    **dict.fromkeys(["devices", "device", "num-processes", "no-cuda", "use-cpu", "gpus", "accelerator"], _OF_PROFILE),
    **dict.fromkeys(["gradient-accumulation-steps", "accumulate-grad-batches", "grad-accum"], _OF_BATCHES),
    **dict.fromkeys(["model", "model-name-or-path"], "this recipe has no such flag: it takes no pretrained model"),
    **dict.fromkeys(["push-to-hub", "hub-model-id", "push-to-hub-model-id"], _OF_EXPORT),
}
"""What is not a flag of a recipe, and where it is."""


def check(config_class: type, words: list[str]) -> None:
    """Refuse flags that other trainers have, and name ours.

    Raises:
        UserError: there is one.
    """
    flags = flags_of(config_class)
    for word in words:
        name = word.partition("=")[0].replace("_", "-")
        if not name.startswith("--") or name in flags or name == "--":
            continue
        bare = name.removeprefix("--")
        if told := _meant(flags, bare) or _ELSEWHERE.get(bare) or _meant(flags, bare.rpartition(".")[2]):
            raise UserError(f"{word.partition('=')[0]}: {program.as_typed(told)}")


def _meant(flags: list[str], bare: str) -> str:
    """Name the flags that another trainer's name, without dashes in front, stands for; empty if there are none."""
    meant = [flag for flag, others in NAMES.items() if flag in flags and bare in others.split()]
    # --run.model chooses among a run's own weights: nobody who types --model means it.
    meant = meant or [flag for flag in flags if flag.rpartition(".")[2] == bare and flag != "--run.model"]
    return f"there is no such flag; did you mean {' or '.join(meant)}?" if meant else ""


def flags_of(config_class: type, prefix: str = "") -> list[str]:
    """List the flags of a config's class, in order."""
    flags: list[str] = []
    kinds = typing.get_type_hints(config_class)
    for field in dataclasses.fields(config_class):
        kind = kinds[field.name]
        if dataclasses.is_dataclass(kind):
            flags += flags_of(typing.cast(type, kind), f"{prefix}{field.name}.")
        else:
            flags.append(as_flag(f"{prefix}{field.name}"))
    return flags
