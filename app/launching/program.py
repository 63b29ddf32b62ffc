"""The name of this program as the user typed it: messages with a command to type take it from here."""

import os
from pathlib import Path

_VARIABLE = "SAMESTEP_PROGRAM"  # in the environment, so that the processes of a launch have it too
_SCRIPT, _MODULE = "samestep", "python -m app"


def remember(started_as: str) -> None:
    """Keep the name for this process and all that it starts.

    Args:
        started_as: `sys.argv[0]`.
    """
    if Path(started_as).stem == _SCRIPT:
        os.environ[_VARIABLE] = _SCRIPT


def name() -> str:
    """Return `samestep`, or `python -m app` where this process does not come from that program."""
    return _SCRIPT if os.environ.get(_VARIABLE) == _SCRIPT else _MODULE


def typed(words: str) -> str:
    """Return a command of this program, given the words after its name."""
    return f"{name()} {words}"


def as_typed(text: str) -> str:
    """Return a text in which the commands `python -m app ...` have the name that the user typed."""
    return text.replace(_MODULE, name())
