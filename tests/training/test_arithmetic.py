"""deterministic_settings: what torch lets be chosen is chosen for exact mode, and given back without a warning."""

import json
import subprocess
import sys
import warnings

import pytest
import torch
from support.tiny import train
from torch.backends import cuda, cudnn

from app.training.exact import deterministic_settings

BEFORE = {
    "high": lambda: torch.set_float32_matmul_precision("high"),
    "cudnn": lambda: setattr(cudnn, "allow_tf32", False),
    "usual": lambda: None,
    "benchmark": lambda: (setattr(cudnn, "benchmark", True), setattr(cudnn, "deterministic", False)),
    "sums": lambda: setattr(cuda.matmul, "allow_bf16_reduced_precision_reduction", (False, False)),
    "matmul": lambda: setattr(cuda.matmul, "fp32_precision", "tf32"),
    "convolution": lambda: setattr(cudnn.conv, "fp32_precision", "ieee"),
}


def chosen():
    """Read everything that can be read: where older and newer settings disagree, torch refuses to read the older."""
    found = {}
    for name, choice in deterministic_settings.CHOICES.items():
        try:
            found[name] = choice.read()
        except RuntimeError:
            found[name] = "unreadable"
    return found


@pytest.fixture
def usual():
    """Put back what a test has chosen."""
    before = chosen()
    yield before
    for name, value in before.items():
        deterministic_settings.CHOICES[name].write(value)


@pytest.mark.parametrize("before", BEFORE)
def test_what_was_chosen_is_given_back(usual, before):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # The garbage collector may come just now, and find what another test has left.
        warnings.simplefilter("ignore", ResourceWarning)
        BEFORE[before]()
        found = chosen()
        with deterministic_settings.fixed():
            inside = chosen()
        assert chosen() == found
    for name, choice in deterministic_settings.CHOICES.items():
        wanted = (False, True) if isinstance(inside[name], tuple) else choice.wanted
        assert inside[name] == wanted, name


def test_a_run_says_in_its_record_what_was_in_force(tmp_path, usual):
    """In exact mode alone: the ordinary mode chooses nothing."""
    for exact in (True, False):
        train(tmp_path / str(exact), exact=exact, save_async=False)
    record = json.loads((tmp_path / "True" / "run.json").read_text())["arithmetic"]
    assert record["float32_matmul"] == record["float32_convolution"] == "ieee" and record["rounding"] == "torch"
    assert record["cudnn_deterministic"] and not record["cudnn_benchmark"] and not record["cudnn_attention"]
    assert not record["bf16_reduced_sums"] and record["cublas_workspace"]
    assert "arithmetic" not in json.loads((tmp_path / "False" / "run.json").read_text())
    assert chosen() == usual


def test_torch_prints_no_warning():
    """Some of its warnings come once a process, and do not pass through Python."""
    code = "from app.training.exact import deterministic_settings as chosen\nwith chosen.fixed(): chosen.in_force()"
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
