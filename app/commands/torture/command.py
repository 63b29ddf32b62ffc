"""Kill a recipe's run again and again, resume it each time, and compare it with a run that was left alone.

    python -m app torture recipes/cls.py --kills 20 --run.steps 60
    python -m app torture recipes/cls.py --profiles accelerate_configs/ddp_cpu.yaml accelerate_configs/fsdp_cpu.yaml:3

The launcher, one rank, or all processes are killed with SIGKILL: half of the times at a random moment, half while a
checkpoint is being written, renamed or deleted. A run that finishes must have every line of metrics.jsonl and every bit
of the weights that the untouched run has. Several profiles take turns, in exact mode. Every flag that is not named
below goes to the recipe. The exit status is 0 if nothing was lost, 1 if something was, and 2 if the recipe fails by
itself.
"""

import random
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from app.commands.own_folder import TORTURE
from app.commands.torture.kills import MOMENTS, Lost, Torture
from app.errors import UserError
from app.launching import profiles


@dataclass
class Options:
    """What to kill, how often, and under which profiles."""

    recipe: Annotated[Path, tyro.conf.Positional]
    """The recipe's file."""
    kills: int = 20
    """Number of kills. When a run finishes first, a new one is started."""
    profiles: tuple[str, ...] = ("ddp_cpu",)
    """Profiles to start and resume under; FILE:3 starts 3 processes, whatever the file says."""
    save_every: int = 3
    """Steps between two checkpoints."""
    seed: int = 0
    """Seed of the random choice of what is killed, and when."""
    folder: str = ""
    """Folder for all runs; what an earlier torture left in it is deleted. Default: runs/torture-RECIPE."""
    patience: float = 60.0
    """Seconds within which the other processes must end after the launcher or one rank was killed."""
    json: str = ""
    """Also write the kills and the differences to this file."""


def main(options: Options, flags: list[str]) -> int:
    """Kill, resume and compare; return the exit status.

    Args:
        flags: of the recipe.

    Raises:
        UserError: an option is wrong, or the recipe fails by itself.
    """
    from app.commands.output import table, write_json

    torture = Torture(options.recipe, _flags(options, flags), *_places(options), options.patience)
    print("training the run that is left alone", flush=True)
    expected = torture.untouched()
    lost = []
    try:
        torture.run(options.kills, random.Random(options.seed), expected)
    except Lost as error:
        lost.append(str(error))
    finally:
        counts = Counter((kill.who, kill.moment) for kill in torture.kills)
        moments = ("training", *MOMENTS)
        rows = [[who, *(counts[who, moment] for moment in moments)] for who in sorted({who for who, _ in counts})]
        print("\n" + table(["killed", "in training", *(f"while {m}" for m in MOMENTS)], rows, right=(1, 2, 3, 4)))
    troubles = [kill.trouble for kill in torture.kills if kill.trouble]
    bad = [*lost, *troubles, *torture.differences]
    print("\n".join(bad))
    ends = f"{torture.finished} runs finished, {len(lost)} lost, {len(torture.differences)} differ"
    print(f"{len(torture.kills)} kills, {ends}")
    result = {"kills": [vars(kill) for kill in torture.kills], "finished": torture.finished, "lost": lost}
    write_json(options.json, {"recipe": str(options.recipe), **result, "differences": torture.differences})
    return int(bool(bad))


def _flags(options: Options, flags: list[str]) -> list[str]:
    if not options.recipe.is_file():
        raise UserError(f"{options.recipe}: there is no such file; give a recipe such as recipes/cls.py")
    for name in ("kills", "save_every"):
        if getattr(options, name) < 1:
            raise UserError(f"--{name.replace('_', '-')} {getattr(options, name)}: must be at least 1")
    torture_flags = ["--run.log-every", "1", "--run.save-every", str(options.save_every), "--run.resume", "auto"]
    return [*flags, *(["--run.exact", "true"] if len(options.profiles) > 1 else []), *torture_flags, "--run.trackers"]


def _places(options: Options) -> tuple[list[profiles.Profile], Path]:
    folder = TORTURE.make_room(Path(options.folder or f"runs/torture-{options.recipe.stem}"))
    chosen = [profiles.read(text) for text in options.profiles]
    for profile in chosen:
        profile.check()
    return chosen, folder
