"""Run scripts in forks of a Python that has made the imports, and keep the ranks of a launch; see tests/standing.py.

    serving.py source SOCKET PYTHON [MODULE...]
        import the modules, or what recipes import; listen, and fork a process for each script, to which PYTHON is the
        Python that starts more of them (forked.py); ends with its input
    serving.py serve FOLDER
        as a rank: run one script after another

A rank that serves reads commands from its own named pipe, FOLDER/rank-R: one JSON list a line, with a number, the
working folder, the script and its arguments. When a command ends well, it writes the number, its process id and its
launcher's into the pipe that all ranks share, FOLDER/done. It ends with the test process.
"""

import atexit
import ctypes
import faulthandler
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import struct
import sys
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

# What recipes and commands import, some of it only when they first need it.
IMPORTED = [
    "tyro._cli",
    "app.run",
    "app.launching.flags",
    "app.data.tables.readers",
    "app.data.text.labeled_text",
    "app.data.corpus.documents",
    "app.data.images.labeled_images",
    "app.data.volumes.pairs",
    "app.data.corpus.blocks",
    "app.tasks.language.attention",
    "app.tasks.pretrained",
    "datasets",
    "datasets.io.generator",
    "monai.networks.nets",
    "PIL.ImageDraw",
    "sacrebleu",
    "safetensors.torch",
    "sklearn.datasets",
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.run",
    "torch.distributed.checkpoint.state_dict",
    "torch.nn.attention.varlen",
    "torch.utils.serialization",
    "transformers.generation",
    "transformers.loss.loss_utils",
    "transformers.models.bert.modeling_bert",
    "transformers.models.bit.modeling_bit",
    "transformers.models.conditional_detr.modeling_conditional_detr",
    "transformers.models.deformable_detr.image_processing_pil_deformable_detr",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.llama.modeling_llama",
    "transformers.models.resnet.modeling_resnet",
    "transformers.models.t5.modeling_t5",
    "transformers.models.vit.modeling_vit",
]
PR_SET_PDEATHSIG = 1
RECIPES = Path(__file__).parents[2] / "recipes"


def serve(folder: Path) -> None:
    """Run commands until the test process ends."""
    rank = os.environ.get("RANK", "0")
    # Opened without waiting for a writer: the test process opened its end before this process started, or has ended.
    descriptor = os.open(folder / f"rank-{rank}", os.O_RDONLY | os.O_NONBLOCK)
    os.set_blocking(descriptor, True)
    processes = f"{os.getpid()} {os.environ.get('LAUNCHER', '')}"
    done = os.open(folder / "done", os.O_WRONLY | os.O_NONBLOCK)
    with open(descriptor) as lines:
        for number, where, script, arguments in map(json.loads, lines):
            run_and_restore(where, script, arguments)
            gc.collect()  # models in reference cycles would keep their memory
            sys.stdout.flush()
            sys.stderr.flush()
            os.write(done, f"{number} {processes}\n".encode())  # one write of a short line is not divided


def run_and_restore(folder: str, script: str, arguments: list[str]) -> None:
    """Run a script as Python would, then restore what it set for the whole process."""
    environment, mask = dict(os.environ), os.umask(0o022)
    os.umask(mask)
    before = sys.path[:], sys.argv, sys.excepthook
    try:
        run(folder, script, arguments)
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
    if folder != Path(__file__).parent:
        for name, module in list(sys.modules.items()):
            file = getattr(module, "__file__", None)
            if file and name != "__main__" and os.path.dirname(file) == str(folder):
                del sys.modules[name]
    if torch := sys.modules.get("torch"):
        torch.set_default_dtype(torch.float32)
        torch.use_deterministic_algorithms(False)


def run(folder: str, script: str, arguments: list[str]) -> None:
    """Run a file, or the argument of Python's -m or -c, in a folder; after -P, that folder is not searched."""
    os.chdir(folder)
    if is_safe := script == "-P":
        script, *arguments = arguments
    place = folder if script.startswith("-") else str(Path(script).parent)
    sys.path[0] = os.devnull if is_safe else place
    sys.argv = list(arguments) if script.startswith("-") else [script, *arguments]
    if script == "-m":
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    elif script == "-c":
        exec(sys.argv[0], {"__name__": "__main__"})
    else:
        runpy.run_path(script, run_name="__main__")


