"""Train with the methods of methods.py, optimizers of other packages, and diagnostics: optimizers.py FOLDER CASE ..."""

import sys
from dataclasses import dataclass, field
from pathlib import Path

import methods
from looping import evaluate, made_steps
from methods import ROWS, Model

from app import OptimConfig, Run, RunConfig
from app.distributed import collectives
from app.distributed.environment import is_main_process, report_user_errors

STEPS, STOP = 12, 6
CASES = {
    "adamw": OptimConfig(lr=0.01, clip=0.1),
    "lion": OptimConfig(name="lion_pytorch.Lion", lr=1e-3, betas=(0.9, 0.99), weight_decay=0.1),
    "free": OptimConfig(name="schedulefree.AdamWScheduleFree", lr=0.02, schedule="constant", warmup=3, clip=0.5),
}


@dataclass
class Config:
    """Seven micro-batches of a step, which no number of ranks here divides."""

    optim: OptimConfig = field(default_factory=OptimConfig)
    run: RunConfig = field(
        default_factory=lambda: RunConfig(
            global_batch=20, micro_batch=3, steps=STEPS, log_every=1, eval_every=4, save_every=100, trackers=()
        )
    )


def train(folder: Path, optim: OptimConfig, exact: bool = True, within: bool = True, **settings) -> None:
    """Train or resume.

    Args:
        within: evaluate by run.evaluate; if not, the recipe calls its function itself.
    """
    config = Config(optim=optim)
    config.run.dir, config.run.exact = str(folder), exact
    for name, value in settings.items():
        setattr(config.run, name, value)
    with Run(config) as run:
        model, optimizer = run.prepare(Model(), config.optim)
        for _ in made_steps(run, model, optimizer, ROWS):
            if run.due(config.run.eval_every):
                run.evaluate(evaluate, model, ROWS[:11]) if within else run.log(evaluate(run, model, ROWS[:11]))
        run.finish(model)


def main(folder: Path, *names: str) -> None:
    """Run cases whole, but the last one stopped and resumed, and AdamW in ordinary mode.

    On one process also the last one whole, and what is to change nothing: no diagnostics, seldom an evaluation.
    """
    methods.main(folder)
    alone = collectives.alone()
    for name in names if alone else names[:-1]:
        often = alone and name == "adamw"
        train(folder / name, CASES[name], inspect_every=3, save_every=1 if often else 100, keep=STEPS)
    stopped = folder / f"{names[-1]}-stopped"
    train(stopped, CASES[names[-1]], inspect_every=3, stop_at=STOP)
    if is_main_process():  # as if it had been killed after step 9
        with (stopped / "diagnostics.jsonl").open("a") as file:
            file.write('{"step": 9, "layers": {}}\n')
    train(stopped, CASES[names[-1]], inspect_every=3)
    if alone and "free" in names:
        train(folder / "free-seldom", CASES["free"], eval_every=100, within=False)
    train(folder / "usual", CASES["adamw"], exact=False, inspect_every=3)
    if alone:
        train(folder / "plain", CASES["adamw"])


if __name__ == "__main__":
    report_user_errors()
    main(Path(sys.argv[1]), *sys.argv[2:])
