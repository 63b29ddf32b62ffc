"""A page about runs for a browser: curves to zoom into and to smooth, pictures, and how the settings differ."""

import base64
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from typing import Any

from app import storage
from app.commands.curves import (
    MARK,
    TURN,
    Panel,
    Turn,
    class_names,
    curves_of,
    has_markers,
    labels,
    last_values,
    marks,
    neighbours,
    panels,
    turns_of,
    widths,
)
from app.commands.plot import layers
from app.config import as_flag, flatten
from app.errors import UserError, not_installed
from app.rundir.history import History
from app.storage import drafts

COLOURS = ("#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd", "#8c564b", "#e377c2", "#17becf")
DASHES = ("solid", "dash", "dot")
PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<meta name="generator" content="{{ mark }}">
<title>{{ title }}</title>
<style>
body { font: 15px/1.45 system-ui, sans-serif; max-width: 1100px; margin: 2em auto; padding: 0 1em; color: #222 }
h1 { font-size: 1.5em } h2 { font-size: 1.15em; margin-top: 2em }
table { border-collapse: collapse } th, td { padding: .25em .9em .25em 0; text-align: left; vertical-align: top }
th { border-bottom: 1px solid #999 } td { border-bottom: 1px solid #eee; font-variant-numeric: tabular-nums }
figure { display: inline-block; margin: .5em 1em .5em 0 } figcaption { font-size: .85em; color: #555 }
img { max-width: 100%; min-width: 128px; image-rendering: pixelated }
input { vertical-align: middle; width: 14em } output { font-variant-numeric: tabular-nums }
</style>
</head>
<body>
{% macro table(head, rows) %}
<table>
<tr>{% for cell in head %}<th>{{ cell }}</th>{% endfor %}</tr>
{% for row in rows %}
<tr>{% for cell in row %}<td>{{ cell }}</td>{% endfor %}</tr>
{% endfor %}
</table>
{% endmacro %}
<h1>{{ title }}</h1>
{{ table(["run", "status", "steps", "score", "layout"], summary) }}
{% if labels | length > 1 %}
<h2>Where the settings differ</h2>
{% if differences %}{{ table(["setting"] + labels, differences) }}{% else %}<p>The settings are the same.</p>{% endif %}
{% endif %}
<h2>Curves</h2>
<p><label>Smoothing <input id="smoothing" type="range" min="0" max="0.99" step="0.01" value="0"></label>
<output id="weight">0.00</output></p>
{{ curves | safe }}
<script>{{ script | safe }}</script>
{% for label, charts in layers %}
<h2>Layers of {{ label }}</h2>
{{ charts | safe }}
{% endfor %}
{% if marks %}
<h2>Resumed</h2>
{{ table(["run", "after step", "how it went on"], marks) }}
{% endif %}
{% for title, rows in classes %}
<h2>{{ title }}</h2>
{{ table(["class"] + labels, rows) }}
{% endfor %}
{% for label, figures in pictures %}
<h2>Pictures of {{ label }}</h2>
{% for name, step, files in figures %}
<figure>
{% for data in files %}<img alt="{{ name }}" src="data:image/png;base64,{{ data }}">{% endfor %}
<figcaption>{{ name }}, step {{ step }}</figcaption>
</figure>
{% endfor %}
{% endfor %}
</body>
</html>
"""
# Smooths by an exponential moving average, corrected at its beginning as Adam's are (Kingma and Ba, 2015).
SCRIPT = """
const plot = document.getElementById("curves"), slider = document.getElementById("smoothing");
const values = plot.data.map((trace) => trace.y);
function smoothed(numbers, weight) {
  let average = 0, count = 0;
  return numbers.map((number) => {
    if (number === null || !isFinite(number)) return null;
    average = weight * average + (1 - weight) * number;
    count += 1;
    return average / (1 - Math.pow(weight, count));
  });
}
slider.addEventListener("input", () => {
  const weight = Number(slider.value), all = [...plot.data.keys()];
  document.getElementById("weight").textContent = weight.toFixed(2);
  const front = all.filter((place) => plot.data[place].meta === "smooth");
  const back = all.filter((place) => plot.data[place].meta === "raw");
  if (front.length) Plotly.restyle(plot, { y: front.map((place) => smoothed(values[place], weight)) }, front);
  if (back.length) Plotly.restyle(plot, { opacity: weight ? 0.25 : 0 }, back);
});
"""
LIBRARY = "plotly.min.js"


def write(runs: Sequence[History], file: Path) -> None:
    """Write the page, and next to it the library that draws its curves, unless that is there already.

    Raises:
        UserError: plotly is not installed.
    """
    from jinja2 import Environment

    try:
        import plotly.io
    except ImportError:
        raise UserError(f"a page of curves: {not_installed('plotly')}") from None
    options = {"include_plotlyjs": "directory", "full_html": False, "div_id": "curves"}
    curves = plotly.io.to_html(_figure(runs), config={"displaylogo": False}, **options)
    names = labels(runs)
    page = Environment(autoescape=True, trim_blocks=True).from_string(PAGE)
    text = page.render(
        title=", ".join(names),
        mark=MARK,
        labels=names,
        summary=_summary(runs),
        curves=curves,
        script=SCRIPT,
        layers=[
            (name, _layers(run, place))
            for place, (run, name) in enumerate(zip(runs, names, strict=True))
            if run.diagnostics
        ],
        marks=[[name, m.step, m.text] for run, name in zip(runs, names, strict=True) for m in marks(run)],
        classes=[(panel.title, _classes(panel, runs)) for panel in panels(runs) if panel.by_class],
        differences=_differences(runs),
        pictures=[(name, _pictures(run)) for run, name in zip(runs, names, strict=True) if run.pictures],
    )
    file.parent.mkdir(parents=True, exist_ok=True)
    drafts.write(file, text)
    library = plotly.offline.get_plotlyjs()
    there = file.with_name(LIBRARY)
    if not there.exists() or there.stat().st_size != len(library.encode()):
        drafts.write(there, library)


def _layers(run: History, place: int) -> str:
    """Draw a run's diagnostics; the library is on the page already."""
    import plotly.io

    options = {"include_plotlyjs": False, "full_html": False, "div_id": f"layers-{place}"}
    return plotly.io.to_html(layers.figure(run), config={"displaylogo": False}, **options)


def _figure(runs: Sequence[History]) -> Any:
    from plotly.subplots import make_subplots

    shown = [panel for panel in panels(runs) if not panel.by_class]
    across = min(2, len(shown))
    down = -(-len(shown) // across)
    gap = 0.35 / down
    figure = make_subplots(
        down, across, subplot_titles=[escape(p.title) for p in shown], vertical_spacing=min(0.2, gap)
    )
    last, named = max(run.step for run in runs), set[str]()
    for number, panel in enumerate(shown):
        place = {"row": number // across + 1, "col": number % across + 1}
        looks = zip(runs, map(escape, labels(runs)), _colours(len(runs)), widths(len(runs)), strict=True)
        turns = turns_of(runs, [curves_of(panel, run) for run in runs])
        for nth, (run, label, colour, width) in enumerate(looks):
            turn_by_name = {name: turn for (of, name), turn in turns.items() if of == nth}
            for trace in _traces(panel, run, label, colour, width, turn_by_name):
                front = trace.meta not in ("raw", "behind")
                figure.add_trace(trace.update(showlegend=front and label not in named), **place)
                named |= {label} if front else set()
            for mark in marks(run):
                figure.add_vline(mark.step, line_dash="dot", line_width=1, line_color=colour, **place)
            for group in neighbours(marks(run), apart=last * 0.025) if number == 0 else []:
                told = "<br>".join(f"{label}, step {mark.step}: {escape(mark.text)}" for mark in group)
                look = {"text": "▼", "showarrow": False, "font": {"size": 11, "color": colour}, "hovertext": told}
                figure.add_annotation(x=group[0].step, y=1, yref="y domain", yshift=7 + 10 * nth, **look, **place)
        figure.update_xaxes(title_text="step", matches="x", rangemode="tozero", **place)
    legend = {"orientation": "h", "y": 1, "yref": "container", "yanchor": "top"}
    figure.update_layout(height=120 + 280 * down, template="plotly_white", legend=legend, showlegend=len(runs) > 1)
    figure.update_layout(margin={"l": 50, "r": 20, "t": 80, "b": 40})
    return figure


def _traces(panel: Panel, run: History, label: str, colour: str, width: float, turns: dict[str, Turn]) -> Iterator[Any]:
    """Draw a run in a panel. What the slider smooths has the raw curve behind it, which the slider shows.

    Args:
        label: of the run, in HTML.
        turns: of curves by name, where they lie on those of other runs.
    """
    from plotly.graph_objects import Scatter

    curves = curves_of(panel, run)
    for curve in curves:
        steps, values = run.column(curve.name)
        smooth = not curve.behind and curve.name.split("/")[0] != "lr"
        look: dict[str, Any] = {"line": {"color": colour, "dash": DASHES[curve.style % len(DASHES)], "width": width}}
        turn = turns.get(curve.name, Turn())
        if turn.of > 1:  # no dash, the turns before, the own one, and those after
            lengths = (0, turn.number * TURN, TURN, (turn.of - 1 - turn.number) * TURN)
            look["line"] |= {"dash": ",".join(f"{2 * length}px" for length in lengths), "width": 2}
        look |= {"x": steps, "y": values, "name": label, "legendgroup": label}
        look |= {"mode": "lines+markers" if len(steps) < 20 or has_markers(curve, len(steps)) else "lines"}
        faint: dict[str, Any] = {"mode": "lines", "line": {"color": colour, "width": 1}, "meta": "raw"}
        hover = f"{label}: {escape(curve.name)} %{{y:.5g}}<br>step %{{x}}<extra></extra>"
        if curve.behind:
            yield Scatter(**{**look, **faint, "meta": "behind"}, opacity=0.3, hovertemplate=hover)
            continue
        if smooth and not any(other.behind for other in curves):
            yield Scatter(**{**look, **faint}, opacity=0, hoverinfo="skip")
        opacity = 1 if width < 2 or turn.of > 1 else 0.5
        yield Scatter(**look, opacity=opacity, hovertemplate=hover, meta="smooth" if smooth else "")


def _classes(panel: Panel, runs: Sequence[History]) -> list[list[Any]]:
    """List the classes of a score, each with its last value in every run."""
    columns = [["" if value is None else f"{value:.4g}" for value in last_values(panel, run)] for run in runs]
    return [list(row) for row in zip(class_names(panel), *columns, strict=True)]


def _colours(count: int) -> list[str]:
    return [COLOURS[i % len(COLOURS)] for i in range(count)]


def _summary(runs: Sequence[History]) -> list[list[Any]]:
    """List each run's label, status, steps, score and the layouts that it ran on."""
    rows = []
    for run, label in zip(runs, labels(runs), strict=True):
        layouts = [(launch.layout, launch.step) for launch in run.launches]
        moves = [
            pair for before, pair in zip([None, *layouts], layouts, strict=False) if not before or before[0] != pair[0]
        ]
        layout = "; ".join(f"{layout} (from step {step})" if step else layout for layout, step in moves)
        rows.append([label, run.status, f"{run.step} of {run.record.steps}", run.score_in_words, layout])
    return rows


def _differences(runs: Sequence[History]) -> list[list[Any]]:
    """List the settings that are not the same in all runs, each with its value in every run."""
    settings = [flatten(run.config) for run in runs]
    names = list(dict.fromkeys(name for fields in settings for name in fields))
    differing = [n for n in names if n != "run.dir" and len({repr(fields.get(n)) for fields in settings}) > 1]
    return [[as_flag(name), *(fields.get(name) for fields in settings)] for name in differing]


def _pictures(run: History) -> list[tuple[str, int, list[str]]]:
    """List a run's last pictures: their name, their step, and the first 16 files in base64."""

    def encoded(file: Path) -> str:
        return base64.b64encode(storage.at(file.parent).read(file.name)).decode()

    shown = {name: files[:16] for name, files in run.pictures.items()}
    return [(name, int(files[0].stem[5:13]), list(map(encoded, files))) for name, files in shown.items()]
