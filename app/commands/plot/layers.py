"""The diagnostics of a run: norms and update-to-weight ratios by layer, and the sizes of gradients as a heat map."""

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

from app.commands.curves import labels, save
from app.rundir.history import History

CHARTS = {"update-to-weight ratio": "update_ratio", "gradient norm": "gradient_norm"}
HEAT = "sizes of all gradients"
_FEW = 12  # layers whose names fit in a legend
_COLOURS = "viridis"  # from the first layer to the last


class Heat(NamedTuple):
    """Shares of the gradients' numbers in percent, by step and by the power of two from which they go on."""

    steps: list[int]
    powers: list[int]
    shares: list[list[float | None]]
    """[powers][steps]; None: no number."""


def names(run: History) -> list[str]:
    """List the layers, in the order in which the file has them."""
    return list(dict.fromkeys(name for line in run.diagnostics for name in line["layers"]))


def column(run: History, name: str, what: str) -> tuple[list[int], list[float | None]]:
    """Return the steps and the values of a number of one layer; None for one that a logarithmic axis cannot show."""
    points = [(line["step"], line["layers"][name][what]) for line in run.diagnostics if name in line["layers"]]
    return [step for step, _ in points], [value or None for _, value in points]


def heat(run: History) -> Heat:
    """Add up the histograms of all layers; numbers that are zero count, and have no row."""
    sums: list[dict[str, int]] = []
    for line in run.diagnostics:
        sums.append({})
        for layer in line["layers"].values():
            for place, count in layer["histogram"].items():
                sums[-1][place] = sums[-1].get(place, 0) + count
    there = [int(place) for counts in sums for place in counts if place != "zero"]
    powers = list(range(min(there, default=0), max(there, default=-1) + 1))
    totals = [max(1, sum(counts.values())) for counts in sums]
    shares = [
        [100 * counts[str(p)] / total if str(p) in counts else None for counts, total in zip(sums, totals, strict=True)]
        for p in powers
    ]
    return Heat([line["step"] for line in run.diagnostics], powers, shares)


def figure(run: History) -> Any:
    """Draw a run's diagnostics for the page, with plotly."""
    from plotly.colors import sample_colorscale
    from plotly.graph_objects import Heatmap, Scatter
    from plotly.subplots import make_subplots

    layers, heat_map = names(run), heat(run)
    below = [{"colspan": 2}, None]
    drawn = make_subplots(
        2, 2, specs=[[{}, {}], below], subplot_titles=[*CHARTS, HEAT], vertical_spacing=0.16, horizontal_spacing=0.1
    )
    colours = sample_colorscale(_COLOURS, [place / max(1, len(layers) - 1) for place in range(len(layers))])
    for col, what in enumerate(CHARTS.values(), 1):
        for name, colour in zip(layers, colours, strict=True):
            steps, values = column(run, name, what)
            look = {"mode": "lines+markers" if len(steps) < 20 else "lines", "line": {"color": colour, "width": 1.4}}
            hover = f"{escape(name)} %{{y:.4g}}<br>step %{{x}}<extra></extra>"
            shown = {"name": escape(name), "legendgroup": name, "showlegend": col == 1}
            drawn.add_trace(Scatter(x=steps, y=values, hovertemplate=hover, **shown, **look), row=1, col=col)
        drawn.update_yaxes(type="log", exponentformat="power", dtick=1, row=1, col=col)
    bar = {"title": "% of numbers", "len": 0.42, "y": 0.2}
    hover = "%{z:.3g}% from 2^%{y}<br>step %{x}<extra></extra>"
    shares = Heatmap(
        x=heat_map.steps, y=heat_map.powers, z=heat_map.shares, colorscale=_COLOURS, colorbar=bar, hovertemplate=hover
    )
    drawn.add_trace(shares, row=2, col=1)
    drawn.update_yaxes(title_text="size of numbers, power of 2", row=2, col=1)
    drawn.update_xaxes(title_text="step")
    drawn.update_layout(height=680, template="plotly_white", showlegend=len(layers) <= _FEW)
    drawn.update_layout(margin={"l": 50, "r": 20, "t": 40, "b": 40})
    return drawn


def draw(runs: Sequence[History], file: Path) -> None:
    """Write the diagnostics of runs into a PNG picture, a row for each run, with matplotlib."""
    import matplotlib
    from matplotlib.figure import Figure

    picture = Figure(figsize=(15, 3.4 * len(runs) + 0.4), layout="constrained")
    rows = picture.subplots(len(runs), 3, squeeze=False)
    for run, label, axes in zip(runs, labels(runs), rows, strict=True):
        layers, heat_map = names(run), heat(run)
        colours = matplotlib.colormaps[_COLOURS]
        for axis, (title, what) in zip(axes, CHARTS.items(), strict=False):
            for place, name in enumerate(layers):
                steps, values = column(run, name, what)
                look = {"color": colours(place / max(1, len(layers) - 1)), "linewidth": 1.2}
                spots = [float("nan") if value is None else value for value in values]
                axis.plot(steps, spots, marker="." if len(steps) < 20 else "", label=name, **look)
            axis.set_yscale("log")
            axis.set_title(f"{label}: {title}", fontsize=10)
        order = picture.colorbar(matplotlib.cm.ScalarMappable(cmap=colours), ax=axes[1], ticks=[0, 1])
        order.ax.set_yticklabels(["first weight", "last"], fontsize=7)
        if len(layers) <= _FEW:
            axes[0].legend(fontsize=6)
        if heat_map.powers:
            shares = [[float("nan") if share is None else share for share in row] for row in heat_map.shares]
            mesh = axes[2].pcolormesh(heat_map.steps, heat_map.powers, shares, cmap=_COLOURS, shading="nearest")
            picture.colorbar(mesh, ax=axes[2], label="% of numbers")
        axes[2].set_title(f"{label}: {HEAT}", fontsize=10)
        axes[2].set_ylabel("size of numbers, power of 2", fontsize=8)
        for axis in axes:
            axis.set_xlabel("step", fontsize=8)
            axis.tick_params(labelsize=8)
    save(picture, file)
