"""Run recipes as many.py does: once.py FILE.

The first half of the file's commands is run as it is. In the second half, models of any size are made on rank 0 alone,
and others are refused.
"""

import json
import sys
from pathlib import Path
from unittest.mock import patch

from app.distributed import collectives, made_once


def make_once(build, shapes):
    """Refuse to make a model with contents but on rank 0."""

    def on_rank_0():
        assert collectives.rank() == 0
        return build()

    return original(on_rank_0, shapes)


original = made_once.make

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent.parent))
    from laws import many

    commands = json.loads(Path(sys.argv[1]).read_text())
    half = len(commands) // 2
    many.main(commands[:half])
    with patch.object(made_once, "LARGE", 0), patch.object(made_once, "make", make_once):
        many.main(commands[half:])
