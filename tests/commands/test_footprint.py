"""What a plan says of the peak memory is what training takes: of torch's own modules, and of every recipe."""

import json
import re
import sys
from pathlib import Path
from typing import get_args

import pytest
import torch
from support.launching import PROFILES, ROOT, run
from torch import nn

from app.__main__ import main
from app.commands import recipe_file
from app.commands.plan import footprint, largest_micro_batch, simulated_device
from app.commands.plan.footprint import FIRST, LATER, UPDATE, Footprint, MicroBatch, largest
from app.commands.plan.live_storage import LiveStorages
from app.commands.plan.meta_tensors import emptied
from app.data.text.tokenizer import byte_tokenizer
from app.launching import profiles
from app.tasks.activation_checkpointing import ActivationCheckpointing, checkpoint_activations
from app.training.loop.purpose import Body


class Words(nn.Module):
    """Tokens, attention with or without dropout, and logits that are most of what there is."""

    def __init__(self, dropout: float):
        super().__init__()
        self.into, self.out = nn.Embedding(1000, 64), nn.Linear(64, 1000)
        layer = nn.TransformerEncoderLayer(64, 4, 256, dropout, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2)

    def forward(self, ids):
        return self.out(self.layers(self.into(ids))).flatten(0, 1)


class Pictures(nn.Module):
    """Convolutions, both kinds of norms, and a layer that is used twice."""

    def __init__(self):
        super().__init__()
        self.twice = nn.Conv2d(16, 16, 3, padding=1)
        into = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), self.twice)
        self.layers = nn.Sequential(into, nn.GroupNorm(4, 16), nn.ReLU(), self.twice, nn.MaxPool2d(2))
        self.out = nn.Linear(16 * 16 * 16, 10)

    def forward(self, pixels):
        return self.out(self.layers(pixels).flatten(1))


