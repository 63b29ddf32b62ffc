"""Output that is not as usual: its reader leaves, as in `... | head`, it is closed, or it cannot show a letter.

What is printed is then dropped or written with escapes, and nothing else changes.
"""

import io
import os
import sys
from typing import cast


class _Stream(io.TextIOWrapper):
    """A text stream that is never broken."""

    def write(self, text: str) -> int:
        """Write a text, or drop it if nobody reads any more."""
        try:
            return super().write(text)
        except BrokenPipeError:
            self._drop()
            return len(text)

    def flush(self) -> None:
        """Write what is buffered, or drop it if nobody reads any more."""
        try:
            super().flush()
        except BrokenPipeError:
            self._drop()
            super().flush()

    def _drop(self) -> None:
        """Have the file descriptor lead nowhere; what is buffered goes there too."""
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self.fileno())
        os.close(nowhere)


def outlive_readers() -> None:
    """Let this process go on whatever happens to its output. A notebook's streams are left alone.

    A letter that the terminal's encoding lacks is written as an escape, such as \\xe9.
    """
    for number, name in enumerate(("stdout", "stderr"), 1):
        old = getattr(sys, name)
        if old is None:  # it was closed when Python began
            _hold(number)
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115  # until the process ends
        elif type(old) is io.TextIOWrapper and old is getattr(sys, f"__{name}__"):
            old.flush()
            file = io.FileIO(old.fileno(), "w", closefd=False)
            at_once = old.write_through  # as with PYTHONUNBUFFERED: nothing may wait here
            raw = cast(io.BytesIO, file if at_once else io.BufferedWriter(file))
            setattr(sys, name, _Stream(raw, old.encoding, "backslashreplace", None, old.line_buffering, at_once))


def _hold(number: int) -> None:
    """Have a closed file descriptor lead nowhere: else the next file that is opened would get its number, and output.

    Libraries write to the numbers themselves.
    """
    try:
        os.fstat(number)
    except OSError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        if nowhere != number:
            os.dup2(nowhere, number)
            os.close(nowhere)
