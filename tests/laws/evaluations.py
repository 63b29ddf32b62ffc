"""Make the evaluations of drawn.py and of scored.py in one launch: evaluations.py FOLDER."""

import os
import sys
from pathlib import Path

import drawn
import scored

from app.distributed.environment import report_user_errors


def main(folder: Path) -> None:
    """Make each in a folder of its own."""
    for name in ("drawn", "scored"):
        (folder / name).mkdir(exist_ok=True)
    drawn.main(folder / "drawn", os.environ.get("RANK", "0"))
    scored.main(folder / "scored")


if __name__ == "__main__":
    report_user_errors()
    main(Path(sys.argv[1]))
