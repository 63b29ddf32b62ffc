r"""Train a language model: from scratch on data that needs no download, or a pretrained one on your own texts.

    accelerate launch recipes/lm.py
    accelerate launch recipes/lm.py --mask.rate 0.15 --run.dir runs/masked
    accelerate launch --config_file accelerate_configs/fsdp_cpu.yaml recipes/lm.py --run.dir runs/fsdp
    accelerate launch recipes/lm.py --model Qwen/Qwen3-0.6B --lora.rank 8 --optim.lr 2e-4 \
        --data.path chats.jsonl --data.messages messages --data.block 1024
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from app import EMAConfig, Needs, OptimConfig, Run, RunConfig, parse
from app.config import OnResume, setting
from app.data.config import CorpusData, Masking
from app.rundir.throughput import Cost
from app.tasks.activation_checkpointing import CHECKPOINTING_HELP, ActivationCheckpointing, checkpoint_activations
from app.tasks.from_scratch import LanguageScratch, check_direction, check_shape, decoder, encoder
from app.tasks.language import logits, use
from app.tasks.language.loading import check_positions, load_language_model
from app.tasks.language.logits import Logits
from app.tasks.language.lora import Lora, add_adapters, check_lora, hold_base
from app.tasks.pretrained import load_tokenizer

if TYPE_CHECKING:
    from torch import Tensor, nn
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from app.data.corpus.blocks import Blocks
    from app.data.corpus.joined_blocks import JoinedBlocks
    from app.data.corpus.masking import MaskedBlocks
    from app.data.corpus.token_blocks import TokenBlocks
    from app.sampling.batch_plan import Turn

    AnyBlocks = Blocks | TokenBlocks | JoinedBlocks | MaskedBlocks


@dataclass
class Config:
    """Train a language model."""

    model: str = ""
    """Pretrained model: a Hub id or a folder. Default: train from scratch, in the shape of --scratch."""
    scratch: LanguageScratch = field(default_factory=LanguageScratch)
    lora: Lora = field(default_factory=Lora)
    data: CorpusData = field(default_factory=CorpusData)
    mask: Masking = field(default_factory=Masking)
    token_dropout: float = 0.0
    """Probability that an input token is replaced, which is predicted nevertheless: by the tokenizer's mask token, or
    by the unknown token, or by a random one. Special tokens stay. 0.1 is usual; 0: none."""
    activation_checkpointing: ActivationCheckpointing = setting(
        "none", on_resume=OnResume.ACCEPT, help=CHECKPOINTING_HELP
    )
    logits: Logits = setting("auto", help=logits.HELP)
    attention: Literal["auto", "model", "mask", "varlen", "flex"] = "auto"
    """How attention keeps documents in a block apart. model: as transformers does it. mask: one mask for all layers.
    varlen: flash attention, which needs no mask (bf16 or fp16 on a GPU, no dropout in attention). flex: torch's
    flex_attention, compiled. auto: varlen if the machine can run it, otherwise mask. run.json says which was taken."""
    sample: str = ""
    """Prompt of the sample text that each evaluation writes. Default: how the first evaluation document begins."""
    sample_length: int = setting(64, at_least=0)
    """Maximum number of tokens in the sample text; with --mask.rate, of a text that the model fills in. 0: none."""
    optim: OptimConfig = field(
        default_factory=lambda: OptimConfig(
            lr=None, betas=(0.9, 0.95), weight_decay=0.1, schedule="cosine", warmup=0.05, min_lr=0.1
        )
    )
    ema: EMAConfig = field(default_factory=EMAConfig)
    run: RunConfig = field(default_factory=lambda: RunConfig(global_batch=32, micro_batch=16))

    @property
    def masked(self) -> bool:
        """Tell whether the model finds masked tokens, instead of predicting the next one."""
        return self.mask.rate > 0

    def default_lr(self) -> tuple[float, str]:
        """Return the learning rate if --optim.lr is not given, and what it is for."""
        if self.lora.rank:
            return 2e-4, "LoRA adapters"
        if self.model:
            return 2e-5, "fine-tuning"
        return 1e-3 if self.masked else 2e-3, "training from scratch"


def load_data(
    config: Config, needs: Needs = Needs()
) -> "tuple[AnyBlocks, Mapping[str, AnyBlocks], PreTrainedTokenizerBase, str]":
    """Return training blocks and sets of evaluation blocks, the tokenizer, and a line that describes them."""
    from app.data.corpus import corpus
    from app.data.corpus.masking import MaskedBlocks, Masker

    tables, scratch = corpus.load(config.data, needs), config.scratch
    if config.model:
        tokenizer = load_tokenizer(config.model, config.data.block, "--data.block")
    else:
        more = scratch.tokenizer, scratch.vocab, config.masked
        tokenizer = corpus.own_tokenizer(tables.train, config.data, *more)
    masker = Masker.of(config.mask, tokenizer)  # early, for its error
    train_blocks = corpus.blocks(tables.train, config.data, tokenizer)
    eval_sets = {name: corpus.blocks(table, config.data, tokenizer) for name, table in tables.sets.items()}
    about = corpus.describe(tables, train_blocks, eval_sets, tokenizer)
    if masker is None:
        return train_blocks, eval_sets, tokenizer, about
    train = MaskedBlocks(train_blocks, masker)
    held_out = {name: MaskedBlocks(blocks, masker, config.run.seed) for name, blocks in eval_sets.items()}
    trained = f"{train.tokens:,} tokens in an epoch, " if tables.has_training_rows else ""
    about += f"\nmasked: {trained}{held_out[''].tokens:,} in an evaluation"
    return train, held_out, tokenizer, about


def build_model(config: Config, tokenizer: "PreTrainedTokenizerBase", needs: Needs = Needs()) -> "PreTrainedModel":
    """Build a transformers model that predicts the next token or masked ones, with adapters if --lora.rank asks."""
    if config.model:
        model = load_language_model(config.model, config.masked, needs=needs)
    else:
        model = (encoder if config.masked else decoder)(config.scratch, tokenizer, config.data.block, needs=needs)
    if config.data.packing == "documents":
        check_positions(model, config.model)
    model = add_adapters(model, config.lora, config.masked)
    checkpoint_activations(model, config.activation_checkpointing)
    return model


def predict(model: "nn.Module", inputs: dict[str, Any]) -> "tuple[Tensor, Tensor]":
    """Return the logits of a micro-batch, [blocks, size, vocabulary], and the tokens that are right, [blocks, size].

    With --logits chunked, the logits are losses, [blocks, size].
    """
    from app.tasks.language.attention import model_inputs

    arguments = model_inputs(inputs)
    targets = arguments.pop("targets")
    with logits.told(model, targets):
        return model(**arguments).logits, targets


def loss_of(run: Run, model: "nn.Module", micro: "Turn", criterion: Callable[..., Any]) -> "Tensor":
    """Return the mean loss over the supervised tokens of a micro-batch; log that of each source of a mixture."""
    from app.data.corpus.blocks import token_loss_by_row

    predicted = predict(model, micro.inputs)
    run.observe_rows(lambda: token_loss_by_row(*predicted), micro)
    return criterion(*predicted)


def evaluate(
    run: Run,
    model: "nn.Module",
    blocks: Any,
    collate: Callable[[list], Any],
    criterion: Callable[..., Any],
    tokenizer: "PreTrainedTokenizerBase",
    config: Config,
) -> dict[str, float]:
    """Score the model on every supervised token of the evaluation blocks, and print a sample text."""
    from app.data.corpus.blocks import beginning
    from app.tasks.language.generate import filled_in, sample_text
    from app.training.scores.text import TokenAccuracy

    scores = run.scores_of(*([TokenAccuracy(logits.likeliest(model))] if config.masked else []))
    for micro in run.evaluation(model, blocks, collate, weights=blocks.weights):
        predicted = predict(model, micro.inputs)
        scores.update(micro.weight, *predicted, loss=criterion(*predicted))
        del predicted  # logits are large: not two of them at a time
    results = scores.compute()
    loss, tokens = results["eval/loss"], results.pop("eval/samples")
    results["eval/perplexity"] = math.exp(min(loss, 700.0))
    if not config.masked:  # what is masked is only a part of the text
        results["eval/bits_per_byte"] = loss * tokens / math.log(2) / blocks.documents.bytes
    with run.logger.time_aside("evaluating"):
        if config.sample_length and config.masked:
            run.say(filled_in(model, tokenizer, blocks, collate, config.sample_length))
        elif config.sample_length:
            prompt = config.sample or beginning(blocks, tokenizer)
            run.say(sample_text(model, tokenizer, prompt, config.sample_length, config.run.seed))
    return results | {"eval/tokens": tokens}


def main(config: Config) -> dict[str, float]:
    """Train the model and return its last scores."""
    from app.data.corpus.blocks import token_loss
    from app.data.corpus.masking import Masker, check_masking
    from app.data.corpus.shorter import RampedCollate
    from app.data.text.token_dropout import TokenDropout
    from app.tasks.language.attention import Attention
    from app.tasks.language.both_ways import BothWays

    with Run(config) as run:
        check_masking(config.mask, config.token_dropout, config.sample)
        check_shape(config.scratch)
        check_direction(config.scratch, config.masked)
        check_lora(config.lora, config.model, run.accelerator, run.needs)
        with run.main_process_first():
            train_blocks, eval_sets, tokenizer, about = load_data(config, run.needs)
        run.say(about)
        plain = build_model(config, tokenizer, run.needs)
        attention = (BothWays if config.masked else Attention).of(plain, config.attention, config.data.packing, run)
        augment = Masker.of(config.mask, tokenizer) or TokenDropout.of(config.token_dropout, tokenizer)
        collate, cost = RampedCollate(attention.collate, config.data), Cost.of(plain, config.data.block)
        logits.choose(plain, config.logits, run)
        hold_base(plain, config.lora, run.accelerator, run.needs)
        run.keep_best("-eval/loss")
        model, optimizer = run.prepare(plain, config.optim)
        criterion = run.compiled(token_loss)
        for batch in run.batches(train_blocks, collate, weights=train_blocks.weights, augment=augment, cost=cost):
            for micro in batch.micros(model):
                loss = loss_of(run, model, micro, criterion)
                run.backward(loss, micro)
            run.step(optimizer)
            if run.due(config.run.eval_every):
                run.evaluate(evaluate, model, eval_sets, collate, criterion, tokenizer, config)
        return run.finish(model, tokenizer, use=use.command(config.masked, bool(config.data.messages)))


if __name__ == "__main__":
    main(parse(Config))
