"""Compare recipes/s2s.py with transformers' Seq2SeqTrainer: chrF over several seeds, and speed.

    python -m benchmarks.s2s [--seeds 0 1 2] [--out FILE.json] [-- FLAGS of recipes/s2s.py]

Both train the same model from scratch, with the same tokenizer, rows, batch, number of steps, learning rates and
clipping, in fp32. The other one is what transformers' example run_translation does, written anew: a Dataset that is
tokenized with `map`, DataCollatorForSeq2Seq, Seq2SeqTrainer in its own order, texts generated for the same rows, and
sacrebleu. Each training is a process of its own; they alternate, and who is first changes with the seed. Speed is
samples a second of the steps alone, by the clock and by processor time, of which the second one does not count what
else the machine does.
"""

from benchmarks.seeds import Watch, compare, recipe_run, timed, trainer_settings
from recipes import s2s

FLAGS = "--run.epochs 1 --run.global-batch 32 --run.micro-batch 32"
KEPT = ("eval/chrf", "eval/same", "by_clock", "by_processor")


def samestep(config, folder: str) -> dict[str, float]:
    """Train with the recipe."""
    config.generate.samples = 0
    scores = recipe_run(s2s, config, folder)
    return {name.removeprefix("eval/"): scores[name] for name in KEPT}


def trainer(config, folder: str) -> dict[str, float]:
    """Train as run_translation does."""
    from datasets import Dataset
    from transformers import DataCollatorForSeq2Seq, Seq2SeqTrainer, Seq2SeqTrainingArguments

    from app.config import chosen
    from app.data.text import pair_text
    from app.sampling.seeding import seed_all
    from app.training.scores.text import text_scores

    config, _ = chosen(config)
    data = config.data
    tables = pair_text.load_pairs(data)
    tokenizer = pair_text.own_tokenizer(tables.train, data, config.scratch.vocab)

    def encode(rows):
        sources = [f"{data.prefix}{text}" for text in rows[data.source]]
        inputs = tokenizer(sources, truncation=True, max_length=data.max_source)
        targets = tokenizer(text_target=rows[data.target], truncation=True, max_length=data.max_target)
        return {**inputs, "labels": targets["input_ids"]}

    def encoded(rows) -> Dataset:
        return rows.map(encode, batched=True, remove_columns=rows.column_names)

    asked = pair_text.Evenly(
        pair_text.tokenize(tables.evaluation, data, tokenizer), config.generate.rows or len(tables.evaluation)
    )
    some = tables.evaluation.select(asked.numbers)
    watch, train = Watch(), encoded(tables.train)
    steps = -(-int(len(train) * config.run.epochs) // config.run.global_batch)
    seed_all(config.run.seed)
    model = s2s.build_model(config, tokenizer)
    settings = Seq2SeqTrainingArguments(
        **trainer_settings(config, steps, folder),
        label_smoothing_factor=config.smoothing,
        predict_with_generate=True,
    )
    how = Seq2SeqTrainer(
        model=model, args=settings, train_dataset=train, processing_class=tokenizer, callbacks=[timed(watch)],
        data_collator=DataCollatorForSeq2Seq(tokenizer, model),
    )  # fmt: skip
    how.train()
    ids = how.predict(encoded(some), max_new_tokens=data.max_target, num_beams=config.generate.beams).predictions
    ids[ids == -100] = tokenizer.pad_token_id
    written = [text.strip() for text in tokenizer.batch_decode(ids, skip_special_tokens=True)]
    scores = text_scores(written, some[data.target], config.generate.tokenize)
    return {name: scores[name] for name in ("chrf", "same")} | watch.speeds(steps * config.run.global_batch)


if __name__ == "__main__":
    compare("benchmarks.s2s", __doc__, s2s, {"samestep": samestep, "trainer": trainer}, FLAGS)
