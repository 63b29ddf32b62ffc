r"""Train a language model: from scratch on data that needs no download, or a pretrained one on your own texts.

    accelerate launch recipes/lm.py
    accelerate launch --config_file accelerate_configs/fsdp_cpu.yaml recipes/lm.py --run.dir runs/fsdp
    accelerate launch recipes/lm.py --model Qwen/Qwen3-0.6B --lora.rank 8 --optim.lr 2e-4 \
        --data.path chats.jsonl --data.messages messages --data.block 1024
"""

import math
from dataclasses import dataclass, field
from typing import Literal

from app import OptimConfig, Run, RunConfig, parse
from app.data.config import CorpusData
from app.rundir.throughput import Cost
from app.tasks.from_scratch import DecoderScratch, check_shape, decoder
from app.tasks.language.lora import Lora, add_adapters, check_lora
from app.tasks.pretrained import check_positions, load_model, load_tokenizer

USE_IT = (
    "python -c 'from transformers import pipeline; "
    """print(pipeline("text-generation", "{model}")("some text", max_new_tokens=60))'"""
)


@dataclass
class Config:
    """Train a language model."""

    model: str = ""
    """Pretrained model: a Hub id or a folder. Nothing: from scratch, in the shape of --scratch."""
    scratch: DecoderScratch = field(default_factory=DecoderScratch)
    lora: Lora = field(default_factory=Lora)
    data: CorpusData = field(default_factory=CorpusData)
    activation_checkpointing: bool = False
    """Compute activations again in the backward pass: less memory, about a third more work."""
    attention: Literal["auto", "model", "mask", "varlen", "flex"] = "auto"
    """How documents in a block are kept apart. model: as transformers does it. mask: by one mask for all layers.
    varlen: by flash attention, which holds no mask (bf16 or fp16 on a GPU, no dropout in attention). flex: by torch's
    flex_attention, compiled. auto: varlen where it can be had, else mask. run.json says which."""
    sample: str = "def "
    """What the text begins with that is written at each evaluation."""
    sample_length: int = 64
    """Tokens of that text at most. 0: none is written."""
    optim: OptimConfig = field(
        default_factory=lambda: OptimConfig(
            lr=2e-3, betas=(0.9, 0.95), weight_decay=0.1, schedule="cosine", warmup=0.05, min_lr=0.1
        )
    )
    run: RunConfig = field(default_factory=lambda: RunConfig(global_batch=32, micro_batch=16))


def load_data(config: Config):
    """Return blocks to train on and to evaluate on, the tokenizer, and a line on what they are."""
    from app.data.corpus import corpus

    tables = corpus.load(config.data)
    if config.model:
        tokenizer = load_tokenizer(config.model, config.data.block, "--data.block")
    else:
        tokenizer = corpus.own_tokenizer(tables.train, config.data, config.scratch.tokenizer, config.scratch.vocab)
    train_blocks = corpus.blocks(tables.train, config.data, tokenizer)
    eval_blocks = corpus.blocks(tables.evaluation, config.data, tokenizer)
    return train_blocks, eval_blocks, tokenizer, corpus.describe(tables, train_blocks, eval_blocks, tokenizer)


def build_model(config: Config, tokenizer):
    """Return a transformers model that predicts the next token, with adapters where they are asked for."""
    from transformers import AutoModelForCausalLM

    if config.model:
        model = load_model(AutoModelForCausalLM, config.model)
    else:
        model = decoder(config.scratch, tokenizer, config.data.block)
    if config.data.packing == "documents":
        check_positions(model, config.model)
    model = add_adapters(model, config.lora)
    if config.activation_checkpointing:
        # transformers 5.17 has it by its older name alone.
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable({"use_reentrant": False})
    return model


def loss_of(model, inputs: dict):
    """Return the mean loss over the tokens of a micro-batch that are to be learnt."""
    from app.data.corpus.blocks import token_loss
    from app.tasks.language.attention import model_inputs

    known = {name: tensor for name, tensor in model_inputs(inputs).items() if name != "targets"}
    # With a cache transformers would take no notice of where documents begin.
    return token_loss(model(**known, use_cache=False).logits, inputs["targets"])


def evaluate(run: Run, model, blocks, collate, tokenizer, config: Config) -> dict[str, float]:
    """Score the model on every token to learn of the evaluation blocks once, and have it write."""
    from app.tasks.language.generate import sample_text

    scores = run.scores_of()
    for micro in run.evaluation(model, blocks, collate, weights=blocks.weights):
        scores.update(micro.weight, loss=loss_of(model, micro.inputs))
    found = scores.compute()
    loss, tokens = found["eval/loss"], found.pop("eval/samples")
    if config.sample_length:
        with run.records.time_aside():
            run.say(sample_text(model, tokenizer, config.sample, config.sample_length, config.run.seed))
    bits = loss * tokens / math.log(2)
    return {
        "eval/loss": loss,
        "eval/perplexity": math.exp(min(loss, 700.0)),
        "eval/bits_per_byte": bits / blocks.documents.bytes,
        "eval/tokens": tokens,
    }


def main(config: Config) -> dict[str, float]:
    """Train, and return the last scores."""
    from app.tasks.language.attention import Attention

    with Run(config) as run:
        check_shape(config.scratch)
        check_lora(config.lora)
        with run.main_process_first():
            train_blocks, eval_blocks, tokenizer, about = load_data(config)
        run.say(about)
        plain = build_model(config, tokenizer)
        attention = Attention.of(plain, config.attention, config.data.packing, run)
        collate, cost = attention.collate, Cost.of(plain, config.data.block)
        model, optimizer = run.prepare(plain, config.optim)
        for batch in run.batches(train_blocks, collate, weights=train_blocks.weights, cost=cost):
            for micro in batch.micros(model):
                loss = loss_of(model, micro.inputs)
                run.backward(loss, micro)
            run.step(optimizer)
            if run.due(config.run.eval_every):
                run.log(evaluate(run, model, eval_blocks, collate, tokenizer, config))
        return run.finish(model, tokenizer, use=USE_IT)


if __name__ == "__main__":
    main(parse(Config))
