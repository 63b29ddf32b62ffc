"""The folders in which commands train runs of their own, and what they may hold when a command is repeated."""

import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from app.commands.output import check_local
from app.errors import UserError, printable
from app.rundir.foreign import read_bytes


@dataclass(frozen=True)
class Kind:
    """A command's folder: the file by which it is known, and all other names in it.

    The file is empty, as the command makes it, or JSON with the fields `has`.
    """

    flag: str
    mark: str
    names: str
    """A regular expression."""
    has: tuple[str, ...] = ()

    def is_at(self, folder: Path) -> bool:
        """Tell whether a folder is one of this command's."""
        try:
            text = read_bytes(folder / self.mark)
            content = json.loads(text) if text else {}
        except (OSError, ValueError, RecursionError):
            return False
        return not text or (bool(self.has) and isinstance(content, dict) and content.keys() >= set(self.has))

    def make_room(self, folder: Path, keep: bool = False) -> Path:
        """Make the folder, and empty it if it is there.

        Args:
            keep: leave what is in it, which will be replaced.

        Raises:
            UserError: it holds something that the command did not write, or cannot be written.
        """
        check_local(self.flag, folder)
        try:
            if folder.exists() and (names := sorted(path.name for path in folder.iterdir())):
                foreign = [name for name in names if name != self.mark and not re.fullmatch(self.names, name)]
                if foreign or not self.is_at(folder):
                    what = printable((foreign or names)[0])
                    raise UserError(
                        f"{self.flag} {folder}: it holds something other than a report of this command ({what}); give "
                        "another folder"
                    )
                if not keep:
                    shutil.rmtree(folder)
            folder.mkdir(parents=True, exist_ok=True)
            (folder / self.mark).touch()  # so that one that is interrupted is known too
        except OSError as error:
            raise UserError(f"{self.flag} {folder}: {error.strerror}; give a folder that can be written") from None
        return folder


PROVE = Kind("--report", "report.json", r"report\.png|\d\d-.+", ("recipe", "exact", "steps"))
TORTURE = Kind("--folder", "torture", r"untouched|tortured-\d+|output")
LR_RANGE = Kind("--report", "lr-range.json", r"lr-range\.png|output\.txt|tmp\w+", ("lr", "loss"))


def lies_in_one(run: Path) -> bool:
    """Tell whether a run was trained by one of these commands."""
    place = run.absolute()
    return any(kind.is_at(folder) for folder in place.parents[:2] for kind in (PROVE, TORTURE, LR_RANGE))
