"""What must agree between a checkpoint and a run before the run goes on from it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from app.checkpoints.record import Counts, DataRecord, MixPart, MixRecord, Record
from app.config import RunConfig
from app.data.fingerprint import changed_shard, contents, difference, other_models
from app.data.rows import Rows
from app.distributed import collectives
from app.distributed.layout_record import Layout
from app.errors import UserError
from app.sampling.batch_plan import BatchPlan
from app.sampling.mixture import Part
from app.sampling.orders import Mixed


class Start(NamedTuple):
    """Where this launch begins in the run."""

    step: int = 0
    """The number of steps made before this launch."""
    scores: dict[str, float] = {}
    """The last value of each score before this launch."""
    unevaluated: bool = False
    """Whether the last of those steps was stopped during its evaluation, which then comes first."""
    buffers: Sequence[str] = ()
    """Names of the buffers that are known to change in training."""
    changed: dict[str, tuple[Any, Any]] = {}
    """Settings that are others from here on: by name, as they were and as they are."""
    losses: dict[str, Any] = {}
    """Sums of the losses of the last steps, from which the means that are logged next are formed."""
    patience: dict[str, Any] = {}
    """How long ago the best score was measured."""
    counts: Counts = Counts()
    """What happened in those steps."""

    @property
    def made(self) -> int:
        """Return the number of steps that have updated weights."""
        return self.counts.made


def start(saved: Record, changed: dict[str, tuple[Any, Any]]) -> Start:
    """Read from a checkpoint's record where a launch begins."""
    return Start(
        saved.step, saved.scores, saved.unevaluated, saved.buffers, changed, saved.losses, saved.patience, saved.counts
    )


def described(start: Start, plan: BatchPlan, before: Layout, here: Layout, folder: Path) -> str:
    """Tell the user where a run goes on; `before` is the layout that saved it."""
    moved = "" if before == here else f" (saved on {before})"
    first = ", whose evaluation comes first" if start.unevaluated else ""
    return f"resuming {folder} after step {start.step} of {plan.steps}{moved}{first}"


def contents_everywhere(data: Rows) -> dict[str, Any]:
    """Digest the training data once on each machine, and compare the digests. Every rank takes part.

    Call it before anything draws from `data`, such as the loader.

    Raises:
        UserError: a machine has other data than the main process.
    """
    contents_by_rank = collectives.from_each_machine(lambda: contents(data))
    for rank, other in contents_by_rank.items():
        if changed := difference(contents_by_rank[0], other) or ", ".join(other_models(contents_by_rank[0], other)):
            raise UserError(
                f"rank {rank} would train on other data than rank 0: {changed}. Give every machine the same data, for "
                "example on a disk that all of them share"
            )
    return contents_by_rank[0]


def fitting(
    saved: Record, plan: BatchPlan, settings: RunConfig, folder: Path, contents: dict[str, Any] | None = None
) -> BatchPlan:
    """Plan what follows a checkpoint, from its record.

    Args:
        contents: the digest of the data, by which a shard that has changed is named; None: nobody has made one.

    Raises:
        UserError: the checkpoint is of a data set of another size, or of a longer run.
    """
    step, seen = saved.step, saved.seen
    plan = plan.going_on(settings, step, seen)
    if step > plan.steps or seen > plan.total:
        made = f"made {step} steps" if step > plan.steps else f"seen {seen:,} samples"
        asked = f"{plan.steps}" if step > plan.steps else f"{plan.total:,}"
        raise UserError(
            f"the run in {folder} has {made}, and only {asked} are asked for: give a larger --run.steps or "
            "--run.epochs, or another --run.dir"
        )
    if saved.data.mix or isinstance(plan.order, Mixed):
        return _fitting_mix(saved, plan, folder, contents or {})
    rows, before = plan.samples, saved.data.rows
    if plan.fingerprint != saved.data.fingerprint:
        now = f"now there are {rows:,}" if rows != before else "their lengths or weights were others"
        raise UserError(
            f"{folder} holds a run over other training data: it had {before:,} rows, and {now}"
            f"{_of_shard(saved, contents or {})}. Give it the data that it had, or another --run.dir"
        )
    return plan


def _of_shard(saved: Record, contents: dict[str, Any]) -> str:
    """Say which shard is another one than a run had, in brackets; nothing if nobody knows."""
    was, now = bool(saved.data.contents.get("shards")), bool(contents.get("shards"))
    if contents and was != now:  # --data.stream auto looks at the room on the disk, which changes
        told = "was streamed, and now is not" if was else "was not streamed, and now is"
        return f" (it {told}: try --data.stream {'true' if was else 'false'})"
    shard = changed_shard(saved.data.contents, contents)
    return shard and f" ({shard})"


