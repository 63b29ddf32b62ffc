"""recipes/lm.py beyond the laws: what it logs, writes and exports, adapters, checkpointed activations, and cost."""

import itertools
import json
import math
import re
from typing import get_args

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.launching import ROOT, launch, metrics, scores, steps
from support.token_shards import tokenize
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)

from app import parse
from app.commands.export import command as export
from app.data.corpus.blocks import token_loss
from app.distributed.state.safe_reader import StateReader
from app.errors import UserError
from app.rundir.throughput import Cost, peak_flops
from app.tasks.activation_checkpointing import ActivationCheckpointing, checkpoint_activations
from app.tasks.from_scratch import LanguageScratch, check_shape, decoder
from app.tasks.language.loading import check_positions, load_language_model
from app.tasks.language.lora import Lora, add_adapters
from recipes import lm

RECIPE = ROOT / "recipes" / "lm.py"
SMALL = ["--scratch.layers", 2, "--scratch.width", 32, "--scratch.heads", 2, "--scratch.tokenizer", "byte"]
SMALL += ["--data.block", 32, "--run.global-batch", 8, "--run.micro-batch", 4, "--run.trackers", "--run.log-every", 1]


def train(folder, path, *more) -> dict:
    """Run the recipe in this process."""
    words = [*SMALL, "--data.path", path, "--run.dir", folder, *more]
    return lm.main(parse(lm.Config, [str(word) for word in words]))


# tests/laws/test_recipes.py has the model's files and scores under FSDP2.
@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.exhaustive)])
def test_with_tied_embeddings(rows, tmp_path, capsys, processes):
    """What it prints and logs; and that others load the model and get its score, document by document."""
    held_out = rows(5)
    flags = ["--data.eval-path", held_out, "--run.steps", 6, "--sample", "alpha ", "--sample-length", 9]
    if processes == 1:
        train(tmp_path / "run", rows(60), *flags)
        printed = capsys.readouterr().out
    else:
        words = [*SMALL, "--data.path", rows(60), "--run.dir", tmp_path / "run", *flags]
        result = launch("fsdp_cpu", processes, RECIPE, *words)
        assert result.status == 0, result.output
        printed = result.output
    assert len(re.findall(r"^  \| alpha .*", printed, re.MULTILINE)) == 1
    line, score = steps(tmp_path / "run")[-1], scores(tmp_path / "run")[-1]
    assert "tokens_per_second" not in line
    logged = next(line for line in metrics(tmp_path / "run") if "ids" in line)
    assert logged["tokens_per_second"] == pytest.approx(logged["samples_per_second"] * 32)
    assert "mfu" not in logged, "nobody knows the peak of this CPU"

    model = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model").eval()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "run" / "model")
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    texts = [json.loads(line)["text"] for line in held_out.read_text().splitlines()]
    assert score["eval/tokens"] == sum(len(text) + 1 for text in texts)
    stream, total = [], 0.0
    for text in texts:  # as blocks cut them: attention begins anew with a block
        ids = [tokenizer.bos_token_id, *tokenizer(text)["input_ids"], tokenizer.eos_token_id]
        stream.append(list(itertools.pairwise(ids)))
    place = 0
    for document in stream:
        while document:
            part, document = document[: 32 - place % 32], document[32 - place % 32 :]
            place += len(part)
            inputs, targets = (torch.tensor([list(column)]) for column in zip(*part, strict=True))
            with torch.no_grad():
                total += token_loss(model(inputs).logits, targets).item() * len(part)
    assert score["eval/loss"] == pytest.approx(total / score["eval/tokens"], rel=1e-5)
    assert score["eval/perplexity"] == pytest.approx(math.exp(score["eval/loss"]))
    bits = score["eval/loss"] * score["eval/tokens"] / math.log(2)
    assert score["eval/bits_per_byte"] == pytest.approx(bits / sum(len(text) for text in texts))


@pytest.mark.parametrize(
    "flags",
    [[], ["--data.packing", "concat"], ["--data.prompt", "label", "--data.completion", "text"], ["--mask.rate", 0.2]],
    ids=["documents", "concat", "prompts", "masked"],
)
def test_a_run_on_tokens_is_the_run_on_the_texts(rows, tmp_path, flags):
    """Where all tokens are in one chunk: the same blocks, losses and scores."""
    one_chunk = ["--tokens-per-shard", 10**6, "--tokens-per-chunk", 10**6]
    columns = flags if "--data.prompt" in flags else []
    for count, split in ((60, "train"), (5, "validation")):
        tokenize(rows(count), tmp_path / "tokens", *one_chunk, *columns, "--split", split)
    few = [*flags, "--run.steps", 4, "--sample-length", 4]
    train(tmp_path / "texts", rows(60), "--data.eval-path", rows(5), *few)
    train(tmp_path / "run", tmp_path / "tokens", "--scratch.tokenizer", "bpe", *few)
    assert steps(tmp_path / "run") == steps(tmp_path / "texts")
    assert scores(tmp_path / "run") == scores(tmp_path / "texts")


