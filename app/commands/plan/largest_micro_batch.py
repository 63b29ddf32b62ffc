"""The largest micro-batch that fits into a device, by the peak memory of each profile's processes."""

import dataclasses
import os
from collections.abc import Generator
from typing import Any

import torch
from torch import nn

from app.commands.output import size
from app.commands.plan import memory
from app.commands.plan.footprint import Footprint, Question, Questions
from app.commands.plan.meta_tensors import Cut
from app.commands.plan.pretended_split import cuts_of
from app.config import RunConfig
from app.distributed import fsdp
from app.errors import UserError
from app.launching.profiles import Profile
from app.sampling.batch_plan import BatchPlan
from app.training.exact import gradients as exact_gradients

# Part of a GPU's memory to leave free: for CUDA and its libraries, for fragments, and for the error of our count.
SPARE = 0.1
GB = 10**9


def key(profile: Profile) -> str:
    """Return a key that tells a profile from all others."""
    return f"{profile.file}:{profile.processes}"


def room(profile: Profile, asked: float) -> int | None:
    """Return the bytes of memory that one process of a profile has; None if this machine has no such device.

    Args:
        asked: --memory in GB; 0: what this machine has.
    """
    if asked:
        return round(asked * GB)
    if profile.on_cpu:
        whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return whole // max(1, profile.processes // profile.machines)
    return torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else None


@dataclasses.dataclass(frozen=True)
class Peak:
    """What a profile's processes need at their peak, in bytes, and which micro-batch fits."""

    peak: int
    activations: int
    rows: int
    """Of the micro-batch whose memory was counted."""
    longest: int | None
    """Its length; None if lengths are not known."""
    micro_batch: int
    """The run's."""
    device_memory: int | None
    """None if it is not known."""
    fits: tuple[int, int] | None = None
    """The largest micro-batch that fits, and its peak."""
    too_large: tuple[int, int] | None = None
    """The next larger one, and its peak."""
    too_much: bool = False
    """Whether the run's own micro-batch does not fit."""


@dataclasses.dataclass(frozen=True)
class _Recipe:
    """What a recipe has in a dry run, whatever the profile."""

    config: RunConfig
    models: list[nn.Module]
    weights: list[memory.Weight]
    buffers: int
    """Bytes of the models' buffers."""

    def cut(self, profile: Profile) -> Cut:
        """Say how a profile cuts weights."""
        return cuts_of(self.models, profile.mesh("tp"), self.config.slices)

    def held(self, profile: Profile, plan: BatchPlan) -> memory.Memory:
        """Count what one process holds between micro-batches."""
        weights = memory.of_one_process(self.weights, self.models, self.cut(profile))
        turns, exact = plan.accumulation(profile.data_ranks), self.config.exact
        return memory.per_process(weights, self.buffers, profile, turns, exact, self.config.save_async)


class MicroBatchSearch:
    """Asks for footprints, and finds from them the largest micro-batch that fits, for each profile."""

    def __init__(self, profiles: list[Profile], asked: float):
        """Prepare to ask.

        Args:
            asked: memory of one device in GB; 0: what this machine has.
        """
        self.profiles, self.asked = profiles, asked
        self.found: dict[str, Peak] = {}
        self._known: dict[Question, Footprint] = {}

    def asking(self, run: Any, plan: BatchPlan) -> Questions:
        """Ask about a recipe in a dry run, and keep the result for each profile that can work in `found`."""
        models = run.accelerator.models
        optimizers = [getattr(optimizer, "optimizer", optimizer) for optimizer, _ in run.optimizers.known]
        recipe = _Recipe(run.config, models, *memory.weigh(models, optimizers, run.accelerator.averages))
        for profile in self.profiles:
            refused = run.config.exact and exact_gradients.refusal(bool(profile.zero_stage), profile.compiled_whole)
            if not (profile.troubles or profile.zero_stage or refused):
                try:
                    memory.check_packed(models, profile)
                    self.found[key(profile)] = yield from self._about(recipe, profile, plan)
                except UserError:  # such as more ranks than micro-batches; the table says so
                    continue

    def _about(self, recipe: _Recipe, profile: Profile, plan: BatchPlan) -> Generator[Question, Footprint, Peak]:
        planned, space = plan.micro_batch, room(profile, self.asked)
        most_held = yield from self._peak(recipe, profile, plan, planned)
        footprint = self._known[_question(profile, planned)]
        rows, longest = footprint.micro.rows, footprint.micro.longest
        counted = Peak(most_held, activations(footprint, profile), rows, longest, planned, space)
        if space is None:
            return counted
        # On a CPU, a checkpoint's copies are in the same memory.
        limit = space - recipe.held(profile, plan).copy if profile.on_cpu else int(space * (1 - SPARE))
        # Every data rank needs a micro-batch of its own.
        most = plan.global_batch // profile.data_ranks
        sizes = [2**power for power in range(most.bit_length())]
        sizes = sorted({*sizes, min(planned, most), most})
        fits, too_large = yield from self._search(recipe, profile, plan, sizes, {planned: most_held}, limit)
        return dataclasses.replace(counted, fits=fits, too_large=too_large, too_much=most_held > limit)

    def _search(
        self, recipe: _Recipe, profile: Profile, plan: BatchPlan, sizes: list[int], peaks: dict[int, int], limit: int
    ):
        """Return the largest size that fits and the next larger one, each with its peak; None if there is no such size.

        A straight line through two peaks says where to look next; what is returned was counted.
        """
        place = max(i for i, micro in enumerate(sizes) if micro <= max(peaks))
        low, high = -1, len(sizes)  # the largest place known to fit, the smallest known not to
        while high - low > 1:
            if sizes[place] not in peaks:
                peaks[sizes[place]] = yield from self._peak(recipe, profile, plan, sizes[place])
            if peaks[sizes[place]] <= limit:
                low = place
            else:
                high = place
            place = min(max(_guess(sizes, peaks, limit), low + 1), high - 1)
        fits, too_large = ((sizes[i], peaks[sizes[i]]) if 0 <= i < len(sizes) else None for i in (low, high))
        return fits, too_large

    def _peak(
        self, recipe: _Recipe, profile: Profile, plan: BatchPlan, micro_batch: int
    ) -> Generator[Question, Footprint, int]:
        question, cut = _question(profile, micro_batch), recipe.cut(profile)  # refused before it is asked
        if question not in self._known:
            self._known[question] = yield question
        sized = dataclasses.replace(plan, micro_batch=micro_batch)
        turns, is_exact = sized.accumulation(profile.data_ranks), recipe.config.exact
        gathered = gathered_bytes(recipe.models, profile, cut)
        return peak(self._known[question], profile, recipe.held(profile, sized), turns, is_exact, gathered)


