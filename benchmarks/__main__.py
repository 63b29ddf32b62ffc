"""Compare Samestep with bare loops and other trainers, and write the results.

    python -m benchmarks [--only NAME ...] [--texts NAME=FLAGS ...] [--rounds 24] [--sessions 3]
                         [--out benchmarks/results]

The contestants of a row take turns of a few steps, each in its own process, and are compared turn by turn: the table
shows the median and the quartiles of the ratios, ours to theirs. Turns are short, so that other work on the machine
slows all contestants alike.
"""

import argparse
import dataclasses
import sys
from pathlib import Path

from app.commands.doctor.machine import processor
from benchmarks.results import machine, slug
from benchmarks.rows import run_rows
from benchmarks.works import works


def main() -> None:
    """Run the rows asked for; print and write each as it is done."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[], help="rows whose names contain one of these")
    parser.add_argument("--texts", nargs="*", default=[], help="further sets for cls: name=flags of recipes/cls.py")
    parser.add_argument("--rounds", type=int, default=24, help="at least 3")
    parser.add_argument("--sessions", type=int, help="how often a row's contestants are started anew")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    texts = dict(text.split("=", 1) for text in options.texts)
    chosen = [w for w in works(texts) if not options.only or any(part in w.name for part in options.only)]
    if not chosen:
        sys.exit(
            f"no row is called like {', '.join(options.only)}: there are {', '.join(w.name for w in works(texts))}"
        )
    if options.sessions:
        chosen = [dataclasses.replace(work, sessions=options.sessions) for work in chosen]
    run_rows(chosen, options.rounds, options.out / f"{slug(processor())}.json", machine())


if __name__ == "__main__":
    main()