def source(place: str, python: str, *imports: str) -> Callable[[], None]:
    """Fork a process for each script that is asked for, and return the work to do in it."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(place)
    listener.listen()
    for name in imports or IMPORTED:
        importlib.import_module(name)
    if not imports:
        _read_flags()
        _step_once()
    sys.executable = python
    gc.collect()
    gc.freeze()  # collections in the forks would copy its memory
    gc.set_threshold(20_000)  # short runs make little that only a collection frees
    threading.Thread(target=_end_with_input, daemon=True).start()
    while True:
        asking, _ = listener.accept()
        sent, files, _, _ = socket.recv_fds(asking, 1 << 20, 3)
        if not sent:  # it only looked whether somebody listens
            continue
        (size,) = struct.unpack("<I", sent[:4])
        sent = sent[4:]
        while len(sent) < size and (more := asking.recv(1 << 20)):
            sent += more
        if len(sent) < size:  # who asked was killed
            continue
        if not (child := os.fork()):
            listener.close()
            return _become(asking, files, **json.loads(sent))
        with suppress(OSError):  # who asked was killed; the fork finds that out too
            asking.send(struct.pack("<i", child))
        threading.Thread(target=_tell_status, args=[child, asking], daemon=True).start()
        for file in files:
            os.close(file)


def _read_flags() -> None:
    """Read the flags of all recipes once: tyro remembers what it finds out, or each run takes 0.1 s longer."""
    from many import load

    from app import parse

    for recipe in sorted(RECIPES.glob("*.py")):
        parse(load(str(recipe)).Config, [])
        del sys.modules[recipe.stem]


def _step_once() -> None:
    """Do what a process does only once: torch's first step and the patterns of transformers' saved names take 0.1 s."""
    import torch
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    layer = torch.nn.Linear(16, 16)
    optimizer = torch.optim.AdamW(layer.parameters(), fused=True)
    inner = torch.nn.functional.gelu(layer(torch.ones(4, 16))).view(1, 1, 4, 16)
    torch.nn.functional.scaled_dot_product_attention(inner, inner, inner).sum().backward()
    optimizer.step()
    get_checkpoint_conversion_mapping("bert")


def _end_with_input() -> None:
    sys.stdin.read()
    os._exit(0)


def _tell_status(child: int, asking: socket.socket) -> None:
    """Wait for a fork, and tell who asked for it how it ended."""
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    with suppress(OSError):
        asking.send(struct.pack("<i", status))
    asking.close()


def _become(
    asking: socket.socket, files: list[int], env: dict[str, str], folder: str, words: list[str]
) -> Callable[[], None]:
    """Take over an environment and files, and end when who asked ends; return the work."""
    os.setsid()
    if sys.platform == "linux":  # it may be stopped when the Python that has forked it ends (standing.py)
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    for target, file in enumerate(files):
        os.dup2(file, target)
        os.close(file)
    os.environ.clear()
    os.environ.update(env)
    tempfile.tempdir = None  # it was read from another environment
    sys.path[1:1] = [path for path in env.get("PYTHONPATH", "").split(os.pathsep) if path and path not in sys.path]

    def end_with_asking() -> None:
        asking.recv(1)  # nothing comes: it was killed, or waits no longer
        faulthandler.dump_traceback()
        os._exit(1)

    threading.Thread(target=end_with_asking, daemon=True).start()
    script, *arguments = words
    return lambda: run(folder, script, arguments)


def end_as_python(act: Callable[[], None]) -> NoReturn:
    """Act, and end the process as Python would, but for its memory.

    Taking apart the modules that are shared with other forks would copy each page of them.
    """
    status, interrupted = 0, False
    try:
        act()
    except KeyboardInterrupt as error:
        interrupted = True
        sys.excepthook(type(error), error, error.__traceback__)
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        if not isinstance(end.code, int | None):
            print(end.code, file=sys.stderr)
    except BaseException as error:
        status = 1
        sys.excepthook(type(error), error, error.__traceback__)
    threading._shutdown()  # waits for threads, as Python does
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    if interrupted:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(status & 0xFF)


if __name__ == "__main__":
    how, *words = sys.argv[1:]
    if how == "source":
        end_as_python(source(*words))
    else:
        serve(Path(*words))
