"""Summarise the results of all parts in a folder, in one JSON file and one table."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

from app.commands.output import table
from benchmarks.gpu.parts import PARTS
from benchmarks.results import describe

NAMES = ("summary.json", "summary.md")


def merge(folder: Path) -> str:
    """Write summary.json and summary.md of the parts that have left results there; return the latter.

    Raises:
        SystemExit: there are no results.
    """
    results = [json.loads(file.read_text()) for file in sorted(folder.glob("*.json")) if file.name not in NAMES]
    results = [result for result in results if "part" in result]
    if not results:
        raise SystemExit(f"{folder} has no results of parts: run some first, or name their folder with --out")
    order = {part.name: place for place, part in enumerate(PARTS)}
    results.sort(key=lambda result: order.get(result["part"], len(order)))
    (folder / NAMES[0]).write_text(json.dumps({"parts": {r["part"]: r for r in results}}, indent=1) + "\n")
    text = _page(results)
    (folder / NAMES[1]).write_text(text + "\n")
    return text


def _page(results: list[dict]) -> str:
    lines = ["# One GPU: what was found", ""]
    if any(result["small"] for result in results):
        lines += ["Small shapes: this shows that the parts run, and measures nothing.", ""]
    machines = Counter(describe(result["machine"]) for result in results)
    lines += [f"{name} ({count} of {len(results)} parts)  " for name, count in machines.most_common()]
    head = ["part", "ended", "seconds", "tests", "date", "commit", "what it shows"]
    rows = [
        [r["part"], _ended(r), f"{r['seconds']:.0f}", _tests(r["tests"]), r["date"], r["commit"], r["about"]]
        for r in results
    ]
    lines += ["", "```", table(head, rows, right=(2,)), "```"]
    for result in results:
        lines += _details(result)
    return "\n".join(lines)


def _ended(result: dict) -> str:
    # A result file says "running" until its part ends; this part was killed before.
    return "cut off" if result["status"] == "running" else result["status"]


def _tests(tests: dict[str, str]) -> str:
    counts = Counter(verdict.partition(":")[0] for verdict in tests.values())
    return ", ".join(f"{count} {verdict}" for verdict, count in counts.items())


def _details(result: dict) -> list[str]:
    """Return a part's results as text; for a failed part, the end of its output."""
    lines = [_flat(row) for row in result["found"]]
    lines += [f"{name}: {verdict}" for name, verdict in result["tests"].items() if not verdict.startswith("passed")]
    if "left" in result:
        lines += [_flat(row) for row in _rows(result["left"])]
    if not lines or result["status"] not in ("passed", "running"):
        lines += [line for line in result["end"] if not line.startswith('{"')]
    return ["", f"## {result['part']}", "", f"`{result['command']}`", "", "```", *lines, "```"]


def _rows(content: Any) -> list[dict]:
    """Return a file's rows, or the whole file as one row."""
    lists = [content] if isinstance(content, list) else list(content.values()) if isinstance(content, dict) else []
    tables = [rows for rows in lists if isinstance(rows, list) and rows and all(isinstance(row, dict) for row in rows)]
    return tables[0] if tables else [{"content": content} if not isinstance(content, dict) else content]


def _flat(row: dict[str, Any]) -> str:
    return ", ".join(f"{name} {_short(value)}" for name, value in row.items())


def _short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list | tuple):
        return "-".join(map(_short, value))
    return json.dumps(value) if isinstance(value, dict) else str(value)
