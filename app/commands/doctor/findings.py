"""A finding about this machine: what was examined, what was found, and what to do about it."""

import threading
from collections.abc import Callable, Iterable
from typing import NamedTuple

OK, NOTE, TROUBLE = "ok", "note", "TROUBLE"


class Finding(NamedTuple):
    """A row of the doctor's table; `fix` is empty if there is nothing to do."""

    what: str
    found: str
    verdict: str = OK
    fix: str = ""


def look(what: str, check: Callable[[], Iterable[Finding]], seconds: float = 120.0) -> list[Finding]:
    """Make one check. If it fails or hangs, that is a finding too, and does not stop the other checks."""
    findings: list[Finding] = []

    def examine() -> None:
        try:
            findings.extend(check())
        except Exception as error:
            words = " ".join(f"{type(error).__name__}: {error}".split())
            findings.append(Finding(what, words, TROUBLE, "fix what the message names; the other checks went on"))

    thread = threading.Thread(target=examine, daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        late = f"no answer within {seconds:.0f} s"
        return [*findings, Finding(what, late, TROUBLE, "find out what it waits for; the other checks went on")]
    return findings
