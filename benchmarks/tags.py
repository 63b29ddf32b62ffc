"""Compare recipes/tag.py with transformers' way to train a tagger: entity F1 over several seeds, and speed.

    python -m benchmarks.tags [--seeds 0 1 2] [--out FILE.json] [-- FLAGS of recipes/tag.py]

Both train the same model from scratch, with the same tokenizer, rows, batch, number of steps, learning rates and
clipping, in fp32. The other one is what transformers' example run_ner does, written anew: a Dataset that is tokenized
with `map`, DataCollatorForTokenClassification, Trainer in its own order, and seqeval. Each training is a process of its
own; they alternate, and who is first changes with the seed. Speed is samples a second of the steps alone, by the clock
and by processor time, of which the second one does not count what else the machine does.
"""

from benchmarks.seeds import Watch, compare, recipe_run, timed, trainer_settings
from recipes import tag

FLAGS = "--run.epochs 2 --run.global-batch 32 --run.micro-batch 32"
KEPT = ("eval/f1", "eval/accuracy", "by_clock", "by_processor")


def samestep(config, folder: str) -> dict[str, float]:
    """Train with the recipe."""
    scores = recipe_run(tag, config, folder)
    return {name.removeprefix("eval/"): scores[name] for name in KEPT}


def trainer(config, folder: str) -> dict[str, float]:
    """Train as run_ner does."""
    import seqeval.metrics
    from datasets import Dataset
    from transformers import DataCollatorForTokenClassification, Trainer, TrainingArguments

    from app.config import chosen
    from app.data.text import tagged_text
    from app.sampling.seeding import seed_all

    config, _ = chosen(config)
    tables, tags = tagged_text.load_tagged(config.data)
    tokenizer = tagged_text.own_tokenizer(
        tables.train, config.data.tokens, config.scratch.vocab, config.data.max_length
    )
    codes = {name: code for code, name in enumerate(tags.names)}

    def encode(rows):
        words, row_tags = rows[config.data.tokens], rows[config.data.tags]
        inputs = tokenizer(words, is_split_into_words=True, truncation=True, max_length=config.data.max_length)
        inputs["labels"] = []
        for row, names in enumerate(row_tags):
            places = inputs.word_ids(row)
            begins = [word is not None and (not i or word != places[i - 1]) for i, word in enumerate(places)]
            inputs["labels"].append([codes[names[w]] if b else -100 for w, b in zip(places, begins, strict=True)])
        return inputs

    def encoded(table) -> Dataset:
        rows = Dataset.from_list(list(table.select_columns([config.data.tokens, config.data.tags])))
        return rows.map(encode, batched=True, remove_columns=rows.column_names)

    def scores(predicted):
        pairs = [(guess[truth != -100], truth[truth != -100]) for guess, truth in zip(*predicted, strict=True)]
        guesses, truths = ([[tags.names[i] for i in row] for row in side] for side in zip(*pairs, strict=True))
        entities = {"f1": seqeval.metrics.f1_score(truths, guesses)}
        return entities | {"accuracy": seqeval.metrics.accuracy_score(truths, guesses)}

    watch, train = Watch(), encoded(tables.train)
    steps = -(-int(len(train) * config.run.epochs) // config.run.global_batch)
    seed_all(config.run.seed)
    settings = TrainingArguments(**trainer_settings(config, steps, folder))
    how = Trainer(
        model=tag.build_model(config, tags, tokenizer), args=settings, train_dataset=train,
        eval_dataset=encoded(tables.evaluation), processing_class=tokenizer, callbacks=[timed(watch)],
        data_collator=DataCollatorForTokenClassification(tokenizer), compute_metrics=scores,
        preprocess_logits_for_metrics=lambda logits, labels: logits.argmax(-1),
    )  # fmt: skip
    how.train()
    scored = how.evaluate()
    samples = steps * config.run.global_batch
    return {"f1": scored["eval_f1"], "accuracy": scored["eval_accuracy"], **watch.speeds(samples)}


if __name__ == "__main__":
    compare("benchmarks.tags", __doc__, tag, {"samestep": samestep, "trainer": trainer}, FLAGS)