def test_a_model_needs_the_tokenizer_of_the_tokens(rows, tmp_path):
    tokenize(rows(60), tmp_path / "tokens")
    train(tmp_path / "run", tmp_path / "tokens", "--run.steps", 2)
    model = tmp_path / "run/model"
    train(tmp_path / "tuned", tmp_path / "tokens", "--run.steps", 2, "--model", model)
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.add_tokens(["alpha"])
    tokenizer.save_pretrained(tmp_path / "other")
    tokenize(rows(60), tmp_path / "others", "--tokenizer", tmp_path / "other")
    with pytest.raises(UserError, match=r"holds tokens of another tokenizer \(.*other\) than --model has"):
        train(tmp_path / "refused", tmp_path / "others", "--run.steps", 2, "--model", model)


def test_checkpointed_activations_change_no_bit(rows, tmp_path):
    for name in get_args(ActivationCheckpointing):
        more = ["--activation-checkpointing", name, "--scratch.dropout", 0.2, "--scratch.shape", "gpt2"]
        train(tmp_path / name, rows(40), "--run.steps", 3, *more)
        assert steps(tmp_path / name) == steps(tmp_path / "none")
        assert scores(tmp_path / name) == scores(tmp_path / "none")


def test_activations_are_checkpointed_once(monkeypatch):
    monkeypatch.setenv("FSDP_ACTIVATION_CHECKPOINTING", "true")
    with pytest.raises(UserError, match="--activation-checkpointing ops: the profile's fsdp_activation_checkpointing"):
        checkpoint_activations(GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=1)), "ops")


def test_a_model_without_blocks_is_refused():
    class Bare(PreTrainedModel):
        config_class = GPT2Config

    with pytest.raises(UserError, match="--activation-checkpointing ops: Bare does not support"):
        checkpoint_activations(Bare(GPT2Config()), "ops")


def test_adapters_alone_are_trained_and_others_load_them(rows, tmp_path):
    train(tmp_path / "base", rows(40), "--run.steps", 2)
    base = tmp_path / "base" / "model"
    found = train(tmp_path / "lora", rows(40), "--run.steps", 4, "--model", base, "--lora.rank", 2)
    files = {path.name for path in (tmp_path / "lora" / "model").iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json"} <= files
    targets = json.loads((tmp_path / "lora" / "model" / "adapter_config.json").read_text())["target_modules"]
    assert targets == sorted(targets) and len(targets) > 1
    assert "model.safetensors" not in files
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "lora" / "model").eval()
    before = AutoModelForCausalLM.from_pretrained(base).eval()
    ids = torch.tensor([[256, *b"alpha beta"]])
    with torch.no_grad():
        assert not torch.allclose(again(ids).logits, before(ids).logits, atol=1e-4)
    adapters = {name for name, _ in again.named_parameters() if "lora" in name}
    kept = {name.replace(".base_layer", ""): value for name, value in again.state_dict().items()}
    assert all(torch.equal(kept[name], value) for name, value in before.state_dict().items())
    with pytest.raises(UserError, match=rf"lora/model cannot be loaded: .* adapters alone .* Merge .* --model {base}"):
        train(tmp_path / "more", rows(40), "--model", tmp_path / "lora" / "model", "--lora.rank", 2)
    assert len(adapters) == 2 * 7 * 2 and math.isfinite(found["eval/loss"])


def test_a_model_under_adapters_is_trained_with_its_dropout(tmp_path):
    """transformers loads models in evaluation mode, and peft leaves them in it."""
    shape = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(**shape, vocab_size=50, attention_dropout=0.5)).save_pretrained(tmp_path)
    model = add_adapters(load_language_model(str(tmp_path), masked=False), Lora(rank=2))
    assert all(module.training for module in model.modules())


