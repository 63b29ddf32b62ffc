"""Which tests start processes is seen in their code; one that does so unseen fails."""

import subprocess
import sys
from pathlib import Path

import pytest
from support.launching import launch_many

from launch_marker import MARK, starts_processes


def test_this_one_starts_python_unseen():
    """By a name that hides it; the hook refuses before anything runs."""
    start = getattr(sys.modules["subproc" + "ess"], "Pop" + "en")
    with pytest.raises(RuntimeError, match=rf"unseen starts .*python.*: mark it with @pytest.mark.{MARK}"):
        start([sys.executable, "-c", ""])
    start([Path("/bin/true")]).wait()


def directly():
    subprocess.run([])


def by_another():
    return [each() for each in ()] or directly


def in_a_function_inside():
    def inside():
        launch_many("cpu", 1, Path(), [], Path())

    return inside


class Started:
    def begin(self):
        directly()


def by_a_class():
    Started()


def not_at_all():
    return Path("subprocess"), MARK


@pytest.mark.parametrize("function", [directly, by_another, in_a_function_inside, by_a_class])
def test_what_starts_a_process_is_seen(function):
    assert starts_processes(function)


def test_what_starts_none_is_not():
    assert not starts_processes(not_at_all)


def test_marks_are_set(request):
    """On this file's own tests: parametrize refers to functions that start processes, and calls none of them."""
    assert not request.node.get_closest_marker(MARK)
