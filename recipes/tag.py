r"""Train a tagger of tokens: from scratch on data that needs no download, or from a pretrained model on your own.

    accelerate launch recipes/tag.py
    accelerate launch --config_file accelerate_configs/ddp_cpu.yaml recipes/tag.py --run.dir runs/ddp
    accelerate launch recipes/tag.py --model bert-base-cased \
        --data.path train.conll --data.eval-path dev.conll
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from app import EMAConfig, Needs, OptimConfig, Run, RunConfig, parse
from app.data.config import TagData
from app.tasks.from_scratch import Scratch, bert_config, check_shape
from app.tasks.pretrained import head_of, load_model, load_tokenizer

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from app.data.text.tagged_text import Tags
    from app.data.text.tokens import TokenTable

USE_IT = (
    "python -c 'from transformers import pipeline; "
    """print(pipeline("token-classification", "{model}", aggregation_strategy="simple")("some text"))'"""
)


@dataclass
class Config:
    """Train a tagger of tokens: named entities, parts of speech."""

    model: str = ""
    """Pretrained model: a Hub id or a folder. Default: train from scratch, in the shape of --scratch."""
    scratch: Scratch = field(default_factory=Scratch)
    data: TagData = field(default_factory=TagData)
    optim: OptimConfig = field(default_factory=lambda: OptimConfig(lr=None, warmup=0.1))
    ema: EMAConfig = field(default_factory=EMAConfig)
    run: RunConfig = field(default_factory=lambda: RunConfig(epochs=4, global_batch=32, micro_batch=8))

    def default_lr(self) -> tuple[float, str]:
        """Return the learning rate if --optim.lr is not given, and what it is for."""
        return (3e-5, "fine-tuning") if self.model else (2e-3, "training from scratch")


def load_data(
    config: Config, needs: Needs = Needs()
) -> "tuple[TokenTable, dict[str, TokenTable], Tags, PreTrainedTokenizerBase, str]":
    """Return training rows and sets of evaluation rows as token ids, tags, the tokenizer, and a description."""
    from app.data.text import tagged_text

    tables, tags = tagged_text.load_tagged(config.data, needs)
    tokens, length = config.data.tokens, config.data.max_length
    if config.model:
        tokenizer = load_tokenizer(config.model, length, in_words=True)
    else:
        tokenizer = tagged_text.own_tokenizer(tables.train, tokens, config.scratch.vocab, length)
    train_rows = tagged_text.tokenize(tables.train, tokens, tags.sets["train"], tokenizer, length)
    eval_sets = {
        name: tagged_text.tokenize(table, tokens, tags.sets[name], tokenizer, length)
        for name, table in tables.sets.items()
    }
    about = tagged_text.describe(tables, tags, train_rows, eval_sets, length)
    return train_rows, eval_sets, tags, tokenizer, about


def build_model(
    config: Config, tags: "Tags", tokenizer: "PreTrainedTokenizerBase", needs: Needs = Needs()
) -> "PreTrainedModel":
    """Build a transformers model with a head for these tags."""
    from transformers import AutoModelForTokenClassification, BertForTokenClassification

    head = {**head_of(tags.names), "pad_token_id": tokenizer.pad_token_id}
    if config.model:
        settings = {**head, "ignore_mismatched_sizes": True}
        return load_model(AutoModelForTokenClassification, config.model, needs=needs, **settings)
    return BertForTokenClassification(bert_config(config.scratch, tokenizer, config.data.max_length, **head))


def evaluate(
    run: Run, model: "nn.Module", rows: "TokenTable", collate: Callable[[list], Any], tags: "Tags"
) -> dict[str, float]:
    """Score the model on every evaluation row, once each."""
    from app.training.scores.tags import EntityScores, TokenScores

    scores = run.scores_of(EntityScores(tags.names) if tags.spans else TokenScores(tags.names))
    for micro in run.evaluation(model, rows, collate, rows.lengths, weights=rows.token_weights):
        output = model(**micro.inputs)
        scores.update(micro.weight, output.logits, micro.inputs["labels"], loss=output.loss)
    results = scores.compute()
    return results | {"eval/tokens": results.pop("eval/samples")}


def main(config: Config) -> dict[str, float]:
    """Train the model and return its last scores."""
    from app.data.text.tokens import PadCollate
    from app.tasks.language.attention import never_look

    with Run(config) as run:
        check_shape(config.scratch)
        with run.main_process_first():
            train_rows, eval_sets, tags, tokenizer, about = load_data(config, run.needs)
        run.say(about)
        run.keep_best("eval/f1")
        collate = PadCollate.of(tokenizer, config.data.pad_to_multiple_of)
        plain = build_model(config, tags, tokenizer, run.needs)
        never_look(plain, run.accelerator)
        model, optimizer = run.prepare(plain, config.optim)
        for batch in run.batches(train_rows, collate, train_rows.lengths, weights=train_rows.token_weights):
            for micro in batch.micros(model):
                run.backward(model(**micro.inputs).loss, micro)
            run.step(optimizer)
            if run.due(config.run.eval_every):
                run.evaluate(evaluate, model, eval_sets, collate, tags)
        return run.finish(model, tokenizer, use=USE_IT)


if __name__ == "__main__":
    main(parse(Config))
