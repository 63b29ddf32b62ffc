"""A large model is made on rank 0 alone where weights are cut, and its run is the same to the last bit."""

import pytest
from support.launching import ROOT, hashes, launch_all, scores, steps, train_all

PROFILES = {"fsdp_cpu": 2, "tp_cpu": 2, "fsdp_tp_cpu": 4}
NAMES = {"tp_cpu": ["tied", "apart", "masked", "adapters"], "fsdp_tp_cpu": ["tied", "loaded"]}  # all else on fsdp_cpu
COMMON = ["--run.global-batch", 12, "--run.micro-batch", 4, "--run.log-every", 1, "--run.trackers", "--run.steps", 2]
SMALL = ["--scratch.layers", 2, "--scratch.width", 32, "--scratch.heads", 4]
LM = [*SMALL, "--scratch.vocab", 300, "--data.block", 32, "--sample-length", 4, "--scratch.dropout", 0.1]
CASES = {
    "tied": ("lm", LM),
    "apart": ("lm", [*LM, "--scratch.tied", "false", "--run.exact", "true", "--run.slices", 4]),
    "masked": ("lm", [*LM, "--mask.rate", 0.2]),  # a BERT, with buffers and a bias that two modules share
    "loaded": ("lm", [*LM, "--model", "MODEL"]),
    "adapters": ("lm", [*LM, "--model", "MODEL", "--lora.rank", 2]),
}


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory, rows, data_cache):
    """Return a folder with a model that a run has finished."""
    folder = tmp_path_factory.mktemp("pretrained")
    flags = [*LM, *COMMON, "--data.path", rows(31), "--data.eval-path", rows(7), "--run.dir", folder / "run"]
    train_all("cpu", 1, [(ROOT / "recipes" / "lm.py", flags, None)], folder)
    return folder / "run" / "model"


@pytest.mark.parametrize("profile", ["fsdp_cpu", "tp_cpu", pytest.param("fsdp_tp_cpu", marks=pytest.mark.exhaustive)])
def test_the_run_is_the_same(tmp_path, rows, pretrained, profile):
    cases = {name: CASES[name] for name in NAMES.get(profile, CASES)}
    commands = []
    for where in ("everywhere", "once"):
        for name, (recipe, flags) in cases.items():
            flags = [pretrained if flag == "MODEL" else flag for flag in flags]
            flags = [*flags, *COMMON, "--data.path", rows(31), "--data.eval-path", rows(7)]
            flags += ["--run.dir", tmp_path / where / name]
            commands.append((ROOT / "recipes" / f"{recipe}.py", flags, None))
    launch_all(profile, PROFILES[profile], commands, tmp_path, "once.py", timeout=300)
    for name in cases:
        everywhere, once = (tmp_path / where / name for where in ("everywhere", "once"))
        assert steps(once) == steps(everywhere) and len(steps(once)) == 2
        assert scores(once) == scores(everywhere)
        assert hashes(once / "model") == hashes(everywhere / "model") != {}
