"""Every profile is one that accelerate's own reader takes, without a key that it would ignore."""

import shutil

import pytest
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import launch_command_parser
from support.launching import PROFILES

from app.distributed import accelerate_patches
from app.launching import profiles

NAMES = ["cpu", "ddp_cpu", "fsdp_cpu", "gpu", "ddp", "fsdp", "hsdp", "ddp_2nodes", "fsdp_2nodes", "zero2", "zero3"]
NAMES += ["tp", "tp_cpu", "fsdp_tp", "fsdp_tp_cpu", "fsdp_offload"]


def test_all_profiles_are_here():
    assert {path.stem for path in PROFILES.glob("*.yaml")} == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_profile_is_read_whole(name):
    path = str(PROFILES / f"{name}.yaml")
    profile = load_config_from_file(path)  # refuses unknown keys at the top
    flags = launch_command_parser().parse_args(["--config_file", path, "script.py"])
    sections = profile.fsdp_config, profile.deepspeed_config, profile.parallelism_config, profile.dynamo_config
    for section in (*sections, profile.mpirun_config):
        for key in section:
            assert hasattr(flags, key), f"accelerate launch does not know {key}"
    assert profile.num_processes >= 1 and profile.mixed_precision in ("no", "bf16")


@pytest.mark.parametrize("name", NAMES)
def test_accelerate_has_nothing_to_say(name, monkeypatch, caplog):
    """Of what it chose because a profile left it open; on any number of cores."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("psutil.cpu_count", lambda logical=True: 64)
    words = ["--config_file", str(PROFILES / f"{name}.yaml"), "script.py"]
    accelerate_patches.complete(launch_command_parser().parse_args(words))
    assert caplog.messages == []


def test_sharding_profiles_are_fsdp2():
    for name in ("fsdp", "fsdp_cpu", "hsdp", "fsdp_2nodes", "fsdp_offload"):
        assert load_config_from_file(str(PROFILES / f"{name}.yaml")).fsdp_config["fsdp_version"] == 2


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("ddp_cpu", ("ddp_cpu", 2, "DDP")),
        ("ddp_cpu.yaml:4", ("ddp_cpu:4", 4, "DDP")),
        ("accelerate_configs/fsdp_cpu.yaml:3", ("fsdp_cpu:3", 3, "FSDP2")),
    ],
)
def test_a_profile_is_found_by_name_from_any_folder(tmp_path, monkeypatch, text, found):
    monkeypatch.chdir(tmp_path)
    profile = profiles.read(text)
    assert profile.file.is_file() and (profile.name, profile.processes, profile.wrapping) == found


@pytest.mark.parametrize(
    ("text", "mesh", "wrapping", "shards", "data_ranks"),
    [
        ("tp", (1, 1, 8), "TP x8", 1, 1),
        ("tp_cpu", (1, 1, 2), "TP x2", 1, 1),
        ("fsdp_tp", (1, 4, 2), "FSDP2, TP x2", 4, 4),
        ("fsdp_tp_cpu", (1, 2, 2), "FSDP2, TP x2", 2, 2),
    ],
)
def test_profiles_that_split_layers_are_read_right(text, mesh, wrapping, shards, data_ranks):
    profile = profiles.read(text)
    assert tuple(profile.mesh(dimension) for dimension in ("dp_replicate", "dp_shard", "tp")) == mesh
    found = profile.wrapping, profile.shards, profile.data_ranks
    assert found == (wrapping, shards, data_ranks) and not profile.troubles


def test_a_mesh_of_another_size_is_a_trouble():
    ((trouble, fix),) = profiles.read("fsdp_tp_cpu:6").troubles
    assert trouble == "a mesh of 4 for 6 processes" and "start 4 processes" in fix


def test_a_file_of_ones_own_comes_before_a_profile_of_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cpu").mkdir()  # a folder is none
    shutil.copy(PROFILES / "ddp_cpu.yaml", "fsdp_cpu.yaml")
    assert profiles.find("fsdp_cpu.yaml").resolve() == tmp_path / "fsdp_cpu.yaml"
    assert profiles.find("cpu") == PROFILES / "cpu.yaml"
    assert str(profiles.find("mine/cpu.yaml")) == "mine/cpu.yaml" and str(profiles.find("cpu.txt")) == "cpu.txt"