def data_of(plan: BatchPlan, contents: dict[str, Any]) -> DataRecord:
    """Return what a checkpoint says of the data; `contents` is their digest."""
    mix = None
    if isinstance(plan.order, Mixed):
        parts = tuple(MixPart(part.start, tuple(map(float, part.weights)), part.caps) for part in plan.order.parts)
        mix = MixRecord(tuple(each.name for each in plan.order.sources), parts, plan.order.lanes)
    return DataRecord(plan.samples, plan.fingerprint, contents, mix)


def _fitting_mix(saved: Record, plan: BatchPlan, folder: Path, contents: dict[str, Any]) -> BatchPlan:
    """Plan what follows a checkpoint of a mixture: the mix may be another one from here on, and have new sources.

    Raises:
        UserError: a source is gone or has changed, or one of the two is no mixture.
    """
    order, mix, fix = plan.order, saved.data.mix, "give it the data that it had, or another --run.dir"
    if mix is None or not isinstance(order, Mixed):
        was, now = ("one data set", "a mixture") if mix is None else ("a mixture", "one data set")
        raise UserError(f"{folder} holds a run over {was}, and now there is {now}: {fix}")
    names, before = [each.name for each in order.sources], list(mix.sources)
    if names[: len(before)] != before:
        raise UserError(
            f"{folder} holds a run over a mixture of {', '.join(before)}, and now it is of {', '.join(names)}: keep "
            "the sources in their order, give those that are not wanted any more the weight 0, and name new ones last"
        )
    if order.lanes != mix.lanes:
        kind = "were all mapped, and now one is streamed" if mix.lanes == 1 else "had a streamed one, and now have none"
        raise UserError(
            f"{folder} holds a run over a mixture whose sources {kind}, which changes the order of all of them: give "
            "--data.stream or `stream:` in the mix as it was, or another --run.dir"
        )
    of_these = len(before)
    if plan.fingerprint_of(order.rows_of(of_these), order.fingerprint_of(of_these)) != saved.data.fingerprint:
        raise UserError(
            f"{folder} holds a run over a mixture, of which a source has other rows than it had"
            f"{_of_shard(saved, contents)}, or other tokens (a tokenizer from scratch is learnt from all sources, so a "
            f"new one changes it): {fix}"
        )
    parts = [Part(part.start, part.weights, part.caps) for part in mix.parts]
    return plan.ordered(order.going_on(parts, saved.seen, plan.short))


def check_every_source_is_read(plan: BatchPlan) -> None:
    """Refuse a new run over a mixture with a source that is never read; a run that goes on may have one no more.

    Raises:
        UserError: there is one.
    """
    if isinstance(plan.order, Mixed):
        read = [any(weights) for weights in zip(*(part.weights for part in plan.order.parts), strict=True)]
        if idle := next((each.name for each, some in zip(plan.order.sources, read, strict=True) if not some), None):
            raise UserError(f"--data.mix: the source {idle} has the weight 0 and would never be read: leave it out")


def changed_mix(saved: Record, plan: BatchPlan) -> dict[str, tuple[Any, Any]]:
    """Return the mix before a checkpoint and the one after it, as a setting that has changed; empty if it has not."""
    if saved.data.mix is None or not isinstance(plan.order, Mixed):
        return {}
    before = [part for part in saved.data.mix.parts if part.start <= saved.seen][-1]
    now = [part for part in plan.order.parts if part.start <= saved.seen][-1]
    names = [each.name for each in plan.order.sources]
    was, here = _in_words(names, before.weights, before.caps), _in_words(names, now.weights, now.caps)
    return {} if was == here else {"data.mix": (was, here)}


def _in_words(names: Sequence[str], weights: Sequence[Any], caps: Sequence[int | None]) -> str:
    """Write a mix as `web 7, code 3 (at most 1,000)`; sources without weight are left out."""
    rows = zip(names, weights, caps, strict=False)  # new sources come last
    told = [f"{n} {float(w):g}" + ("" if cap is None else f" (at most {cap:,} samples)") for n, w, cap in rows if w]
    return ", ".join(told)


def check_contents(saved: DataRecord, now: dict[str, Any], folder: Path, accept: bool) -> str:
    """Compare the training data, and models that belong to them, with those that a checkpoint's run had.

    Args:
        saved: `data` of the checkpoint's record.
        now: the digest of the data.
        accept: let the run go on over changed data.

    Returns:
        What the user should know; empty where nothing has changed.

    Raises:
        UserError: they have changed, and that is not accepted.
    """
    rows = difference(saved.contents, now)
    changes = {"the training data have changed": rows} if rows else {}
    for model in other_models(saved.contents, now):
        changes[f"{model} has changed"] = "its weights or its config are others"
    if changes and not accept:
        raise UserError(
            f"{folder} holds a run, and since it began {_joined(changes, ': ')}. Give it what it had, accept the "
            "change with --run.changed accept, or give another --run.dir"
        )
    return _joined(changes, ", which is accepted (--run.changed): ")


def _joined(changes: dict[str, str], between: str) -> str:
    return "; ".join(f"{what}{between}{how}" for what, how in changes.items())
