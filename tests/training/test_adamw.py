"""AdamW in less memory: numbers in eight bits, rounding at random, and what both do to training."""

import pytest
import torch

from app.config import OptimConfig
from app.distributed import deepspeed
from app.errors import UserError
from app.training.optim import bf16, eight_bit, wholes
from app.training.optim.adamw import AdamW8bit, LeanAdamW
from app.training.optim.building import Place, build_optimizer, check


@pytest.mark.parametrize("signed", [True, False])
def test_every_code_comes_back(signed):
    """And zeros stay zeros, whatever else is in their block."""
    values = eight_bit._values(signed, torch.device("cpu"))
    assert len(values.unique()) == 256
    codes, scales = eight_bit.quantize(values[None] * 3, 256, signed)
    assert torch.equal(codes[0].int(), torch.arange(256)) and scales.tolist() == [[3.0]]
    codes, scales = eight_bit.quantize(torch.zeros(2, 300), 256, signed)
    assert not eight_bit.dequantize(codes, scales, 256, signed).any()


def test_codes_are_the_nearest_up_to_the_table():
    """Of numbers of many sizes: half of the widest step, and what a table of 16-bit numbers loses."""
    draw = torch.Generator().manual_seed(0)
    numbers = torch.randn(64, 768, generator=draw) * 10 ** (-4 * torch.rand(64, 768, generator=draw))
    block = eight_bit.block_of(768)
    codes, scales = eight_bit.quantize(numbers, block, signed=True)
    error = (eight_bit.dequantize(codes, scales, block, signed=True) - numbers).abs()
    assert bool((error <= 0.0091 * scales.repeat_interleave(block, 1)).all())
    assert float((error / numbers.abs()).median()) < 0.03


@pytest.mark.parametrize(
    ("row", "block"),
    [
        (4096, 256),
        (1024, 128),
        (768, 32),
        (11008, 32),
        (704, 16),
        (256, 32),
        (128, 16),
        (96, 16),
        (1000, 256),
        (2, 256),
    ],
)
def test_blocks_divide_what_eight_processes_have_of_a_row(row, block):
    assert eight_bit.block_of(row) == block


def test_random_bits_belong_to_places():
    """A part of a weight draws what the whole draws there; another key draws others; they are uniform."""
    rows, columns = (torch.arange(count, dtype=torch.int32) for count in (600, 512))
    whole = bf16.random_bits(rows, columns, 2**62 + 12345)
    part = bf16.random_bits(rows[100:301], columns[256:], 2**62 + 12345)
    assert torch.equal(part, whole[100:301, 256:])
    other = bf16.random_bits(rows, columns, 54321)
    assert int(whole.min()) >= 0 and int(whole.max()) < 2**16
    assert (whole == other).float().mean() < 1e-4
    for shift in (0, 8):
        counts = torch.bincount((whole >> shift & 255).flatten(), minlength=256).double()
        # A chi-squared of 255 degrees of freedom: mean 255, standard deviation 22.6.
        assert 170 < float(((counts - 1200) ** 2 / 1200).sum()) < 340
    pairs = torch.stack([each.flatten().double() for each in (whole, other, whole.roll(1, 0), whole.roll(1, 1))])
    assert float((torch.corrcoef(pairs) - torch.eye(4)).abs().max()) < 0.01


def test_rounding_is_right_on_average():
    """And exact numbers, infinity and NaN stay what they are."""
    places = torch.arange(1000, dtype=torch.int32)
    numbers = torch.full((1000, 1000), -(1 + 2**-10))
    rounded = bf16.stochastic(numbers, places, places, 7)
    assert rounded.dtype == torch.bfloat16 and set(rounded.unique().tolist()) == {-1.0, -1.0078125}
    assert float(rounded.double().mean()) == pytest.approx(-(1 + 2**-10), abs=2e-5)
    special = torch.tensor([[1.0, -0.5, 0.0, float("inf"), -float("inf"), 3e38]])
    rounded = bf16.stochastic(special, places[:1], places[:6], 7)
    assert rounded[0, :5].tolist() == special[0, :5].tolist() and rounded[0, 5].isfinite()
    assert bf16.stochastic(torch.tensor([[float("nan")]]), places[:1], places[:1], 7).isnan().all()


def test_places_of_a_weight_that_is_whole():
    rows, columns = wholes.places(torch.zeros(3, 4, 5), torch.device("cpu"))
    assert rows.tolist() == [0, 1, 2] and columns.tolist() == list(range(20))
    assert [len(each) for each in wholes.places(torch.zeros(()), torch.device("cpu"))] == [1, 1]


