"""Test the laws and measure speed on one NVIDIA GPU, without a network. The most valuable parts run first.

    make bench-gpu                          # all parts; PART=laws, PART="lm exact" for some
    python -m benchmarks.gpu --list         # which parts there are, and how long they take
    python -m benchmarks.gpu --only laws-cls lm
    python -m benchmarks.gpu --summary      # merge the results of parts that were run before
    python -m benchmarks.gpu --small        # small shapes, also on a CPU: to check that all parts run, not to measure

Each part is a separate process with a time limit. In benchmarks/results/DEVICE/ it writes PART.json, which always has
the results so far, and PART.txt with all its output. A part that fails or takes too long does not stop the others.
After each part, all results there are merged into summary.json and summary.md.
"""

import argparse
import signal
import sys
from pathlib import Path

from app.commands.output import table
from benchmarks.gpu.parts import LIMIT, Part, chosen
from benchmarks.gpu.running import run_part
from benchmarks.gpu.summary import merge
from benchmarks.results import commit, machine, slug


def main() -> None:
    """Run the chosen parts, and merge all results."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", default=[], metavar="PART", help="parts, or what their names begin with")
    parser.add_argument("--list", action="store_true", help="name the parts, and end")
    parser.add_argument("--summary", action="store_true", help="merge what there is, and end")
    parser.add_argument("--small", action="store_true", help="small shapes; a CPU will do")
    parser.add_argument(
        "--limit", type=float, default=LIMIT, help="seconds that a part may take (default: %(default)s)"
    )
    parser.add_argument("--out", type=Path, help="folder of the results (default: benchmarks/results/DEVICE)")
    options = parser.parse_args()
    parts = chosen(options.only)
    if options.list:
        print(listing(parts, options.limit))
        return
    import torch

    on_gpu = torch.cuda.is_available()
    if not (on_gpu or options.small or options.summary):
        sys.exit("there is no GPU that torch can use; --small runs all parts in small shapes on a CPU")
    about = {"machine": machine(), "commit": commit()}
    device = about["machine"].get("gpu") or about["machine"]["cpu"]
    folder = options.out or Path(__file__).parents[1] / "results" / f"{slug(device)}{'-small' if options.small else ''}"
    if options.summary:
        print(merge(folder))
        return
    # So that SIGTERM also ends the processes of a part.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    ended = {}
    for number, part in enumerate(parts, 1):
        print(f"== {number} of {len(parts)}, {part.name}: {part.about} (at most {options.limit:.0f} s)", flush=True)
        result = run_part(part, folder, options.small, options.limit, about)
        ended[part.name] = result["status"]
        why = f": {result['end'][0]}" if result["status"] == "skipped" else ""
        print(f"== {part.name} {result['status']}{why} after {result['seconds']:.0f} s\n", flush=True)
        merge(folder)
    print(merge(folder))
    print(f"\n{folder / 'summary.md'}")
    bad = [f"{name} {status}" for name, status in ended.items() if status not in ("passed", "skipped")]
    if bad:
        sys.exit(f"not all parts have passed: {', '.join(bad)}")


def listing(parts: list[Part], limit: float) -> str:
    """Return the list of parts with their time limits."""
    rows = [[part.name, f"{part.minutes:g}", part.about] for part in parts]
    whole = sum(part.minutes for part in parts)
    ends = (
        f"{len(parts)} parts, on one H200 about {whole:.0f} minutes by estimate; none may take more than {limit / 60:g}"
    )
    return f"{table(['part', 'minutes', 'what it shows'], rows, right=(1,))}\n\n{ends}"


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
