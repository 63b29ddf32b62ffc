"""A page about runs that needs nothing but a browser: curves to zoom into, pictures, and how the settings differ."""

import base64
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from app.commands.curves import labels, marks, panels, widths
from app.config import as_flag, flatten
from app.errors import UserError, not_installed
from app.rundir.history import History

COLOURS = ("#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd", "#8c564b", "#e377c2", "#17becf")
DASHES = ("solid", "dash", "dot")
PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>{{ title }}</title>
<style>
body { font: 15px/1.45 system-ui, sans-serif; max-width: 1100px; margin: 2em auto; padding: 0 1em; color: #222 }
h1 { font-size: 1.5em } h2 { font-size: 1.15em; margin-top: 2em }
table { border-collapse: collapse } th, td { padding: .25em .9em .25em 0; text-align: left; vertical-align: top }
th { border-bottom: 1px solid #999 } td { border-bottom: 1px solid #eee; font-variant-numeric: tabular-nums }
figure { display: inline-block; margin: .5em 1em .5em 0 } figcaption { font-size: .85em; color: #555 }
img { max-width: 100%; min-width: 128px; image-rendering: pixelated }
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
<h2>Curves</h2>
{{ curves | safe }}
{% if labels | length > 1 %}
<h2>Where the settings differ</h2>
{% if differences %}{{ table(["setting"] + labels, differences) }}{% else %}<p>The settings are the same.</p>{% endif %}
{% endif %}
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


def write(runs: Sequence[History], file: Path) -> None:
    """Write the page.

    Raises:
        UserError: plotly is not installed.
    """
    from jinja2 import Environment

    try:
        import plotly.io
    except ImportError:
        raise UserError(f"a page of curves: {not_installed('plotly')}") from None
    curves = plotly.io.to_html(_figure(runs), include_plotlyjs=True, full_html=False, config={"displaylogo": False})
    names = labels(runs)
    page = Environment(autoescape=True, trim_blocks=True).from_string(PAGE)
    text = page.render(
        title=", ".join(names),
        labels=names,
        summary=_summary(runs),
        curves=curves,
        differences=_differences(runs),
        pictures=[(name, _pictures(run)) for run, name in zip(runs, names, strict=True) if run.pictures],
    )
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")


def _figure(runs: Sequence[History]) -> Any:
    from plotly.graph_objects import Scatter
    from plotly.subplots import make_subplots

    shown = panels(runs)
    across = min(2, len(shown))
    down = -(-len(shown) // across)
    gap = 0.35 / down
    figure = make_subplots(down, across, subplot_titles=[p.title for p in shown], vertical_spacing=min(0.2, gap))
    named: set[str] = set()
    for number, panel in enumerate(shown):
        place = {"row": number // across + 1, "col": number % across + 1}
        looks = zip(runs, labels(runs), _colours(len(runs)), widths(len(runs)), strict=True)
        for run, label, colour, width in looks:
            for nth, name in enumerate(panel.names):
                steps, values = run.column(name)
                line = {"color": colour, "dash": DASHES[nth % len(DASHES)], "width": width}
                told = {
                    "opacity": 1 if width < 2 else 0.5,
                    "name": label,
                    "legendgroup": label,
                    "showlegend": label not in named,
                }
                hover = f"{label}: {name} %{{y:.5g}}<br>step %{{x}}<extra></extra>"
                mode = "lines+markers" if len(steps) < 20 else "lines"
                figure.add_trace(Scatter(x=steps, y=values, mode=mode, line=line, hovertemplate=hover, **told), **place)
                named.add(label)
            for mark in marks(run):
                note = {"annotation_text": mark.text if number == 0 else "", "annotation_font_size": 10}
                figure.add_vline(mark.step, line_dash="dot", line_width=1, line_color=colour, **note, **place)
        figure.update_xaxes(title_text="step", matches="x", rangemode="tozero", **place)
    legend = {"orientation": "h", "y": 1, "yref": "container", "yanchor": "top"}
    figure.update_layout(height=120 + 280 * down, template="plotly_white", legend=legend, showlegend=len(runs) > 1)
    figure.update_layout(margin={"l": 50, "r": 20, "t": 80, "b": 40})
    return figure


def _colours(count: int) -> list[str]:
    return [COLOURS[i % len(COLOURS)] for i in range(count)]


def _summary(runs: Sequence[History]) -> list[list[Any]]:
    """List each run's label, status, steps, score and the layouts that it ran on."""
    rows = []
    for run, label in zip(runs, labels(runs), strict=True):
        layout = "; ".join(
            f"{launch['layout']} (from step {launch['step']})" if launch["step"] else launch["layout"]
            for launch in run.launches
        )
        rows.append([label, run.status, f"{run.step} of {run.info.get('steps', '?')}", run.score_in_words, layout])
    return rows


def _differences(runs: Sequence[History]) -> list[list[Any]]:
    """List the settings that are not the same in all runs, each with its value in every run."""
    settings = [flatten(run.config) for run in runs]
    names = list(dict.fromkeys(name for fields in settings for name in fields))
    differing = [n for n in names if n != "run.dir" and len({repr(fields.get(n)) for fields in settings}) > 1]
    return [[as_flag(name), *(fields.get(name) for fields in settings)] for name in differing]


def _pictures(run: History) -> list[tuple[str, int, list[str]]]:
    """List a run's last pictures: their name, their step, and the first 16 files in base64."""
    return [
        (name, int(files[0].stem[5:13]), [base64.b64encode(file.read_bytes()).decode() for file in files[:16]])
        for name, files in run.pictures.items()
    ]
