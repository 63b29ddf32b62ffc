"""Follow a run while it trains: how far it is, its latest numbers, the shape of its curves.

    python -m app watch runs/cls

Ends with the run, or with Ctrl-C, which does not touch the run. If the output is not a terminal, prints once and ends.
"""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from app.errors import UserError


@dataclass
class Options:
    """Which run to follow."""

    run: Annotated[Path, tyro.conf.Positional]
    """The run's folder."""
    every: float = 1.0
    """Seconds between two updates."""


def main(options: Options) -> int:
    """Show the run until it ends; return 1 if it failed or was lost, else 0.

    Raises:
        UserError: the folder holds no run.
    """
    from rich.console import Console
    from rich.live import Live

    from app.commands.watch import live
    from app.rundir import history

    if options.every <= 0:
        raise UserError(f"--every {options.every}: must be above 0")
    console, run = Console(), history.read(options.run)
    if not console.is_terminal:
        console.print(live.view(run))
    else:
        with Live(live.view(run), console=console, auto_refresh=False) as shown:
            try:
                while run.status == "running":
                    time.sleep(options.every)
                    run = history.read(options.run)
                    shown.update(live.view(run), refresh=True)
            except KeyboardInterrupt:
                pass
    return int(run.status in ("failed", "lost"))
