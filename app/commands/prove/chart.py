"""A picture of a report: losses and deviations over the steps, drawn with matplotlib."""

from pathlib import Path

from app.commands.prove.report import Report, losses_of

_SMALLEST = 1e-12  # smaller deviations are drawn as 0


def draw(report: Report, path: Path) -> bool:
    """Draw the loss of each run and its deviations from the first run; return False if matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(11, 7), layout="constrained")
    (losses, *_), _ = axes = figure.subplots(2, 2, sharex=True)
    losses.set_title("loss")
    for row in report.rows:
        values = losses_of(row.trial)
        style = "-" if row.verdict == "reference" else "--"
        losses.plot(range(1, len(values) + 1), values, style, label=f"{row.trial.chain.name}: {row.verdict}")
    losses.legend()
    limits = {"loss": report.tolerances.loss, "gradient norm": report.tolerances.gradient}
    limits["weights"] = report.tolerances.weights
    for axis, (what, limit) in zip(axes.flat[1:], limits.items(), strict=True):
        axis.set_title(f"{what}: relative deviation")
        axis.set_yscale("symlog", linthresh=_SMALLEST)
        for row in report.rows:
            apart = row.comparison.deviations.get(what, [])
            axis.plot(range(1, len(apart) + 1), apart, label=row.trial.chain.name)
        axis.axhline(limit, color="grey", linestyle=":")
        axis.set_ylim(bottom=0, top=max(axis.get_ylim()[1], 1e-8))
    for axis in axes[1]:
        axis.set_xlabel("step")
    figure.suptitle(f"{report.recipe}: {report.summary()}")
    figure.savefig(path, dpi=120)
    return True
