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


def test_modules_of_a_script_are_its_own(tmp_path):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "helper.py").write_text(f"NAME = {name!r}")
        (tmp_path / name / "script.py").write_text("import helper\nprint(helper.NAME)")
        assert share("cpu", 1, tmp_path / name / "script.py").output == f"{name}\n"
