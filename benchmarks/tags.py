"""Compare recipes/tag.py with transformers' way to train a tagger: entity F1 over several seeds, and speed.

    python -m benchmarks.tags [--seeds 0 1 2] [--out FILE.json] [-- FLAGS of recipes/tag.py]

Both train the same model from scratch, with the same tokenizer, rows, batch, number of steps, learning rates and
clipping, in fp32. The other one is what transformers' example run_ner does, written anew: a Dataset that is tokenized
with `map`, DataCollatorForTokenClassification, Trainer in its own order, and seqeval. Each training is a process of its
own; they alternate, and who is first changes with the seed. Speed is samples a second of the steps alone, by the clock
and by processor time, of which the second one does not count what else the machine does.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.results import machine

BOTH = ("samestep", "trainer")
FLAGS = "--run.epochs 2 --run.global-batch 32 --run.micro-batch 32 --run.threads 1 --run.trackers"
QUIET = "--run.eval-every 1000000 --run.save-every 1000000 --run.quiet true"


class Watch:
    """The time from the first step to the end of the last one."""

    def __init__(self):
        self.first = self.last = (0.0, 0.0)

    def begin(self) -> None:
        self.first = time.perf_counter(), time.process_time()

    def note(self) -> None:
        self.last = time.perf_counter(), time.process_time()

    def speeds(self, samples: float) -> dict[str, float]:
        """Return samples a second, by the clock and by processor time."""
        wall, cpu = (last - first for first, last in zip(self.first, self.last, strict=True))
        return {"by_clock": samples / wall, "by_processor": samples / cpu}


def samestep(config, folder: str) -> dict[str, float]:
    """Train with the recipe."""
    from app import Run
    from recipes import tag

    watch, batches, step = Watch(), Run.batches, Run.step

    def watched(run, *arguments, **named):
        for number, batch in enumerate(batches(run, *arguments, **named)):
            if not number:
                watch.begin()
            yield batch

    def noted(run, optimizer):
        step(run, optimizer)
        watch.note()

    Run.batches, Run.step = watched, noted
    config.run.dir = folder
    found = tag.main(config)
    lines = [json.loads(line) for line in Path(folder, "metrics.jsonl").read_text().splitlines()]
    samples = max(line.get("samples", 0) for line in lines)
    return {"f1": found["eval/f1"], "accuracy": found["eval/accuracy"], **watch.speeds(samples)}


def trainer(config, folder: str) -> dict[str, float]:
    """Train as run_ner does."""
    import seqeval.metrics
    from datasets import Dataset
    from transformers import DataCollatorForTokenClassification, Trainer, TrainerCallback, TrainingArguments

    from app.config import chosen
    from app.data.text import tagged_text
    from app.sampling.seeding import seed_all
    from recipes import tag

    config, _ = chosen(config)
    tables, tags = tagged_text.load_tagged(config.data)
    tokenizer = tagged_text.own_tokenizer(
        tables.train, config.data.tokens, config.scratch.vocab, config.data.max_length
    )
    codes = {name: code for code, name in enumerate(tags.names)}

    def encode(rows):
        words, own = rows[config.data.tokens], rows[config.data.tags]
        found = tokenizer(words, is_split_into_words=True, truncation=True, max_length=config.data.max_length)
        found["labels"] = []
        for row, names in enumerate(own):
            places = found.word_ids(row)
            begins = [word is not None and (not i or word != places[i - 1]) for i, word in enumerate(places)]
            found["labels"].append([codes[names[w]] if b else -100 for w, b in zip(places, begins, strict=True)])
        return found

    def encoded(table) -> Dataset:
        rows = Dataset.from_list(list(table.select_columns([config.data.tokens, config.data.tags])))
        return rows.map(encode, batched=True, remove_columns=rows.column_names)

    def scores(found):
        pairs = [(guess[truth != -100], truth[truth != -100]) for guess, truth in zip(*found, strict=True)]
        guesses, truths = ([[tags.names[i] for i in row] for row in side] for side in zip(*pairs, strict=True))
        own = {"f1": seqeval.metrics.f1_score(truths, guesses)}
        return own | {"accuracy": seqeval.metrics.accuracy_score(truths, guesses)}

    class Timed(TrainerCallback):
        """Notes the beginning of the first step and the end of each."""

        def on_step_begin(self, args, state, control, **_):
            if not state.global_step:
                watch.begin()

        def on_step_end(self, *_, **__):
            watch.note()

    watch, train = Watch(), encoded(tables.train)
    steps = -(-int(len(train) * config.run.epochs) // config.run.global_batch)
    seed_all(config.run.seed)
    settings = TrainingArguments(
        output_dir=folder, per_device_train_batch_size=config.run.micro_batch, max_steps=steps,
        per_device_eval_batch_size=config.run.micro_batch,
        gradient_accumulation_steps=config.run.global_batch // config.run.micro_batch,
        learning_rate=config.optim.lr, lr_scheduler_type=config.optim.schedule,
        warmup_steps=round(config.optim.warmup * steps), weight_decay=config.optim.weight_decay,
        max_grad_norm=config.optim.clip, optim="adamw_torch_fused", use_cpu=True, seed=config.run.seed,
        save_strategy="no", report_to="none", disable_tqdm=True, dataloader_pin_memory=False,
    )  # fmt: skip
    how = Trainer(
        model=tag.build_model(config, tags, tokenizer), args=settings, train_dataset=train,
        eval_dataset=encoded(tables.evaluation), processing_class=tokenizer, callbacks=[Timed()],
        data_collator=DataCollatorForTokenClassification(tokenizer), compute_metrics=scores,
        preprocess_logits_for_metrics=lambda logits, labels: logits.argmax(-1),
    )  # fmt: skip
    how.train()
    found = how.evaluate()
    samples = steps * config.run.global_batch
    return {"f1": found["eval_f1"], "accuracy": found["eval_accuracy"], **watch.speeds(samples)}


def one(name: str, flags: list[str]) -> None:
    """Train once, in this process, and print what was found as the last line."""
    import torch

    from app import parse
    from recipes import tag

    config = parse(tag.Config, flags)
    torch.set_num_threads(config.run.threads or 1)
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps({"samestep": samestep, "trainer": trainer}[name](config, f"{folder}/run")))


def main() -> None:
    """Alternate, and print mean and deviation over the seeds."""
    words = sys.argv[1:]
    cut = words.index("--") if "--" in words else len(words)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--one", choices=BOTH, help=argparse.SUPPRESS)
    options, more = parser.parse_args(words[:cut]), words[cut + 1 :]
    flags = [*FLAGS.split(), *QUIET.split(), *more]
    if options.one:
        return one(options.one, flags)
    found: dict[str, list[dict]] = {name: [] for name in BOTH}
    for seed in options.seeds:
        for name in BOTH[:: -1 if seed % 2 else 1]:
            command = [sys.executable, "-m", "benchmarks.tags", "--one", name, "--", *flags, "--run.seed", str(seed)]
            result = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            found[name].append(json.loads(result.stdout.splitlines()[-1]))
            print(seed, name, found[name][-1], flush=True)
    for name, runs in found.items():
        said = []
        for score in runs[0]:
            values = [run[score] for run in runs]
            spread = statistics.stdev(values) if len(values) > 1 else 0.0
            said.append(f"{score} {statistics.mean(values):.4g} +- {spread:.2g}")
        print(f"{name:10} {', '.join(said)}")
    if options.out:
        about = {"date": time.strftime("%Y-%m-%d"), "machine": machine(), "flags": flags, "found": found}
        options.out.write_text(json.dumps(about, indent=1) + "\n")


if __name__ == "__main__":
    main()
