"""benchmarks.wheels collects what a machine without a network lacks, and says when that is too much."""

import os
import re
import subprocess
import sys
import zipfile

import pytest
from support.launching import ROOT

from benchmarks.wheels import NAMES, versions


@pytest.fixture(scope="module")
def registry(tmp_path_factory):
    """Make a folder with a wheel for each package, as a registry; what they hold needs others."""
    folder = tmp_path_factory.mktemp("registry")
    for name in (*NAMES, "further"):
        version, stem = versions().get(name, "3.1"), re.sub("-", "_", name)
        about = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        if name == "datasets":
            about += "Requires-Dist: dill>=0.3\nRequires-Dist: pyarrow>=24\nRequires-Dist: jax; extra == 'jax'\n"
            about += "Requires-Dist: old; python_version < '3.12'\n"
        with zipfile.ZipFile(folder / f"{stem}-{version}-py3-none-any.whl", "w") as archive:
            archive.writestr(f"{stem}-{version}.dist-info/METADATA", about)
            wheel = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
            archive.writestr(f"{stem}-{version}.dist-info/WHEEL", wheel)
            archive.writestr(f"{stem}-{version}.dist-info/RECORD", "")
            archive.writestr(f"{stem}/data", os.urandom(200_000) if name == "monai" else b"")
    return folder


def collect(registry, *words):
    environment = {**os.environ, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(registry), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "benchmarks.wheels", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT)


def test_each_package_is_there_once_in_its_locked_version(registry, tmp_path):
    (tmp_path / "dill-0.1-py3-none-any.whl").write_bytes(b"an older one")
    (tmp_path / "own.txt").write_text("the user's")
    result = collect(registry, "--to", tmp_path, "--add", "further")
    assert result.returncode == 0, result.stderr
    names = {tuple(path.name.split("-")[:2]) for path in tmp_path.glob("*.whl")}
    wanted = {(re.sub("-", "_", name), versions()[name]) for name in NAMES}
    assert names == wanted | {("further", "3.1")} and (tmp_path / "own.txt").exists()
    assert "need, there: pyarrow>=24\n" in result.stdout


def test_too_much_and_what_is_not_to_be_had_end_with_a_message(registry, tmp_path):
    result = collect(registry, "--to", tmp_path, "--limit", 0.1)
    assert result.returncode == 1 and "0.2 MB are more than 0.1 (--limit); the largest is monai-" in result.stderr
    result = collect(registry, "--to", tmp_path, "--add", "nowhere")
    assert result.returncode == 1 and "error: pip could not fetch all" in result.stderr
    assert "Traceback" not in result.stderr
