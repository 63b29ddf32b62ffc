"""What is skipped, and why: a pytest plugin that counts skips by their reasons.

With --no-skips, which the gate gives, a skip for another reason than those below fails: a test that never runs rots.
"""

import re
from collections import Counter

import pytest

# What the gate's machine cannot have. torchvision's wheels do not load next to a build of torch for CPUs.
ALLOWED = ("needs a GPU", "needs two GPUs", "needs torchvision")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option."""
    parser.addoption("--no-skips", action="store_true", help="fail if a test is skipped that this machine could run")


def reasons(reporter) -> Counter[str]:
    """Count the skips of each reason."""
    skipped = reporter.stats.get("skipped", [])
    said = (each.longrepr[2] if isinstance(each.longrepr, tuple) else str(each.longrepr) for each in skipped)
    return Counter(re.sub(r"^Skipped: ", "", text) for text in said)


def to_mend(found: Counter[str]) -> list[str]:
    """List the reasons that are not allowed."""
    return [reason for reason in found if not reason.startswith(ALLOWED)]


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail a run that would pass, if the gate asks for it. Of pytest-xdist's processes the first one decides."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    asked = session.config.getoption("--no-skips") and not hasattr(session.config, "workerinput")
    if asked and reporter and to_mend(reasons(reporter)) and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter) -> None:
    """List what is left out, and what of it must not be."""
    found = reasons(terminalreporter)
    if found:
        terminalreporter.section("skipped, by reason")
    for reason, count in found.most_common():
        terminalreporter.line(f"{count:5d}  {reason}")
    if terminalreporter.config.getoption("--no-skips") and (wrong := to_mend(found)):
        terminalreporter.line(
            "error: --no-skips: install what is missing, or mend the test: " + "; ".join(wrong), red=True
        )
