"""The doctor finds what is in the way, says how to mend it, and gets through whatever a check does."""

import json
import socket
import sys
import time
from contextlib import suppress

import psutil
import pytest
import torch
from support.launching import PROFILES, ROOT, python, run

import app
from app.commands.doctor import allreduce, command, disk, findings, machine
from app.commands.doctor.findings import NOTE, OK, TROUBLE, Finding
from app.launching import profiles


def test_a_check_that_fails_or_hangs_is_a_row():
    """What it had found before stays."""

    def breaks():
        yield Finding("a", "1")
        raise ZeroDivisionError("no")

    first, second = findings.look("it", breaks)
    assert first == Finding("a", "1") and second.what == "it" and second.verdict == TROUBLE
    assert "ZeroDivisionError: no" in second.found and second.fix
    (late,) = findings.look("it", lambda: time.sleep(30) or [], seconds=0.1)
    assert late.verdict == TROUBLE and "no answer within" in late.found


def test_this_machine(tmp_path):
    """The whole of it, here: two ranks talk, runs can be kept apart, and nothing stays behind."""
    out = tmp_path / "report" / "doctor.json"
    words = [sys.executable, "-m", "app", "doctor", "--profile", PROFILES / "ddp.yaml", "--dir", tmp_path / "runs"]
    result = run([*words, "--json", out])
    found = {row["what"]: row for row in json.loads(out.read_text())["findings"] if row["verdict"] != TROUBLE}
    assert found["all-reduce, gloo x2"]["found"].endswith("of float32)"), result.output
    assert {found[name]["verdict"] for name in ("flock", "python", "gloo", "all-reduce, gloo x2")} == {OK}
    tested = f"torch=={torch.__version__.partition('+')[0]}" in (ROOT / "requirements.lock").read_text()
    assert found["torch"]["verdict"] == (OK if tested else NOTE)
    assert found["hub"]["verdict"] == NOTE and "hf download" in found["hub"]["fix"]
    assert [path.name for path in tmp_path.iterdir()] == ["report"]
    assert all(f"{name}  " in result.output for name in found) and "Traceback" not in result.output


@pytest.mark.launches
def test_ranks_that_do_not_meet_are_given_up(monkeypatch):
    """With what to try; no process is left."""
    before = psutil.Process().children()
    found = allreduce._try("gloo", 0.05)  # they are still importing torch
    assert found.verdict == TROUBLE and "no answer" in found.found and "GLOO_SOCKET_IFNAME" in found.fix
    assert psutil.Process().children() == before
    monkeypatch.setattr(sys, "executable", "/bin/cat")  # which knows no -m
    found = allreduce._try("gloo", 10.0)
    assert found.verdict == TROUBLE and "cat" in found.found and found.fix


@pytest.mark.launches
def test_a_folder_that_cannot_hold_runs(tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise PermissionError(13, "Permission denied")

    assert [row.verdict for row in disk.folder(tmp_path / "new" / "runs")][2] == OK
    with monkeypatch.context() as patch:
        patch.setattr(disk.tempfile, "TemporaryDirectory", refuse)
        (row,) = disk.folder(tmp_path)
    assert row.verdict == TROUBLE and "--run.dir" in row.fix
    monkeypatch.setattr(disk.fcntl, "flock", lambda *_: None)  # as a disk does that takes locks and forgets them
    rows = {row.what: row for row in disk.folder(tmp_path)}
    assert rows["flock"].verdict == TROUBLE and rows["flock"].fix


def test_versions_are_compared_with_the_lock(tmp_path, monkeypatch):
    (tmp_path / "lock").write_text("torch==1.0.0\naccelerate==1.15.0\n")
    monkeypatch.setattr(machine, "LOCK", tmp_path / "lock")
    rows = {row.what: row for row in machine.versions()}
    assert rows["samestep"].found == app.__version__
    assert rows["torch"].verdict == NOTE and "1.0.0" in rows["torch"].fix
    assert rows["accelerate"].verdict == OK and rows["datasets"].verdict == OK


def test_a_port_that_is_taken_is_no_trouble():
    with socket.socket() as taken:
        with suppress(OSError):  # another program has taken it
            taken.bind(("127.0.0.1", 29500))
            taken.listen()
        (row,) = machine.port()
    assert row.verdict == NOTE and "--main_process_port 0" in row.fix


@pytest.mark.parametrize(
    "change, says",
    [
        (("mixed_precision: 'no'", "mixed_precision: fp16"), "fp16 on CPU"),
        (("use_cpu: true", "use_cpus: true"), "use_cpus"),
        (("distributed_type: MULTI_GPU", "distributed_type: MULTI_CPU"), "starts one process"),
        (("distributed_type: MULTI_GPU", "distributed_type: DEEPSPEED"), "DeepSpeed on CPU"),
        (("mixed_precision: 'no'", "mixed_precision: 'no'\nfsdp_config:\n  fsdp_layer: 1"), "fsdp_layer"),
        (("mixed_precision: 'no'", "parallelism_config:\n  parallelism_config_tp_size: 3"), "a mesh of 3"),
    ],
)
def test_a_profile_that_cannot_work_is_found(tmp_path, change, says):
    text = (PROFILES / "ddp_cpu.yaml").read_text()
    assert change[0] in text
    (tmp_path / "p.yaml").write_text(text)
    assert not [row for row in command.fits(profiles.read(str(tmp_path / "p.yaml"))) if row.verdict == TROUBLE]
    (tmp_path / "p.yaml").write_text(text.replace(*change))
    rows = [row for row in command.fits(profiles.read(str(tmp_path / "p.yaml"))) if row.verdict == TROUBLE]
    assert any(says in row.found and row.fix for row in rows)


@pytest.mark.parametrize(
    "name, wrapping, shards",
    [
        ("cpu", "", 1),
        ("ddp_cpu:1", "", 1),
        ("ddp", "DDP", 1),
        ("fsdp", "FSDP2", 8),
        ("hsdp", "HSDP", 4),
        ("zero3:2", "DeepSpeed ZeRO-3", 2),
    ],
)
def test_profiles_are_read_as_the_launcher_reads_them(monkeypatch, name, wrapping, shards):
    monkeypatch.setattr("importlib.util.find_spec", lambda module: module)  # DeepSpeed is there
    stem, colon, count = name.partition(":")
    profile = profiles.read(f"{PROFILES / stem}.yaml{colon}{count}")
    assert (profile.wrapping, profile.shards, profile.troubles) == (wrapping, shards, [])


def test_what_cannot_be_asked_is_refused():
    result = python("-m", "app", "doctor", "--profile", "nowhere.yaml")
    assert result.status == 2 and "nowhere.yaml" in result.output and "Traceback" not in result.output
