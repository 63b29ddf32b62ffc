"""Keep the processes of a launch, and run one script after another: serving.py FOLDER [fork]; see tests/standing.py.

Each rank reads commands from its own named pipe, FOLDER/rank-R: one JSON list a line, with a number, the working
folder, the script and its arguments. When a command ends, the rank writes its status to FOLDER/NUMBER-R. The ranks end
with the test process. With `fork`, each command is a forked process, which ends as Python ends; imports are made
before the fork.
"""

import gc
import json
import os
import runpy
import sys
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


def import_all() -> None:
    """Import modules that take long, before the fork."""
    import datasets
    import transformers

    import app.run

    assert app.run and datasets and transformers.AutoModelForSequenceClassification


if __name__ == "__main__":
    if sys.argv[2:] != ["fork"]:
        main(Path(sys.argv[1]))
    elif (command := fork(Path(sys.argv[1]))) is not None:
        run_script(*command)
