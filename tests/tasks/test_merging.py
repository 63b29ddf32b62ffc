"""Adapters on layers that share their weights: trained, resumed, loaded and merged as what they are."""

import pytest
import torch
from support.launching import scores, steps
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
)

from app import parse
from app.commands.export import command as export
from app.data.text.tokenizer import byte_tokenizer
from app.errors import UserError
from app.tasks.language import merging
from app.tasks.language.lora import Lora, add_adapters
from recipes import lm

pytestmark = pytest.mark.usefixtures("data_cache")
SIZE = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 16, "intermediate_size": 32}
MODELS = {
    "llama": lambda: LlamaForCausalLM(
        LlamaConfig(vocab_size=258, max_position_embeddings=64, tie_word_embeddings=True, **SIZE)
    ),
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(vocab_size=258, n_positions=64, n_embd=16, n_layer=2, n_head=2)),
    "bert": lambda: BertForMaskedLM(BertConfig(vocab_size=259, max_position_embeddings=64, **SIZE)),
}
TARGETS = {
    "llama": (
        ["lm_head"],
        ["embed_tokens"],
        ["embed_tokens", "lm_head", "q_proj"],
        ["q_proj", "v_proj"],
        ["all-linear"],
    ),
    "gpt2": (["lm_head"], ["wte"], ["wte", "lm_head"], ["c_attn"], ["all-linear"]),
    "bert": (["decoder"], ["word_embeddings"], ["query", "decoder"], ["value"], ["all-linear"]),
}
ROW = torch.tensor([[*b"alpha beta gamma delta"]])


def trained(model):
    """Give adapters values that a training might give them, in all layers that have some."""
    torch.manual_seed(1)
    with torch.no_grad():
        for name, value in model.named_parameters():
            if "lora_" in name:
                value.normal_(0, 0.5)
    return model.eval()


def logits(model):
    with torch.no_grad():
        return model.eval()(ROW).logits


@pytest.mark.parametrize(("kind", "targets"), [(kind, each) for kind, all_ in TARGETS.items() for each in all_])
def test_a_merged_model_computes_what_its_adapters_did(tmp_path, kind, targets):
    torch.manual_seed(0)
    model = trained(add_adapters(MODELS[kind](), Lora(rank=2, targets=tuple(targets)), masked=kind == "bert"))
    expected, before = logits(model), logits(model.get_base_model())
    with model.disable_adapter():
        assert not torch.allclose(expected, logits(model), atol=1e-3), "the adapters do something"
    assert torch.equal(expected, before)
    merged = merging.Merged(model)
    merged.model.save_pretrained(tmp_path)
    again = type(merged.model).from_pretrained(tmp_path)
    torch.testing.assert_close(logits(again), expected, atol=1e-4, rtol=1e-4)
    merged.check(tmp_path)
    shared = {"llama": {"lm_head", "embed_tokens"}, "gpt2": {"lm_head", "wte"}, "bert": {"decoder", "word_embeddings"}}
    assert again.config.tie_word_embeddings != bool(shared[kind] & set(targets)), "what is shared stays shared"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_that_became_another_is_refused(tmp_path, monkeypatch, dtype):
    for part, refused in ((merging._part, False), (lambda model: None, True)):
        torch.manual_seed(0)
        monkeypatch.setattr(merging, "_part", part)
        merged = merging.Merged(trained(add_adapters(MODELS["llama"]().to(dtype), Lora(rank=2, targets=("lm_head",)))))
        merged.model.save_pretrained(tmp_path)
        if not refused:
            merged.check(tmp_path)
            continue
        with pytest.raises(UserError, match=r"--merge: the merged model is another one: its logits differ .* by \d"):
            merged.check(tmp_path)


@pytest.mark.parametrize("targets", [["lm_head"], ["embed_tokens"]])
def test_a_run_is_resumed_loaded_and_merged(tmp_path, rows, monkeypatch, targets):
    base = tmp_path / "base"
    MODELS["llama"]().save_pretrained(base)
    byte_tokenizer(64).save_pretrained(base)
    flags = ["--data.path", rows(40), "--data.block", 32, "--run.steps", 6, "--run.global-batch", 4]
    flags += ["--run.micro-batch", 2, "--run.trackers", "--run.log-every", 1]

    def run(name, *more):
        lm.main(parse(lm.Config, [str(word) for word in (*flags, "--run.dir", tmp_path / name, *more)]))

    adapters = ["--model", base, "--lora.rank", 2, "--lora.targets", *targets, "--optim.lr", 0.05]
    run("whole", *adapters)
    run("stopped", *adapters, "--run.stop-at", 3)
    run("stopped", *adapters)
    assert steps(tmp_path / "stopped") == steps(tmp_path / "whole")
    export.main(export.Options(tmp_path / "whole", merge=True, to=str(tmp_path / "merged")))
    apart = AutoModelForCausalLM.from_pretrained(tmp_path / "whole" / "model")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(logits(merged), logits(apart), atol=1e-4, rtol=1e-4)
    run("again", "--model", tmp_path / "merged", "--run.eval-first", "true")
    before, *_ = scores(tmp_path / "again")
    assert before["eval/loss"] == pytest.approx(scores(tmp_path / "whole")[-1]["eval/loss"], rel=1e-5)

    monkeypatch.setattr(merging, "_part", lambda model: None)
    with pytest.raises(UserError, match="--merge: the merged model is another one"):
        export.main(export.Options(tmp_path / "whole", merge=True, to=str(tmp_path / "wrong")))
    assert not (tmp_path / "wrong").exists()
