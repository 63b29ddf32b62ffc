r"""Train a model that writes a text for a text: from scratch on data that needs no download, or a pretrained one.

    accelerate launch recipes/s2s.py
    accelerate launch --config_file accelerate_configs/fsdp_cpu.yaml recipes/s2s.py --run.dir runs/fsdp
    accelerate launch recipes/s2s.py --model google-t5/t5-small --data.prefix 'translate English to German: ' \
        --data.path train.en train.de --data.source en --data.target de --data.max-source 128 --data.max-target 128
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from app import EMAConfig, Needs, OptimConfig, Run, RunConfig, parse
from app.config import OnResume, setting
from app.data.config import PairData
from app.tasks.activation_checkpointing import CHECKPOINTING_HELP, ActivationCheckpointing, checkpoint_activations
from app.tasks.from_scratch import check_shape
from app.tasks.language import logits, seq2seq
from app.tasks.language.logits import Logits
from app.tasks.language.seq2seq_generation import Generate
from app.tasks.language.use import WRITES

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from app.data.mixtures.joined import MixedRows
    from app.data.streams.samples import StreamedSamples
    from app.data.text.pair_text import PairTable


@dataclass
class Config:
    """Train a model that writes a text for a text: translations, summaries, answers."""

    model: str = ""
    """Pretrained model with encoder and decoder: a Hub id or a folder. Default: train from scratch, in the shape of
    --scratch."""
    scratch: seq2seq.PairScratch = field(default_factory=seq2seq.PairScratch)
    data: PairData = field(default_factory=PairData)
    smoothing: float = setting(0.0, at_least=0)
    """Label smoothing: the share of each target token that is spread evenly over the vocabulary. 0.1 is usual."""
    activation_checkpointing: ActivationCheckpointing = setting(
        "none", on_resume=OnResume.ACCEPT, help=CHECKPOINTING_HELP
    )
    logits: Logits = setting("auto", help=logits.HELP)
    generate: Generate = field(default_factory=Generate)
    optim: OptimConfig = field(default_factory=lambda: OptimConfig(lr=None, warmup=0.1))
    ema: EMAConfig = field(default_factory=EMAConfig)
    run: RunConfig = field(default_factory=lambda: RunConfig(epochs=4, global_batch=32, micro_batch=8))

    def default_lr(self) -> tuple[float, str]:
        """Return the learning rate if --optim.lr is not given, and what it is for."""
        return (1e-4, "fine-tuning") if self.model else (2e-3, "training from scratch")


def load_data(
    config: Config, needs: Needs = Needs()
) -> "tuple[PairTable | StreamedSamples | MixedRows, dict[str, PairTable], PreTrainedTokenizerBase, str]":
    """Return training pairs and sets of evaluation pairs as token ids, the tokenizer, and a description."""
    from app.data.text import pair_text

    tables = pair_text.load_pairs(config.data, needs)
    if config.model:
        tokenizer = seq2seq.load_pair_tokenizer(config.model, config.data)
    else:
        tokenizer = pair_text.own_tokenizer(tables.train, config.data, config.scratch.vocab)
    train_rows = pair_text.training_rows(tables, config.data, tokenizer)
    eval_sets = {name: pair_text.tokenize(table, config.data, tokenizer) for name, table in tables.sets.items()}
    return train_rows, eval_sets, tokenizer, pair_text.describe(tables, train_rows, eval_sets, config.data)


def build_model(config: Config, tokenizer: "PreTrainedTokenizerBase", needs: Needs = Needs()) -> "PreTrainedModel":
    """Build a transformers model with an encoder and a decoder."""
    data, generate = config.data, config.generate
    if config.model:
        model = seq2seq.load_pretrained(config.model, needs)
    else:
        model = seq2seq.new_model(config.scratch, tokenizer, data, generate, needs=needs)
    checkpoint_activations(model, config.activation_checkpointing)
    return seq2seq.will_write(model, data, generate)


def evaluate(
    run: Run,
    model: "nn.Module",
    rows: "PairTable",
    collate: Callable[[list], Any],
    criterion: Callable[..., Any],
    tokenizer: "PreTrainedTokenizerBase",
    config: Config,
) -> dict[str, float]:
    """Score the model on every token to write, and the texts that it writes for some rows."""
    from app.data.text.pair_text import Evenly
    from app.tasks.language import seq2seq_generation
    from app.training.scores.text import TokenAccuracy, text_scores

    scores = run.scores_of(TokenAccuracy(logits.likeliest(model)))
    for micro in run.evaluation(model, rows, collate, rows.lengths, weights=rows.weights):
        predicted = seq2seq.predict(model, micro.inputs)
        scores.update(micro.weight, *predicted, loss=criterion(*predicted))
    results, asked = scores.compute(), config.generate
    if asked.rows:
        some = Evenly(rows, asked.rows)
        written = seq2seq_generation.written(
            run, model, some, collate, tokenizer, asked.longest(config.data), asked.beams
        )
        with run.logger.time_aside("evaluating"):
            texts = some.texts()
            quality = text_scores(written, [text["target"] for text in texts], asked.tokenize)
            results |= {f"eval/{name}": value for name, value in quality.items()}
            run.say(seq2seq_generation.beside(written, texts, asked.samples))
    return results | {"eval/tokens": results.pop("eval/samples")}


def main(config: Config) -> dict[str, float]:
    """Train the model and return its last scores."""
    from app.data.corpus.blocks import token_loss, token_loss_by_row
    from app.data.text.pair_text import PairCollate
    from app.tasks.language.attention import never_look
    from app.training.scores.text import missing

    with Run(config) as run:
        check_shape(config.scratch)
        seq2seq.check_smoothing(config.smoothing)
        with run.main_process_first():
            train_rows, eval_sets, tokenizer, about = load_data(config, run.needs)
        run.say(about)
        lacking = missing() if config.generate.rows else ""
        if lacking:
            run.warn(f"warning: {lacking}")
        run.keep_best("eval/chrf" if config.generate.rows and not lacking else "-eval/loss")
        collate = PairCollate(tokenizer, config.data.pad_to_multiple_of)
        plain = build_model(config, tokenizer, run.needs)
        never_look(plain, run.accelerator)
        logits.choose(plain, config.logits, run)
        model, optimizer = run.prepare(plain, config.optim)
        criterion = run.compiled(token_loss)
        for batch in run.batches(train_rows, collate, train_rows.lengths, weights=train_rows.weights):
            for micro in batch.micros(model):
                predicted = seq2seq.predict(model, micro.inputs, config.smoothing)
                loss = criterion(*predicted, config.smoothing)
                run.observe_rows(partial(token_loss_by_row, *predicted, config.smoothing), micro)
                run.backward(loss, micro)
            run.step(optimizer)
            if run.due(config.run.eval_every):
                run.evaluate(evaluate, model, eval_sets, collate, criterion, tokenizer, config)
        return run.finish(model, tokenizer, use=WRITES)


if __name__ == "__main__":
    main(parse(Config))