class Logits(nn.Module):
    """What a language model of transformers predicts, [tokens, vocabulary]."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, ids):
        # Given, as transformers itself makes one only for tensors without contents.
        mask = torch.ones(len(ids), 1, ids.shape[1], ids.shape[1], dtype=torch.bool, device=ids.device).tril()
        return self.model(ids, attention_mask=mask).logits.flatten(0, 1)


MODELS = {
    "words": (lambda: Words(0.0), lambda: torch.zeros(8, 32, dtype=torch.int64), 8 * 32),
    "dropout": (lambda: Words(0.1), lambda: torch.zeros(8, 32, dtype=torch.int64), 8 * 32),
    "pictures": (Pictures, lambda: torch.zeros(8, 1, 32, 32), 8),
}


def two_steps(model, optimizer, inputs, targets, storages) -> dict[str, int]:
    """Make two steps of two turns; return the peaks of the second one."""
    storages.add([*model.parameters(), *model.buffers()])
    for _ in range(2):
        storages.most.clear()
        with storages:
            for storages.phase in (FIRST, LATER):
                nn.functional.cross_entropy(model(inputs), targets).backward()
            storages.phase = UPDATE
            optimizer.step()
            optimizer.zero_grad()
    return {name: storages.most[name] for name in (FIRST, LATER, UPDATE)}


def on_device(name: str, device: str, precision: str) -> dict[str, int]:
    """Count on tensors without contents."""
    make, inputs, count = MODELS[name]
    model, storages = make(), LiveStorages()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    taken = simulated_device.SimulatedDevice(device, precision, storages)
    with emptied([model], [optimizer]), taken.installed(), taken.casting([model]):
        targets = torch.zeros(count, dtype=torch.int64, device="meta")
        found = two_steps(model, optimizer, inputs().to("meta"), targets, storages)
    assert all(p.device.type == "cpu" and p.grad is None for p in model.parameters()) and not optimizer.state
    assert "forward" not in vars(model) and model(inputs()).dtype == torch.float32
    return found


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", MODELS)
def test_a_step_without_contents_holds_what_a_real_one_holds(name, precision):
    make, inputs, count = MODELS[name]
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    if precision == "bf16":
        from accelerate.utils import convert_outputs_to_fp32

        model.forward = convert_outputs_to_fp32(torch.autocast("cpu", torch.bfloat16)(model.forward))
    real = two_steps(model, optimizer, inputs(), torch.zeros(count, dtype=torch.int64), LiveStorages())
    assert on_device(name, "cpu", precision) == pytest.approx(real, rel=0.01)


def test_a_gpu_keeps_no_attention_matrix_and_a_byte_a_dropped_number():
    on_cpu, on_gpu = (on_device("dropout", device, "fp32")[LATER] for device in ("cpu", "cuda"))
    matrix = 8 * 4 * 32 * 32 * 4
    places = 2 * 8 * 32 * (64 + 64 + 256)  # that dropout looks at outside attention
    assert on_cpu - on_gpu > 0.9 * (2 * matrix + 3 * places)
    assert on_device("dropout", "cuda", "bf16")[LATER] < on_gpu


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_sums_are_taken_in_fp32_where_autocast_on_a_gpu_does(dtype):
    taken = simulated_device.SimulatedDevice("cuda", "bf16", LiveStorages())
    numbers = torch.empty(4, 4, device="meta", dtype=torch.bfloat16)
    with taken.installed(), torch.autocast("cpu", torch.bfloat16):
        expected = dtype or torch.float32
        assert nn.functional.log_softmax(numbers, 1, dtype=dtype).dtype == expected
        assert numbers.softmax(1, dtype).dtype == numbers.sum(dtype=dtype).dtype == expected
        assert numbers.cumsum(0, dtype=dtype).dtype == numbers.sum(0, dtype=dtype).dtype == expected
        assert nn.functional.cross_entropy(numbers, numbers[0].long()).dtype == torch.float32


def test_autocast_on_a_gpu_casts_what_torch_says():
    """A pinned copy of torch's lists, which are in its headers."""
    text = (Path(torch.__file__).parent / "include/ATen/autocast_mode.h").read_text()
    for name, own in (("LOWER_PRECISION_FP", "LOWER"), ("FP32", "HIGHER"), ("FP32_SET_OPT_DTYPE", "SUMMED")):
        body = re.search(rf"#define AT_FORALL_{name}\(_\)((?:.*\\\n)*.*\n)", text)[1]
        listed = {".".join(pair.replace(" ", "").split(",")) for pair in re.findall(r"_\(([\w, ]+)\)", body)}
        listed = {name for name in listed if "imname" not in name}  # of tensors with named dimensions
        assert {
            name for name in getattr(simulated_device, own).split() if simulated_device.known(name, "cuda")
        } == listed
    on_cpu = f"{simulated_device.LOWER_ON_CPU} {simulated_device.HIGHER_ON_CPU}".split()
    assert [name for name in on_cpu if not simulated_device.known(name, "cpu")] == []


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_plan_knows_what_is_computed_again(device):
    """As much as real steps hold on a CPU; on a GPU what blocks begin with can lie in the host's memory."""
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4}
    ids = torch.zeros(4, 64, dtype=torch.int64)
    found, real = {}, {}
    for how in get_args(ActivationCheckpointing):
        model = Logits(LlamaForCausalLM(LlamaConfig(**shape, num_attention_heads=4, use_cache=False)))
        checkpoint_activations(model.model, how)
        optimizer, storages = torch.optim.SGD(model.parameters(), 0.1), LiveStorages()
        targets = torch.zeros(4 * 64, dtype=torch.int64)
        real[how] = two_steps(model, optimizer, ids, targets, storages)[LATER]
        optimizer, storages = torch.optim.SGD(model.parameters(), 0.1), LiveStorages()
        taken = simulated_device.SimulatedDevice(device, "bf16" if device == "cuda" else "fp32", storages)
        with emptied([model], [optimizer]), taken.installed(), taken.casting([model]):
            found[how] = two_steps(model, optimizer, ids.to("meta"), targets.to("meta"), storages)[LATER]
    if device == "cpu":
        assert found == pytest.approx(real, rel=0.01) and found["offload"] == found["block"]
    else:
        block = 4 * 64 * 64 * 4  # what goes into one
        assert found["block"] - 4 * block <= found["offload"] < found["block"] - 2 * block
    assert found["block"] < found["ops"] < found["none"]


@pytest.fixture(scope="module")
def recipes(tmp_path_factory, rows):
    """Predict and measure all recipes, in one process."""
    pytest.importorskip("monai")
    folder = tmp_path_factory.mktemp("peaks")
    out = folder / "found.json"
    environment = {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, ROOT / "tests" / "support" / "peaks.py", out, rows(300)]
    result = run(command, env=environment, timeout=400)
    assert result.status == 0, result.output[-6000:]
    return json.loads(out.read_text())


