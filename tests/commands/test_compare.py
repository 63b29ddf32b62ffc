"""What counts as the same step, and how a difference is named; on lines as runs write them, without any run."""

import copy
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from app.commands.prove.compare import EXACT, ORDINARY, Comparison, compare
from app.commands.prove.difference import MEANS, Difference
from app.commands.prove.trace import Trace, read
from app.errors import UserError
from app.sampling.hashing import hash_of
from app.training.loop.audit import SKETCH, sketch


def tensor(*values):
    values = [*values, *[0.0] * (SKETCH - len(values))]
    return {"hash": repr(values), "norm": math.hypot(*values), "sketch": values}


def trace(steps=3):
    """Write the lines of a run with two weights, whose bias has next to no gradient, and a buffer."""
    lines = {}
    for step in range(steps + 1):
        weights = {"models.0.weight": tensor(1.0 + step, 2.0), "models.0.bias": tensor(1e-3 * step)}
        lines[step] = {"step": step, "weights": {**weights, "models.0.mean": tensor(5.0)}}
        if step:
            lines[step] |= {"ids": f"{step:x}", "inputs": {"0": "a", "1": "b"}, "loss": 2.0, "grad_norm": 3.0}
            lines[step] |= {"lr": 0.1, "losses": {"loss": {"0": 2.5, "1": 1.5}}}
            lines[step]["gradients"] = {"models.0.weight": tensor(3.0), "models.0.bias": tensor(1e-7)}
    return Trace({"models.0.mean"}, lines)


def change(trace, step, **changes):
    """Change fields of a step; a float is a factor for a number, a function changes what is there."""
    changed = copy.deepcopy(trace)
    for path, factor in changes.items():
        *names, last = path.split("__")
        place = changed.steps[step]
        for name in names:
            place = place[name if name in place else f"models.0.{name}"]
        last = last if last in place else f"models.0.{last}"
        if isinstance(place[last], dict):
            place[last] = tensor(*(value * factor for value in place[last]["sketch"]))
        else:
            place[last] = place[last] * factor if isinstance(place[last], float) else "other"
    return changed


CHANGES = {
    "samples": {"ids": None},
    "inputs": {"inputs__1": None},
    "loss": {"loss": 1.01, "losses__loss__1": 1.02},
    "loss weights": {"loss": 1.01},
    "gradient norm": {"grad_norm": 1.1},
    "gradients": {"gradients__weight": 1.1},
    "learning rate": {"lr": 1.1},
    "weights": {"weights__weight": 1.1},
    "buffers": {"weights__mean": 1.1},
}


def test_a_run_is_the_same_as_itself():
    for tolerances in (EXACT, ORDINARY):
        found = compare(trace(), trace(), tolerances)
        assert (found.steps, found.first, found.tensor) == (3, None, None)
        assert found.deviations == dict.fromkeys(("loss", "gradient norm", "weights"), [0.0] * 3)


@pytest.mark.parametrize("tolerances", [EXACT, ORDINARY])
@pytest.mark.parametrize("what", MEANS)
def test_each_difference_is_named_with_its_step_and_place(what, tolerances):
    found = compare(trace(), change(trace(), 2, **CHANGES[what]), tolerances)
    assert (found.first.what, found.first.step) == (what, 2)
    places = {"inputs": "micro-batch 1", "loss": "micro-batch 1", "gradients": "weight", "weights": "weight"}
    assert found.first.places == ([{**places, "buffers": "mean"}[what]] if what in {*places, "buffers"} else [])
    assert found.first.means == MEANS[what] and f"step 2: {what}" in str(found.first)


def test_what_is_nearest_to_the_cause_comes_first():
    """In the order in which a step makes it, whatever else differs in it; and the earliest step."""
    for number, what in enumerate(MEANS):
        later = {k: v for name in [*MEANS][number:] for k, v in CHANGES[name].items()}
        if what == "loss weights":
            later.pop("losses__loss__1", None)
        assert compare(trace(), change(trace(), 1, **later), EXACT).first.what == what
    both = change(change(trace(), 2, ids=None), 1, lr=1.1)
    assert compare(trace(), both, EXACT).first.what == "learning rate"


