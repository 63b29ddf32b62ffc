"""Every profile is one that accelerate's own reader takes, without a key that it would ignore."""

import shutil
import subprocess
import sys
import zipfile

import pytest
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import launch_command_parser

from app.launching import profiles
from launching import PROFILES, ROOT

NAMES = ["cpu", "ddp_cpu", "fsdp_cpu", "gpu", "ddp", "fsdp", "hsdp", "ddp_2nodes", "fsdp_2nodes", "zero2", "zero3"]


def test_all_profiles_are_here():
    assert {path.stem for path in PROFILES.glob("*.yaml")} == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_profile_is_read_whole(name):
    path = str(PROFILES / f"{name}.yaml")
    profile = load_config_from_file(path)  # refuses unknown keys at the top
    flags = launch_command_parser().parse_args(["--config_file", path, "script.py"])
    for section in (profile.fsdp_config, profile.deepspeed_config, profile.parallelism_config, profile.dynamo_config):
        for key in section:
            assert hasattr(flags, key), f"accelerate launch does not know {key}"
    assert profile.num_processes >= 1 and profile.mixed_precision in ("no", "bf16")


def test_sharding_profiles_are_fsdp2():
    for name in ("fsdp", "fsdp_cpu", "hsdp", "fsdp_2nodes"):
        assert load_config_from_file(str(PROFILES / f"{name}.yaml")).fsdp_config["fsdp_version"] == 2


BUILD = "from setuptools import build_meta; print(build_meta.build_wheel('built'))"
READ = """
from app.launching import profiles
print(profiles.__file__)
for text in ("ddp_cpu", "ddp_cpu.yaml:4", "accelerate_configs/fsdp_cpu.yaml:3"):
    found = profiles.read(text)
    print(found.file.is_file(), found.name, found.processes, found.wrapping)
"""


def in_python(code, folder, path=""):
    words = [sys.executable, "-c", code]
    done = subprocess.run(words, cwd=folder, env={"PYTHONPATH": path}, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_a_wheel_has_every_module_and_the_profiles(tmp_path):
    """Installed, it finds them by name from any folder."""
    source, installed, empty = (tmp_path / name for name in ("source", "installed", "empty"))
    for name in ("app", "accelerate_configs"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    empty.mkdir()
    wheel = source / "built" / in_python(BUILD, source)[-1]
    zipfile.ZipFile(wheel).extractall(installed)
    modules = {str(file.relative_to(ROOT)) for file in (ROOT / "app").rglob("*.py")}
    assert {str(file.relative_to(installed)) for file in installed.rglob("*.py")} == modules
    assert {file.stem for file in (installed / "app" / "accelerate_configs").iterdir()} == set(NAMES)
    place, *found = in_python(READ, empty, str(installed))
    assert place == str(installed / "app" / "launching" / "profiles.py")
    assert found == ["True ddp_cpu 2 DDP", "True ddp_cpu:4 4 DDP", "True fsdp_cpu:3 3 FSDP2"]


def test_a_file_of_ones_own_comes_before_a_profile_of_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cpu").mkdir()  # a folder is none
    shutil.copy(PROFILES / "ddp_cpu.yaml", "fsdp_cpu.yaml")
    assert profiles.find("fsdp_cpu.yaml").resolve() == tmp_path / "fsdp_cpu.yaml"
    assert profiles.find("cpu") == PROFILES / "cpu.yaml"
    assert str(profiles.find("mine/cpu.yaml")) == "mine/cpu.yaml" and str(profiles.find("cpu.txt")) == "cpu.txt"
