"""What the model says of all answers before its training: computed once by all ranks, and kept in the data cache."""

import contextlib
import functools
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from app.data.cache import cache_folder, using_cache
from app.data.text.preference_table import PreferenceTable
from app.distributed import collectives
from app.sampling.hashing import hash_of, key_of
from app.storage.drafts import drafted
from app.tasks.language import logits
from app.tasks.language.preference import answer_logits, log_probabilities

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Part of the cache's key: raise it when the numbers change.
FORMAT = 1


def contents_of(model: "PreTrainedModel") -> str:
    """Hash a model's weights and config, before `run.prepare`. Every rank takes part; the main process reads it.

    Adapters are left out: before their training they change nothing.
    """

    def key() -> str:
        if next(model.parameters()).is_meta:  # for a plan, there are no numbers
            return ""
        weights = {name: tensor for name, tensor in model.state_dict().items() if "lora_" not in name}
        config = model.config.to_dict()
        config.pop("_name_or_path", None)  # the same model in another folder says the same
        return key_of(hash_of(weights), json.dumps(config, sort_keys=True, default=str))

    return collectives.from_main(key, long=True)


def add_references(run: Any, model: nn.Module, contents: str, sets: dict[str, PreferenceTable]) -> None:
    """Give sets of pairs the log-probabilities of their answers in the model as it is now. Every rank takes part.

    They are computed in micro-batches that depend on the data and --run.micro-batch alone, so any layout gets the
    same ones, up to rounding; and a run that resumes on another one finds those that it began with.

    Args:
        model: from `run.prepare`, before `run.batches`.
        contents: what `contents_of` returned.
    """
    for name, pairs in sets.items():
        pairs.reference_key = pairs.models["the reference model"] = contents
        if run.for_other_device:  # a plan or an export needs no numbers
            pairs.reference = np.zeros((len(pairs), 2))
            continue
        file = cache_folder() / f"reference-{_key(run, model, pairs)}.npy"
        log_probs = _read(file, len(pairs))
        if not all(collectives.gather(log_probs is not None)):
            run.say(f"computing what the model says of {len(pairs):,} pairs{f' of {name}' if name else ''}, once")
            log_probs = _computed(run, model, pairs)
            with using_cache():
                collectives.from_each_machine(functools.partial(_write, file, log_probs))
        pairs.reference = log_probs


def _key(run: Any, model: nn.Module, pairs: PreferenceTable) -> str:
    """Name all that the numbers depend on."""
    ours, asked = run.accelerator, run.config
    weight_dtypes = sorted({str(parameter.dtype) for parameter in model.parameters()})  # --optim.updates rounds weights
    numerics = ours.device.type, ours.mixed_precision, asked.exact, asked.slices, weight_dtypes, torch.__version__
    return key_of(FORMAT, pairs.fingerprint, asked.micro_batch, pairs.multiple, *numerics, logits.kind(model))


def _read(file: Path, rows: int) -> np.ndarray | None:
    """Return the numbers that a file keeps; None if it is missing or damaged."""
    with contextlib.suppress(OSError, ValueError, EOFError):
        log_probs = np.load(file)
        return log_probs if log_probs.shape == (rows, 2) and np.isfinite(log_probs).all() else None
    return None


def _write(file: Path, values: np.ndarray) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with drafted(file) as draft, draft.open("wb") as stream:
        np.save(stream, values)


def _computed(run: Any, model: nn.Module, pairs: PreferenceTable) -> np.ndarray:
    computed_here: list[tuple[np.ndarray, np.ndarray]] = []
    for micro in run.evaluation(model, pairs, pairs.collate, pairs.lengths):
        sums = log_probabilities(answer_logits(model, micro.inputs), micro.inputs)
        if micro.weight:
            computed_here.append((micro.ids, sums.view(2, -1).T.cpu().numpy()))
    values = np.full((len(pairs), 2), np.nan)
    for part in collectives.gather(computed_here):
        for ids, both in part:
            values[ids] = both
    return values
