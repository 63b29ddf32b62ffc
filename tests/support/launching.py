"""Start real launches, within a time limit that ends every process they began; read what runs have left."""

import functools
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
import torch.distributed.checkpoint as dcp
import yaml
from safetensors.torch import load_file

from app.distributed.state.attempt import STATE
from app.distributed.state.safe_reader import StateReader
from app.launching.launcher import family, kill_tree, launcher_words
from app.rundir.throughput import SPEEDS

ROOT = Path(__file__).parents[2]
PROFILES = ROOT / "accelerate_configs"


@dataclass
class Result:
    """How a command ended, and all that it printed."""

    status: int
    output: str


def environment(more: dict | None = None) -> dict[str, str]:
    """Return what every command finds in its environment, and more; options of this pytest are not those of another."""
    ours = {name: value for name, value in os.environ.items() if name != "PYTEST_ADDOPTS"}
    return {**ours, "HF_HUB_OFFLINE": "1", "PYTHONFAULTHANDLER": "1", **(more or {})}


def python_path(*folders: Path) -> str:
    """Return a PYTHONPATH with folders before what it has already."""
    return os.pathsep.join([*map(str, folders), *filter(None, [os.environ.get("PYTHONPATH")])])


def kill_with_stacks(pid: int) -> None:
    """Kill a process and all its descendants, once they have printed where each of their threads is."""
    for member in family(pid):
        with suppress(psutil.Error):
            member.send_signal(signal.SIGABRT)  # Python's fault handler prints the stacks at it
    time.sleep(1)
    kill_tree(pid)


