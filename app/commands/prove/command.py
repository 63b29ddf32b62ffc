"""Train a recipe under several profiles from the same start, and compare what they do step by step.

    python -m app prove recipes/cls.py --profiles accelerate_configs/cpu.yaml accelerate_configs/ddp_cpu.yaml:3
    python -m app prove recipes/cls.py --profiles one.yaml many.yaml --exact false --steps 100 --optim.lr 1e-4
    python -m app prove recipes/cls.py --profiles cpu --across cpu ddp_cpu:2 fsdp_cpu:2

Every flag that is not named below goes to the recipe. A profile that is outside the tolerance of the ordinary mode is
trained once more in exact mode, which tells a mistake from rounding that grows. The exit status is 0 if all profiles
take the same steps or differ by such rounding alone, 1 if one does not, and 2 if an option is wrong.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from app.commands.own_folder import PROVE
from app.errors import UserError

if TYPE_CHECKING:
    from app.commands.prove.report import Report
    from app.commands.prove.trial import Chain

REPORT, CHART = PROVE.mark, "report.png"
# Flags of the run that are set by an option here.
INSTEAD = {"--run.dir": "--report", "--run.stop-at": "--steps", "--run.exact": "--exact"}


@dataclass
class Options:
    """What to train, under which profiles, and how to compare."""

    recipe: Annotated[Path, tyro.conf.Positional]
    """The recipe's file."""
    profiles: Annotated[tuple[str, ...], tyro.conf.arg(aliases=["--profile"])]
    """Profiles to train under; the first one is the reference. FILE:3 starts 3 processes, whatever the file says."""
    steps: int = 50
    """Number of steps to compare. The learning rate still follows the whole run that the recipe's flags describe."""
    exact: bool = True
    """true: train in exact mode, where every bit must agree. false: train in the ordinary mode, within a tolerance."""
    report: str = ""
    """Folder for the report and for the run of each profile. Default: runs/prove-RECIPE."""
    json: str = ""
    """Also write the report to this file."""
    patience: float = 600.0
    """Seconds without a step after which a run is killed; starting counts too."""
    across: tuple[str, ...] = ()
    """Train once more, from one of these profiles to the next: stopped and resumed in an order drawn by --seed."""
    seed: int = 0
    """Seed of the order of --across, and of the steps at which it stops."""


def main(options: Options, flags: list[str]) -> int:
    """Train, compare and report; return the exit status.

    Args:
        flags: of the recipe.

    Raises:
        UserError: an option is wrong, or the reference fails.
    """
    chains = _check(options, flags)
    folder = PROVE.make_room(Path(options.report or f"runs/prove-{options.recipe.stem}"))
    from app.commands.output import write_json
    from app.commands.prove import chart

    report = _train(options, flags, chains, folder)
    print(f"\n{report.text()}")
    for path in (str(folder / REPORT), options.json):
        write_json(path, report.as_dict())
    drawn = chart.draw(report, folder / CHART)
    print(f"report: {folder / REPORT}{f', {folder / CHART}' if drawn else ' (a picture needs matplotlib)'}")
    return report.status


def _train(options: Options, flags: list[str], chains: list["Chain"], folder: Path) -> "Report":
    """Train under each profile, and across profiles; stop after the first one if it cannot be the reference."""
    from app.commands.prove.report import Report
    from app.commands.prove.trial import OUTPUT, train

    report = Report(str(options.recipe), flags, options.steps, options.exact)
    for number, chain in enumerate(chains, 1):
        print(f"[{number}/{len(chains)}] {': '.join(filter(None, (chain.name, chain.path)))}", flush=True)
        into = folder / f"{number:02}-{chain.profile.file.stem if len(chain.launches) == 1 else 'across'}"
        row = report.add(train(options.recipe, flags, chain, options.exact, into, options.patience))
        if number == 1 and row.verdict in ("failed", "not run"):
            why = row.trial.ended.replace("--run.stop-at", "--steps")
            raise UserError(f"{chain.name}: {why}\nall that it printed is in {into / OUTPUT}")
        if number == 1 and row.verdict != "reference":
            break
    if report.suspects():
        _repeat_exactly(options, flags, report)
    return report


def _repeat_exactly(options: Options, flags: list[str], report: "Report") -> None:
    """Train in exact mode the reference and those runs that may differ from it by rounding alone."""
    from app.commands.prove.trial import train

    reference, suspects = None, report.suspects()
    for row in [report.rows[0], *suspects]:
        print(f"rounding, or a mistake? {row.trial.chain.name} in exact mode", flush=True)
        into = row.trial.folder.with_name(f"{row.trial.folder.name}-exact")
        trial = train(options.recipe, flags, row.trial.chain, True, into, options.patience)
        reference = reference or trial
        if row in suspects:
            report.tell_rounding(row, reference, trial)


def _check(options: Options, flags: list[str]) -> list["Chain"]:
    """Return the runs to make, the reference first."""
    from app.commands.prove.trial import Chain, draw
    from app.launching import profiles

    if not options.recipe.is_file():
        raise UserError(f"{options.recipe}: there is no such file; give a recipe such as recipes/cls.py")
    if len(options.profiles) < 2 and not options.across:
        raise UserError(f"--profiles {' '.join(options.profiles)}: give at least two; the first one is the reference")
    if len(options.across) == 1 or options.steps < 2 * bool(options.across):
        raise UserError("--across needs two profiles to go between, and --steps 2 or more")
    if options.steps < 1:
        raise UserError(f"--steps {options.steps}: must be at least 1")
    for flag in (word.partition("=")[0].replace("_", "-") for word in flags if word.startswith("--")):
        if flag in INSTEAD:
            raise UserError(f"{flag}: prove sets it; use {INSTEAD[flag]}")
    alone, across = ([profiles.read(text) for text in texts] for texts in (options.profiles, options.across))
    for profile in (*alone, *across):
        if profile.machines > 1:
            raise UserError(f"{profile.file} is for {profile.machines} machines; prove starts all on this one")
        profile.check()
    chains = [Chain([(profile, options.steps)]) for profile in alone]
    return [*chains, draw(across, options.steps, options.seed)] if across else chains
