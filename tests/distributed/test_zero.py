"""DeepSpeed: what it is told; and, where it is installed (`pip install deepspeed`), the laws, on CPU ranks."""

import importlib.util
import sys
from types import SimpleNamespace

import pytest
from support.launching import PROFILES, ROOT, python_path, run, scores, steps

from app import UserError, parse
from app.distributed import deepspeed
from laws.many import load

RECIPE = ROOT / "recipes" / "cls.py"
SCRIPT = ROOT / "tests" / "laws" / "zero_on_cpu.py"
FLAGS = ["--scratch.width", 32, "--scratch.vocab", 300, "--data.max-length", 64, "--run.log-every", 1]
# K is 3: one of four turns is idle. The second of two epochs begins inside a step.
FLAGS += ["--run.trackers", "--run.global-batch", 12, "--run.micro-batch", 4, "--run.steps", 12, "--run.eval-every", 3]
FLAGS += ["--optim.clip", 0.1, "--run.save-every", 3]


def plugin(**config):
    return SimpleNamespace(deepspeed_config={"zero_optimization": {"stage": 3}, **config})


def test_batches_and_clipping_are_ours():
    """A profile's own numbers would scale the loss, or clip at another norm than --optim.clip."""
    ours = plugin(train_batch_size=512, gradient_accumulation_steps="auto", gradient_clipping=1.0)
    deepspeed.configure(ours, clip=0.5, models=0)
    assert ours.deepspeed_config == {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.5,
        "zero_optimization": {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True},
    }


def test_a_second_model_is_refused():
    with pytest.raises(UserError, match="one model"):
        deepspeed.configure(plugin(), clip=1.0, models=1)


def test_on_cpu_it_is_refused(rows, tmp_path):
    """accelerate 1.15 would take DDP without a word."""
    text = (PROFILES / "zero2.yaml").read_text().replace("num_processes: 8", "num_processes: 2\nuse_cpu: true")
    (tmp_path / "zero.yaml").write_text(text)
    env = {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_USE_CPU": "true"}
    result = run([sys.executable, RECIPE, *FLAGS, "--data.path", rows(101), "--run.dir", tmp_path / "run"], env=env)
    assert result.status == 2 and "needs GPUs" in result.output and "fsdp_cpu.yaml" in result.output


def train(*words):
    """Run the recipe in this process."""
    recipe = load(RECIPE)
    recipe.main(parse(recipe.Config, list(map(str, words))))


@pytest.mark.apart
@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed")
# Stage 3 shards what stage 2 does, and weights; tests/laws/test_shipped_profiles.py trains both.
@pytest.mark.parametrize("stage", [pytest.param(2, marks=pytest.mark.exhaustive), 3])
def test_the_laws_hold(rows, tmp_path, stage):
    """The run of one process, also when stopped and resumed; another layout is refused; the model loads."""
    from safetensors.torch import load_file

    text = (PROFILES / f"zero{stage}.yaml").read_text().replace("num_processes: 8", "num_processes: 2")
    (tmp_path / "zero.yaml").write_text(text.replace("mixed_precision: bf16", "mixed_precision: 'no'"))
    head = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", tmp_path / "zero.yaml"]
    env = {"PYTHONPATH": python_path(ROOT / "tests")}
    data = [*FLAGS, "--data.path", rows(101), "--data.eval-path", rows(7), "--run.dir"]
    train(*data, tmp_path / "one")
    halves = [*data, tmp_path / "halves"]
    flags = [*data, tmp_path / "whole", "next", *halves, "--run.stop-at", 4, "next", *halves]
    result = run([*head, "--main_process_port", 0, SCRIPT, RECIPE, *flags], env=env)
    assert result.status == 0 and result.output.count(f"DeepSpeed ZeRO-{stage}, fp32, cpu") >= 3, result.output
    assert "resuming" in result.output and "FutureWarning" not in result.output
    pairs = list(zip(steps(tmp_path / "one"), steps(tmp_path / "whole"), strict=True))
    assert all(a["ids"] == b["ids"] and a["loss"] == pytest.approx(b["loss"], rel=1e-5) for a, b in pairs)
    assert all(a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-3) for a, b in pairs)
    assert steps(tmp_path / "halves") == steps(tmp_path / "whole")
    assert scores(tmp_path / "halves") == scores(tmp_path / "whole")
    weights = {name: load_file(tmp_path / name / "model" / "model.safetensors") for name in ("one", "whole", "halves")}
    assert set(weights["one"]) == set(weights["whole"])
    assert max((tensor - weights["whole"][name]).abs().max() for name, tensor in weights["one"].items()) < 1e-5
    assert all(tensor.equal(weights["halves"][name]) for name, tensor in weights["whole"].items())
    with pytest.raises(UserError, match="bound to their layout"):
        train(*data, tmp_path / "halves")
