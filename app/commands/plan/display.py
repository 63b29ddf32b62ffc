"""A plan in words: lines about the run, a table of layouts, and what resuming would do."""

from typing import Any

from app.commands.output import size, table
from app.commands.plan import largest_micro_batch
from app.commands.plan.memory import LEFT_OUT


def is_too_large(layout: dict[str, Any]) -> bool:
    """Tell whether a micro-batch of the run itself does not fit into the memory of a device."""
    return bool(layout["peak"] and layout["peak"]["too_much"])


def show(about: dict[str, Any], layouts: list[dict[str, Any]], folder: dict[str, Any], uncounted: str) -> None:
    """Print a plan.

    Args:
        about: of the run on any layout: steps, samples, parameters, checkpoints.
        layouts: what each profile makes of it.
        folder: what the run folder holds.
        uncounted: why activations could not be counted; empty if they were.
    """
    a = about
    stop = f", stopping after {a['stop_at']}" if a["stop_at"] else ""
    frozen = a["parameters"] - a["trained"]
    lines = {
        "samples": f"{a['samples']:,}, seen {a['epochs']:.4g} times: {a['seen']:,}",
        "steps": f"{a['steps']:,} of {a['batch_sizes']} samples, {a['steps_per_epoch']:.4g} an epoch{stop}",
        "micro-batches": f"{a['micro_batches']} a step, so at most as many data ranks",
        "tokens": "lengths are not known"
        if a["tokens_per_step"] is None
        else f"{a['tokens_per_step']:,.0f} a step; {a['padding']:.1%} of what is computed is padding",
        "parameters": f"{a['parameters']:,}; {f'{frozen:,} of them frozen' if frozen else 'all trained'}",
        "optimizer": ", ".join(a["optimizers"]) + "; an average of the weights" * a["averaged"],
        "checkpoint": f"{size(a['checkpoint'])} on disk; {a['checkpoints']} of them at most: {size(a['disk'])}",
    }
    print("\n".join(f"  {name:<15}{text}" for name, text in lines.items()), end="\n\n")
    head = ["profile", "layout", "samples/step", "idle", "weights", "gradients", "sums", "optimizer", "in all"]
    print(table([*head, "save copy", "verdict"], [_row(layout) for layout in layouts], right=range(3, 10)))
    print(f"memory of one process; sums: of exact mode; save copy: on the host; not counted: {LEFT_OUT}\n")
    for layout in layouts:
        if layout["peak"]:
            print(f"{layout['profile']}: {largest_micro_batch.sentence(layout['peak'])}")
    if uncounted:
        print(f"activations could not be counted, as the loop does not run on tensors without contents: {uncounted}")
    print()
    _show_folder(folder)


def _row(layout: dict[str, Any]) -> list[str]:
    kind = f"{layout['layout']}, {layout['precision']}"
    if layout["trouble"]:
        return [layout["profile"], kind, *["-"] * 8, f"TROUBLE: {layout['trouble']}"]
    spread = f"{layout['data_ranks']} x {layout['accumulation']} x {layout['rows']}"
    held = [size(layout["memory"][name]) for name in ("weights", "gradients", "sums", "optimizer", "total", "copy")]
    return [
        layout["profile"],
        kind,
        spread,
        f"{layout['idle']:.0%}",
        *held,
        "does not fit" if is_too_large(layout) else layout["note"] or "ok",
    ]


def _show_folder(folder: dict[str, Any]) -> None:
    for warning in folder["warnings"]:
        print(warning)
    if folder["step"] is None:
        print(f"{folder['path']}: no checkpoint; the run starts at its beginning")
    else:
        scores = "".join(f", {name} {value:.4g}" for name, value in folder["scores"].items())
        first = "; its evaluation comes first" if folder["unevaluated"] else ""
        print(
            f"{folder['path']}: resuming restores step {folder['step']} (saved on {folder['saved_on']}{scores}){first}"
        )
    if folder["changes"]:
        rows = [[c["name"], repr(c["before"]), repr(c["now"]), c["effect"]] for c in folder["changes"]]
        print(table(["changed", "before", "now", "effect"], rows))
    if folder["trouble"]:
        print(f"TROUBLE: {folder['trouble']}")
