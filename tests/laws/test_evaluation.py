"""Law 5: evaluation counts every sample once, on any number of processes, even on more than there are samples."""

import json

import pytest
from support.launching import ROOT, filled, scores, steps, train_many

from laws import evaluations as script
from laws import scored

RECIPE = ROOT / "recipes" / "cls.py"
SIZES = (2, 101, 307)
SCORED = (("cpu", 1), ("ddp_cpu", 3))  # where one model is scored
FIVE = pytest.param(("ddp_cpu", 5), marks=pytest.mark.exhaustive)  # for `make laws`


@pytest.fixture(scope="module")
def evaluations(tmp_path_factory, rows, data_cache):
    """Return a function from a layout to the folder of drawn.py's and scored.py's runs; one model is scored beside."""
    root = tmp_path_factory.mktemp("evaluation")
    runs = filled(root, ROOT / "tests" / "laws" / "evaluations.py", script.main)
    common = ["--data.path", rows(100), "--run.trackers", "--data.max-length", 64]
    train_many(
        "cpu", 1, RECIPE, [[*common, "--scratch.width", 32, "--run.epochs", 4, "--run.dir", root / "model"]], root
    )
    # One step that changes nothing, so that every number of processes scores the same weights.
    still = ["--model", root / "model" / "model", "--run.steps", 1, "--optim.lr", 1e-30, "--optim.weight-decay", 0]
    still += ["--run.global-batch", 20, "--run.micro-batch", 4]

    def evaluations(profile, processes):
        if (profile, processes) not in SCORED:
            return runs(profile, processes)[0]
        sets = {size: ["--data.eval-path", rows(size), "--run.dir", root / f"{processes}-{size}"] for size in SIZES}
        listed = [(str(RECIPE), [str(word) for word in [*common, *still, *each]], None) for each in sets.values()]
        (root / f"{processes}.json").write_text(json.dumps(listed))
        return runs(profile, processes, root / f"{processes}.json")[0]

    return evaluations


@pytest.fixture(scope="module")
def evaluated(evaluations):
    """Return a function from a number of processes to the scores of one model on each set size."""

    def evaluated(processes):
        folder = evaluations(*SCORED[processes > 1])
        return {size: scores(folder.with_name(f"{processes}-{size}"))[-1] for size in SIZES}

    return evaluated


@pytest.mark.parametrize("processes", [3])
def test_same_score_on_any_number_of_processes(evaluated, processes):
    """Accuracy, F1 and count are equal to the last digit; the loss, a sum in another order, to 1e-6."""
    for size in SIZES:
        one, many = evaluated(1)[size], evaluated(processes)[size]
        assert one["eval/samples"] == many["eval/samples"] == size
        assert one["eval/accuracy"] == many["eval/accuracy"]
        assert one["eval/f1"] == many["eval/f1"]
        assert abs(one["eval/loss"] - many["eval/loss"]) < 1e-6 * one["eval/loss"]


def test_scores_are_those_of_a_loop_without_us(evaluated, rows, tmp_path_factory):
    """The accuracy of a plain loop over the saved model, one text at a time."""
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    evaluated(1)
    model_folder = next(tmp_path_factory.getbasetemp().glob("evaluation*/model/model"))
    model = AutoModelForSequenceClassification.from_pretrained(model_folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    hits = 0
    lines = [json.loads(line) for line in rows(101).read_text().splitlines()]
    for line in lines:
        with torch.no_grad():
            inputs = tokenizer(line["text"], truncation=True, max_length=64, return_tensors="pt")
            hits += model.config.id2label[model(**inputs).logits.argmax().item()] == line["label"]
    assert evaluated(1)[101]["eval/accuracy"] == pytest.approx(hits / len(lines), abs=1e-7)
    assert 0 < hits < len(lines)


@pytest.fixture(scope="module")
def noisy(evaluations):
    """Return a function from a layout to the folder of drawn.py."""
    return lambda profile, processes: evaluations(profile, processes) / "drawn"


@pytest.mark.parametrize("layout", [("fsdp_cpu", 2), ("ddp_cpu", 3), FIVE])
def test_what_an_evaluation_draws_belongs_to_its_micro_batch(noisy, layout):
    """In rows, collate and forward pass: scores have the same bits on any layout."""
    one, many = scores(noisy("cpu", 1) / "run"), scores(noisy(*layout) / "run")
    assert many == one and len(one) == 2
    assert steps(noisy(*layout) / "run") == steps(noisy("cpu", 1) / "run")


def test_every_evaluation_of_a_run_draws_the_same(noisy):
    """So scores of two steps differ only by what was learned between them, which here is nothing."""
    first, second = ({**line, "step": 0} for line in scores(noisy("cpu", 1) / "run"))
    assert first == second
    assert len({line["loss"] for line in steps(noisy("cpu", 1) / "run")}) == 3


def test_what_a_step_draws_outside_its_micro_batches_is_the_same_everywhere(noisy):
    """Whether or not the step has evaluated."""
    one = json.loads((noisy("cpu", 1) / "rank-0.json").read_text())
    for rank in range(3):
        assert json.loads((noisy("ddp_cpu", 3) / f"rank-{rank}.json").read_text()) == one
    assert len({number for line in one for number in line}) == 12


@pytest.fixture(scope="module")
def torchmetrics(evaluations):
    """Return a function from a layout to the scores of torchmetrics."""
    return lambda profile, processes: scores(evaluations(profile, processes) / "scored" / "run")[-1]


@pytest.mark.parametrize("layout", [("ddp_cpu", 3), ("fsdp_cpu", 2), FIVE])
def test_torchmetrics_have_the_same_bits_on_any_layout(torchmetrics, layout):
    """Those whose states are sums, and those that keep what they have seen, or a running mean."""
    one, many = torchmetrics("cpu", 1), torchmetrics(*layout)
    assert many == one and one["eval/samples"] == scored.SIZE


def test_torchmetrics_have_their_own_values(torchmetrics):
    """Those of one update with all samples."""
    found = torchmetrics("cpu", 1)
    for name, (metric, arguments) in scored.kinds().items():
        metric.update(*arguments(scored.LOGITS, scored.TARGETS))
        assert found[f"eval/{name}"] == pytest.approx(metric.compute().item(), rel=1e-5), name