def peak(footprint: Footprint, profile: Profile, held: memory.Memory, turns: int, is_exact: bool, gathered: int) -> int:
    """Return the most bytes that one process of a profile holds at any time.

    Args:
        held: what it holds all the time.
        turns: how many it takes in a step.
        gathered: bytes of weights that FSDP2 gathers at once.
    """
    # The loader copies the next step to a GPU while this one is computed.
    inputs = footprint.inputs * turns * (1 if profile.on_cpu else 2)
    if profile.is_fsdp:
        beside = activations(footprint, profile) + gathered
        updating = max(0, footprint.update - footprint.held - footprint.gradients) // profile.shards
        if profile.offloads and not profile.on_cpu:
            # Shards are on the host, and updated there; gradients that FSDP2 sums over turns are whole, and here.
            return (held.gradients if turns > 1 else 0) + beside + inputs
        return held.total + max(beside, updating) + inputs
    # Only the first turn creates gradients, unless DDP's buckets hold them from the start. Exact mode frees them after
    # each turn.
    fresh = is_exact or (turns == 1 and profile.wrapping != "DDP")
    most = footprint.first if fresh else max(footprint.first, footprint.later)
    buckets = footprint.gradients if profile.wrapping == "DDP" and (is_exact or turns > 1) else 0
    return max(most, footprint.update) + held.sums + buckets + inputs


def activations(footprint: Footprint, profile: Profile) -> int:
    """Return what a later turn holds at its peak in addition to what training holds all the time."""
    keeps_casts = not profile.is_fsdp or profile.precision == "fp32" or profile.compiled
    return (footprint.later if keeps_casts else footprint.uncast) - footprint.held - footprint.gradients


def gathered_bytes(models: list[nn.Module], profile: Profile, cut: Cut) -> int:
    """Count the bytes of gathered weights on a process at once: those outside layers, and two of the largest layer.

    FSDP2 gathers the next layer while it computes one.

    Args:
        cut: the weights that are cut besides, and into how many parts.
    """
    if profile.shards == 1:
        return 0
    named = profile.section("fsdp_config").get("fsdp_transformer_layer_cls_to_wrap") or ""
    asked = set(named.replace(" ", "").split(",")) - {""} if isinstance(named, str) else set(named)
    most = 0

    def part(parameter: nn.Parameter) -> int:
        return parameter.nbytes // cut.get(parameter, (0, 1))[1]

    for model in models:
        classes = fsdp.layer_classes(model, asked)
        layers = [m for m in model.modules() if type(m).__name__ in classes]
        inside = {p for layer in layers for p in layer.parameters()}
        rest = sum(part(p) for p in model.parameters() if p not in inside)
        most += rest + 2 * max((sum(map(part, layer.parameters())) for layer in layers), default=0)
    return most


def sentence(peak: Peak) -> str:
    """Say it in a sentence."""
    length = f" of length {peak.longest}" if peak.longest else ""
    text = f"activations {size(peak.activations)} for --run.micro-batch {peak.micro_batch} ({peak.rows} rows{length})"
    text += f"; peak {size(peak.peak)}"
    if peak.device_memory is None:
        return f"{text}; --memory GB (of one device) tells which micro-batch fits"
    text += f" of {size(peak.device_memory)}"
    fits, too_large = peak.fits, peak.too_large
    larger = f"{too_large[0]} would not ({size(too_large[1])})" if too_large else ""
    if fits:
        text += f"; --run.micro-batch {fits[0]} would fit ({size(fits[1])}), "
        return text + (larger or "and a larger one is of no use with this --run.global-batch")
    return f"{text}; not even --run.micro-batch {too_large[0]} would fit ({size(too_large[1])})" if too_large else text


def _question(profile: Profile, micro_batch: int) -> Question:
    return Question("cpu" if profile.on_cpu else "cuda", profile.precision, micro_batch, profile.mesh("tp"))


def _guess(sizes: list[int], peaks: dict[int, int], limit: int) -> int:
    """Guess the place of the largest size that fits, from the two largest sizes that were counted."""
    *_, a, b = [0, *sorted(peaks)]
    below = peaks.get(a, 0)
    reach = b + (limit - peaks[b]) / max((peaks[b] - below) / (b - a), 1.0)
    return max((place for place, micro in enumerate(sizes) if micro <= reach), default=0)
