"""A plan in words: lines about the run, a table of layouts, and what resuming would do."""

from app.commands.output import size, table
from app.commands.plan import largest_micro_batch
from app.commands.plan.described import About, Folder, Layout
from app.commands.plan.memory import LEFT_OUT


def show(about: About, layouts: list[Layout], folder: Folder, uncounted: str) -> None:
    """Print a plan.

    Args:
        layouts: what each profile makes of it.
        uncounted: why activations could not be counted; empty if they were.
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
        "checkpoint": f"{size(checkpoints.checkpoint)} on disk; {checkpoints.checkpoints} of them at most: "
        f"{size(checkpoints.disk)}",
    }
    print("\n".join(f"  {name:<15}{text}" for name, text in lines.items()), end="\n\n")
    head = ["profile", "layout", "samples/step", "idle", "weights", "gradients", "sums", "optimizer", "in all"]
    print(table([*head, "save copy", "verdict"], [_row(layout) for layout in layouts], right=range(3, 10)))
    print(f"memory of one process; sums: of exact mode; save copy: on the host; not counted: {LEFT_OUT}\n")
    for layout in layouts:
        if layout.peak:
            print(f"{layout.profile}: {largest_micro_batch.sentence(layout.peak)}")
    if uncounted:
        print(f"activations could not be counted, as the loop does not run on tensors without contents: {uncounted}")
    print()
    _show_folder(folder)


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


def _show_folder(folder: Folder) -> None:
    for warning in folder.warnings:
        print(warning)
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
