"""Stand in for Python: have a fork of a Python that has made the imports (serving.py) run a script, and end as it ends.

forked.py SOCKET SCRIPT|-m|-c ARGUMENTS...

Signals that it gets go to the fork; when it is killed, so is the fork. It imports little, because it is started often.
"""

import json
import os
import signal
import socket
import struct
import sys
from contextlib import suppress

PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGABRT)


def ask(place: str, env: dict, folder: str, words: list[str], files: list[int]) -> tuple[socket.socket, int]:
    """Have a fork do work; return a socket, which will tell its status, and its process id.

    Args:
        words: the script and its arguments.
        files: its input, output and errors.
    """
    sent = json.dumps({"env": env, "folder": folder, "words": words}).encode()
    fork = socket.socket(socket.AF_UNIX)
    fork.connect(place)
    socket.send_fds(fork, [struct.pack("<I", len(sent))], files)
    fork.sendall(sent)
    told = fork.recv(4)
    if not told:
        raise ConnectionError("the Python that forks has ended")
    return fork, struct.unpack("<i", told)[0]


def status_of(fork: socket.socket) -> int:
    """Wait for a fork; return its status, negative for a signal."""
    told = fork.recv(4)
    return struct.unpack("<i", told)[0] if told else 1


def main(place: str, words: list[str]) -> None:
    """Run the script in a fork, and end as the fork ends."""
    signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON)
    env = dict(os.environ)
    if "RANK" in env:  # a rank reads `use_cpu` from the profile that its launcher names, whose child the fork is not
        env["ACCELERATE_USE_CPU"] = "true"
        env["LAUNCHER"] = str(os.getppid())
    fork, pid = ask(place, env, os.getcwd(), words, [0, 1, 2])

    def pass_on(number: int, _) -> None:
        with suppress(ProcessLookupError):  # it has ended, and its status is on its way
            os.kill(pid, number)

    for number in PASSED_ON:
        signal.signal(number, pass_on)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)
    status = status_of(fork)
    if status < 0:
        if -status != signal.SIGKILL:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


if __name__ == "__main__":
    # Forks have what is asked for: output without a buffer (torchrun), and a short start without `site` (doctor).
    main(sys.argv[1], [word for word in sys.argv[2:3] if word not in ("-u", "-S")] + sys.argv[3:])
