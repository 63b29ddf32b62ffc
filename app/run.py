"""The run: one training of one recipe in one folder, which goes on where it was when the command is repeated."""

import inspect
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from app import layout, ranks
from app.accelerator import Accelerator
from app.batches import BatchPlan, EvaluationPlan, Step, Turn, seed_of
from app.checkpoint import Checkpoints
from app.config import OptimConfig, RunConfig, check, to_dict
from app.errors import UserError
from app.export import save_model
from app.folder import RunFolder
from app.gradients import Gradients
from app.loader import load
from app.metrics import Scores
from app.optim import build_optimizer, learning_rate
from app.optim import check as check_optim
from app.progress import Progress, duration
from app.steplog import StepLog, numbered
from app.tracking import MetricsFile, Trackers


class Batch:
    """The global batch of one step: this data rank's part of it."""

    def __init__(self, run: "Run", step: Step, samples: int):
        self.samples = samples
        self._run, self._step, self._loops = run, step, 0

    def micros(self, *models: nn.Module) -> Iterator[Turn]:
        """Go through this rank's micro-batches, each with its own randomness; gradients synchronise on the last.

        A second loop over the same batch has randomness of its own.
        """
        for position, turn in enumerate(self._step.turns):
            _seed(self._run.config.seed, self._step.index, turn.index, self._loops)
            with self._run.gradients.turn(models, last=position == len(self._step.turns) - 1):
                yield turn
        self._loops += 1