def test_other_weights_before_the_first_step():
    found = compare(trace(), change(trace(), 0, weights__weight=1.5), ORDINARY)
    assert found.first.step == 0 and "build_model" in found.first.means
    assert found.first.deviation == pytest.approx(0.5)
    assert found.tensor is found.first


def test_the_tensor_that_differs_most_is_named_first():
    found = compare(trace(), change(trace(), 3, loss=1.5, weights__bias=3.0, weights__weight=1.5), EXACT)
    assert found.first.what == "loss weights" and found.tensor.places == ["weight", "bias"]
    assert found.tensor.deviation == pytest.approx(math.hypot(2, 1) / math.hypot(3, 3e-3))


@pytest.mark.parametrize(
    "within, beyond",
    [
        ({"loss": 1 + 5e-6}, {"loss": 1 + 2e-5}),
        ({"grad_norm": 1 + 5e-4}, {"grad_norm": 1 + 2e-3}),
        ({"gradients__weight": 1 + 5e-4}, {"gradients__weight": 1 + 2e-3}),
        # The model has gone from (1, 2) to (3, 2).
        ({"weights__weight": 1 + 2e-4}, {"weights__weight": 1 + 2e-3}),
        ({"weights__mean": 1 + 5e-4}, {"weights__mean": 1 + 2e-3}),
        # Held to the bit in either mode.
        ({}, {"lr": 1 + 1e-15}),
    ],
)
def test_ordinary_mode_has_a_tolerance_and_exact_mode_none(within, beyond):
    assert compare(trace(), change(trace(), 2, **within), ORDINARY).first is None
    assert compare(trace(), change(trace(), 2, **beyond), ORDINARY).first.step == 2
    assert not within or compare(trace(), change(trace(), 2, **within), EXACT).first.step == 2


def test_a_weight_that_only_rounding_moves_is_left_out_of_the_ordinary_mode():
    """AdamW makes steps of full size of a gradient that is nothing but rounding."""
    other = change(trace(), 2, weights__bias=-2000.0, gradients__bias=-1.0)
    assert compare(trace(), other, ORDINARY).first is None
    assert compare(trace(), other, EXACT).first.places == ["bias"]
    loud = change(trace(), 2, gradients__bias=1e5)
    moved = change(loud, 2, weights__bias=-2000.0)
    for run in (loud, moved):  # its gradient in step 1 does not count for this
        run.steps[1]["gradients"].pop("models.0.bias")
        run.steps[3]["gradients"].pop("models.0.bias")
    assert compare(loud, moved, ORDINARY).first.what == "weights"


def test_a_way_that_is_rounding_is_no_measure():
    """A learning rate next to 0 moves weights by their last bits; those may differ."""
    tiny = Trace(
        set(), {0: {"weights": {"w": tensor(1.0)}}, 1: trace().steps[1] | {"weights": {"w": tensor(1 + 1e-7)}}}
    )
    other = copy.deepcopy(tiny)
    other.steps[1]["weights"]["w"] = tensor(1 + 1.5e-7)
    assert compare(tiny, other, ORDINARY).first is None


def test_what_only_one_run_has_differs():
    for remove in ("grad_norm", "loss"):
        other = copy.deepcopy(trace())
        del other.steps[1][remove]
        assert compare(trace(), other, ORDINARY).first.deviation == math.inf
    other = copy.deepcopy(trace())
    del other.steps[1]["weights"]["models.0.weight"]
    assert compare(trace(), other, ORDINARY).first.places == ["weight"]
    other = copy.deepcopy(trace())
    other.steps[1]["weights"]["models.0.weight"] = {"hash": "nan", "norm": None, "sketch": [None] * SKETCH}
    assert compare(trace(), other, ORDINARY).first.deviation == math.inf


