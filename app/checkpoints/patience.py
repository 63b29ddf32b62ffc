"""Waiting for a store that is away: a checkpoint goes up once it is back, while training goes on."""

import errno
import time
from collections.abc import Callable
from typing import Any, TypeVar

Result = TypeVar("Result")
LONGEST = 900.0  # seconds for which one part of a save is tried again
PAUSE = 5.0  # seconds between two tries; each of them waits for the store itself, see app/storage/objects.py
_AWAY = {errno.EIO, errno.ETIMEDOUT}  # what a store that is down looks like; refused credentials do not pass by waiting


class Patience:
    """Tries parts of one save again while the store is away, and says so once."""

    def __init__(self, tell: Callable[[OSError], Any], on_try: Callable[[], Any] = lambda: None):
        """Call `tell` at the first failure, and `on_try` before each further try."""
        self._tell, self._on_try, self._told = tell, on_try, False

    def __call__(self, act: Callable[[], Result]) -> Result:
        """Do something that may be done again.

        Raises:
            OSError: it fails for another reason, or the store stays away.
        """
        end = time.monotonic() + LONGEST
        while True:
            try:
                return act()
            except OSError as error:
                if error.errno not in _AWAY or time.monotonic() > end:
                    raise
                if not self._told:
                    self._told = True
                    self._tell(error)
            time.sleep(PAUSE)
            self._on_try()


def at_once(act: Callable[[], Result]) -> Result:
    """Do something once."""
    return act()