class Run:
    """Open a run folder, resume what is in it, and look after everything around the visible loop."""

    def __init__(self, config: Any, name: str = ""):
        """Describe a run.

        Args:
            config: the recipe's config; its field `run` is a RunConfig.
            name: of the folder under runs/, where --run.dir is not given; default: the recipe's file.
        """
        self.full_config, self.config = config, config.run
        self.steps_done, self.scores, self.finished = 0, {}, False
        self.name = name or _recipe_name(config)
        self.dir = Path(self.config.dir or f"runs/{self.name}")
        self._optimizers: list[tuple[torch.optim.Optimizer, OptimConfig | None]] = []
        self._plan: BatchPlan | None = None
        self._pending: list[dict[str, float]] = []
        self._begun = False

    def __enter__(self) -> "Run":
        settings: RunConfig = self.config
        check(settings)
        self.accelerator = Accelerator(settings.threads)
        main = self.accelerator.is_main_process
        self.progress = Progress(main)
        self.gradients = Gradients(self.accelerator)
        BatchPlan(1, 1, settings.global_batch, settings.micro_batch).accumulation(self.accelerator.data_ranks)
        rank, world = self.accelerator.process_index, self.accelerator.num_processes
        self.checkpoints = Checkpoints(self.dir / "checkpoints", rank, world, settings.keep, settings.best)
        self.folder = RunFolder(self.dir)
        fields = to_dict(self.full_config)
        for note in ranks.from_main(lambda: self.folder.claim(fields, settings, bool(self.checkpoints.steps()))):
            self.say(note)
        self.trackers: Trackers | None = None
        self.metrics_file: MetricsFile | None = None
        _seed(settings.seed)
        return self

    def __exit__(self, kind, error, traceback) -> None:
        if isinstance(error, UserError):
            error.audible = self.accelerator.is_main_process or not ranks.heard_on_main(error)
        self.progress.close()
        if self.accelerator.is_main_process:
            self._leave(error)
        ranks.leave(clean=error is None)

    def _leave(self, error: BaseException | None) -> None:
        if self.trackers is not None:
            self.trackers.finish()
        if self._begun and not self.finished:
            stopped = error is None or isinstance(error, KeyboardInterrupt)
            why = {} if stopped else {"error": f"{type(error).__name__}: {error}"}
            self.folder.update(status="preempted" if stopped else "failed", **why)
            if stopped:
                saved = self.checkpoints.steps()
                where = f"from step {saved[-1]}" if saved else "from the start"
                self.say(
                    f"stopped after step {self.steps_done} of {self._plan.steps}; repeat the command to go on {where}"
                )
        self.folder.release(discard=not self._begun)

    def say(self, text: str) -> None:
        """Print a line, once, whatever the number of processes."""
        self.progress.say(text)

    def warn(self, text: str) -> None:
        """Print a line to standard error, once."""
        self.progress.warn(text)

    @contextmanager
    def main_process_first(self) -> Iterator[None]:
        """Let one process of each machine prepare what the others then find, such as cached data."""
        with self.accelerator.local_main_process_first():
            yield
        # What preparing drew from the generators must not reach the initial weights of some ranks only.
        _seed(self.config.seed)

    def prepare(self, model: nn.Module, optim: OptimConfig | torch.optim.Optimizer) -> tuple[nn.Module, Any]:
        """Place a model and make its optimizer. Call once for each model.

        Args:
            optim: settings, from which the learning rate of every step follows; or an optimizer of your own, whose
                learning rate is yours.
        """
        settings = optim if isinstance(optim, OptimConfig) else None
        if settings is not None:
            check_optim(settings)
            model.to(self.accelerator.device)
            optim = build_optimizer(model, settings)
        model, optimizer = self.accelerator.prepare(model, optim)
        self._optimizers.append((optimizer, settings))
        return model, optimizer

    def batches(
        self,
        data: Sequence,
        collate: Callable[[list], Any],
        lengths: np.ndarray | None = None,
        weights: np.ndarray | None = None,
        augment: Callable[[Any, np.random.Generator], Any] | None = None,
    ) -> Iterator[Batch]:
        """Go through the steps that are left, resuming first. What a step's body logs belongs to that step.

        Args:
            data: indexed by sample; with `__getitems__` taking a list of ids where it has one.
            collate: makes model inputs of a list of rows.
            lengths: of all samples, where known: less padding, and micro-batches that cost alike.
            weights: of all samples in the loss, where they are not all 1.
            augment: changes one row with a random generator of its own.
        """
        plan = self._plan = self._make_plan(len(data), lengths, weights)
        self._begin(plan)
        end = min(plan.steps, self.config.stop_at or plan.steps)
        place = self.accelerator.data_rank, self.accelerator.data_ranks, self.accelerator.device
        for step in load(plan, range(self.steps_done, end), data, collate, *place, self._workers, augment):
            self.steps_done += 1
            self._set_learning_rates()
            samples = plan.seen(self.steps_done) - plan.seen(self.steps_done - 1)
            self._log = StepLog(self.accelerator, step)
            yield Batch(self, step, samples)
            self._after_step()

    def _make_plan(self, samples: int, lengths: np.ndarray | None, weights: np.ndarray | None) -> BatchPlan:
        settings = self.config
        if not samples:
            raise UserError("the training set is empty: there is nothing to train on")
        total = settings.steps * settings.global_batch if settings.steps else round(settings.epochs * samples)
        plan = BatchPlan(samples, total, settings.global_batch, settings.micro_batch, settings.seed, lengths, weights)
        if not total:
            raise UserError(f"--run.epochs {settings.epochs} of {samples} samples is less than one sample")
        if settings.stop_at > plan.steps:
            raise UserError(f"--run.stop-at {settings.stop_at}: the run has {plan.steps} steps")
        return plan

    def _begin(self, plan: BatchPlan) -> None:
        self.say(layout.header(plan, self.accelerator))
        found = self.checkpoints.newest(self.warn)
        if found:
            path, record = found
            self.accelerator.load_state(str(path))
            self.steps_done, self.scores = record["step"], record["metrics"]
            before = record["layout"]
            moved = "" if before == layout.layout(self.accelerator) else f" (saved on {_in_short(before)})"
            self.say(f"resuming {self.dir} after step {self.steps_done} of {plan.steps}{moved}")
        self._begun = True
        if self.accelerator.is_main_process:
            self._begin_writing(plan)
        self.progress.start(self.steps_done, plan.steps)
        self._clock, self._clock_step, self._aside = time.perf_counter(), self.steps_done, 0.0
        self._first = self._clock, self.steps_done

    def _begin_writing(self, plan: BatchPlan) -> None:
        self.metrics_file = MetricsFile(self.dir / "metrics.jsonl", self.steps_done)
        ids = self.folder.info.get("trackers", {})
        self.trackers = Trackers(self.config.trackers, self.dir, ids, self.warn)
        self.trackers.start(to_dict(self.full_config), self.steps_done)
        self.folder.update(
            recipe=self.name,
            status="running",
            step=self.steps_done,
            steps=plan.steps,
            samples=plan.samples,
            layout=layout.layout(self.accelerator),
            versions=layout.versions(),
            trackers=ids,
        )
        self.folder.info.pop("error", None)

    @property
    def _workers(self) -> int:
        asked = self.config.workers
        return asked if asked >= 0 else (0 if self.accelerator.device.type == "cpu" else 4)

    @property
    def _last(self) -> bool:
        return self.steps_done in (self._plan.steps, self.config.stop_at)

    def due(self, every: int) -> bool:
        """Tell whether something that happens every so many steps is due now; 0 means at the end of each epoch.

        The last step of the run is always due.
        """
        if self.steps_done == self._plan.steps:
            return True
        return self.steps_done % every == 0 if every else self._plan.epoch_ends(self.steps_done - 1)

    @property
    def _measuring(self) -> bool:
        return self.steps_done % self.config.log_every == 0 or self._saving or self.steps_done == 1

    @property
    def _saving(self) -> bool:
        return self._last or self.due(self.config.save_every)

    def _set_learning_rates(self) -> None:
        for optimizer, settings in self._optimizers:
            if settings is not None:
                rate = learning_rate(settings, self.steps_done - 1, self._plan.steps, self.config.global_batch)
                for group in optimizer.param_groups:
                    group["lr"] = rate

    def backward(self, loss: Tensor, micro: Turn, name: str = "loss") -> None:
        """Add a micro-batch's gradient to that of the global batch.

        Args:
            loss: the mean over the micro-batch, a scalar.
            name: under which the loss of the global batch is logged.
        """
        share = self._log.add(name, loss, micro)
        self.gradients.backward(loss, share)

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Clip, update, and clear the gradients."""
        settings = next(settings for known, settings in self._optimizers if known is optimizer)
        clip = settings.clip if settings else 0.0
        if clip or self._measuring:
            self._log.add_norm(self.gradients.clip(optimizer, clip))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    def log(self, values: dict[str, float]) -> None:
        """Log numbers with this step, beside its loss."""
        self._pending.append(values)
        self.scores |= values

    def _after_step(self) -> None:
        if self._measuring:
            self._write_step(self._log.collect())
        for values in self._pending:
            self._write(values)
            self.say("  ".join([f"step {self.steps_done}", *(f"{k} {v:.4g}" for k, v in values.items())]))
        self._pending = []
        self.progress.advance()
        if self._saving:
            self.save()

    def _write_step(self, measured: dict[str, Any]) -> None:
        now = time.perf_counter()
        plan, seen = self._plan, self._plan.seen(self.steps_done)
        rate = (seen - plan.seen(self._clock_step)) / max(now - self._clock - self._aside, 1e-9)
        self._clock, self._clock_step, self._aside = now, self.steps_done, 0.0
        rates = {f"lr{numbered(i)}": o.param_groups[0]["lr"] for i, (o, _) in enumerate(self._optimizers)}
        values = {
            **measured,
            **rates,
            "samples": seen,
            "epoch": seen / plan.samples,
            "samples_per_second": rate,
        }
        self._write(values)
        self.progress.show({"step": self.steps_done, **values}, (plan.total - seen) / rate)

    def _write(self, values: dict[str, Any]) -> None:
        if self.accelerator.is_main_process:
            self.metrics_file.write(self.steps_done, values)
            self.trackers.log(self.steps_done, values)

    def save(self) -> None:
        """Commit a checkpoint of this step. A failure costs a warning; earlier checkpoints stay."""
        with self._time_aside():
            record = {"metrics": self.scores, "layout": layout.layout(self.accelerator)}
            problems = self.checkpoints.save(self.steps_done, record, self.accelerator.save_state)
        if problems:
            kept = self.checkpoints.steps()
            self.warn(
                f"warning: no checkpoint was saved at step {self.steps_done}: {'; '.join(problems)}. Training goes on; "
                f"the newest checkpoint is {f'step {kept[-1]}' if kept else 'none'}"
            )
        elif self.accelerator.is_main_process:
            self.folder.update(step=self.steps_done)

    @contextmanager
    def _time_aside(self) -> Iterator[None]:
        """Leave out of samples per second what is not training."""
        start = time.perf_counter()
        yield
        self._aside += time.perf_counter() - start

    def evaluation(
        self, model: nn.Module, data: Sequence, collate: Callable[[list], Any], lengths: np.ndarray | None = None
    ) -> Iterator[Turn]:
        """Go through a data set once, every sample on one rank, with the model in evaluation mode and no gradients.

        Every rank makes the same number of passes; one that has nothing left gets a real row with weight 0.
        """
        if not len(data):
            raise UserError("the evaluation set is empty: there is nothing to score")
        plan = EvaluationPlan(len(data), self.config.micro_batch, lengths)
        rank, ranks_ = self.accelerator.data_rank, self.accelerator.data_ranks
        steps = range(plan.steps(ranks_))
        training, grad = model.training, torch.is_grad_enabled()
        with self._time_aside():
            model.eval()
            torch.set_grad_enabled(False)
            try:
                for step in load(plan, steps, data, collate, rank, ranks_, self.accelerator.device, self._workers):
                    yield step.turns[0]
            finally:
                torch.set_grad_enabled(grad)
                model.train(training)
                self.accelerator.reshard(model)

    def scores_of(self, **metrics: Any) -> Scores:
        """Collect torchmetrics that combine over all ranks."""
        return Scores(self.accelerator.device, **metrics)

    def finish(self, model: nn.Module, *parts: Any, use: str = "") -> dict[str, float]:
        """Write the finished model, and say how the run went and how to go on.

        Args:
            parts: tokenizer, processor and the like, saved with the model.
            use: a command that uses the model, shown to the user; {model} stands for its folder.

        Returns:
            The last value of every score.
        """
        if self.steps_done < self._plan.steps:
            return self.scores
        save_model(self.accelerator, model, self.dir / "model", *parts)
        self.progress.close()
        self.finished = True
        if self.accelerator.is_main_process:
            self.folder.update(status="finished", step=self.steps_done, metrics=self.scores)
        began, first = self._first
        taken = duration(time.perf_counter() - began)
        steps = self.steps_done - first
        self.say(f"finished: {self.steps_done} steps" + (f", {steps} of them now, in {taken}" if steps else " already"))
        for key, value in self.scores.items():
            self.say(f"  {key:<16} {value:.4f}")
        self.say(f"  {'model':<16} {self.dir / 'model'}")
        if use:
            self.say(f"  {'use it':<16} {use.format(model=self.dir / 'model')}")
        self.say(f"  {'go on':<16} the same command with a larger --run.epochs; another --run.dir starts another run")
        return self.scores


def _seed(*key: int) -> None:
    """Seed every generator that a model may draw from."""
    seed = seed_of(*key)
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


def _recipe_name(config: Any) -> str:
    try:
        return Path(inspect.getfile(type(config))).stem
    except (TypeError, OSError):
        return "notebook"


def _in_short(where: dict) -> str:
    ranks_ = where["data_ranks"]
    kind = [where["wrapping"]] if where["wrapping"] else []
    return ", ".join([f"{ranks_} data rank{'s' * (ranks_ > 1)}", *kind, where["precision"], where["device"]])
