"""Collect the packages that a machine without a network lacks, as wheels in one folder.

    python -m benchmarks.wheels                         # into wheels/, for Python 3.12 on Linux, x86-64
    python -m benchmarks.wheels --python 3.13 --add peft

The machine must already have torch, accelerate, transformers, numpy, pandas, pyarrow, pillow, scikit-learn, psutil,
xxhash, rich and pytest, as container images for GPUs do. Versions are those of requirements.lock. On that machine, run
in this folder:

    python3 -m pip install --no-index --no-deps --upgrade --target site wheels/*.whl
    export PYTHONPATH=$PWD:$PWD/site
"""

import argparse
import re
import subprocess
import sys
import zipfile
from email.parser import Parser
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

LOCK = Path(__file__).parents[1] / "requirements.lock"
# Not wandb: without it a run still writes metrics.jsonl, and says so.
NAMES = ("datasets", "dill", "docstring-parser", "monai", "multiprocess", "nibabel", "plotly", "tyro", "typeguard")
# pip matches platform tags literally, and does not add older ones.
TAGS = [f"manylinux_2_{minor}_x86_64" for minor in (39, 35, 34, 31, 28, 27, 24, 17)]
TAGS += ["manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64"]


def versions() -> dict[str, str]:
    """Return the versions of requirements.lock, by normalised package name."""
    lines = re.findall(r"^([\w.-]+)==([^\s;]+)", LOCK.read_text(encoding="utf-8"), re.MULTILINE)
    return {_plain(name): version for name, version in lines}


def collect(names: list[str], folder: Path, python: str, tags: list[str]) -> list[Path]:
    """Download a wheel for each name, without dependencies; return the files.

    Older wheels in the folder are deleted, because pip refuses two of one package.
    """
    locked = versions()
    wanted = [f"{name}=={locked[_plain(name)]}" if _plain(name) in locked else name for name in names]
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.whl"):
        old.unlink()
    platforms = [word for tag in tags for word in ("--platform", tag)]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary=:all:", "--implementation", "cp", "--python-version", python, *platforms]
    subprocess.run([*command, "--dest", str(folder), *wanted], check=True)
    return sorted(folder.glob("*.whl"))


def needed(files: list[Path], python: str) -> list[str]:
    """Return the dependencies that are not among the packages, with the versions that all of them accept."""
    packages, limits_by_name = set(), {}
    for file in files:
        with zipfile.ZipFile(file) as archive:
            (name,) = (n for n in archive.namelist() if re.fullmatch(r"[^/]+\.dist-info/METADATA", n))
            about = Parser().parsestr(archive.read(name).decode())
        packages.add(_plain(about["Name"]))
        for line in map(Requirement, about.get_all("Requires-Dist", [])):
            if line.marker is None or line.marker.evaluate({"python_version": python, "extra": ""}):
                name = _plain(line.name)
                limits_by_name[name] = limits_by_name.get(name, SpecifierSet()) & line.specifier
    return [f"{name}{limits}" for name, limits in sorted(limits_by_name.items()) if name not in packages]


def main() -> None:
    """Collect the wheels; print their number, their size, and the packages that the machine must have."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--to", type=Path, default=Path("wheels"), help="the folder; its own wheels are replaced")
    parser.add_argument("--python", default="3.12", help="Python there (default 3.12)")
    parser.add_argument(
        "--platform", nargs="+", default=TAGS, help="tags of wheels that run there (default: Linux, x86-64)"
    )
    parser.add_argument("--add", nargs="+", default=[], metavar="NAME", help="further packages, without what they need")
    parser.add_argument("--limit", type=float, default=60.0, help="most megabytes (1e6 bytes) in all (default 60)")
    options = parser.parse_args()
    try:
        files = collect([*NAMES, *options.add], options.to, options.python, options.platform)
    except subprocess.CalledProcessError:
        sys.exit("error: pip could not fetch all of them: see what it says above; a package may have no wheel for "
                 f"Python {options.python} on {options.platform[0]} and the like")  # fmt: skip
    sizes = {file.name: file.stat().st_size / 1e6 for file in files}
    for name, size in sizes.items():
        print(f"{size:8.2f} MB  {name}")
    rest = ", ".join(needed(files, options.python))
    print(f"{sum(sizes.values()):8.2f} MB  in {options.to}; they also need, there: {rest}")
    if sum(sizes.values()) > options.limit:
        largest = max(sizes, key=sizes.get)
        sys.exit(
            f"error: {sum(sizes.values()):.1f} MB are more than {options.limit:g} (--limit); the largest is {largest}"
        )


def _plain(name: str) -> str:
    """Return a package's normalised name (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


if __name__ == "__main__":
    main()
