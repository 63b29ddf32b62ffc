"""Keep the processes of a launch, and run one script after another; see tests/standing.py.

    serving.py FOLDER SOCKET    as a rank: a fork of the process that listens at SOCKET does the rank's work
    serving.py FOLDER fork      each command is a forked process, which ends as Python ends
    serving.py FOLDER source    listen at FOLDER/socket, and fork a process for each rank that connects

Each rank reads commands from its own named pipe, FOLDER/rank-R: one JSON list a line, with a number, the working
folder, the script and its arguments. When a command ends, the rank writes its status to FOLDER/NUMBER-R. The ranks end
with the test process. `fork` and `source` import what recipes import first, once for all their forks.
"""

import faulthandler
import gc
import json
import os
import runpy
import signal
import socket
import struct
import sys
import threading
import time
from pathlib import Path


def commands(pipe: Path):
    """Yield commands until the writer is gone."""
    # Opened without waiting for a writer: the test process opened its end before this process started, or has ended.
    descriptor = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    os.set_blocking(descriptor, True)
    with open(descriptor) as lines:
        yield from map(json.loads, lines)


def run_script(folder: str, script: str, arguments: list[str]) -> None:
    """Run a script as Python would, then restore what it set for the whole process."""
    environment, mask = dict(os.environ), os.umask(0o022)
    os.umask(mask)
    before = sys.path[:], sys.argv, sys.excepthook
    os.chdir(folder)
    sys.path[0], sys.argv = (folder if script.startswith("-") else str(Path(script).parent)), [script, *arguments]
    try:
        run(script)
    except Exception:
        _end_as_a_failure()
        raise
    _forget(Path(script).parent)
    sys.path[:], sys.argv, sys.excepthook = before
    os.umask(mask)
    os.environ.clear()
    os.environ.update(environment)


def _end_as_a_failure() -> None:
    """Have Python end with the status of its error, also after an earlier script whose Run ended well."""
    if environment := sys.modules.get("app.distributed.environment"):
        environment.leave_with = None


def _forget(folder: Path) -> None:
    """Give the next script a Python without this one's modules and settings of torch."""
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if file and name != "__main__" and Path(file).parent == folder != Path(__file__).parent:
            del sys.modules[name]
    if torch := sys.modules.get("torch"):
        torch.set_default_dtype(torch.float32)
        torch.use_deterministic_algorithms(False)


def run(script: str) -> None:
    """Run a file, or the argument of Python's -m or -c."""
    if script.startswith("-"):
        sys.argv = sys.argv[1:]
    if script == "-m":
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    elif script == "-c":
        exec(sys.argv[0], {"__name__": "__main__"})
    else:
        runpy.run_path(script, run_name="__main__")


def main(folder: Path) -> None:
    """Serve until the test process ends."""
    rank = os.environ.get("RANK", "0")
    for number, where, script, arguments in commands(folder / f"rank-{rank}"):
        run_script(where, script, arguments)
        gc.collect()  # models in reference cycles would keep their memory
        end(folder / f"{number}-{rank}", 0)


def end(file: Path, status: int) -> None:
    """Write a command's status, after all of its output is flushed."""
    sys.stdout.flush()
    sys.stderr.flush()
    draft = file.with_suffix(".draft")
    draft.write_text(str(status))
    draft.rename(file)


def fork(folder: Path) -> tuple[str, str, list[str]] | None:
    """Fork a process for each command, and return the command in it; return None when the test process ends."""
    import_all()
    for number, where, script, arguments in commands(folder / "rank-0"):
        child = os.fork()
        if not child:
            os.setsid()
            return where, script, arguments
        end(folder / f"{number}-0", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    return None


def source(folder: Path) -> Path | None:
    """Fork a process for each rank that connects, and return the rank's folder in it; None when the tests end."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(folder / "socket"))
    listener.listen()
    import_all()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the forks
    threading.Thread(target=_end_with_tests, args=[folder / "rank-0"], daemon=True).start()
    while True:
        rank, _ = listener.accept()
        sent, descriptors, _, _ = socket.recv_fds(rank, 1 << 20, 3)
        (size,) = struct.unpack("<I", sent[:4])
        sent = sent[4:]
        while len(sent) < size:
            sent += rank.recv(1 << 20)
        if not os.fork():
            listener.close()
            return _become(rank, descriptors, json.loads(sent))
        for descriptor in (rank.detach(), *descriptors):
            os.close(descriptor)


def _end_with_tests(pipe: Path) -> None:
    for _ in commands(pipe):
        pass
    os._exit(0)


def _become(rank: socket.socket, descriptors: list[int], about: dict) -> Path:
    """Take over a rank's environment and output, and end when the rank ends; return the rank's folder."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    for target, descriptor in enumerate(descriptors):
        os.dup2(descriptor, target)
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(about["environment"])
    os.chdir(about["cwd"])

    def end_with_rank() -> None:
        rank.recv(1)
        if _rank:  # it was killed
            faulthandler.dump_traceback()
        os._exit(1)

    threading.Thread(target=end_with_rank, daemon=True).start()
    _rank.append(rank)
    return Path(about["folder"])


_rank: list[socket.socket] = []  # of this fork, until its work is done


def hand_over(folder: Path, place: str) -> int:
    """Have a fork do this rank's work, and return its status."""
    # A rank reads `use_cpu` from the profile that its launcher names; the fork's parent is none.
    about = {"environment": {**os.environ, "ACCELERATE_USE_CPU": "true"}, "cwd": os.getcwd(), "folder": str(folder)}
    sent = json.dumps(about).encode()
    with socket.socket(socket.AF_UNIX) as fork:
        while fork.connect_ex(place):
            time.sleep(0.05)  # it has not begun to listen yet
        socket.send_fds(fork, [struct.pack("<I", len(sent))], [0, 1, 2])
        fork.sendall(sent)
        return 0 if fork.recv(1) else 1


def import_all() -> None:
    """Import modules that take long, before the fork."""
    import datasets
    import transformers

    import app.run

    assert app.run and datasets and transformers.AutoModelForSequenceClassification
    gc.collect()
    gc.freeze()  # collections in the forks would copy its memory


if __name__ == "__main__":
    how = sys.argv[2]
    if how == "fork":
        if (command := fork(Path(sys.argv[1]))) is not None:
            run_script(*command)
    elif how == "source":
        main(source(Path(sys.argv[1])))
        _rank.pop().send(b"0")
    else:
        sys.exit(hand_over(Path(sys.argv[1]), how))
