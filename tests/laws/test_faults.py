"""Mistakes that only show on several ranks; every rank gets the error."""

import json

import pytest
import torch
from safetensors.torch import load_file
from support.launching import ROOT, launch, metrics

from laws import faults


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """Return both ranks' errors or results by case, the folder of the runs, and the output."""
    folder = tmp_path_factory.mktemp("faults")
    result = launch("ddp_cpu", 2, ROOT / "tests" / "laws" / "faults.py", folder)
    assert result.status == 0, result.output[-3000:]
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(2)], folder, result.output


@pytest.fixture(scope="module")
def sharded(tmp_path_factory):
    """Return both ranks' errors by case under FSDP2."""
    folder = tmp_path_factory.mktemp("faults-fsdp")
    result = launch("fsdp_cpu", 2, ROOT / "tests" / "laws" / "faults.py", folder, "stopping", "swapped", "heads")
    assert result.status == 0, result.output[-3000:]
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(2)]


def test_layers_in_another_order_are_found_under_fsdp(told, sharded):
    """FSDP2 would mix up their weights without a word; DDP does not mind."""
    assert [rank["swapped"] for rank in told[0]] == [None, None]
    for rank in sharded:
        assert "in step 1, rank 1 gathers layers." in rank["swapped"] and "0 times" in rank["swapped"]


def test_heads_that_a_loss_does_not_use_are_found_under_fsdp(sharded):
    """Their backward passes are paired by their order too; gradients accumulate, so all weights have some."""
    assert all("where rank 0" in rank["heads"] and "mix up weights" in rank["heads"] for rank in sharded)


def test_a_loop_over_micro_batches_goes_to_its_end(told):
    assert all("has not come to its last micro-batch" in rank["left early"] for rank in told[0])


def test_a_parameter_without_gradient_is_named(told):
    """DDP would fail one step later, with advice that users cannot follow here."""
    for rank in told[0]:
        assert "idle.weight, idle.bias had no gradient" in rank["unused"] and "requires_grad_" in rank["unused"]


def test_what_ddp_does_not_sum_is_named(told):
    """A parameter without a gradient in a later step, whose gradients would differ between ranks; a static graph."""
    for rank in told[0]:
        assert "idle.weight, idle.bias had no gradient in this rank's last micro-batch of step 2" in rank["seldom"]
        assert "find_unused_parameters" in rank["seldom"] and "static_graph" in rank["static"]


def test_metrics_that_keep_all_values_do_without_samples_on_a_rank(told):
    """And computing twice gives the same."""
    first, second = told[0][0]["auroc"]
    assert first == second == told[0][1]["auroc"][0]
    assert first["eval/samples"] == 4 and 0 <= first["eval/auroc"] <= 1


def test_what_batchnorm_means_is_said_once(told):
    assert told[2].count("1 is a BatchNorm: each micro-batch is normalised by itself") == 1
    assert "warning: 1 is" not in told[2]


def test_tied_weights_of_a_plain_module_are_written(told):
    weights = load_file(told[1] / "tied" / "model" / "model.safetensors")
    assert {"first.bias", "second.bias"} < set(weights) and len(weights) == 3
    assert all(torch.isfinite(tensor).all() for tensor in weights.values())


def test_ranks_that_drift_apart_are_found(told):
    """With the first tensor that differs, in the first step of an epoch of two steps."""
    for rank in told[0]:
        assert "rank 1 has drifted from rank 0: after step 1, 1 of 4 weights differ, first 1.bias" in rank["drift"]


def test_ranks_with_other_data_are_found(told):
    for rank in told[0]:
        assert "rank 1 would go through other samples than rank 0" in rank["other data"]
        assert (
            "rank 1 would go through other samples" in rank["other mix"]
            and "same file of --data.mix" in rank["other mix"]
        )


def test_a_step_that_is_not_finite_and_not_measured_is_named(told, sharded):
    """Before its update under DDP, whose ranks have whole gradients; under FSDP when numbers are read next."""
    place = "micro-batch {} on rank {}: samples [7]"
    (words, made), (other, _) = (rank["stopping"] for rank in told[0])
    assert f"the gradient of step {made + 1} is nan" in words and 0 < made < 39 and words == other
    assert any(place.format(micro, micro // 2) in words for micro in range(3))
    later = [rank["stopping"][0] for rank in sharded]
    assert f"the loss of step {made + 1} was not finite (micro-batch" in later[0] and later[0] == later[1]
    assert any(place.format(micro, micro // 2) in later[0] for micro in range(3)) and "found in step 40" in later[0]


def test_a_machine_with_other_data_of_the_same_size_is_found(told):
    """Before training, with what differs; an error in reading on one machine reaches all."""
    for rank in told[0]:
        assert "rank 1 would train on other data than rank 0: 1 of 20 rows" in rank["other contents"]
        assert "row 12 cannot be read" in rank["broken rows"]
    assert not (told[1] / "contents" / "checkpoints").exists()


def test_ranks_that_compute_together_and_have_read_other_samples_are_found(told):
    """They would wait for each other in layers that get tensors of other shapes, or mix up their rows."""
    for rank in told[0]:
        assert rank["unlike"][0] == [2.0, 1]
        assert "step 1: ranks that compute a micro-batch together have read other samples" in rank["unlike"][1]


def test_a_step_that_is_not_finite_is_skipped_alike_on_every_layout(told, tmp_path):
    """In each of three epochs; its samples are named, and it does not change the weights."""
    assert faults.skipping(tmp_path / "one") == told[0][0]["skipping"] == told[0][1]["skipping"] == 3
    one, two = metrics(tmp_path / "one"), metrics(told[1] / "skipping")
    assert [(line["step"], line.get("skipped_steps"), line.get("ids")) for line in two] == [
        (line["step"], line.get("skipped_steps"), line.get("ids")) for line in one
    ]
    assert told[2].count("the step is skipped (--run.nonfinite)") == 3 and "samples [" in told[2]
    weights = [load_file(at / "model" / "model.safetensors") for at in (tmp_path / "one", told[1] / "skipping")]
    for name, tensor in weights[0].items():
        assert torch.isfinite(tensor).all() and torch.allclose(tensor, weights[1][name], rtol=1e-5)


def test_a_folder_that_is_not_shared_is_said(told):
    """If not, checkpoints would be committed that no rank can read."""
    for rank in told[0]:
        assert "--run.dir must be on a disk that all machines share" in rank["not shared"]