def test_bits_that_make_no_distance_count_in_exact_mode():
    """A zero and a negative one are as far apart as any two equal numbers."""
    other = copy.deepcopy(trace())
    other.steps[2]["weights"]["models.0.weight"]["hash"] = "minus"
    assert compare(trace(), other, EXACT).first.what == "weights"
    assert compare(trace(), other, ORDINARY).first is None


def test_runs_are_compared_as_far_as_both_have_come():
    found = compare(trace(5), change(trace(2), 2, lr=2.0), EXACT)
    assert found.steps == 2 and found.first.what == "learning rate" and len(found.deviations["loss"]) == 2


@given(st.integers(1, 200), st.integers(0, 2**31))
def test_sketches_keep_distances(size, seed):
    draw = torch.Generator().manual_seed(seed)
    a, b = torch.randn(2, size, generator=draw, dtype=torch.float64)
    signs = torch.randint(0, 2, (size,), generator=draw) * 2 - 1
    found = (sketch(a, signs) - sketch(b, signs)).norm() / (a - b).norm()
    assert 1 / 4 < found < 4
    assert sketch(a, signs).equal(sketch(a.clone(), signs)) and len(sketch(a, signs)) == SKETCH


def test_one_number_among_many_keeps_its_size():
    a = torch.randn(5000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    b, signs = a.clone(), torch.ones(5000)
    b[4321] += 1e-6
    assert (sketch(a, signs) - sketch(b, signs)).norm().item() == pytest.approx(1e-6, rel=1e-6)


def test_differences_that_would_cancel_do_not():
    signs = torch.randint(0, 2, (64,), generator=torch.Generator().manual_seed(0)) * 2 - 1
    a = torch.tensor([1.0] * 32 + [-1.0] * 32, dtype=torch.float64)
    assert 1 / 4 < sketch(a, signs).norm() / a.norm() < 4


def test_hashes_know_bits_shapes_and_names():
    x = torch.arange(6.0)
    same = [{"x": x, "n": [1, "a", None]}, {"x": x.clone(), "n": [1, "a", None]}]
    assert hash_of(same[0]) == hash_of(same[1])
    others = [x, x.view(2, 3), x.int(), x + 2**-20, {"x": x}, {"y": x}, [x], [x, x], x.numpy(), -x * 0, x * 0, 6, "6"]
    others += [x.bfloat16(), torch.tensor(True), torch.tensor(1.0), x[:0], object()]
    assert len({hash_of(value) for value in others}) == len(others)
    assert hash_of(object()) == hash_of(object())
    assert hash_of(x.view(2, 3).T) == hash_of(x.view(2, 3).T.contiguous())


def test_a_deviation_that_grows():
    """From the first step that has one to the largest; what does not grow has no rate."""
    found = Comparison(6, deviations={"loss": [0.0, 1e-7, 0.0, 1e-6, 1e-4, 3e-8], "weights": [1e-3, 1e-4, 0, 0, 0, 0]})
    growth = found.growth("loss")
    assert (growth.begin, growth.end) == (2, 5) and growth.rate == pytest.approx(10)
    assert str(growth) == "1.0e-07 in step 2, 1.0e-04 in step 5, 10-fold a step"
    assert found.growth("weights") is None and found.growth("none") is None


@pytest.mark.parametrize("what, step, may", [("loss", 2, True), ("loss", 1, False), ("samples", 2, False)])
def test_what_may_be_rounding(what, step, may):
    """Not what differs in the first step, nor what is computed without a sum."""
    assert Comparison(3, Difference(what, step=step)).may_be_rounding == may
    assert not Comparison(3).may_be_rounding


def test_damaged_lines_cannot_be_compared(tmp_path):
    (tmp_path / "audit.jsonl").write_text('{"step": 0, "weights": {}}\n{"step": 1, "weigh\n')
    with pytest.raises(UserError, match=r"audit\.jsonl has 1 damaged lines"):
        read(tmp_path)
