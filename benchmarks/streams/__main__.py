"""Measure data that are read by chunks next to mapped data, to other libraries, and to other orders.

    python -m benchmarks.streams [--only PART ...] [--rows 16000] [--rounds 6] [--list]

trained: steps on streamed data against the same steps on mapped data. read: rows of reading alone, also of datasets,
WebDataset and LitData, from a disk and from a store over http. resume: the first batch at step 10^6. start: opening an
index of up to 10^9 rows. requests: how many, and how many bytes, for a sample. rows: single rows against chunks.
padding: what it costs that a step cannot be sorted. How windows mix rows is measured by `benchmarks.stream_mixing`.

Each part is a process of its own, with a cache of its own in a temporary folder. WebDataset, LitData and Lance are
compared where they are installed: pip install --no-deps --target FOLDER -r benchmarks/streams/requirements.txt, and
PYTHONPATH=FOLDER. What is missing is said.
"""

import argparse
import importlib
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

PARTS = {
    "trained": "trained",
    "read": "rows_alone",
    "resume": "resuming",
    "start": "starting",
    "requests": "transfers",
    "rows": "single_rows",
    "padding": "padding",
}


def main() -> None:
    """Run the parts that were asked for, each in a process of its own, and name the machine."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.streams", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART")
    parser.add_argument("--rows", type=int, default=16_000, help="texts (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=6, help="of contestants in turn (default: %(default)s)")
    parser.add_argument("--list", action="store_true", help="name the parts, and end")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.list:
        print("\n".join(PARTS))
        return
    if options.folder:
        (part,) = options.only
        importlib.import_module(f"benchmarks.streams.{PARTS[part]}").run(options.folder, options.rows, options.rounds)
        return
    failed = [part for part in options.only if not _run(part, options)]
    from benchmarks.results import commit, describe, machine

    print(f"{describe(machine())}; commit {commit()}; {options.rows:,} rows, {options.rounds} rounds")
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


def _run(part: str, options: argparse.Namespace) -> bool:
    """Run a part, and tell whether it ended well."""
    print(f"== {part}", flush=True)
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        words = ["--only", part, "--folder", folder, "--rows", str(options.rows), "--rounds", str(options.rounds)]
        environment = {**os.environ, "HF_DATASETS_CACHE": f"{folder}/cache", "HF_HUB_OFFLINE": "1"}
        environment["HF_DATASETS_DISABLE_PROGRESS_BARS"] = "1"
        done = subprocess.run([sys.executable, "-m", "benchmarks.streams", *words], env=environment)
    print(f"({time.monotonic() - began:.0f} s)\n", flush=True)
    return done.returncode == 0


if __name__ == "__main__":
    main()
