"""Job files against the schemas that Kubernetes and SkyPilot publish, and a job file with a mistake in it."""

import importlib
import importlib.util
import sys
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from unittest.mock import MagicMock

import jsonschema
import pytest
import yaml
from support.launching import ROOT

from app.__main__ import main

pytestmark = pytest.mark.apart
TOY = ROOT / "tests" / "laws" / "toy.py"
DISKS = ["--volume", "runs:/runs", "--run.dir", "/runs/x"]
BUCKETS = ["--secret", "store", "--run.dir", "s3://bucket/runs/x"]


@pytest.fixture
def submitted(tmp_path, monkeypatch):
    """Give a function from the words of a command to the parts of the job file."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "toy.py").write_text(TOY.read_text())

    def submitted(*words: str) -> list[dict]:
        small = ["--run.micro-batch", "1", "--nodes", "2", "--dry-run"]
        assert main(["submit", words[0], "toy.py", *words[1:], *small]) == 0
        (file,) = Path("jobs").iterdir()
        return list(yaml.safe_load_all(file.read_text()))

    return submitted


@pytest.mark.parametrize("profile", ["ddp_cpu", "ddp:8"])
@pytest.mark.parametrize("place", [DISKS, BUCKETS], ids=["disk", "bucket"])
def test_kubernetes(submitted, profile, place):
    import kubernetes_validate

    service, job = submitted("kubernetes", "--profile", profile, "--image", "lab/train:1", *place)
    for part in (service, job):
        kubernetes_validate.validate(part, "1.37", strict=True)
    job["spec"]["backoffLimits"] = job["spec"].pop("backoffLimit")
    with pytest.raises(kubernetes_validate.ValidationError, match="backoffLimits"):
        kubernetes_validate.validate(job, "1.37", strict=True)


def sky_schemas(monkeypatch) -> ModuleType:
    """Import SkyPilot's module of schemas alone: the rest of it would need the packages of every cloud."""
    (place,) = importlib.util.find_spec("sky").submodule_search_locations
    for name in ("sky", "sky.skylet", "sky.utils", "sky.setup_files", "sky.server"):
        package = ModuleType(name)
        package.__path__ = [str(Path(place, *name.split(".")[1:]))]
        package.__version__ = version("skypilot")
        monkeypatch.setitem(sys.modules, name, package)
    for name in ("sky.skylet.autostop_lib", "sky.utils.volume", "sky.server.plugins"):
        monkeypatch.setitem(sys.modules, name, MagicMock())
    monkeypatch.setenv("IS_SKYPILOT_SERVER", "true")  # a server is strict about names
    schemas = importlib.import_module("sky.utils.schemas")
    monkeypatch.setattr(schemas, "_task_config_schema", dict)  # of SkyPilot's own settings, which no job file has
    for name in [name for name in sys.modules if name.startswith("sky.")]:
        monkeypatch.setitem(sys.modules, name, sys.modules[name])  # they go with the test
    return schemas


@pytest.mark.parametrize("profile", [["ddp_cpu"], ["ddp:8", "--accelerators", "H100"]], ids=["cpu", "gpu"])
def test_skypilot(submitted, monkeypatch, profile):
    schemas = sky_schemas(monkeypatch)
    task = submitted("skypilot", "--profile", *profile, "--run.dir", "s3://bucket/runs/x")[0]
    schema, resources = schemas.get_task_schema(), schemas.get_resources_schema()
    jsonschema.validate(task, schema)
    jsonschema.validate(task["resources"], resources)
    with pytest.raises(jsonschema.ValidationError, match="num_node"):
        jsonschema.validate({**task, "num_node": 2}, schema)
    with pytest.raises(jsonschema.ValidationError, match="use_spots"):
        jsonschema.validate({**task["resources"], "use_spots": True}, resources)
