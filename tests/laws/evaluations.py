"""Make the evaluations of drawn.py, of scored.py and of recipes in one launch: evaluations.py FOLDER [COMMANDS].

COMMANDS: the recipes' commands, in a file as for many.py.
"""

import json
import os
import sys
from pathlib import Path

import drawn
import many
import scored

from app.distributed.environment import report_user_errors


def main(folder: Path, commands: str = "") -> None:
    """Make each in a folder of its own."""
    for name in ("drawn", "scored"):
        (folder / name).mkdir(exist_ok=True)
    drawn.main(folder / "drawn", os.environ.get("RANK", "0"))
    scored.main(folder / "scored")
    if commands:
        many.main(json.loads(Path(commands).read_text()))


if __name__ == "__main__":
    report_user_errors()
    main(Path(sys.argv[1]), *sys.argv[2:])
