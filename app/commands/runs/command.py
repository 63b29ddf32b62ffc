"""List runs, with their best scores and chosen settings; or the checkpoints of one run.

    python -m app runs
    python -m app runs /data/runs other --columns optim.lr run.global-batch --sort best
    python -m app runs runs/cls --verify
    python -m app runs runs/cls --price 2.5 --mtbf 24
    python -m app runs runs/cls --status

Looks into folders three levels deep. A run is `running`, `finished`, `preempted` (stopped with steps left), `failed`,
or `lost` (its folder says running, but its process is gone). Repeating its command resumes it. For a folder that is a
run itself, lists its checkpoints, and where its time went.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from app.commands.output import table, write_json
from app.distributed.environment import PREEMPTED
from app.errors import UserError, printable, whole_urls

if TYPE_CHECKING:
    from app.rundir.history import History

RUNNING = 3  # the exit status of --status for a run that some process goes on with


@dataclass
class Options:
    """Where to look for runs, and what to show of them."""

    folders: Annotated[tuple[Path, ...], tyro.conf.Positional] = (Path("runs"),)
    """Folders of runs, or folders that contain some."""
    columns: tuple[str, ...] = ()
    """Settings to show as well, by their names without the dashes, such as optim.lr."""
    sort: str = ""
    """Order of the runs: best (the best score first), score, changed, run, status, steps, layout, or a setting. With a
    minus sign, the other way round: --sort=-optim.lr. Default: the one that changed last comes first."""
    all: bool = False
    """List the runs that prove, torture and lr-range have trained too. Without it they are listed only if their folder
    is named."""
    status: bool = False
    """For one run: print its status alone, and end with 0 if it is finished, 75 if it is preempted (repeat its command
    to go on), 3 if it is running, and 1 if it has failed or is lost."""
    verify: bool = False
    """For one run: read every file of its checkpoints, and compare it with its checksum."""
    price: float = 0.0
    """What one device costs an hour, in any currency: the list says what each run has cost, and for one run, what on.
    0: no money."""
    mtbf: float = 0.0
    """For one run: mean hours between two failures of all its hardware together (one failure of one machine stops the
    run). Says how often to save, and what saving and failures cost then. 0: not told."""
    json: str = ""
    """Also write the list to this file."""


def main(options: Options) -> int:
    """Print the list, and return the exit status: 1 if a checkpoint is damaged; see --status for its own.

    Raises:
        UserError: a folder does not exist, or no run has such a setting.
    """
    from app.commands import costs
    from app.commands.runs import checkpoints, listing
    from app.rundir import history

    if options.status:
        return _status(options)
    costs.check(options.price, options.mtbf)
    runs, problems = history.find(options.folders)
    hidden = [] if options.all else [run for run in runs if _is_left_out(run, options.folders)]
    runs = [run for run in runs if run not in hidden]
    if len(runs) == len(options.folders) == 1 and runs[0].folder == options.folders[0]:
        if options.columns or options.sort:
            raise UserError(f"--columns and --sort are about several runs, and {runs[0].folder} is one: leave them out")
        return checkpoints.show(runs[0], options.verify, options.price, options.mtbf, options.json)
    if options.verify:
        raise UserError("--verify is about the checkpoints of one run: give its folder, as in runs/cls")
    if options.mtbf:
        raise UserError("--mtbf is about one run: give its folder, as in runs/cls")
    if not runs:
        print(f"no runs in {', '.join(printable(whole_urls(str(folder))) for folder in options.folders)}")
        _tell_left_out(len(hidden), problems)
        write_json(options.json, {"runs": []})
        return 0
    settings = listing.settings_named(options.columns, runs)
    runs = listing.ordered(runs, options.sort)
    price = options.price
    print(table(listing.head(settings, price), [listing.row(run, settings, price) for run in runs], right=(2,)))
    for run in runs:
        if run.status == "failed":
            print(f"\n{run.place}: {run.record.error}")
    _tell_left_out(len(hidden), problems)
    write_json(options.json, {"runs": [listing.for_programs(run, settings, price) for run in runs]})
    return 0


def _status(options: Options) -> int:
    """Print the status of one run, and return the exit status that stands for it."""
    from app.rundir import history

    if (
        len(options.folders) != 1
        or options.columns
        or options.sort
        or options.verify
        or options.price
        or options.mtbf
        or options.json
    ):
        raise UserError("--status is about one run: give its folder, as in runs/cls, and nothing else")
    status = history.read(options.folders[0]).status
    print(status)
    return {"finished": 0, "preempted": PREEMPTED, "running": RUNNING}.get(status, 1)


def _is_left_out(run: "History", asked: tuple[Path, ...]) -> bool:
    """Tell whether a command trained a run for a report, and nobody has asked for its folder."""
    from app.commands.own_folder import lies_in_one

    named = {folder.absolute() for folder in asked}
    place = run.folder.absolute()
    return not named & {place, place.parent} and lies_in_one(place)


def _tell_left_out(count: int, problems: list[str]) -> None:
    for problem in problems:
        print(f"\nleft out: {printable(problem)}")
    if count:
        print(f"\nleft out: {count} run{'s' * (count != 1)} of prove, torture or lr-range; --all lists them too")
