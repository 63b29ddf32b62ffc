"""Launches that stay: the next script finds nothing of the one before, and a failure ends the launch."""

from launching import share

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
