"""What lies in a folder that a run is to have: whether it is a run's, or holds other things, or leads elsewhere."""

import re
from collections.abc import Iterator
from pathlib import Path

from app import storage
from app.errors import UserError, printable
from app.rundir.foreign import fields_of
from app.rundir.lock import is_lock, is_released
from app.rundir.run_record import RUN, is_a_runs

# All that a run writes by itself; no other name is ever written, and none of these may be a link.
FILES = (RUN, "config.yaml", "recipe.py", "metrics.jsonl", "diagnostics.jsonl", "audit.jsonl", "lock")
FOLDERS = ("checkpoints", "images", "model", "collectives", "wandb", "tensorboard")
# What a file system, a desktop or git puts into a folder that is otherwise empty.
_OF_SYSTEMS = re.compile(
    r"\.DS_Store|\._.*|\.(git)?keep|\.gitignore|\.directory|\.nfs.*|\.snapshots?|\.Trash-\d+|lost\+found|Thumbs\.db|"
    r"desktop\.ini"
)
_OF_OUTPUT = re.compile(r".*\.(log|out|err)|log(\.txt)?")  # where the output of a launch usually goes
_SHOWN = 4  # names in a message


def is_run(folder: Path, has_checkpoint: bool = False) -> bool:
    """Tell whether a folder is a run's, by what only a run has written: its run.json.

    If that is damaged or missing, it is the lock of a run that was killed, or checkpoints. Whether those are a run's is
    seen when the newest good one is looked for, before anything is written.
    """
    fields = fields_of(folder / RUN)
    if fields is not None:
        return is_a_runs(fields, is_lock(folder))
    return has_checkpoint or (is_lock(folder) and not is_released(folder))


def others(folder: Path) -> list[str]:
    """List what lies in a folder that no run has, and that is neither a system's nor the output of a launch.

    Raises:
        OSError: the folder cannot be read.
    """
    files = storage.at(folder)
    drafts = {draft for name in (*FILES, *FOLDERS) for draft in files.drafts(name)}

    def is_other(entry: storage.Entry) -> bool:
        released = entry.name == "lock" and is_released(folder)
        expected = released or entry.name in drafts or _OF_SYSTEMS.fullmatch(entry.name)
        return not (expected or _takes_output(files, entry))

    return [entry.name for entry in files.entries() if is_other(entry)]


def _takes_output(files: storage.Storage, entry: storage.Entry) -> bool:
    """Tell whether a file holds what a launch prints: by its name, or because this process writes there."""
    if entry.kind is not storage.Kind.FILE:
        return False
    return bool(_OF_OUTPUT.fullmatch(entry.name)) or files.takes_output(entry.name)


def check(folder: Path, has_checkpoint: bool) -> None:
    """Refuse a folder that holds other things than a run, and one whose parts are links. It may be a link itself.

    Args:
        has_checkpoint: whether it has folders that are called as checkpoints are.

    Raises:
        UserError: it does, and what they are.
        OSError: the folder cannot be read.
    """
    files = storage.at(folder)
    if not files.is_folder():
        return
    for name in () if files.is_remote else (*FILES, *FOLDERS, *_inside_checkpoints(files)):  # a store has no links
        if files.is_link(name):
            raise UserError(
                f"--run.dir {folder}: {printable(name)} is a link, and a run follows no link "
                "out of its folder: remove it, or keep the whole folder elsewhere and make the folder itself the link"
            )
    if is_run(folder, has_checkpoint):
        return
    names = others(folder)
    if not names:
        return
    shown = ", ".join(printable(name) for name in names[:_SHOWN])
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    damaged = ""
    if RUN in names:
        damaged = " (its run.json is damaged or another program's, and no checkpoint or lock shows that it is a run's)"
    raise UserError(
        f"--run.dir {folder} holds other things than a run: {shown}{more}{damaged}. Give the name of a new folder, or "
        "move them away; nothing was written there"
    )


def _inside_checkpoints(files: storage.Storage) -> Iterator[str]:
    """Yield the names of the checkpoints in a folder, and of what lies in them."""
    for checkpoint in files.entries("checkpoints") if files.is_folder("checkpoints") else []:
        if checkpoint.name.startswith("checkpoints/step-"):
            yield checkpoint.name
            if checkpoint.kind is storage.Kind.FOLDER:
                yield from (entry.name for entry in files.walk(checkpoint.name))


def sweep(folder: Path) -> None:
    """Delete the drafts of files and of the model that killed launches of the run have left."""
    files = storage.at(folder)
    for name in (*FILES, "model"):
        for draft in files.drafts(name):
            files.delete(draft)
