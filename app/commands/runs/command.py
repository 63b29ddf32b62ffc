"""List runs: how far each is, its score, its layout, and when it last wrote something.

    python -m app runs
    python -m app runs /data/runs other/run --json runs.json

Looks into folders three levels deep. A run is `running`, `finished`, `preempted` (stopped with steps left), `failed`,
or `lost` (its folder says running, but its process is gone). Repeating its command resumes it.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from app.commands.output import table, write_json


@dataclass
class Options:
    """Where to look for runs."""

    folders: Annotated[tuple[Path, ...], tyro.conf.Positional] = (Path("runs"),)
    """Folders of runs, or folders that contain some."""
    json: str = ""
    """Also write the list to this file."""


def main(options: Options) -> int:
    """Print the list, and return the exit status.

    Raises:
        UserError: a folder does not exist.
    """
    from app.rundir import history

    runs = history.find(options.folders)
    rows, listed = [], []
    for run in runs:
        score, launches = run.score, run.launches
        layout = launches[-1]["layout"] if launches else ""
        steps = f"{run.step}/{run.info.get('steps', '?')}"
        rows.append([str(run.folder), run.status, steps, run.score_in_words, layout, history.age(run.changed)])
        about = {"folder": str(run.folder), "status": run.status, "step": run.step, "steps": run.info.get("steps")}
        listed.append({**about, "score": dict([score] if score else []), "layout": layout, "changed": run.changed})
    if not runs:
        print(f"no runs in {', '.join(map(str, options.folders))}")
    else:
        print(table(["run", "status", "steps", "score", "layout", "changed"], rows, right=(2,)))
    for run in runs:
        if run.status == "failed":
            print(f"\n{run.folder}: {run.info.get('error')}")
    write_json(options.json, {"runs": listed})
    return 0
