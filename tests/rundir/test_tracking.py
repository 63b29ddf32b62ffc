"""trackers: metrics.jsonl has no step twice, trackers get the same numbers, and a bad one costs a warning."""

import json
import math
import os
import struct
import time
from pathlib import Path

import numpy as np
import pytest
from accelerate import PartialState
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker

from app import UserError
from app.rundir import metrics_file
from app.rundir.metrics_file import Follower, MetricsFile
from app.rundir.trackers import Trackers, _logged_in, check_names

CONFIG = {"run": {"steps": 3, "trackers": ["a"]}, "optim": {"lr": 0.1}, "model": "", "quick": None}


def write(path: Path, resumed_from: int, steps: range, launch: int = 0) -> None:
    file = MetricsFile(path, resumed_from)
    for step in steps:
        file.write(step, {"loss": step / 3 + launch})
    file.log.close()


def read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_numbers_are_kept_to_the_last_bit(tmp_path):
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path, 0)
    values = {"loss": 0.1 + 0.2, "lr": 1e-300, "samples": 2**53 + 1, "ids": "00ff", "epoch": 1 / 3}
    file.write(1, values)
    assert read(path) == [{"step": 1, **values}]  # on disk at once: nothing was closed
    file.write(2, {})
    assert read(path)[1] == {"step": 2}


def test_a_resumed_run_takes_back_the_steps_after_its_checkpoint(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(path, 0, range(1, 8))
    write(path, 4, range(5, 7), launch=1)
    lines = read(path)
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert [line["loss"] for line in lines] == [s / 3 + (s > 4) for s in range(1, 7)]


def test_scores_stay_with_their_step(tmp_path):
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path, 0)
    for step in (1, 2, 3):
        file.write(step, {"loss": 0.5})
        file.write(step, {"eval/accuracy": step})
    MetricsFile(path, 2)
    assert [(line["step"], "loss" in line) for line in read(path)] == [(1, True), (1, False), (2, True), (2, False)]


def test_a_run_that_starts_anew_starts_an_empty_file(tmp_path):
    write(tmp_path / "metrics.jsonl", 0, range(1, 4))
    MetricsFile(tmp_path / "metrics.jsonl", 0)
    assert (tmp_path / "metrics.jsonl").read_bytes() == b""


TAILS = {
    "cut": b'{"step": 3, "lo',
    "without its end of line": b'{"step": 9, "loss": 1.0}',
    "zeros": bytes(40),
    "not text": pytest.param(b"\xff\xfe\x80\n"),
    "not an object": b"3\n[]\nnull\n",
    "without a step": b'{"loss": 1}\n',
    "blank": b"\n\n",
    "step of another type": b'{"step": "x"}\n{"step": null}\n',
}


@pytest.mark.parametrize("tail", TAILS.values(), ids=TAILS)
def test_a_line_that_is_none_is_dropped(tmp_path, tail):
    path = tmp_path / "metrics.jsonl"
    write(path, 0, range(1, 3))
    good = path.read_bytes()
    path.write_bytes(good + tail)
    write(path, 5, range(6, 7))
    assert [line["step"] for line in read(path)] == [1, 2, 6]
    assert path.read_bytes().startswith(good)
    assert os.listdir(tmp_path) == ["metrics.jsonl"]


@pytest.mark.parametrize("tail", TAILS.values(), ids=TAILS)
def test_a_reader_leaves_out_what_is_damaged_or_half_written(tmp_path, tail):
    """A half line is not damaged: it is being written, unless zeros show a power failure."""
    path = tmp_path / "metrics.jsonl"
    write(path, 0, range(1, 3))
    path.write_bytes(path.read_bytes() + tail)
    lines, damaged = metrics_file.read_lines(path)
    assert [line.fields["step"] for line in lines] == [1, 2] == [line["step"] for line in metrics_file.read(path)]
    assert damaged == tail.count(b"\n") + (b"\0" in tail)


def test_a_file_that_is_followed_gives_every_whole_line_once(tmp_path):
    path = tmp_path / "metrics.jsonl"
    follower = Follower(path)
    assert follower.new() == [] == metrics_file.read(path)
    found = []
    with path.open("wb", buffering=0) as file:
        for piece in (b'{"step": 1}\n{"st', b'ep": 2}', b"\n", b"\0\xff\n", b'{"step": 3}\n'):
            file.write(piece)
            found.append([line["step"] for line in follower.new()])
    assert found == [[1], [], [2], [], [3]] and follower.new() == []


def trackers(folder: Path, *names: str, ids: dict | None = None) -> tuple[Trackers, list[str]]:
    warnings: list[str] = []
    return Trackers(names, folder, {} if ids is None else ids, warnings.append), warnings


