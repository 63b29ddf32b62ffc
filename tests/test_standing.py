"""Launches that stay: the next script finds nothing of the one before, and a failure ends the launch."""

import json
import os
import signal
import socket
import struct
import sys
import time

import psutil
import pytest

from launching import ROOT, environment, share
from standing import warm

SCRIPT = """
import os, sys
print("process", os.getpid(), "in", os.getcwd(), os.environ.get("LEFT"), os.umask(0o077), sys.argv[1:], sys.excepthook)
os.environ["LEFT"] = "behind"
os.chdir("/")
sys.excepthook = None
if sys.argv[1] == "fails":
    raise ValueError("as asked")
"""


def test_scripts_share_a_launch_until_one_fails(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    first, second, failed, later = (share("cpu", 1, script, word) for word in ("well", "well", "fails", "well"))
    assert first.status == 0 and "in " in first.output and "None" in first.output
    assert second == first
    assert failed.status != 0 and "ValueError: as asked" in failed.output
    assert later.status == 0 and later.output != first.output
    process = later.output.split()[1]
    assert later.output.replace(process, first.output.split()[1]) == first.output


ENDS_WELL = """
from app.distributed import environment
environment.report_user_errors()
environment.leave_with = 0
"""


def test_a_failure_counts_after_a_run_that_ended_well(tmp_path):
    """Whose process would have ended with status 0, whatever comes."""
    for name, code in {"well.py": ENDS_WELL, "fails.py": "raise ValueError('as asked')"}.items():
        (tmp_path / name).write_text(code)
    assert share("cpu", 1, tmp_path / "well.py").status == 0
    assert share("cpu", 1, tmp_path / "fails.py").status == 1


@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="Linux has it")
def test_ranks_do_not_take_the_core_from_each_other(tmp_path):
    """Launches that stay take a fifth less processor time so."""
    (tmp_path / "script.py").write_text("import os\nprint(os.sched_getscheduler(0) == os.SCHED_BATCH)")
    assert share("cpu", 1, tmp_path / "script.py").output == "True\n"


STOPPED = """
import ctypes, os, sys
told = ctypes.c_int()
ctypes.CDLL(None).prctl(2, ctypes.byref(told))  # PR_GET_PDEATHSIG
sys.stdout.write(f"{os.getpid()} {os.environ['LAUNCHER']} {told.value}\\n")  # print would write twice
"""


@pytest.mark.skipif(sys.platform != "linux", reason="it has prctl")
def test_between_scripts_a_launch_takes_no_processor_time(tmp_path):
    """And what is stopped is killed with the Python that it was forked from, as when tests are killed."""
    (tmp_path / "script.py").write_text(STOPPED)
    first, again = (share("ddp_cpu", 2, tmp_path / "script.py").output.splitlines() for _ in range(2))
    assert sorted(first) == sorted(again)
    ranks, launcher, told = ({int(number) for number in column} for column in zip(*map(str.split, again), strict=True))
    assert len(ranks) == 2 and len(launcher) == 1 and told == {signal.SIGKILL}
    processes, end = [psutil.Process(pid) for pid in ranks | launcher], time.monotonic() + 20
    while {process.status() for process in processes} != {psutil.STATUS_STOPPED}:
        assert time.monotonic() < end
        time.sleep(0.02)


def test_modules_of_a_script_are_its_own(tmp_path):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "helper.py").write_text(f"NAME = {name!r}")
        (tmp_path / name / "script.py").write_text("import helper\nprint(helper.NAME)")
        assert share("cpu", 1, tmp_path / name / "script.py").output == f"{name}\n"


def test_who_is_killed_while_it_asks_changes_nothing():
    """It may have sent a part of what it asks for, or all of it, and not wait for an answer."""
    source = warm(environment())
    source.wait()
    asked = json.dumps({"env": {}, "folder": "/", "words": ["-c", "pass"]}).encode()
    with open(os.devnull) as nothing:
        for part in (0, 5, len(asked)):
            with socket.socket(socket.AF_UNIX) as asking:
                asking.connect(str(source.socket))
                head = struct.pack("<I", len(asked))
                socket.send_fds(asking, [head + asked[:part]], [nothing.fileno()] * 3)
    assert source.run(ROOT, "-c", "print('alive')", timeout=60) == (0, "alive\n")
    assert source.process.poll() is None
