"""Train a text classifier: from scratch on data that needs no download, or from a pretrained model on your own.

    accelerate launch recipes/cls.py
    accelerate launch --config_file accelerate_configs/ddp_cpu.yaml recipes/cls.py --run.dir runs/ddp
    accelerate launch recipes/cls.py --model bert-base-cased --optim.lr 2e-5 \
        --data.path nyu-mll/glue --data.name mrpc --data.text sentence1 sentence2
"""

from dataclasses import dataclass, field

from app import OptimConfig, Run, RunConfig, UserError, parse
from app.data.config import TextData
from app.hub import loading

USE_IT = (
    "python -c 'from transformers import pipeline; "
    """print(pipeline("text-classification", "{model}", truncation=True)("some text"))'"""
)


@dataclass
class Scratch:
    """The shape of a model that is trained from scratch."""

    layers: int = 2
    """Transformer layers."""
    width: int = 128
    """Width of the hidden states."""
    heads: int = 2
    """Attention heads; they divide the width."""
    vocab: int = 8192
    """Tokens of the tokenizer, which is trained on the training texts."""
    dropout: float = 0.1
    """Dropout of hidden states and attention."""


@dataclass
class Config:
    """Train a text classifier."""

    model: str = ""
    """Pretrained model: a Hub id or a folder. Nothing: from scratch, in the shape of --scratch."""
    scratch: Scratch = field(default_factory=Scratch)
    data: TextData = field(default_factory=TextData)
    optim: OptimConfig = field(default_factory=lambda: OptimConfig(lr=1e-3, warmup=0.1))
    run: RunConfig = field(default_factory=lambda: RunConfig(epochs=4, best="eval/accuracy"))


def load_data(config: Config):
    """Return training and evaluation rows as token ids, their labels, and the tokenizer."""
    from app.data import text

    tables, labels = text.load_labelled(config.data)
    tokenizer = load_tokenizer(config, tables.train)
    length = config.data.max_length
    train_rows = text.tokenize(tables.train, config.data.text, tokenizer, length, labels.train_values)
    eval_rows = text.tokenize(tables.evaluation, config.data.text, tokenizer, length, labels.eval_values)
    return train_rows, eval_rows, labels, tokenizer


def load_tokenizer(config: Config, train):
    """Return the pretrained model's tokenizer, or train one."""
    from transformers import AutoTokenizer

    from app.data import text

    if config.model:
        with loading(config.model):
            tokenizer = AutoTokenizer.from_pretrained(config.model)
        return text.check_tokenizer(tokenizer, config.data.max_length)
    return text.own_tokenizer(train, config.data.text, config.scratch.vocab, config.data.max_length)


def build_model(config: Config, labels, tokenizer):
    """Return a transformers model with a head for these labels."""
    from transformers import AutoModelForSequenceClassification, BertConfig, BertForSequenceClassification

    head = {
        "num_labels": len(labels.names),
        "id2label": dict(enumerate(labels.names)),
        "label2id": {name: index for index, name in enumerate(labels.names)},
        "problem_type": labels.problem,
        "pad_token_id": tokenizer.pad_token_id,
    }
    if config.model:
        with loading(config.model):
            load = AutoModelForSequenceClassification.from_pretrained
            return load(config.model, ignore_mismatched_sizes=True, **head)
    size = config.scratch
    if size.width % size.heads:
        raise UserError(
            f"--scratch.heads {size.heads} does not divide --scratch.width {size.width}: give one that does"
        )
    shape = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=size.width,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        intermediate_size=4 * size.width,
        max_position_embeddings=config.data.max_length,
        hidden_dropout_prob=size.dropout,
        attention_probs_dropout_prob=size.dropout,
        **head,
    )
    return BertForSequenceClassification(shape)


def metrics_for(labels) -> dict:
    """Return the torchmetrics that suit the kind of labels."""
    from torchmetrics import MeanSquaredError, PearsonCorrCoef, classification

    classes = len(labels.names)
    if labels.problem == "regression":
        return {"mse": MeanSquaredError(), **({"pearson": PearsonCorrCoef()} if classes == 1 else {})}
    if labels.problem == "multi_label_classification":
        return {
            "accuracy": classification.MultilabelAccuracy(classes, average="micro", validate_args=False),
            "f1": classification.MultilabelF1Score(classes, average="macro", validate_args=False),
        }
    return {
        "accuracy": classification.MulticlassAccuracy(classes, average="micro", validate_args=False),
        "f1": classification.MulticlassF1Score(classes, average="macro", validate_args=False),
    }


def evaluate(run: Run, model, rows, collate, labels) -> dict[str, float]:
    """Score the model on every evaluation row once."""
    scores = run.scores_of(**metrics_for(labels))
    for micro in run.evaluation(model, rows, collate, rows.lengths):
        output = model(**micro.inputs)
        logits = output.logits.squeeze(-1) if labels.problem == "regression" else output.logits
        scores.update(micro.weight, logits, micro.inputs["labels"], loss=output.loss)
    return scores.compute()


def main(config: Config) -> dict[str, float]:
    """Train, and return the last scores."""
    from app.data.text import PadCollate

    with Run(config) as run:
        with run.main_process_first():
            train_rows, eval_rows, labels, tokenizer = load_data(config)
        if train_rows.truncated:
            cut = f"{train_rows.truncated:,} of {len(train_rows):,} training texts"
            run.say(f"{cut} were longer than {config.data.max_length} tokens (--data.max-length) and were cut")
        collate = PadCollate.of(tokenizer)
        model, optimizer = run.prepare(build_model(config, labels, tokenizer), config.optim)
        for batch in run.batches(train_rows, collate, train_rows.lengths):
            for micro in batch.micros(model):
                loss = model(**micro.inputs).loss
                run.backward(loss, micro)
            run.step(optimizer)
            if run.due(config.run.eval_every):
                run.log(evaluate(run, model, eval_rows, collate, labels))
        return run.finish(model, tokenizer, use=USE_IT)


if __name__ == "__main__":
    main(parse(Config))