@pytest.mark.parametrize("name", ["cls", "lm", "lm-chunked", "tag", "s2s", "dpo", "img", "det", "gan", "graph", "seg"])
def test_a_recipe_takes_what_was_predicted(recipes, name):
    """By torch's own memory profile, several micro-batches a step."""
    found = recipes[name]
    assert found["peak"] == pytest.approx(found["tensors"], rel=0.1)
    # oneDNN's convolutions take, inside themselves, copies of what comes in: in a U-Net a sixth of all there is.
    assert found["peak"] == pytest.approx(found["measured"], rel=0.2 if name == "seg" else 0.1)
    assert found["peak"] > 1.2 * (found["peak"] - found["activations"])  # the comparison is about activations


@pytest.mark.parametrize("key", ["peak", "measured"])
def test_logits_in_chunks_take_less(recipes, key):
    """The texts have words enough that logits are a good part of what there is."""
    assert recipes["lm-chunked"][key] < 0.85 * recipes["lm"][key]


def test_what_is_said_to_fit_fits_and_the_next_does_not(recipes):
    good, bad = recipes["fits"], recipes["too_large"]
    assert good["measured"] <= good["limit"] < bad["measured"] and bad["micro_batch"] == 2 * good["micro_batch"]


@pytest.mark.parametrize(("room", "fits_", "too_large"), [(1e6, 64, None), (1000, 8, 16), (420, 1, 2), (5, None, 1)])
def test_the_search_ends_at_the_border(room, fits_, too_large):
    """From any start, with no more questions than there are sizes."""
    profile = profiles.read(str(PROFILES / "cpu.yaml"))
    for start in (1, 4, 64):
        found = largest_micro_batch.MicroBatchSearch([profile], room)
        asked = []

        def peak(recipe, profile, plan, micro, asked=asked):
            asked.append(micro)
            return 400 + 60 * micro if micro > 1 else 410
            yield

        found._peak = peak
        sizes = [1, 2, 4, 8, 16, 32, 64]
        known = {start: 400 + 60 * start if start > 1 else 410}
        search = found._search(None, profile, None, sizes, known, int(room))
        with pytest.raises(StopIteration) as ended:
            next(search)
        good, bad = ended.value.value
        assert (good and good[0], bad and bad[0]) == (fits_, too_large)
        assert len(asked) == len(set(asked)) <= len(sizes)


def test_an_exact_turn_finds_no_gradients_and_buckets_stay():
    """Which of the counted peaks a layout has."""
    found = Footprint(MicroBatch(None, None, 4, None), 100, 40, 5, first=300, later=340, uncast=330, update=180)
    held = largest_micro_batch.memory.Memory(30, 40, 80, 60, 0)
    cpu, ddp = (profiles.read(str(PROFILES / f"{name}.yaml")) for name in ("cpu", "ddp_cpu"))
    assert largest_micro_batch.peak(found, cpu, held._replace(sums=0), 1, False, 0) == 300 + 5
    assert largest_micro_batch.peak(found, cpu, held._replace(sums=0), 2, False, 0) == 340 + 10
    assert largest_micro_batch.peak(found, cpu, held, 2, True, 0) == 300 + 80 + 10
    fsdp, offload = (profiles.read(f"{PROFILES / name}.yaml:2") for name in ("fsdp", "fsdp_offload"))
    for turns, kept in ((1, 0), (2, 40)):  # all but whole gradients, which FSDP2 sums over turns
        on_gpu = largest_micro_batch.peak(found, fsdp, held, turns, False, 0)
        assert largest_micro_batch.peak(found, offload, held, turns, False, 0) == on_gpu - held.total + kept
    assert largest_micro_batch.peak(found, ddp, held._replace(sums=0), 1, False, 0) == 340 + 5
    assert largest_micro_batch.peak(found, ddp, held._replace(sums=0), 2, False, 0) == 340 + 40 + 10


def test_the_largest_micro_batch_is_the_one_with_most_padded_tokens():
    from app.sampling.batch_plan import BatchPlan

    plan = BatchPlan(64, 640, 16, 4, lengths=torch.arange(1, 65).numpy())
    micro, costs = (
        largest(plan),
        [len(i) * plan.lengths[i].max() for s in range(plan.steps) for i, _ in plan.micro_batches(s)],
    )
    assert micro.rows * micro.longest == max(costs) > min(costs) and micro.longest == plan.lengths[micro.ids].max()
    assert largest(BatchPlan(64, 640, 16, 4)).rows == 4


