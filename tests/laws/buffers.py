"""Train models whose buffers training changes, changing.py's and norms.py's, in one launch: buffers.py FOLDER [LEFT].

LEFT: as for norms.py.
"""

import os
import sys
from pathlib import Path

import changing
import norms

from app.distributed.environment import report_user_errors


def main(folder: Path, left: str = "") -> None:
    """Make each in a folder of its own."""
    for name in ("changing", "norms"):
        (folder / name).mkdir(exist_ok=True)
    changing.main(folder / "changing", os.environ.get("RANK", "0"))
    norms.main(folder / "norms", left)


if __name__ == "__main__":
    report_user_errors()
    main(Path(sys.argv[1]), *sys.argv[2:])