def trained(optimizer_of, steps=300, kind=torch.float32) -> float:
    """Fit a matrix by small updates; return the error that is left, relative to that of the start."""
    draw = torch.Generator().manual_seed(0)
    start, inputs = torch.randn(64, 128, generator=draw) / 8, torch.randn(256, 128, generator=draw)
    aim = inputs @ (torch.randn(64, 128, generator=draw) / 8).T
    weight = torch.nn.Parameter(start.to(kind))
    optimizer = optimizer_of(weight)
    losses = []
    for _ in range(steps):
        loss = (inputs @ weight.float().T - aim).square().mean()
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return losses[-1] / losses[0]


def lean(updates, kind=LeanAdamW, lr=1e-3):
    return lambda weight: kind([{"params": [weight], "seeds": [5]}], lr=lr, weight_decay=0.0, updates=updates)


def test_eight_bits_train_as_32_do():
    plain = trained(lambda weight: torch.optim.AdamW([weight], lr=1e-3, weight_decay=0.0))
    assert trained(lean("plain")) == pytest.approx(plain, rel=1e-4)
    assert trained(lean("plain", AdamW8bit)) == pytest.approx(plain, rel=0.1)


def test_small_updates_of_16_bit_weights_are_not_lost():
    """Rounded to the nearest they are: a rate of 4e-5 is less than half of a weight's last bit."""
    rate, steps = 4e-5, 300
    whole = 1 - trained(lean("plain", lr=rate), steps)
    lost = 1 - trained(lean("plain", lr=rate), steps, torch.bfloat16)
    assert whole > 0.1 and lost < 0.75 * whole
    for updates in ("stochastic", "kahan"):
        assert 1 - trained(lean(updates, lr=rate), steps, torch.bfloat16) == pytest.approx(whole, rel=0.1), updates


def test_pieces_of_rows_change_no_bit(monkeypatch):
    found = []
    for at_once in (1, 1000, 2**18):
        monkeypatch.setattr("app.training.optim.adamw.AT_ONCE", at_once)
        found.append([trained(lean(u, AdamW8bit), 5, torch.bfloat16) for u in ("stochastic", "kahan")])
    assert found[0] == found[1] == found[2]


def test_weights_that_lie_in_memory_by_columns():
    """Their state, and they, are updated too, not copies of them."""
    draw = torch.Generator().manual_seed(0)
    start, gradients = torch.randn(40, 128, generator=draw), torch.randn(3, 40, 128, generator=draw)
    found = []
    for by_columns in (False, True):
        for kind in (LeanAdamW, AdamW8bit):
            weight = torch.nn.Parameter(start.T.clone().T if by_columns else start.clone())
            optimizer = kind([weight], lr=0.1)
            for gradient in gradients:
                weight.grad = gradient.clone()
                optimizer.step()
            found.append(weight.detach())
    assert torch.equal(found[0], found[2]) and torch.equal(found[1], found[3]) and not torch.equal(found[0], start)


def test_classes_that_are_asked_for():
    model = torch.nn.Linear(128, 64)
    assert type(build_optimizer(model, OptimConfig(name="adamw8bit"))) is AdamW8bit
    found = build_optimizer(model, OptimConfig(updates="stochastic"), Place(torch.device("cpu"), False, True, 3))
    assert type(found) is LeanAdamW and found.defaults["updates"] == "stochastic"
    seeds = [seed for group in found.param_groups for seed in group["seeds"]]
    again = build_optimizer(model, OptimConfig(updates="stochastic"), Place(torch.device("cpu"), False, True, 4))
    assert len(set(seeds + [seed for group in again.param_groups for seed in group["seeds"]])) == 4
    assert all("seeds" not in g for g in build_optimizer(model, OptimConfig(name="AdamW8bit")).param_groups)


def test_what_cannot_be_had_is_refused():
    def refused(call, *arguments) -> str:
        with pytest.raises(UserError) as error:
            call(*arguments)
        return str(error.value)

    assert "--optim.updates kahan works with --optim.name AdamW and AdamW8bit, not with SGD" in refused(
        check, OptimConfig(name="SGD", updates="kahan")
    )
    assert "--optim.updates some does not work: it must be one of plain" in refused(check, OptimConfig(updates="some"))
    model, asked = torch.nn.Linear(128, 64), OptimConfig(updates="kahan")
    assert "take a profile with mixed_precision bf16" in refused(bf16.keep_weights, model, asked, "no")
    assert model.weight.dtype == torch.float32
    bf16.keep_weights(model, asked, "bf16")
    assert model.weight.dtype == model.bias.dtype == torch.bfloat16
    optimizer = build_optimizer(torch.nn.Linear(128, 64), OptimConfig(name="AdamW8bit"))
    weight = optimizer.param_groups[0]["params"][0]
    optimizer.check_split({weight: 0}, 16)
    optimizer.check_split({weight: 1}, 8)
    assert "tp_size 16 cuts rows of 128 numbers inside blocks of 16" in refused(optimizer.check_split, {weight: 1}, 16)
    assert "AdamW8bit works by rows, which DeepSpeed flattens" in refused(deepspeed.check_optimizer, optimizer)
