"""Run the rows of a comparison, write each when it is done, and draw them."""

import json
import statistics
import tempfile
import time
from pathlib import Path

from benchmarks.results import as_table, describe, plot
from benchmarks.turns import Contestant, ratios, start_up, take_turns
from benchmarks.works import Work

WARM_UP = 5
STARTS = 8


def run_rows(chosen: list[Work], rounds: int, file: Path, machine: dict) -> dict:
    """Run rows; print each, and add it to those in the file; return all of them."""
    report = json.loads(file.read_text()) if file.exists() else {"rows": {}}
    report["machine"] = machine
    file.parent.mkdir(parents=True, exist_ok=True)
    for work in chosen:
        start = time.monotonic()
        report["rows"][work.name] = compare(work, rounds)
        file.write_text(json.dumps(report, indent=1) + "\n")
        print(as_table({work.name: report["rows"][work.name]}))
        print(f"({time.monotonic() - start:.0f} s)\n", flush=True)
    file.with_suffix(".md").write_text(f"{describe(machine)}\n\n```\n{as_table(report['rows'])}\n```\n")
    plot(report, file.with_suffix(".png"))
    return report


def compare(work: Work, rounds: int) -> dict:
    """Let a row's contestants take turns; return their numbers and the comparison."""
    warm_up = 1 if work.evaluate else WARM_UP
    each = -(-max(rounds, 3) // work.sessions)  # quartiles need a few
    total = warm_up + each * work.steps + 1
    measured: list[Contestant] = []
    for session in range(1 if work.start else work.sessions):
        with tempfile.TemporaryDirectory() as folder:
            contestants = work.contestants(Path(folder, "run"), total)
            if work.start:
                start_up(contestants, min(rounds, STARTS))
            else:
                take_turns(contestants, each, work.steps, warm_up)
        for new, old in zip(contestants, measured, strict=session > 0):
            new.turns[:0], new.peak = old.turns, max(new.peak, old.peak)
        measured = contestants
    return summary(work, measured, total)


def summary(work: Work, contestants: list[Contestant], total: int) -> dict:
    """Compare the first contestant with each of the others."""
    ours, *peers = contestants
    numbers = {"date": time.strftime("%Y-%m-%d"), "rounds": len(ours.turns), "sessions": work.sessions, "steps": total}
    numbers |= {"samestep": about(ours), "peers": {}}
    for peer in peers:
        compared = against(ours, peer, 1 if work.start else work.sessions)
        numbers["peers"][peer.name] = {**about(peer), **compared, "target": work.targets[peer.name]}
    return numbers


def about(contestant: Contestant) -> dict:
    """Return a contestant's own numbers: items a second (median), peak memory in bytes, and its score."""
    speed = statistics.median(turn["items"] / turn["wall"] for turn in contestant.turns)
    return {"items_per_second": speed, "peak_bytes": contestant.peak, **contestant.result}


def against(ours: Contestant, peer: Contestant, sessions: int = 1) -> dict:
    """Compare two contestants turn by turn: the median ratio of items a second, quartiles, and each session."""
    walls, cpus = ratios(ours, peer), ratios(ours, peer, "cpu")
    low, middle, high = statistics.quantiles(walls, n=4)
    each = len(walls) // sessions
    by_session = [statistics.median(walls[at : at + each]) for at in range(0, len(walls), each)]
    compared = {"ratio": middle, "quartiles": [low, high], "by_session": by_session}
    return {**compared, "cpu_ratio": statistics.median(cpus)}
