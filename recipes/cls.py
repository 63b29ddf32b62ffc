r"""Train a text classifier: from scratch on data that needs no download, or from a pretrained model on your own.

    accelerate launch recipes/cls.py
    accelerate launch --config_file accelerate_configs/ddp_cpu.yaml recipes/cls.py --run.dir runs/ddp
    accelerate launch recipes/cls.py --model bert-base-cased --optim.lr 2e-5 \
        --data.path nyu-mll/glue --data.name mrpc --data.text sentence1 sentence2
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from app import EMAConfig, Needs, OptimConfig, Run, RunConfig, parse
from app.data.config import TextData
from app.tasks.class_loss import ClassLoss, ClassLossConfig, check_problem, plain_loss_by_row
from app.tasks.from_scratch import Scratch, bert_config, check_shape
from app.tasks.pretrained import head_of, load_model, load_tokenizer

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from app.data.mixtures.joined import MixedRows
    from app.data.streams.samples import StreamedSamples
    from app.data.tables.labels import Labels
    from app.data.text.tokens import TokenTable
    from app.training.scores.base import Metric

USE_IT = (
    "python -c 'from transformers import pipeline; "
    """print(pipeline("text-classification", "{model}", truncation=True)({text}))'"""
)
TEXT, PAIR = '"some text"', '{{"text": "one text", "text_pair": "the other"}}'


@dataclass
class Config:
    """Train a text classifier."""

    model: str = ""
    """Pretrained model: a Hub id or a folder. Default: train from scratch, in the shape of --scratch."""
    loss: ClassLossConfig = field(default_factory=ClassLossConfig)
    scratch: Scratch = field(default_factory=Scratch)
    data: TextData = field(default_factory=TextData)
    token_dropout: float = 0.0
    """Probability that a token of a training text is replaced: by the tokenizer's mask token, or by the unknown token,
    or by a random one. Special tokens stay. 0.1 is usual; 0: none."""
    optim: OptimConfig = field(default_factory=lambda: OptimConfig(lr=None, warmup=0.1))
    ema: EMAConfig = field(default_factory=EMAConfig)
    run: RunConfig = field(default_factory=lambda: RunConfig(epochs=4))

    def default_lr(self) -> tuple[float, str]:
        """Return the learning rate if --optim.lr is not given, and what it is for."""
        return (2e-5, "fine-tuning") if self.model else (1e-3, "training from scratch")


def load_data(
    config: Config, needs: Needs = Needs()
) -> "tuple[TokenTable | StreamedSamples | MixedRows, dict[str, TokenTable], Labels, PreTrainedTokenizerBase, str]":
    """Return training rows and sets of evaluation rows as token ids, labels, the tokenizer, and a description."""
    from app.data.text import labeled_text

    tables, labels = labeled_text.load_labelled(config.data, needs)
    columns, length = config.data.text, config.data.max_length
    if config.model:
        tokenizer = load_tokenizer(config.model, length, pair=len(columns) > 1)
    else:
        tokenizer = labeled_text.own_tokenizer(tables.train, columns, config.scratch.vocab, length)
    train_rows = labeled_text.training_rows(tables, config.data, tokenizer, labels)
    eval_sets = {
        name: labeled_text.tokenize(table, columns, tokenizer, length, labels.sets[name])
        for name, table in tables.sets.items()
    }
    about = labeled_text.describe(tables, labels, train_rows, eval_sets, length)
    return train_rows, eval_sets, labels, tokenizer, about


def build_model(
    config: Config, labels: "Labels", tokenizer: "PreTrainedTokenizerBase", needs: Needs = Needs()
) -> "PreTrainedModel":
    """Build a transformers model with a head for these labels."""
    from transformers import AutoModelForSequenceClassification, BertForSequenceClassification

    head = {
        **head_of(labels.names),
        "problem_type": labels.problem,
        "pad_token_id": tokenizer.pad_token_id,
    }
    if config.model:
        settings = {**head, "ignore_mismatched_sizes": True}
        return load_model(AutoModelForSequenceClassification, config.model, needs=needs, **settings)
    return BertForSequenceClassification(bert_config(config.scratch, tokenizer, config.data.max_length, **head))


def loss_for(config: Config, labels: "Labels") -> ClassLoss | None:
    """Return the loss of --loss; None for the model's own."""
    if config.loss == ClassLossConfig():
        return None
    check_problem(labels.problem)
    return ClassLoss(config.loss, labels.names, labels.known_values)


def measure_for(labels: "Labels") -> "Metric":
    """Choose the scores for this kind of labels."""
    from app.training.scores.classification import Classification, MultiLabel
    from app.training.scores.regression import Regression

    if labels.problem == "regression":
        return Regression()
    kind = MultiLabel if labels.problem == "multi_label_classification" else Classification
    return kind(labels.names)


def best_by(labels: "Labels", is_pair: bool) -> str:
    """Name the score of the best checkpoint: how similar two texts are is scored by the correlation."""
    if labels.problem != "regression":
        return "eval/accuracy"
    return "eval/pearson" if is_pair and len(labels.names) == 1 else "-eval/mse"


def evaluate(
    run: Run, model: "nn.Module", rows: "TokenTable", collate: Callable[[list], Any], labels: "Labels"
) -> dict[str, float]:
    """Score the model on every evaluation row, once each."""
    scores = run.scores_of(measure_for(labels))
    for micro in run.evaluation(model, rows, collate, rows.lengths):
        output = model(**micro.inputs)
        predicted = output.logits.squeeze(-1) if labels.problem == "regression" else output.logits
        scores.update(micro.weight, predicted, micro.inputs["labels"], loss=output.loss)
    return scores.compute()


def main(config: Config) -> dict[str, float]:
    """Train the model and return its last scores."""
    from app.data.text.token_dropout import TokenDropout, check_dropout
    from app.data.text.tokens import PadCollate
    from app.tasks.language.attention import never_look

    with Run(config) as run:
        check_shape(config.scratch)
        check_dropout(config.token_dropout)
        with run.main_process_first():
            train_rows, eval_sets, labels, tokenizer, about = load_data(config, run.needs)
        run.say(about)
        is_pair = len(config.data.text) > 1
        run.keep_best(best_by(labels, is_pair))
        collate = PadCollate.of(tokenizer, config.data.pad_to_multiple_of)
        plain = build_model(config, labels, tokenizer, run.needs)
        never_look(plain, run.accelerator)
        model, optimizer = run.prepare(plain, config.optim)
        loss_of, augment = loss_for(config, labels), TokenDropout.of(config.token_dropout, tokenizer)
        weights = loss_of and loss_of.weights
        for batch in run.batches(train_rows, collate, train_rows.lengths, weights=weights, augment=augment):
            for micro in batch.micros(model):
                output = model(**micro.inputs)
                loss = loss_of(output.logits, micro.inputs) if loss_of else output.loss
                by_row = loss_of.by_row if loss_of else partial(plain_loss_by_row, labels.problem)
                run.observe_rows(partial(by_row, output.logits, micro.inputs), micro)
                run.backward(loss, micro)
            run.step(optimizer)
            if run.due(config.run.eval_every):
                run.evaluate(evaluate, model, eval_sets, collate, labels)
        return run.finish(model, tokenizer, use=USE_IT.replace("{text}", PAIR if is_pair else TEXT))


if __name__ == "__main__":
    main(parse(Config))