class Recorder(GeneralTracker):
    """A tracker that accelerate knows: it writes calls down, and fails at the one that `broken` names."""

    name = "recorder"
    requires_logging_directory = False
    main_process_only = False
    calls: list = []
    broken = ""

    def __init__(self, run_name, **kwargs):
        super().__init__()
        self.note("init", run_name)

    def note(self, call, *values):
        Recorder.calls.append((call, *values))
        if call == self.broken:
            raise OSError(f"no connection at {call}")

    @property
    def tracker(self):
        return None

    def start(self):
        self.note("start")

    def store_init_configuration(self, values):
        self.note("config", values)

    def log(self, values, step=None, **kwargs):
        self.note("log", values, step)

    def finish(self):
        self.note("finish")


@pytest.fixture
def recorder(monkeypatch):
    monkeypatch.setitem(LOGGER_TYPE_TO_CLASS, "recorder", Recorder)
    monkeypatch.setattr(Recorder, "calls", [])
    monkeypatch.setattr(Recorder, "broken", "")
    return Recorder


def test_a_tracker_gets_the_config_once_and_numbers_of_each_step(tmp_path, recorder):
    to, warnings = trackers(tmp_path / "run", "recorder")
    to.start(CONFIG, 0)
    to.log(1, {"loss": 0.5, "samples": 8, "ids": "00ff"})
    to.finish()
    to, more = trackers(tmp_path / "run", "recorder")
    to.start(CONFIG, 1)
    to.log(2, {"loss": 0.25})
    to.finish()
    assert warnings == more == []
    config = recorder.calls.pop(2)[1]
    assert {k: config[k] for k in ("run.steps", "optim.lr", "model")} == {"run.steps": 3, "optim.lr": 0.1, "model": ""}
    assert set(config) == {"run.steps", "run.trackers", "optim.lr", "model", "quick"}
    assert all(isinstance(value, int | float | str) for value in config.values())
    assert recorder.calls == [
        ("init", "run"),
        ("start",),
        ("log", {"loss": 0.5, "samples": 8}, 1),
        ("finish",),
        ("init", "run"),
        ("start",),
        ("log", {"loss": 0.25}, 2),
        ("finish",),
    ]


@pytest.mark.parametrize("broken", ["init", "start", "config", "log", "finish"])
def test_a_tracker_that_fails_costs_one_warning(tmp_path, recorder, monkeypatch, broken):
    monkeypatch.setattr(recorder, "broken", broken)
    to, warnings = trackers(tmp_path / "run", "recorder")
    to.start(CONFIG, 0)
    for step in (1, 2, 3):
        to.log(step, {"loss": 0.5})
    to.finish()
    (warning,) = warnings
    assert "recorder" in warning and f"no connection at {broken}" in warning


def test_a_mistyped_tracker_is_refused():
    check_names(("wandb", "tensorboard"))
    with pytest.raises(UserError, match=r"--run.trackers wandbb: .*; did you mean wandb\?"):
        check_names(("tensorboard", "wandbb"))


def test_no_tracker_is_no_trouble(tmp_path):
    to, warnings = trackers(tmp_path / "run")
    to.start(CONFIG, 0)
    to.log(1, {"loss": 0.5})
    to.finish()
    assert warnings == [] and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("rewound_to", [4, 0])
def test_tensorboard_has_the_values_of_every_step_once(tmp_path, rewound_to):
    """After a rewind from step 7 too, where all steps after the checkpoint come again; it keeps single precision."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    expected = {}
    for launch, (resumed_from, steps) in enumerate([(0, range(1, 8)), (rewound_to, range(rewound_to + 1, 10))]):
        to, warnings = trackers(tmp_path / "run", "tensorboard")
        to.start(CONFIG, resumed_from)
        for step in steps:
            values = {"loss": step / 7 + launch, "samples": 8 * step}
            to.log(step, {**values, "ids": "00ff"})
            expected[step] = values
        to.log(steps[-1], {"eval/accuracy": 0.1 * (launch + 1)})
        to.finish()
        assert warnings == []
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    for name in ("loss", "samples"):
        found = {event.step: event.value for event in events.Scalars(name)}
        assert len(events.Scalars(name)) == 9
        assert found == {step: float(np.float32(values[name])) for step, values in expected.items()}
    assert [(e.step, e.value) for e in events.Scalars("eval/accuracy")] == [(9, float(np.float32(0.2)))]


def wandb_records(path: Path) -> list:
    """Read a wandb file: LevelDB's log format (7 bytes of header a chunk, blocks of 32 KiB), a message a record."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, position, records, parts = path.read_bytes(), 7, [], b""
    while position + 7 <= len(data):
        left = 32768 - position % 32768
        if left < 7:
            position += left
            continue
        _, length, kind = struct.unpack("<IHB", data[position : position + 7])
        if position + 7 + length > len(data):  # being written
            break
        parts += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # a whole record, or the last chunk of one
            records.append(Record.FromString(parts))
            parts = b""
    return records


