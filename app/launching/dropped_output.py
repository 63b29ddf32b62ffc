"""Output whose reader leaves, as in `... | head`: what is printed from then on is dropped, and nothing else changes."""

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
    """Let this process go on when a reader of its output has left. A notebook's streams are left alone."""
    for name in ("stdout", "stderr"):
        old = getattr(sys, name)
        if type(old) is io.TextIOWrapper and old is getattr(sys, f"__{name}__"):
            old.flush()
            file = io.FileIO(old.fileno(), "w", closefd=False)
            at_once = old.write_through  # as with PYTHONUNBUFFERED: nothing may wait here
            raw = cast(io.BytesIO, file if at_once else io.BufferedWriter(file))
            setattr(sys, name, _Stream(raw, old.encoding, old.errors, None, old.line_buffering, at_once))
