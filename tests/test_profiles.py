"""Every profile is one that accelerate's own reader takes, without a key that it would ignore."""

import pytest
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import launch_command_parser

from launching import PROFILES

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
