"""One contestant's process: `python -m benchmarks.contestant PEER RECIPE [--bf16] [--compiled] ... -- FLAGS`."""

import argparse
import importlib
import json
import os
import sys
from pathlib import Path

from benchmarks.gate import Gate


def samestep(recipe: str, flags: list[str], gate: Gate) -> dict:
    """Run a recipe unchanged; between two steps, the gate decides when it goes on."""
    from app import Run, parse

    batches = Run.batches

    def gated(run, *arguments, **named):
        steps = batches(run, *arguments, **named)
        gate.begin()
        for batch in steps:
            yield batch
            gate(batch._step.weight)

    Run.batches = gated
    module = importlib.import_module(f"recipes.{recipe}")
    scores = module.main(parse(module.Config, flags))
    return {name: scores[name] for name in ("eval/loss",) if name in scores}


def samestep_evaluates(flags: list[str], gate: Gate) -> dict:
    """Evaluate the classifier repeatedly, as its recipe does after an epoch; a "step" is one evaluation."""
    from app import Run, parse
    from app.data.text.labeled_text import PadCollate
    from recipes import cls

    config = parse(cls.Config, flags)
    with Run(config) as run:
        train, sets, labels, tokenizer, _ = cls.load_data(config)
        collate = PadCollate.of(tokenizer)
        model, optimizer = run.prepare(cls.build_model(config, labels, tokenizer), config.optim)
        for batch in run.batches(train, collate, train.lengths):
            for micro in batch.micros(model):
                run.backward(model(**micro.inputs).loss, micro)
            run.step(optimizer)
            break
        gate.begin()
        while gate.left >= 0:
            scores = cls.evaluate(run, model, sets[""], collate, labels)
            gate(scores["eval/samples"])
    return {}


def peer(name: str, options: argparse.Namespace, flags: list[str], gate: Gate) -> dict:
    """Train a recipe's job with another loop."""
    from benchmarks.jobs import job_of

    job = job_of(options.recipe, flags, options.bf16, options.variant)
    module = importlib.import_module(f"benchmarks.peers.{name}")
    asked = {"wrap": options.wrap, "own_order": options.own_order, "compiled": options.compiled}
    named = {option: value for option, value in asked.items() if value}
    if options.evaluate:
        module.evaluate(job, gate)
        return {}
    module.train(job, gate, **named)
    sharded = options.wrap not in ("", "ddp")
    return {} if sharded else {"eval/loss": job.score()}


def main() -> None:
    """Train, and write the score next to the gate's pipes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("peer")
    parser.add_argument("recipe")
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--compiled", action="store_true")
    parser.add_argument("--variant", default="")
    parser.add_argument("--wrap", default="")
    parser.add_argument("--own-order", action="store_true")
    parser.add_argument("--evaluate", action="store_true")
    words = sys.argv[1:]
    cut = words.index("--") if "--" in words else len(words)
    options, flags = parser.parse_args(words[:cut]), words[cut + 1 :]
    if options.bf16:
        os.environ["ACCELERATE_MIXED_PRECISION"] = "bf16"
    if options.compiled:
        os.environ["ACCELERATE_DYNAMO_BACKEND"] = "INDUCTOR"
    gate = Gate()
    if options.peer == "samestep" and options.evaluate:
        result = samestep_evaluates(flags, gate)
    elif options.peer == "samestep":
        result = samestep(options.recipe, flags, gate)
    else:
        result = peer(options.peer, options, flags, gate)
    if os.environ.get("RANK", "0") == "0":
        Path(os.environ["BENCH_GATE"], "result.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
