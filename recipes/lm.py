r"""Train a language model: from scratch on data that needs no download, or a pretrained one on your own texts.

    accelerate launch recipes/lm.py
    accelerate launch --config_file accelerate_configs/fsdp_cpu.yaml recipes/lm.py --run.dir runs/fsdp
    accelerate launch recipes/lm.py --model Qwen/Qwen3-0.6B --lora.rank 8 --optim.lr 2e-4 \
        --data.path chats.jsonl --data.messages messages --data.block 1024
"""

import math
from dataclasses import dataclass, field
from typing import Literal

from app import EMAConfig, OptimConfig, Run, RunConfig, parse
from app.data.config import CorpusData
from app.rundir.throughput import Cost
from app.tasks.from_scratch import DecoderScratch, check_shape, decoder
from app.tasks.language.lora import Lora, add_adapters, check_lora
from app.tasks.pretrained import check_positions, load_model, load_tokenizer

USE_IT = (
    "python -c 'from transformers import pipeline; "
    """print(pipeline("text-generation", "{model}")("some text", max_new_tokens=60))'"""
)
USE_A_CHAT = USE_IT.replace('"some text"', '[dict(role="user", content="some text")]')


@dataclass
class Config:
    """Train a language model."""

    model: str = ""
    """Pretrained model: a Hub id or a folder. Default: train from scratch, in the shape of --scratch."""
    scratch: DecoderScratch = field(default_factory=DecoderScratch)
    lora: Lora = field(default_factory=Lora)
    data: CorpusData = field(default_factory=CorpusData)
    activation_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more work."""
    attention: Literal["auto", "model", "mask", "varlen", "flex"] = "auto"
    """How attention keeps documents in a block apart. model: as transformers does it. mask: one mask for all layers.
    varlen: flash attention, which needs no mask (bf16 or fp16 on a GPU, no dropout in attention). flex: torch's
    flex_attention, compiled. auto: varlen if the machine can run it, otherwise mask. run.json says which was taken."""
    sample: str = ""
    """Prompt of the sample text that each evaluation writes. Default: how the first evaluation document begins."""
    sample_length: int = 64
    """Maximum number of tokens in the sample text. 0: write none."""
    optim: OptimConfig = field(
        default_factory=lambda: OptimConfig(
            lr=None, betas=(0.9, 0.95), weight_decay=0.1, schedule="cosine", warmup=0.05, min_lr=0.1
        )
    )
    ema: EMAConfig = field(default_factory=EMAConfig)
    run: RunConfig = field(default_factory=lambda: RunConfig(global_batch=32, micro_batch=16))

    def default_lr(self) -> tuple[float, str]:
        """Return the learning rate if --optim.lr is not given, and what it is for."""
        if self.lora.rank:
            return 2e-4, "LoRA adapters"
        return (2e-5, "fine-tuning") if self.model else (2e-3, "training from scratch")


def load_data(config: Config):
    """Return training blocks and sets of evaluation blocks, the tokenizer, and a line that describes them."""
    from app.data.corpus import corpus

    tables = corpus.load(config.data)
    if config.model:
        tokenizer = load_tokenizer(config.model, config.data.block, "--data.block")
    else:
        tokenizer = corpus.own_tokenizer(tables.train, config.data, config.scratch.tokenizer, config.scratch.vocab)
    train_blocks = corpus.blocks(tables.train, config.data, tokenizer)
    eval_sets = {name: corpus.blocks(table, config.data, tokenizer) for name, table in tables.sets.items()}
    return train_blocks, eval_sets, tokenizer, corpus.describe(tables, train_blocks, eval_sets, tokenizer)


def build_model(config: Config, tokenizer):
    """Build a transformers model that predicts the next token, with adapters if --lora.rank asks for them."""
    from transformers import AutoModelForCausalLM

    if config.model:
        model = load_model(AutoModelForCausalLM, config.model)
    else:
        model = decoder(config.scratch, tokenizer, config.data.block)
    if config.data.packing == "documents":
        check_positions(model, config.model)
    model = add_adapters(model, config.lora)
    if config.activation_checkpointing:
        # transformers 5.17 knows only the older name.
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable({"use_reentrant": False})
    return model


def loss_of(model, inputs: dict, criterion):
    """Return the mean loss over the supervised tokens of a micro-batch."""
    from app.tasks.language.attention import model_inputs

    known = {name: tensor for name, tensor in model_inputs(inputs).items() if name != "targets"}
    # With a cache, transformers would ignore where documents begin.
    return criterion(model(**known, use_cache=False).logits, inputs["targets"])


def evaluate(run: Run, model, blocks, collate, criterion, tokenizer, config: Config) -> dict[str, float]:
    """Score the model on every supervised token of the evaluation blocks, and print a sample text."""
    from app.data.corpus.blocks import beginning
    from app.tasks.language.generate import sample_text

    scores = run.scores_of()
    for micro in run.evaluation(model, blocks, collate, weights=blocks.weights):
        scores.update(micro.weight, loss=loss_of(model, micro.inputs, criterion))
    found = scores.compute()
    loss, tokens = found["eval/loss"], found.pop("eval/samples")
    if config.sample_length:
        with run.logger.time_aside():
            prompt = config.sample or beginning(blocks, tokenizer)
            run.say(sample_text(model, tokenizer, prompt, config.sample_length, config.run.seed))
    bits = loss * tokens / math.log(2)
    return {
        "eval/loss": loss,
        "eval/perplexity": math.exp(min(loss, 700.0)),
        "eval/bits_per_byte": bits / blocks.documents.bytes,
        "eval/tokens": tokens,
    }


def main(config: Config) -> dict[str, float]:
    """Train the model and return its last scores."""
    from app.data.corpus.blocks import token_loss
    from app.data.corpus.shorter import RampedCollate
    from app.tasks.language.attention import Attention

    with Run(config) as run:
        check_shape(config.scratch)
        check_lora(config.lora)
        with run.main_process_first():
            train_blocks, eval_sets, tokenizer, about = load_data(config)
        run.say(about)
        plain = build_model(config, tokenizer)
        attention = Attention.of(plain, config.attention, config.data.packing, run)
        collate, cost = RampedCollate(attention.collate, config.data), Cost.of(plain, config.data.block)
        run.keep_best("-eval/loss")
        model, optimizer = run.prepare(plain, config.optim)
        criterion = run.compiled(token_loss)
        for batch in run.batches(train_blocks, collate, weights=train_blocks.weights, cost=cost):
            for micro in batch.micros(model):
                loss = loss_of(model, micro.inputs, criterion)
                run.backward(loss, micro)
            run.step(optimizer)
            if run.due(config.run.eval_every):
                run.evaluate(evaluate, model, eval_sets, collate, criterion, tokenizer, config)
        return run.finish(model, tokenizer, use=USE_A_CHAT if config.data.messages else USE_IT)


if __name__ == "__main__":
    main(parse(Config))
