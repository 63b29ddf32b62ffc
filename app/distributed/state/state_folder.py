"""What `Accelerator.save_state` writes and `load_state` reads: a folder that is whole or absent, for any layout.

    state/           models, optimizers, schedulers, averages and registered objects (sharded.py)
    random.json      the generators of random numbers of each rank
    manifest.json    size and checksum of every other file

A run's checkpoint has the same files, and its record in the place of random.json, which it does not need: `load` reads
it too.
"""

import json
from pathlib import Path
from typing import Any

from app import storage
from app.distributed import collectives
from app.distributed.state import manifest, random_states, sharded
from app.distributed.state.attempt import STATE, Attempt
from app.distributed.state.sharded import Holder
from app.errors import UserError
from app.storage.records import FileSum, NewerFormat

_RANDOM = "random.json"
_REPLACED = "replaced"  # how the name of an earlier state ends while another one takes its place


def save(accelerator: Holder, folder: Path) -> None:
    """Write all that an accelerator has prepared. Every rank takes part.

    A folder that `save` has written is replaced once the new one is whole.

    Raises:
        UserError: it could not be written, or there is something else in its place.
    """
    collectives.from_main(lambda: _check_replaceable(folder))
    states = collectives.gather(random_states.collect(accelerator.device))
    random = {"data_ranks": accelerator.data_ranks, "ranks": states}
    write = sharded.writer(accelerator)  # where one rank has what cannot be kept, all are refused here
    attempt = Attempt(accelerator.process_index)
    outcome = attempt.make(
        lambda: _start(folder),
        write,
        lambda draft, sums: _finish(draft, folder, sums, random),
    )
    if outcome.problems:
        raise UserError(f"{folder} was not written: {'; '.join(outcome.problems)}")


def _start(folder: Path) -> Path:
    """Make the folder's draft."""
    files = storage.at(folder.parent)
    files.make()
    for leftover in files.drafts(folder.name):
        if leftover != f"{folder.name}.tmp":  # a name that a user may have given
            files.delete(leftover)
    return folder.parent / files.draft(folder.name)


def _check_replaceable(folder: Path) -> None:
    """Refuse to write where there is anything but what `save` writes, or an empty folder."""
    files = storage.at(folder)
    if not files.exists() or (files.is_folder() and not files.is_link() and not files.entries()):
        return
    try:
        more = manifest.foreign_to(folder, [*manifest.listed(folder), manifest.MANIFEST])
    except (OSError, ValueError):
        more = folder.name
    if more or not files.is_file(_RANDOM):
        raise UserError(
            f"there is something in {folder} that save_state did not write ({more or STATE}): name another folder"
        )


def _finish(draft: Path, folder: Path, sums: dict[str, FileSum], random: dict[str, Any]) -> None:
    """List the draft's files, and give it the folder's name."""
    manifest.check_shared(draft, sums, "the folder of save_state")
    storage.at(draft).fill(_RANDOM, json.dumps(random))
    manifest.write(draft, {**sums, **manifest.keep(draft, [_RANDOM])})
    files = storage.at(folder.parent)
    replaced = files.put_aside(folder.name, manifest.MANIFEST, _REPLACED) if files.exists(folder.name) else ""
    try:
        files.publish(draft.name, folder.name, manifest.MANIFEST)
    except BaseException:
        if replaced:
            files.publish(replaced, folder.name, manifest.MANIFEST)
        raise
    for earlier in files.asides(folder.name, _REPLACED):
        files.delete(earlier)


def load(accelerator: Holder, folder: Path) -> None:
    """Read what `save` wrote on any layout, or a run's checkpoint, into what is prepared. Every rank takes part.

    Generators of random numbers get back their states where there are as many ranks and data ranks as wrote them;
    elsewhere they are left alone, as the numbers of one rank are no other rank's.

    Raises:
        UserError: it is not there, damaged, of another model or other optimizers, or not of this format.
    """
    if why := collectives.from_main(lambda: _why_not(folder)):
        raise UserError(why)
    collectives.everywhere(lambda: _verify(folder, accelerator.process_index, accelerator.num_processes))
    sharded.load(accelerator, str(folder / STATE))
    files = storage.at(folder)
    if files.is_file(_RANDOM):
        random = json.loads(files.read_text(_RANDOM))
        states = random["ranks"]
        if (len(states), random["data_ranks"]) == (accelerator.num_processes, accelerator.data_ranks):
            random_states.restore(states[accelerator.process_index], accelerator.device)


def _verify(folder: Path, part: int, parts: int) -> None:
    """Check a rank's share of the files."""
    try:
        manifest.verify_patiently(folder, part, parts)
    except NewerFormat as newer:
        raise UserError(str(newer)) from None
    except (OSError, ValueError) as error:
        raise UserError(f"{folder} is damaged: {error}; load another one") from None


def _earlier(folder: Path) -> str:
    """Name an earlier state that a save which was killed has put aside; empty if there is none."""
    files = storage.at(folder.parent)
    aside = files.asides(folder.name, _REPLACED) if files.is_folder() else []
    return f"; {folder.with_name(aside[-1])} is the state before the save that was killed: rename it" if aside else ""


def _why_not(folder: Path) -> str:
    """Say why a folder is none that can be read; empty where it may be."""
    files = storage.at(folder)
    if not files.is_folder():
        return f"load_state: {folder}: there is no such folder{_earlier(folder)}"
    if not files.is_file(manifest.MANIFEST) or not files.is_folder(STATE):
        return (
            f"load_state: {folder} is not a folder that this Accelerator's save_state wrote, nor a checkpoint of a run "
            "(runs/NAME/checkpoints/step-00000040); accelerate's own format is not read"
        )
    return ""
