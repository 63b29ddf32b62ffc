"""The processes that load data for a run: a signal that asks the run to stop leaves them alone."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from app.distributed.notice import SIGNALS


@contextmanager
def starting_helpers() -> Iterator[None]:
    """Start the processes that load data inside this block; each calls `leave_to_parent` when it begins.

    Terminals, torchrun and schedulers send a stop signal to all processes of a run. It must not end a helper, nor its
    threads that exist before its first line of Python. So helpers are started with the signals blocked.
    """
    held = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS if hasattr(signal, "sigwaitinfo") else ())
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, held)


def leave_to_parent() -> None:
    """Have a process that loads data ignore signals that ask the run to stop; only its parent ends it.

    Programs that it starts (such as a video decoder) inherit SIGTERM as blocked, and are ended by SIGKILL.
    """
    for number in (signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    if hasattr(signal, "sigwaitinfo"):
        threading.Thread(target=_end_with_parent, name="signals", daemon=True).start()


def _end_with_parent() -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != os.getppid():
        pass
    os._exit(0)
