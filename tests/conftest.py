"""What all tests share: caches of their own, data that is written once, and the runs that many tests look at."""

import gc
import json
import os
import random
from pathlib import Path

import hypothesis
import pytest

# On a machine that other workers share, how long an example takes says nothing of it.
hypothesis.settings.register_profile("shared", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("shared")
pytest_plugins = ["launch_marker", "skips", "support.store"]
os.environ["WANDB_MODE"] = "offline"
os.environ["HF_HUB_OFFLINE"] = "1"  # before anything imports huggingface_hub, which would try again and again
os.environ.setdefault("OMP_NUM_THREADS", "1")  # as `make` sets it: the launcher then says nothing of it
# Threads that wait must not spin: three workers share two cores.
os.environ.setdefault("GOMP_SPINCOUNT", "0")
gc.disable()  # until all tests are imported
# It would take the compiler 5 s, and save each of some 30 kernels a tenth of a second.
os.environ.setdefault("TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS", "0")
WORDS = ["alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta", "iota", "kappa"]


def take_a_share_of_the_cores() -> None:
    """Give each of pytest-xdist's workers cores of its own: processes that wait for each other busily slow all down."""
    worker, workers = os.environ.get("PYTEST_XDIST_WORKER"), int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    if worker and hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, cores[int(worker.removeprefix("gw")) :: workers] or cores)


def let_others_finish() -> None:
    """Have processes that wake up wait for the one that runs.

    A rank that takes the core from another one in the middle of a message spins, as gloo waits for the other's lock.
    """
    if hasattr(os, "SCHED_BATCH"):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


take_a_share_of_the_cores()
let_others_finish()


def pytest_collection_finish():
    """Have Python's garbage collector look at what tests leave, and not again and again at what they import."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000)
    gc.enable()


def pytest_sessionfinish():
    """Have this process end with pytest's own status, also after a run that a test has stopped by a signal."""
    from app.distributed import environment

    environment.end.status = None


@pytest.fixture(scope="session", autouse=True)
def caches(tmp_path_factory):
    """Keep the user's caches out of the tests, and the tests out of the user's caches.

    pytest-xdist's workers share them: what one has parsed, tokenized or compiled, the others find.
    """
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "caches"
    folder.mkdir(exist_ok=True)
    os.environ |= {"HF_HOME": str(folder / "hf"), "HF_DATASETS_CACHE": str(folder / "datasets")}
    os.environ["XDG_STATE_HOME"] = str(folder / "state")  # which recipes this user has trained with
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder / "inductor")
    return folder


def write_rows(path: Path, count: int) -> Path:
    """Write labelled texts of uneven length, the same ones every time."""
    random_ = random.Random(count)
    with path.open("w") as file:
        for _ in range(count):
            label = random_.choice(["red", "green", "blue"])
            text = " ".join(random_.choice([*WORDS, label, label]) for _ in range(random_.randint(2, 30)))
            file.write(json.dumps({"text": text, "label": label}) + "\n")
    return path


@pytest.fixture(scope="session")
def rows(tmp_path_factory):
    """Give a function that writes a jsonl file with so many rows, once."""
    folder = tmp_path_factory.mktemp("rows")

    def rows(count: int) -> Path:
        path = folder / f"{count}.jsonl"
        return path if path.exists() else write_rows(path, count)

    return rows


@pytest.fixture(scope="module")
def data_cache(caches):
    """Give tests in this process the caches that launches have, and no progress bars."""
    yield from _cached_in(caches / "datasets")


@pytest.fixture(scope="module")
def own_data_cache(tmp_path_factory):
    """Give the tests of a module an empty cache of their own."""
    yield from _cached_in(tmp_path_factory.mktemp("cache"))


def _cached_in(folder: Path):
    import datasets

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", folder)
        patch.setenv("HF_DATASETS_CACHE", str(folder))
        datasets.disable_progress_bars()
        yield folder
        datasets.enable_progress_bars()


@pytest.fixture(scope="module")
def stdlib(data_cache):
    """Give the training and the evaluation table of builtin:stdlib."""
    from support.tables import load

    return load()


@pytest.fixture
def flushes_and_renames(monkeypatch):
    """List, in order, the names of the files and folders that are flushed to disk, and "rename" for each rename."""
    events, flush, rename = [], os.fsync, Path.rename

    def record_flush(descriptor):
        events.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        flush(descriptor)

    def record_rename(path, target):
        events.append("rename")
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", record_flush)
    monkeypatch.setattr(Path, "rename", record_rename)
    return events
