"""Profiles that others wrote work, or are refused in the same words by `plan`, `doctor` and the run."""

import json
import os
import sys

import pytest
import yaml
from accelerate.commands.launch import launch_command_parser
from accelerate.utils.launch import prepare_multi_gpu_env
from support.launching import PROFILES, ROOT, run, steps
from support.launching import launch as start
from support.others_profiles import REFUSED, RUN, WORK

from app import UserError
from app.__main__ import main
from app.commands.doctor import command as doctor
from app.commands.doctor.findings import TROUBLE
from app.commands.launch import command as launch
from app.distributed import accelerate_patches, supported
from app.launching import profiles

RECIPE = ROOT / "recipes" / "lm.py"
TOY = ROOT / "tests" / "laws" / "toy.py"
SMALL = ["--scratch.layers", 2, "--scratch.width", 32, "--scratch.heads", 4, "--scratch.vocab", 300]
SMALL += ["--data.block", 32, "--run.steps", 2, "--run.global-batch", 4, "--run.micro-batch", 1]
SMALL += ["--run.trackers", "--run.log-every", 1, "--sample-length", 0]
OURS = sorted(path.stem for path in PROFILES.glob("*.yaml"))


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Return the file of each profile by its name, both of those that work and of those that are refused."""
    folder = tmp_path_factory.mktemp("profiles")
    every = WORK | {name: settings for name, (settings, *_) in REFUSED.items()}
    files = {name: folder / f"{number}.yaml" for number, name in enumerate(every)}
    for name, file in files.items():
        file.write_text(yaml.safe_dump(every[name]))
    return files


@pytest.fixture(scope="module")
def planned(written, rows, tmp_path_factory):
    """Return what `plan` says is in the way of each profile, by the profile's name."""
    found = tmp_path_factory.mktemp("plan") / "plan.json"
    words = [*SMALL, "--data.path", rows(31), "--data.eval-path", rows(7), "--run.dir", found.parent / "no"]
    assert main(list(map(str, ["plan", RECIPE, *words, "--profile", *written.values(), "--json", found]))) == 1
    return dict(zip(written, (each["trouble"] for each in json.loads(found.read_text())["layouts"]), strict=True))


# Of what is launched, a file of each kind, but for DDP, whose files ask for what ddp_cpu.yaml does, which most tests
# launch; `make laws` has the others.
LAUNCHED = ["TRL's fsdp_qlora", "without num_processes"]


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name.startswith(tuple(LAUNCHED)) else [pytest.mark.exhaustive]) for name in WORK],
)
def test_it_works(written, planned, rows, tmp_path, name):
    profile = profiles.read(str(written[name]))
    assert not planned[name]
    assert [row for row in doctor.fits(profile) if row.verdict == TROUBLE] == []
    words = [RECIPE, *SMALL, "--data.path", rows(31), "--data.eval-path", rows(7)]
    if "FSDP" not in profile.wrapping:
        words = [TOY, "--run.steps", 2]  # it has no layers of transformers to wrap, and starts sooner
    result = start(written[name], profile.processes, *words, "--run.dir", tmp_path / "run")
    assert result.status == 0, result.output[-6000:]
    assert len(steps(tmp_path / "run")) == 2
    layout = json.loads((tmp_path / "run" / "run.json").read_text())["layout"]
    assert (layout["wrapping"], layout["processes"]) == (profile.wrapping, profile.processes)


@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused_in_the_same_words(written, planned, name):
    """By `plan`, `doctor` and `launch`, with a way out."""
    says = REFUSED[name][1]
    assert says and says in planned[name]
    rows = [row for row in doctor.fits(profiles.read(str(written[name]))) if row.verdict == TROUBLE]
    assert rows and says in rows[0].found and rows[0].fix
    with pytest.raises(UserError) as refused:
        launch.main_of_words([str(written[name]), str(RECIPE)])
    assert str(refused.value) == f"{written[name]}: {rows[0].found}: {rows[0].fix}"


def environment_of(profile: profiles.Profile) -> dict[str, str]:
    """Return what accelerate's launcher gives to ranks."""
    words = ["--config_file", str(profile.file), "--num_processes", str(profile.processes), "--main_process_port", "0"]
    arguments = accelerate_patches.complete(launch_command_parser().parse_args([*words, "script.py"]))
    zero = {"ACCELERATE_USE_DEEPSPEED": str(profile.settings["distributed_type"] == "DEEPSPEED")}
    return prepare_multi_gpu_env(arguments) | zero | {"WORLD_SIZE": str(profile.processes)}


@pytest.mark.parametrize("name", [*WORK, *(name for name, case in REFUSED.items() if RUN in case), *OURS])
def test_a_rank_is_asked_for_what_the_file_asks_for(written, monkeypatch, name):
    """So what is refused of a file is refused in a run that accelerate's own launcher has started."""
    monkeypatch.setattr("accelerate.utils.launch.is_fp8_available", lambda: True)
    profile = profiles.read(str(written.get(name, PROFILES / f"{name}.yaml")))
    given = {key: value for key, value in environment_of(profile).items() if key not in os.environ}
    for variable, value in given.items():
        monkeypatch.setenv(variable, value)
    assert supported.of_environment(profile.on_cpu) == profile.asked


@pytest.mark.parametrize(
    "name",
    [
        "TRL's context_parallel",
        *(pytest.param(name, marks=pytest.mark.exhaustive) for name in ("a mesh that is larger", "FSDP1 in groups")),
    ],
)
def test_a_rank_refuses_it(written, tmp_path, name):
    """Under `accelerate launch`, before it makes a mesh; once, not once a rank."""
    words = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", written[name]]
    words += ["--main_process_port", 0, TOY, "--run.dir", tmp_path / "run"]
    result = run(words)
    found = [line for line in result.output.splitlines() if line.startswith("error: ")]
    assert len(found) == 1 and f"the profile: {REFUSED[name][1]}" in found[0], result.output
    assert not (tmp_path / "run").exists()
