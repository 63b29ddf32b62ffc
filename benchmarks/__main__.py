"""Compare Samestep with bare loops and other trainers, and write what was found.

    python -m benchmarks [--only NAME ...] [--texts NAME=FLAGS ...] [--rounds 24] [--out benchmarks/results]

The contestants of a row take turns of a few steps, each in its own process, and are compared turn by turn: what is
shown is the median of the ratios, ours to theirs, and their quartiles. Turns are short, so that what else happens on
the machine meets all alike.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.results import as_table, describe, machine, machine_slug, plot
from benchmarks.turns import Contestant, ratios, start_up, take_turns
from benchmarks.works import Work, works

WARM_UP = 5
STARTS = 8


def main() -> None:
    """Run the rows asked for; print and write each as it is done."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[], help="rows whose names contain one of these")
    parser.add_argument("--texts", nargs="*", default=[], help="further sets for cls: name=flags of recipes/cls.py")
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    texts = dict(text.split("=", 1) for text in options.texts)
    chosen = [w for w in works(texts) if not options.only or any(part in w.name for part in options.only)]
    if not chosen:
        sys.exit(
            f"no row is called like {', '.join(options.only)}: there are {', '.join(w.name for w in works(texts))}"
        )
    file = options.out / f"{machine_slug()}.json"
    known = json.loads(file.read_text()) if file.exists() else {"machine": machine(), "rows": {}}
    for work in chosen:
        start = time.monotonic()
        known["rows"][work.name] = compare(work, options.rounds)
        known["machine"] = machine()
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(known, indent=1) + "\n")
        print(as_table({work.name: known["rows"][work.name]}))
        print(f"({time.monotonic() - start:.0f} s)\n", flush=True)
    file.with_suffix(".md").write_text(f"{describe(known['machine'])}\n\n```\n{as_table(known['rows'])}\n```\n")
    plot(known, file.with_suffix(".png"))


def compare(work: Work, rounds: int) -> dict:
    """Let a row's contestants take turns; return what they did, and how it compares."""
    warm_up = 1 if work.evaluate else WARM_UP
    total = warm_up + rounds * work.steps + 1
    with tempfile.TemporaryDirectory() as folder:
        contestants = work.contestants(Path(folder, "run"), total)
        if work.start:
            start_up(contestants, min(rounds, STARTS))
        else:
            take_turns(contestants, rounds, work.steps, warm_up)
    ours, *peers = contestants
    found = {"date": time.strftime("%Y-%m-%d"), "steps": total, "samestep": about(ours), "peers": {}}
    for peer in peers:
        walls, cpus = ratios(ours, peer), ratios(ours, peer, "cpu")
        low, middle, high = statistics.quantiles(walls, n=4)
        compared = {"ratio": middle, "quartiles": [low, high], "cpu_ratio": statistics.median(cpus)}
        found["peers"][peer.name] = {**about(peer), **compared, "target": work.targets[peer.name]}
    return found


def about(contestant: Contestant) -> dict:
    """Return a contestant's own numbers: items a second (median), peak memory in bytes, and its score."""
    speed = statistics.median(turn["items"] / turn["wall"] for turn in contestant.turns)
    return {"items_per_second": speed, "peak_bytes": contestant.peak, **contestant.result}


if __name__ == "__main__":
    main()
