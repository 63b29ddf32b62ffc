"""A plan in words: lines about the run, a table of layouts, and what resuming would do."""

from collections.abc import Iterator

from app import storage
from app.commands import costs
from app.commands.output import size, table
from app.commands.plan import largest_micro_batch
from app.commands.plan.described import About, Fetching, Folder, Layout, Measured, Source
from app.commands.plan.memory import LEFT_OUT
from app.errors import whole_urls
from app.storage.bucket import scratch


def show(about: About, layouts: list[Layout], folder: Folder, uncounted: str, price: float, mtbf: float) -> None:
    """Print a plan.

    Args:
        layouts: what each profile makes of it.
        uncounted: why activations could not be counted; empty if they were.
        price: of one device an hour; 0 for none.
        mtbf: mean hours between two failures of the run's hardware; 0 where it is not given.
    """
    length, model, checkpoints = about.length, about.model, about.checkpoints
    stop = f", stopping after {length.stop_at}" if length.stop_at else ""
    frozen = model.parameters - model.trained
    lines = {
        "samples": f"{length.samples:,}, seen {length.epochs:.4g} times: {length.seen:,}",
        "steps": f"{length.steps:,} of {length.batch_sizes} samples, {length.steps_per_epoch:.4g} an epoch{stop}",
        "micro-batches": f"{length.micro_batches} a step, so at most as many data ranks",
        "tokens": "lengths are not known"
        if length.tokens_per_step is None
        else f"{length.tokens_per_step:,.0f} a step; {length.padding:.1%} of what is computed is padding",
        "parameters": f"{model.parameters:,}; {f'{frozen:,} of them frozen' if frozen else 'all trained'}",
        "optimizer": ", ".join(model.optimizers) + "; an average of the weights" * model.averaged,
        "checkpoint": f"{size(checkpoints.checkpoint)} {'in the bucket' if checkpoints.staged else 'on disk'}; "
        f"{checkpoints.checkpoints} of them at most: {size(checkpoints.disk)}",
    }
    if checkpoints.staged:
        lines["on its way up"] = _of_staging(checkpoints.staged)
    of_sources = (line for source in about.sources for line in _of_source(source, length.global_batch))
    told = [*lines.items(), *of_sources]
    print("\n".join(f"  {name:<15}{text}" for name, text in told), end="\n\n")
    head = ["profile", "layout", "samples/step", "idle", "weights", "gradients", "sums", "optimizer", "in all"]
    allowed = {source.name: source.chunks.cache for source in about.sources if source.chunks}
    print(table([*head, "save copy", "verdict"], [_row(layout) for layout in layouts], right=range(3, 10)))
    print(f"memory of one process; sums: of exact mode; save copy: on the host; not counted: {LEFT_OUT}\n")
    for layout in layouts:
        if layout.peak:
            print(f"{layout.profile}: {largest_micro_batch.sentence(layout.peak)}")
        for fetching in layout.fetching:
            print(_of_machine(layout, fetching, allowed[fetching.source]))
        if price:
            devices = f"{layout.processes} device{'s' * (layout.processes > 1)}"
            print(f"{layout.profile}: {devices}, {costs.money(layout.processes, price)} an hour")
    if uncounted:
        print(f"activations could not be counted, as the loop does not run on tensors without contents: {uncounted}")
    print()
    _show_folder(folder)
    _show_cost(folder.measured, price, mtbf)


def _of_staging(staged: int) -> str:
    """Say what a checkpoint on its way to a bucket takes of disks, and what there is on this machine."""
    free = storage.at(scratch()).free()
    here = f", where {size(free)} are free here" if free is not None else ""
    return f"{size(staged)} of disks at most, each machine its ranks' share, in {scratch()}{here}"


def _of_source(source: Source, batch: int) -> Iterator[tuple[str, str]]:
    """Yield lines about a source: what the run takes of it, and how it is read by chunks."""
    whose = f" of {source.name}" if source.name else ""
    if whose:
        yield "source", f"{source.name}: {source.samples:,} samples, {source.epochs:.4g} times its {source.rows:,} rows"
    if chunks := source.chunks:
        rows = source.rows / chunks.chunks * chunks.in_use
        shared = f" x {chunks.sort_over} micro-batches" if chunks.sort_over > 1 else ""
        mixed = f"{chunks.lanes} lane{'s' * (chunks.lanes > 1)}{shared} x {chunks.window} are mixed at a time"
        yield (
            "chunks",
            f"{chunks.chunks:,}{whose}, of at most {size(chunks.largest)}, {size(chunks.stored)} in all; {mixed}: "
            f"about {rows:,.0f} rows, those of {rows / batch:,.3g} steps",
        )


def _of_machine(layout: Layout, fetching: Fetching, allowed: int | None) -> str:
    source = f" of {fetching.source}" if fetching.source else ""
    often = "in the first epoch, and nothing later" if fetching.once else "an epoch"
    limit = "has no limit" if allowed is None else f"may take {size(allowed)}"
    return (
        f"{layout.profile}: a machine fetches {size(fetching.an_epoch)}{source} {often}; {fetching.lanes} of the lanes "
        f"are read there, which needs {size(fetching.cache)} of a cache that {limit}"
    )


def _row(layout: Layout) -> list[str]:
    kind, spread = f"{layout.layout}, {layout.precision}", layout.spread
    if spread is None:
        return [layout.profile, kind, *["-"] * 8, f"TROUBLE: {layout.trouble}"]
    held = spread.memory
    return [
        layout.profile,
        kind,
        f"{spread.data_ranks} x {spread.accumulation} x {spread.rows}",
        f"{spread.idle:.0%}",
        *map(size, (held.weights, held.gradients, held.sums, held.optimizer, held.total, held.copy)),
        "does not fit" if layout.is_too_large else spread.note or "ok",
    ]


def _show_cost(measured: Measured, price: float, mtbf: float) -> None:
    """Print what a run has taken and what is left; nothing where it is not known and nobody asks."""
    spent, pace = measured.spent, measured.pace
    if pace is None or spent is None:
        if price or mtbf:
            print("what its steps and checkpoints take is measured when it trains: plan again when it has saved")
        return
    took = costs.sum_in_words(spent.total, price)
    print(f"until now: {took}; {spent.goodput:.1%} of the time made steps that count")
    left = costs.sum_in_words(costs.ahead(pace, measured.left), price)
    steps = f"{measured.left:,} step{'s' * (measured.left != 1)} to come"
    print(f"estimated for {steps}, on the same layout and without failures: {left}")
    print("\n".join(costs.saving_lines(pace, price, mtbf)))


def _show_folder(folder: Folder) -> None:
    for warning in folder.warnings:
        print(whole_urls(warning))
    if folder.resumed is None:
        print(f"{folder.path}: no checkpoint; the run starts at its beginning")
    else:
        start = folder.resumed
        scores = "".join(f", {name} {value:.4g}" for name, value in start.scores.items())
        first = "; its evaluation comes first" if start.unevaluated else ""
        print(f"{folder.path}: resuming restores step {start.step} (saved on {start.saved_on}{scores}){first}")
    if folder.changes:
        rows = [[change.name, repr(change.before), repr(change.now), change.effect.value] for change in folder.changes]
        print(table(["changed", "before", "now", "effect"], rows))
    if folder.trouble:
        print(f"TROUBLE: {folder.trouble}")