BODY = """
def main(config):
    with Run(config) as run:
        model, optimizer = run.prepare(torch.nn.Linear(3, 1), config.optim)
        for batch in run.batches([torch.ones(3)] * 20, torch.stack):
            for micro in batch.micros(model):
                run.backward(model(micro.inputs).sum() * FACTOR, micro)
            run.step(optimizer)
            AFTER
        return run.finish(model)


if __name__ == "__main__":
    main(parse(Config))
"""


def script(folder, factor="1", after="pass"):
    """Write a recipe whose loop does what is asked for, and return its file."""
    text = (ROOT / "tests" / "laws" / "holding.py").read_text()
    file = folder / "mine.py"
    file.write_text(text[: text.index("\ndef main(")] + BODY.replace("FACTOR", factor).replace("AFTER", after))
    return file


def test_a_loop_that_looks_at_numbers_is_planned_without_activations(tmp_path, capsys):
    mine = script(tmp_path, factor="model.weight.sum().item()")
    assert main(["plan", str(mine), "--run.dir", str(tmp_path / "run"), "--profile", "cpu"]) == 0
    output = capsys.readouterr().out
    assert "activations could not be counted" in output and "item()" in output
    assert "one process, fp32" in output and not (tmp_path / "run").exists()


WAYS = {
    "torch": "torch.save(model.state_dict(), 'kept')",
    "safetensors": "__import__('safetensors.torch').torch.save_file(dict(model.state_dict()), 'kept')",
    "open": "open('kept', 'wb').write(b'')",
    "remove": "__import__('os').remove('kept')",
}


@pytest.mark.parametrize("way", WAYS)
def test_a_body_that_changes_a_file_is_held_back(tmp_path, monkeypatch, way):
    """Its tensors are without contents, and would take the place of the user's own."""
    mine = script(tmp_path, after=WAYS[way])
    (tmp_path / "kept").write_text("mine")
    monkeypatch.chdir(tmp_path)
    body = Body(lambda run, plan, *data: footprint.batches(asking(), run, plan, *data))
    recipe_file.run_to_loop(mine, ["--run.dir", str(tmp_path / "run")], body)
    assert body.failed and (way == "safetensors" or "kept, and a dry run changes no files" in body.failed)
    assert (tmp_path / "kept").read_text() == "mine"
    (tmp_path / "kept").write_text("open again")


@pytest.mark.parametrize(
    "flags", [["--lora.rank", "2"], ["--ema.decay", "0.9"], ["--mask.rate", "0.2"], ["--model", "MODEL"]]
)
def test_a_plan_makes_no_weights(tmp_path, rows, flags):
    """So it needs no memory for a model that is larger than this machine, and reads and downloads no weights."""
    from transformers import LlamaConfig

    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    if flags[-1] == "MODEL":  # a folder without weights
        LlamaConfig(**shape, vocab_size=300, pad_token_id=0).save_pretrained(tmp_path / "model")
        byte_tokenizer(32).save_pretrained(tmp_path / "model")
        flags = ["--model", str(tmp_path / "model")]
    small = ["--scratch.layers", "1", "--scratch.width", "32", "--scratch.tokenizer", "byte", "--data.block", "32"]
    small += ["--data.path", str(rows(40)), "--run.dir", str(tmp_path / "run")]
    body = Body(lambda run, plan, *data: footprint.batches(asking(), run, plan, *data))
    run, _ = recipe_file.run_to_loop(ROOT / "recipes" / "lm.py", [*small, *flags], body)
    (model,) = run.accelerator.models
    own = [p for name, p in model.named_parameters() if "lora_" not in name]
    assert own and all(p.is_meta for p in own) and not body.failed


def asking():
    """Ask once."""
    yield footprint.Question("cpu", "fp32", 2)


def test_a_peak_above_the_devices_memory_is_no_good_plan(tmp_path, capsys):
    words = ["plan", str(script(tmp_path)), "--run.dir", str(tmp_path / "run"), "--profile", "gpu", "--memory", "1e-7"]
    assert main(words) == 1
    output = capsys.readouterr().out
    assert "does not fit" in output and "not even" in output, output
