"""How a program ends: with status 0 after success, whatever gloo's threads do, and with another after an error."""

from support.launching import ROOT, launch

SCRIPT = ROOT / "tests" / "laws" / "ending.py"


def test_processes_leave_at_once_when_all_is_done(tmp_path):
    """torch 2.13's gloo threads can abort the interpreter's shutdown, so it is skipped after all output is flushed."""
    result = launch("ddp_cpu", 2, SCRIPT, tmp_path / "run", "well")
    assert result.status == 0, result.output[-3000:]
    assert result.output.count("done") == 2 and "the interpreter ended" not in result.output


def test_an_error_after_the_run_is_seen(tmp_path):
    result = launch("ddp_cpu", 2, SCRIPT, tmp_path / "run", "badly")
    assert result.status != 0 and "RuntimeError: after the run" in result.output


def test_one_process_ends_as_python_does(tmp_path):
    """The thread that saves has ended: in torch's code it would abort then, and the launcher would fail."""
    result = launch("cpu", 1, ROOT / "tests" / "laws" / "lingering.py", "--run.dir", tmp_path / "run")
    assert result.status == 0 and "the interpreter ended" in result.output, result.output[-3000:]
    assert "terminate called" not in result.output, result.output[-3000:]