def test_checkpoints_of_adapters_hold_adapters_and_whose_they_are(rows, tmp_path):
    train(tmp_path / "base", rows(40), "--run.steps", 2)
    base, run = tmp_path / "base" / "model", tmp_path / "lora"
    flags = ["--model", base, "--lora.rank", 2, "--run.steps", 4, "--ema.decay", 0.5]
    train(run, rows(40), *flags, "--run.stop-at", 2)
    (state,) = (run / "checkpoints").glob("step-*/state")
    kept = StateReader(state).read_entries()
    assert all("lora" in name for name in kept if name.startswith("models.")) and len(kept) > 3 * 2 * 7 * 2
    held = (base / "model.safetensors").read_bytes()
    weights = load_file(base / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    # Two numbers change places: the sum of all bits stays.
    save_file({**weights, name: weights[name].flip(0)}, base / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"adapters of a model \(.*base/model\) whose weights were others"):
        train(run, rows(40), *flags)
    (base / "model.safetensors").write_bytes(held)
    train(run, rows(40), *flags)
    train(tmp_path / "whole", rows(40), *flags)
    assert steps(run) == steps(tmp_path / "whole")
    export.main(export.Options(run, merge=True, to=str(tmp_path / "merged"), weights="plain"))
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    export.main(export.Options(run, to=str(tmp_path / "apart"), weights="plain"))
    apart = AutoModelForCausalLM.from_pretrained(tmp_path / "apart").eval()
    ids = torch.tensor([[256, *b"alpha beta"]])
    with torch.no_grad():
        torch.testing.assert_close(merged(ids).logits, apart(ids).logits, atol=1e-4, rtol=1e-4)
    assert not [key for key in merged.state_dict() if "lora" in key]
    with pytest.raises(UserError, match="--merge: LlamaForCausalLM has no adapters"):
        export.main(export.Options(tmp_path / "base", merge=True, to=str(tmp_path / "no")))


def test_a_pretrained_gpt2_has_room_for_its_positions_only(rows, tmp_path):
    train(tmp_path / "base", rows(40), "--run.steps", 1, "--scratch.shape", "gpt2")
    base = tmp_path / "base" / "model"
    with pytest.raises(UserError, match=r"--data\.block 64 is more than the 32 positions"):
        train(tmp_path / "longer", rows(40), "--model", base, "--data.block", 64)
    # A prompt and its text that together are longer than the model.
    train(tmp_path / "again", rows(40), "--model", base, "--run.steps", 1, "--sample", "x" * 40, "--sample-length", 20)


def test_flags_of_adapters_and_shapes_are_checked():
    model = decoder(LanguageScratch(width=32), type("Tokenizer", (), TOKENIZER)(), 16)
    with pytest.raises(UserError, match=r"--lora\.targets nothing"):
        add_adapters(model, Lora(rank=2, targets=("nothing",)))
    with pytest.raises(UserError, match=r"--lora\.rank -1"):
        add_adapters(model, Lora(rank=-1))
    with pytest.raises(UserError, match=r"--scratch\.kv-heads 3"):
        check_shape(LanguageScratch(kv_heads=3))
    assert add_adapters(model, Lora()) is model


TOKENIZER = {"__len__": lambda self: 300, "bos_token_id": 256, "eos_token_id": 257, "pad_token_id": 257}


def test_a_gpt2_without_biases_keeps_them_at_nothing():
    model = decoder(LanguageScratch(shape="gpt2", bias=False), type("Tokenizer", (), TOKENIZER)(), 16)
    biases = [p for name, p in model.named_parameters() if name.endswith("bias")]
    assert biases and not any(p.requires_grad or p.any() for p in biases)


def test_cost_counts_the_products_of_a_block():
    """A weight and a token are 2 operations in each of three passes; a frozen one has no gradient to compute."""
    llama = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=50, hidden_size=8, intermediate_size=16, num_hidden_layers=3, num_attention_heads=2,
            num_key_value_heads=1, tie_word_embeddings=False,
        )
    )  # fmt: skip
    matrices = 3 * (8 * 8 * 2 + 8 * 4 * 2 + 3 * 8 * 16) + 50 * 8
    attention = 3 * 2 * (2 * 2 * 4 * 10) * 3  # layers x heads x (scores and their use, 2 x width) x passes
    assert Cost.of(llama, 10) == Cost(10, 10 * (6 * matrices + attention))
    llama.requires_grad_(False)
    assert Cost.of(llama, 10).flops == 10 * (4 * matrices + attention)
    tied = GPT2LMHeadModel(GPT2Config(vocab_size=50, n_positions=10, n_embd=8, n_layer=1, n_head=2))
    assert Cost.of(tied, 10).flops == 10 * (6 * (12 * 8 * 8 + 50 * 8) + attention / 3)
    assert all(isinstance(module, nn.Module) for module in (llama, tied))


def test_mfu_is_the_share_of_a_known_peak():
    assert peak_flops("NVIDIA H100 80GB HBM3", "bf16") == 989.4e12
    assert peak_flops("NVIDIA A100-SXM4-40GB", "fp32") == 19.5e12
    assert peak_flops("Tesla V100-SXM2-16GB", "bf16") is None
    assert peak_flops("cpu", "fp32") is None and peak_flops("NVIDIA L400", "bf16") is None
    assert Cost(10, 1e9).speeds(5.0, 2e10) == {"tokens_per_second": 50.0, "mfu": 0.25}
    assert Cost(10, 1e9).speeds(5.0, None) == {"tokens_per_second": 50.0}


def test_a_model_that_is_not_told_positions_cannot_keep_documents_apart():
    from transformers import BloomConfig, BloomForCausalLM

    bloom = BloomForCausalLM(BloomConfig(vocab_size=50, hidden_size=8, n_layer=1, n_head=2))
    with pytest.raises(UserError, match=r"--model bloom .* --data\.packing concat"):
        check_positions(bloom, "bloom")
