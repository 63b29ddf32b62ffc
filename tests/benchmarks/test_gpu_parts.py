"""`python -m benchmarks.gpu` runs parts that fail or take too long, keeps what they had found, and merges all of it."""

import json
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))

from support.launching import python

from benchmarks.gpu import __main__ as command
from benchmarks.gpu.parts import PARTS, Part, chosen
from benchmarks.gpu.running import run_part
from benchmarks.gpu.summary import merge

pytestmark = pytest.mark.launches
ABOUT = {"machine": {"cpu": "a processor", "cores": 2, "torch": "2.11"}, "commit": "abc1234"}
FINDS = """
import json
print(json.dumps({"row": "first", "ratio": 1.25}), flush=True)
print("tests/test_a.py::test_it[cls] PASSED                 [ 50%]")
print("tests/test_a.py::test_it[seg] SKIPPED (needs monai)  [100%]", flush=True)
"""
FAILS = f"{FINDS}\nraise SystemExit('there was no text')"
# What it leaves running is in a session of its own, as torchrun's ranks are.
HANGS = f"""{FINDS}
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
print(json.dumps({{"child": child.pid}}), flush=True)
time.sleep(600)
"""
LEAVES = "import json, sys; json.dump({'rows': [{'peak': 3.0}]}, open(sys.argv[2], 'w'))"


def part(name: str, program: str, **more) -> Part:
    return Part(name, f"what {name} shows", ("-c", program), 0.1, **more)


def test_one_that_passes_leaves_what_it_found(tmp_path):
    result = run_part(part("good", FINDS), tmp_path, True, 60, ABOUT)
    assert result["status"] == "passed"
    assert result["found"] == [{"row": "first", "ratio": 1.25}]
    assert result["tests"] == {"test_it[cls]": "passed", "test_it[seg]": "skipped: needs monai"}
    assert json.loads((tmp_path / "good.json").read_text()) == result
    assert {"machine", "commit", "date", "limit", "command"} <= result.keys()
    assert "first" in (tmp_path / "good.txt").read_text()


def test_one_that_fails_keeps_what_it_had(tmp_path):
    result = run_part(part("bad", FAILS), tmp_path, True, 60, ABOUT)
    assert result["status"] == "failed"
    assert result["found"] == [{"row": "first", "ratio": 1.25}]
    assert result["end"][-1] == "there was no text"


def test_one_that_is_late_is_ended_with_all_that_it_began(tmp_path):
    start = time.monotonic()
    result = run_part(part("slow", HANGS), tmp_path, True, 6, ABOUT)
    assert result["status"] == "out of time" and time.monotonic() - start < 30
    first, child = result["found"]
    assert first["ratio"] == 1.25
    assert not psutil.pid_exists(child["child"]) or psutil.Process(child["child"]).status() == psutil.STATUS_ZOMBIE


def test_one_whose_module_is_missing_is_skipped_and_says_why(tmp_path):
    result = run_part(Part("none", "nothing", ("-m", "benchmarks.nowhere"), 1), tmp_path, True, 60, ABOUT)
    assert result["status"] == "skipped" and result["end"] == ["there is no module benchmarks.nowhere here"]


def test_what_a_part_leaves_in_a_file_is_kept(tmp_path):
    result = run_part(part("leaving", LEAVES, leaves="--out"), tmp_path, True, 60, ABOUT)
    assert result["left"] == {"rows": [{"peak": 3.0}]}
    assert sorted(file.name for file in tmp_path.iterdir()) == ["leaving.json", "leaving.txt"]


def test_parts_are_merged_whenever_they_were_run(tmp_path):
    for name, program in (("late-one", FINDS), ("bad", FAILS)):
        run_part(part(name, program), tmp_path, True, 60, ABOUT)
    running = json.loads((tmp_path / "bad.json").read_text()) | {"part": "cut", "status": "running"}
    (tmp_path / "cut.json").write_text(json.dumps(running))
    text = merge(tmp_path)
    assert merge(tmp_path) == text == (tmp_path / "summary.md").read_text().rstrip("\n")
    assert "a processor, 2 cores, torch 2.11 (3 of 3 parts)" in text
    assert "row first, ratio 1.25" in text and "test_it[seg]: skipped: needs monai" in text
    assert "there was no text" in text and "cut off" in text and "measures nothing" in text
    assert json.loads((tmp_path / "summary.json").read_text())["parts"].keys() == {"late-one", "bad", "cut"}


def test_a_part_that_fails_does_not_stop_the_others(tmp_path, monkeypatch, capsys):
    parts = [part("bad", FAILS), part("slow", HANGS), part("good", FINDS)]
    monkeypatch.setattr(command, "chosen", lambda words: parts)
    monkeypatch.setattr(sys, "argv", ["gpu", "--small", "--limit", "6", "--out", str(tmp_path)])
    before = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(SystemExit, match=r"bad failed, slow out of time$"):
            command.main()
    finally:
        signal.signal(signal.SIGTERM, before)
    printed = capsys.readouterr().out
    assert "== 3 of 3, good" in printed and "== good passed after" in printed
    assert json.loads((tmp_path / "summary.json").read_text())["parts"]["good"]["status"] == "passed"


def test_parts_are_named_by_their_names_or_beginnings():
    assert [found.name for found in chosen(["lm"])] == ["lm"]
    assert {found.name for found in chosen(["laws"])} == {p.name for p in PARTS if p.name.startswith("laws-")}
    assert chosen([]) == list(PARTS)
    with pytest.raises(SystemExit, match="no part is called lax; there are laws-cls"):
        chosen(["lax"])


def test_the_list_says_how_long_each_may_take():
    result = python("-m", "benchmarks.gpu", "--list")
    assert result.status == 0, result.output
    assert all(found.name in result.output for found in PARTS)
    assert "none may take more than 8" in result.output
