"""The results of a comparison as a table and a picture, with the machine that they are from."""

import os
import platform
import re
import subprocess
from pathlib import Path

from app.commands.output import table


def as_table(rows: dict[str, dict]) -> str:
    """Write the rows as a table, with a line for each peer."""
    lines = []
    for name, row in rows.items():
        ours = row["samestep"]
        for peer, theirs in row["peers"].items():
            low, high = theirs["quartiles"]
            losses = " / ".join(f"{side['eval/loss']:.3f}" if "eval/loss" in side else "-" for side in (ours, theirs))
            speeds = " / ".join(f"{side['items_per_second']:.4g}" for side in (ours, theirs))
            reached = "" if theirs["ratio"] >= theirs["target"] else "missed"
            cells = [f"{theirs['ratio']:.3f}", f"{low:.3f}-{high:.3f}", f"{theirs['cpu_ratio']:.3f}"]
            lines.append([name, peer, speeds, *cells, f"{theirs['target']:.2f}", reached, losses])
    head = ["work", "peer", "items/s", "ratio", "quartiles", "by CPU time", "target", "", "eval loss"]
    return table(head, lines, right=(2, 3, 5, 6))


def plot(report: dict, file: Path) -> None:
    """Draw each ratio with its quartiles and its target, on a logarithmic scale."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    lines = [(f"{name} / {peer}", p) for name, row in report["rows"].items() for peer, p in row["peers"].items()]
    figure, axes = pyplot.subplots(figsize=(9, 0.28 * len(lines) + 1.2), layout="constrained")
    for place, (_, compared) in enumerate(lines):
        axes.plot(compared["quartiles"], [place, place], color="0.6", linewidth=4, solid_capstyle="butt")
        axes.plot(compared["ratio"], place, "o", color="C0")
        if compared["target"]:
            axes.plot(compared["target"], place, "|", color="C3", markersize=12)
    axes.axvline(1.0, color="0.8", zorder=0)
    axes.set(xscale="log", yticks=range(len(lines)), yticklabels=[name for name, _ in lines])
    axes.set_xticks(ticks := [0.8, 1, 1.5, 2, 3], [str(tick) for tick in ticks], minor=False)
    axes.minorticks_off()
    axes.invert_yaxis()
    axes.set_xlabel("items a second, ours to theirs: median and quartiles; red: to be reached")
    axes.set_title(describe(report["machine"]), fontsize=8)
    figure.savefig(file, dpi=120)
    pyplot.close(figure)


def machine() -> dict:
    """Return the machine's hardware and software."""
    import accelerate
    import torch
    import transformers

    from app.commands.doctor.machine import driver, processor

    gpu = {}
    if torch.cuda.is_available():
        gpu = {"gpu": torch.cuda.get_device_name(), "memory": f"{torch.cuda.mem_get_info()[1] / 2**30:.0f} GiB"}
        gpu |= {"driver": driver(), "cuda": torch.version.cuda}
    return {
        "cpu": processor(),
        "cores": os.cpu_count(),
        **gpu,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "accelerate": accelerate.__version__,
        "transformers": transformers.__version__,
    }


def commit() -> str:
    """Return the project's commit, and whether files differ from it."""
    answers = []
    for words in (["rev-parse", "--short", "HEAD"], ["status", "--porcelain", "--untracked-files=no"]):
        try:
            done = subprocess.run(
                ["git", *words], cwd=Path(__file__).parent, capture_output=True, text=True, timeout=30
            )
        except (OSError, subprocess.SubprocessError):
            return "unknown"
        answers.append(done.stdout.strip())
    name, changed = answers
    return f"{name or 'unknown'}{', changed' if changed else ''}"


def describe(about: dict) -> str:
    """Describe a machine in one line."""
    parts = {name: f"{name} {version}" for name, version in about.items()}
    return ", ".join({**parts, "cpu": about["cpu"], "cores": f"{about['cores']} cores"}.values())


def slug(device: str) -> str:
    """Return the name of the results' file, from the device and the number of cores."""
    return re.sub(r"[^a-z0-9]+", "-", f"{device} {os.cpu_count()} cores".lower()).strip("-")