def run(words: list, cwd: Path = ROOT, timeout: float = 150, env: dict | None = None) -> Result:
    """Run a command to its end; past `timeout` seconds, kill it and all its descendants, and fail.

    The failure shows where every thread of every process was.
    """
    words = [str(word) for word in words]
    process = subprocess.Popen(
        words,
        cwd=cwd,
        env=environment(env),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        kill_with_stacks(process.pid)
        output, _ = process.communicate()
        raise AssertionError(f"still running after {timeout} s: {' '.join(words)}\n{output[-12000:]}") from None
    return Result(process.returncode, output)


def launch(profile: str | Path, processes: int, *words, **options) -> Result:
    """Run a script with its flags under `accelerate launch` and one of the project's profiles, or a file."""
    return run(launcher_words(file_of(profile), processes if processes > 1 else 0, *words), **options)


def python(*words, timeout: float = 150, **env: str) -> Result:
    """Run Python with a script, -m or -c, as `run` does."""
    return run([sys.executable, *words], timeout=timeout, env=env)


def filled(root: Path, script: Path, here: Callable[..., None] | None = None) -> Callable[..., tuple[Path, str]]:
    """Return a function from a layout to the folder that a script fills on it when first asked, and what it prints.

    Args:
        here: the script's function, if what one process does needs no launch: it is called in this one.
    """

    @functools.cache
    def filled(profile: str | Path, processes: int, *words) -> tuple[Path, str]:
        folder = root / "-".join([Path(profile).stem, str(processes), *(Path(word).name for word in words)])
        folder.mkdir(parents=True)
        if here and processes == 1:
            here(folder, *map(str, words))
            return folder, ""
        result = launch(profile, processes, script, folder, *words)
        assert result.status == 0, result.output[-6000:]
        return folder, result.output

    return filled


def profile_of(folder: Path, name: str, **settings) -> Path:
    """Write a profile of accelerate_configs with other settings into a folder; return its file."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{name}.yaml"
    file.write_text(yaml.safe_dump(yaml.safe_load((PROFILES / f"{name}.yaml").read_text()) | settings))
    return file


def hsdp_on_cpu(folder: Path) -> Path:
    """Write the profile of two groups that shard over two CPU ranks each; return its file."""
    sizes = {"parallelism_config_dp_replicate_size": 2, "parallelism_config_dp_shard_size": 2}
    known = yaml.safe_load((PROFILES / "hsdp.yaml").read_text())["parallelism_config"]
    assert sizes.keys() <= known.keys()
    how = {"num_processes": 4, "use_cpu": True, "mixed_precision": "no", "parallelism_config": known | sizes}
    return profile_of(folder, "hsdp", **how)


def file_of(profile: str | Path) -> Path:
    """Find a profile's file by the profile's name, or take the file itself."""
    return profile if isinstance(profile, Path) else PROFILES / f"{profile}.yaml"


def launch_many(profile: str | Path, processes: int, recipe: Path, commands: list[list], folder: Path, **options):
    """Run a recipe several times, with other flags each, in one launch; all must succeed."""
    launch_all(profile, processes, [(recipe, flags, None) for flags in commands], folder, **options)


def launch_all(
    profile: str | Path, processes: int, commands: list[tuple], folder: Path, script: str = "many.py", **options
) -> None:
    """Run recipes one after the other in one launch; all must succeed.

    Args:
        commands: for each time the recipe's file, its flags, and a file for what a silent step costs, or None.
        folder: for the list of them.
        script: of tests/laws, that runs them.
    """
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{Path(profile).stem}-{processes}-{time.monotonic_ns()}.json"
    file.write_text(json.dumps([(str(r), [str(word) for word in flags], c and str(c)) for r, flags, c in commands]))
    result = launch(profile, processes, ROOT / "tests" / "laws" / script, file, **options)
    assert result.status == 0, result.output[-6000:]


def train_all(profile: str, processes: int, commands: list[tuple], folder: Path, **options) -> None:
    """Run recipes as `launch_all` does, but in this process where there is one."""
    if processes > 1:
        launch_all(profile, processes, commands, folder, **options)
    else:
        from laws import many

        many.main([(str(recipe), [str(word) for word in flags], c and str(c)) for recipe, flags, c in commands])


def train_many(profile: str, processes: int, recipe: Path, commands: list[list], folder: Path, **options) -> None:
    """Run a recipe several times, with other flags each, as `train_all` does."""
    train_all(profile, processes, [(recipe, flags, None) for flags in commands], folder, **options)


class Training:
    """A launch that goes on while a test acts on it."""

    def __init__(self, folder: Path, words: list, output: str = "output"):
        self.folder, self.printed = folder, folder / output
        self.file = open(self.printed, "w+")  # noqa: SIM115 - closed by `end`
        self.process = subprocess.Popen(
            [str(word) for word in words], cwd=ROOT, stdout=self.file, stderr=subprocess.STDOUT, start_new_session=True
        )

    def reach(self, run, step, seconds=60):
        """Wait until a run has made a step."""
        self.wait_for(lambda: f'"step": {step},' in self.read(run, "metrics.jsonl"), seconds)

    def wait_for(self, there, seconds=60):
        end = time.monotonic() + seconds
        while not there():
            assert time.monotonic() < end, self.output()
            time.sleep(0.02)

    def read(self, run, name):
        path = self.folder / run / name
        return path.read_text() if path.exists() else ""

    def status(self, run):
        return json.loads(self.read(run, "run.json") or "{}").get("status")

    def rank(self, number):
        return psutil.Process(int((self.folder / f"pid-{number}").read_text()))

    def output(self):
        return self.printed.read_text()

    def end(self):
        """Kill what is left of it."""
        kill_tree(self.process.pid)
        self.process.wait()
        self.file.close()


def metrics(folder: Path) -> list[dict]:
    """Read a run's metrics.jsonl."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def steps(folder: Path) -> list[dict]:
    """Read the lines of a run's steps, without what depends on the clock, and without evaluations."""
    return [{k: v for k, v in line.items() if k not in SPEEDS} for line in metrics(folder) if "ids" in line]


def scores(folder: Path) -> list[dict]:
    """Read the lines of a run's evaluations."""
    return [line for line in metrics(folder) if "ids" not in line]


def weights(folder: Path) -> dict[str, bytes]:
    """Read the bytes of a run's finished weights."""
    return {name: _bytes(tensor) for name, tensor in load_file(folder / "model/model.safetensors").items()}


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes()  # numpy has no bfloat16


def hashes(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of every file in a folder, by its path there."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def saved_state(folder: Path, step: int) -> dict[str, bytes]:
    """Read the bytes of all tensors, of models and optimizers, in a run's checkpoint."""
    return state_tensors(folder / "checkpoints" / f"step-{step:08d}")


def state_tensors(folder: Path) -> dict[str, bytes]:
    """Read the bytes of all tensors in a checkpoint, or in a folder that `save_state` has written."""
    reader = StateReader(folder / STATE)
    entries = reader.read_metadata().state_dict_metadata
    tensors = {name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in entries.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it warns that one process loads alone
        dcp.load(tensors, storage_reader=reader, no_dist=True)
    return {name: _bytes(tensor) for name, tensor in tensors.items()}


def furthest(a: list[dict], b: list[dict], key: str = "loss") -> float:
    """Find the largest relative difference between two runs' columns."""
    assert len(a) == len(b) > 0
    return max(abs(x[key] - y[key]) / abs(x[key]) for x, y in zip(a, b, strict=True))


def furthest_loss(a: list[dict], b: list[dict]) -> float:
    """Find the largest relative difference of two runs' losses, whatever the recipe calls them."""
    names = [name for name in a[0] if name.split("/")[0] == "loss"]
    assert names
    return max(furthest(a, b, name) for name in names)