@pytest.mark.parametrize(("host", "known"), [("api.wandb.example", True), ("elsewhere.example", False)])
def test_wandb_is_asked_for_its_own_server(tmp_path, monkeypatch, host, known):
    """Its default server has changed between versions; a key for it in .netrc means logged in."""
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("WANDB_BASE_URL", "https://api.wandb.example")
    (tmp_path / "netrc").write_text(f"machine {host}\n  login user\n  password {'a' * 40}\n")
    (tmp_path / "netrc").chmod(0o600)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    assert _logged_in() == known


def test_wandb_without_a_setting_means_its_present_server(tmp_path, monkeypatch):
    import wandb

    for name in ("WANDB_API_KEY", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    host = wandb.Settings().base_url.removeprefix("https://")
    (tmp_path / "netrc").write_text(f"machine {host}\n  login user\n  password {'a' * 40}\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    assert _logged_in()


def test_lines_wait_until_there_is_room(tmp_path):
    """A full disk may take half a line; it is said once, and no line is lost or cut."""
    said = []
    file = MetricsFile(tmp_path / "metrics.jsonl", 0, said.append)
    file.write(1, {"loss": 0.5})
    real = file.log._file

    class Full:
        def write(self, data):
            return real.write(data[: len(data) // 2])

    file.log._file = Full()
    file.write(2, {"loss": 0.25})
    file.write(3, {"loss": 0.125})
    assert [line["step"] for line in read(tmp_path / "metrics.jsonl")] == [1]
    file.log._file = real
    file.write(4, {"loss": 0.0})
    assert [line["step"] for line in read(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4]
    assert len(said) == 1 and "No space left" in said[0]


def test_a_file_that_is_taken_away_costs_a_warning(tmp_path):
    said = []
    file = MetricsFile(tmp_path / "metrics.jsonl", 0, said.append)
    (tmp_path / "metrics.jsonl").unlink()
    file.write(1, {"loss": 0.5})
    file.write(2, {"loss": 0.5})
    assert len(said) == 1 and "No such file" in said[0]


def test_what_json_does_not_have_is_null(tmp_path):
    """NaN is no JSON: other programs would refuse the whole file."""
    file = MetricsFile(tmp_path / "metrics.jsonl", 0)
    file.write(1, {"eval/pearson": math.nan, "x": math.inf, "y": 0.5})
    text = (tmp_path / "metrics.jsonl").read_text()
    assert json.loads(text, parse_constant=pytest.fail) == {"step": 1, "eval/pearson": None, "x": None, "y": 0.5}


@pytest.mark.long
def test_wandb_is_one_run_over_all_launches(tmp_path, monkeypatch):
    """Offline: one id, kept in run.json, one name, and steps that go on."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    PartialState(cpu=True)
    ids: dict = {}
    known: set = set()
    model = tmp_path / "model"
    model.mkdir()
    (model / "model.safetensors").write_bytes(b"weights")
    for resumed_from in (0, 2, 4):
        to, warnings = trackers(tmp_path / "project" / "run", "wandb", ids=ids)
        to.folder.mkdir(parents=True, exist_ok=True)
        to.start(CONFIG, resumed_from)
        for step in (resumed_from + 1, resumed_from + 2):
            to.log(step, {"loss": step / 3, "ids": "00ff"})
        if resumed_from == 4:
            to.log_model(model)
        to.finish()
        assert warnings == [] and list(ids) == ["wandb"]
        known.add(ids["wandb"])
    history, artifacts = [], []
    files = sorted(tmp_path.rglob("*.wandb"), key=lambda path: path.stat().st_mtime_ns)
    assert len(files) == 3
    for file in files:
        records, patience = wandb_records(file), time.monotonic() + 30
        # wandb's own process may be behind on a busy machine.
        while not any(r.WhichOneof("record_type") == "exit" for r in records) and time.monotonic() < patience:
            time.sleep(0.2)
            records = wandb_records(file)
        # wandb may write it more than once.
        runs = {
            (r.run.run_id, r.run.display_name, r.run.project) for r in records if r.WhichOneof("record_type") == "run"
        }
        assert runs == {(*known, "run", "project")}, [record.WhichOneof("record_type") for record in records]
        for record in records:
            if record.WhichOneof("record_type") == "request" and record.request.HasField("log_artifact"):
                artifacts.append(record.request.log_artifact.artifact)
            if record.WhichOneof("record_type") == "artifact":
                artifacts.append(record.artifact)
            if record.WhichOneof("record_type") == "history":
                items = {
                    item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in record.history.item
                }
                history.append((items["_step"], items["loss"], "ids" in items))
    assert sorted(history) == [(step, step / 3, False) for step in range(1, 7)]  # wandb may end its files in any order
    assert {(found.name, found.type) for found in artifacts} == {("run-model", "model")}
    assert [entry.path for entry in artifacts[0].manifest.contents] == ["model.safetensors"]
