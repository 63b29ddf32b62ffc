"""The run: one training of one recipe in one folder, which goes on where it was when the command is repeated."""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.utils import DistributedType, DynamoBackend
from torch import Tensor, nn

from app.checkpoints import state_dict
from app.checkpoints.export import draft_of, save_model
from app.checkpoints.manager import Saving
from app.checkpoints.store import Checkpoints
from app.config import OptimConfig, RunConfig, check, defaults, to_dict
from app.distributed import batch_norm, collectives, layout
from app.distributed.accelerator import Accelerator
from app.distributed.buffers import Buffers
from app.distributed.desync import Drift
from app.distributed.preemption import Left, Stopping
from app.distributed.watchdog import Watchdog
from app.errors import UserError, mendable
from app.launching import dry_run
from app.rundir import images, recipe_source
from app.rundir.folder import RunFolder
from app.rundir.logger import Records
from app.rundir.throughput import Cost, peak_flops
from app.sampling.batch_plan import BatchPlan, EvaluationPlan, Turn
from app.sampling.seeding import EVALUATION, aside, seed_all
from app.sampling.triggers import Due
from app.training import exact_gradients
from app.training.audit import Audit
from app.training.gradients import Batch, Gradients
from app.training.loader import load
from app.training.metrics import Measure
from app.training.nonfinite import FirstFault
from app.training.optimizer import Optimizers, build_optimizer
from app.training.optimizer import check as check_optim
from app.training.recompiles import Compiling
from app.training.scores import Scores, evaluating, plain
from app.training.step_metrics import StepLog, numbered


class Run:
    """Open a run folder, resume what is in it, and look after everything around the visible loop."""

    def __init__(self, config: Any, name: str = ""):
        """Describe a run.

        Args:
            config: the recipe's config; its field `run` is a RunConfig.
            name: of the folder under runs/, where --run.dir is not given; default: the recipe's file.
        """
        self.fields, self.config = to_dict(config), config.run
        self.name, self._asked = name or _recipe_name(config), config
        self.dir = Path(self.config.dir or f"runs/{self.name}")
        self.steps_done = 0
        self.scores: dict[str, float] = {}
        self._measured: dict[str, float] = {}  # scores of this very step
        self._facts: dict[str, Any] = {}  # for run.json
        self._compiling = Compiling()
        self.optimizers = Optimizers()
        self._plan: BatchPlan | None = None
        self._unevaluated = False  # the step that the run resumes from
        self._leaving = False  # stopped by a signal
        self._begun = self._stepped = False  # of a step: its body has been entered; it has updated
        self._left = False  # in the middle of an evaluation
        self._undo: Callable[[], None] | None = None  # of a step that was made before, and is there to be evaluated

    def __enter__(self) -> "Run":
        check(self.config)
        with ExitStack() as taken:  # given back at once where the run does not begin
            self._open(self.config, taken)
            self._taken = taken.pop_all()
        return self

    def _open(self, settings: RunConfig, taken: ExitStack) -> None:
        if settings.exact:
            taken.enter_context(exact_gradients.settings())
        self.accelerator = Accelerator(settings.threads or int(settings.exact), settings.timeout)
        kind = exact_gradients.ExactGradients if settings.exact else Gradients
        self.gradients = kind(self.accelerator, settings.seed)
        # Asked for now: the answer does not depend on the data, which may take long to load.
        BatchPlan(1, 1, settings.global_batch, settings.micro_batch).accumulation(self.accelerator.data_ranks)
        rank, world = self.accelerator.process_index, self.accelerator.num_processes
        self.folder = RunFolder(self.dir, recipe_source.source_of(self._asked), defaults(self._asked))
        taken.callback(lambda: self.folder.release(discard=self._plan is None))
        self.records = Records(self.accelerator.is_main_process, self.folder, settings.quiet)
        at = self.dir / "checkpoints"
        self.watchdog = Watchdog(settings.timeout, self.records.failed, [at, draft_of(self.dir / "model")])
        kept = {"keep": settings.keep, "best": settings.best}
        asked = {"check_owner": self.folder.check, "on_block": self.watchdog.moved}
        self.checkpoints = Checkpoints(at, rank, world, **kept, **asked)
        self.buffers = Buffers(self.accelerator, self.warn)
        about = self.accelerator, self.buffers, self.checkpoints, self.records, self.watchdog
        self.saving = Saving(*about, settings.save_async)
        self.stopping = Stopping(self.accelerator.device, self.records.failed)
        if not dry_run.on:
            has = bool(self.checkpoints.steps())
            for note in collectives.from_main(lambda: self.folder.claim(self.fields, settings, has), long=True):
                self.say(note)
        seed_all(settings.seed)

    def __exit__(self, kind, error, traceback) -> bool:
        if isinstance(error, Left):
            self._left, error = True, None
        cause, advice = error, self.gradients.explained(error)
        error = advice or error
        try:
            if error is None:
                self._settle()
            self.saving.wait(quietly=error is not None)
        except BaseException as problem:
            error = problem
            raise
        finally:
            self._close(error)
        if advice is not None:
            raise advice from cause
        return self._left

    def _close(self, error: BaseException | None) -> None:
        try:
            self.watchdog.close()
            self.stopping.close()
            if mendable(error):
                error.audible = self.accelerator.is_main_process or not collectives.heard_on_main(error)
            self.records.close()
            if self.accelerator.is_main_process:
                self._leave_folder(error)
        finally:
            self._taken.close()
            collectives.leave(clean=error is None)

    def _leave_folder(self, error: BaseException | None) -> None:
        if self._plan is None:
            return
        asked = self.accelerator.state.dynamo_plugin.backend != DynamoBackend.NO
        if compiled := self._compiling.facts(asked):
            self.records.note(**compiled)
        if error is None and self.steps_done == self._plan.steps and not self._left:
            self.records.note(status="finished", step=self.steps_done, metrics=self.scores)
        elif error is None or isinstance(error, KeyboardInterrupt):
            self.records.note(status="preempted")
            asked = error is None and 0 < self.config.stop_at <= self.steps_done
            self.records.stopped(self.steps_done, self.checkpoints.steps(), asked, self._left)
        else:
            self.records.failed(f"{type(error).__name__}: {error}")

    def say(self, text: str) -> None:
        """Print a line, once, whatever the number of processes."""
        self.records.progress.say(text)

    def warn(self, text: str) -> None:
        """Print a line to standard error, once."""
        self.records.progress.warn(text)

    def note(self, **facts: Any) -> None:
        """Have run.json tell more about this run. Call it before `batches`, with what JSON can hold."""
        self._facts |= facts

    @contextmanager
    def main_process_first(self) -> Iterator[None]:
        """Let one process of each machine prepare what the others then find, such as cached data."""
        with self.accelerator.local_main_process_first():
            yield
        # What preparing drew from the generators must not reach the initial weights of some ranks only.
        seed_all(self.config.seed)

    def prepare(self, model: nn.Module, optim: OptimConfig | torch.optim.Optimizer) -> tuple[nn.Module, Any]:
        """Place a model and make its optimizer. Call once for each model.

        Args:
            optim: settings, from which the learning rate of every step follows; or an optimizer of your own, whose
                learning rate is yours.
        """
        settings = optim if isinstance(optim, OptimConfig) else None
        if self.config.sync_bn and not dry_run.on:  # which is on a CPU; names of weights are the same
            model = batch_norm.synchronised(model, self.accelerator)
        if settings is not None:
            check_optim(settings)
            if not self.accelerator.is_fsdp2:  # which moves a shard at a time
                model.to(self.accelerator.device)
            optim = build_optimizer(model, settings)
        if not model.training:
            model.train()  # from_pretrained gives a model in evaluation mode
        for note in batch_norm.depends_on_layout(model, self.accelerator, self.config):
            self.warn(note)
        model, optimizer = self.gradients.prepare(model, optim, settings.clip if settings else 0.0)
        self.optimizers.add(optimizer, settings)
        return model, optimizer

    def batches(
        self,
        data: Sequence,
        collate: Callable[[list], Any],
        lengths: np.ndarray | None = None,
        weights: np.ndarray | None = None,
        augment: Callable[[Any, np.random.Generator], Any] | None = None,
        cost: Cost | None = None,
    ) -> Iterator[Batch]:
        """Go through the steps that are left, resuming first. What a step's body logs belongs to that step.

        Args:
            data: indexed by sample; with `__getitems__` taking a list of ids where it has one.
            collate: makes model inputs of a list of rows.
            lengths: of all samples, where known: less padding, and micro-batches that cost alike.
            weights: of all samples in the loss, where they are not all 1.
            augment: changes one row with a random generator of its own.
            cost: of a sample, where tokens per second and MFU are to be logged.
        """
        if self._plan is not None:
            raise UserError("run.batches goes through the whole run, and was called before: open another Run")
        plan = BatchPlan.of_run(self.config, len(data), lengths, weights)
        if dry_run.on:
            yield from dry_run.at_loop(self, plan, data, collate, augment)
            return
        plan = self._begin(plan, data, cost)
        end = min(plan.steps, self.config.stop_at or plan.steps)
        # One that was left in its evaluation comes once more, for its body to evaluate; its update stays as it is.
        again = int(self._unevaluated)
        for step in load(plan, range(self.steps_done - again, end), data, collate, *self._place, augment):
            self._undo = state_dict.remember_buffers(self.accelerator.models) if step.index < self.steps_done else None
            self.steps_done = step.index + 1
            self.watchdog.beat(self.steps_done)
            self._measured, self._begun, self._stepped = {}, True, False
            self.optimizers.set_rates(self.steps_done - 1, plan.steps, plan.global_batch)
            self.gradients.watch(self._due.measures(self.steps_done))
            self._log = StepLog(self.accelerator, step, self._faults, self.config.nonfinite == "skip")
            # Loading has drawn what this rank's rows wanted; what the recipe draws next is the same on all.
            seed_all(plan.seed, step.index)
            self._batch = Batch(self.gradients, step)
            self._compiling.begin()
            yield self._batch
            if not self._stepped:
                raise UserError(f"step {self.steps_done} went by without run.step(optimizer): call it after the turns")
            self._settle()
            if self._leaving:
                break

    def _begin(self, plan: BatchPlan, data: Sequence, cost: Cost | None) -> BatchPlan:
        """Resume, open the records, and return the plan of what is left."""
        order = f"{plan.fingerprint} {plan.seed} {plan.global_batch} {plan.micro_batch} {plan.steps}"
        self._drift = None if collectives.alone() else Drift(self.accelerator.models, self.buffers, order)
        self.say(layout.header(plan, self.accelerator))
        here = layout.layout(self.accelerator)
        if layout.is_bound(here):
            self.say("DeepSpeed writes checkpoints that only this layout reads; an fsdp profile writes them for all")
        saved, plan = self.saving.resume(plan, data, self.config)
        plan.check_stop(self.config)
        # An earlier version did not write them.
        self.buffers.begin(saved.get("buffers", ()) if saved else (), plan)
        if saved:
            self.steps_done, self.scores = saved["step"], saved["scores"]
            self._unevaluated = bool(saved.get("unevaluated"))
            moved = "" if saved["layout"] == here else f" (saved on {layout.in_short(saved['layout'])})"
            first = ", whose evaluation comes first" if self._unevaluated else ""
            self.say(f"resuming {self.dir} after step {self.steps_done} of {plan.steps}{moved}{first}")
            changes = layout.changes_bits({**saved["layout"], **saved["versions"]}, here) if self.config.exact else []
            if changes:
                self.warn(f"warning: --run.exact: {'; '.join(changes)}: bits from here on may differ from those before")
        about = {"steps": plan.steps, "samples": plan.samples, "recipe": self.name, "layout": here}
        about |= {"versions": layout.versions(), **self._facts}
        if chosen := self.gradients.arithmetic():
            about["arithmetic"] = chosen

        def write() -> None:
            origin = recipe_source.origin_of(self._asked)
            self.records.open(self.steps_done, self.config, self.fields, self._unevaluated, **about, **origin)

        collectives.from_main(write, long=True)  # trackers may take their time
        peak = peak_flops(here["device"], here["precision"])
        self.records.start(plan, self.steps_done, cost, peak and peak * self.accelerator.num_processes)
        self._plan, self._due = plan, Due(self.config, plan)
        self._faults = FirstFault(plan, *self._place[:3])
        self._audit = Audit(self.accelerator, self.dir, self.steps_done, self.warn) if self.config.audit else None
        self.stopping.start()
        self.watchdog.start()
        return plan

    @property
    def _place(self) -> tuple[int, int, torch.device, int]:
        """This process's data rank, of how many, its device, and the loading processes beside it."""
        device, workers = self.accelerator.device, self.config.workers
        workers = workers if workers >= 0 else (0 if device.type == "cpu" else 4)
        return self.accelerator.data_rank, self.accelerator.data_ranks, device, workers

    def due(self, every: int) -> bool:
        """Tell whether something that happens every so many steps is due now; 0 means at the end of each epoch.

        The last step of the run is always due.
        """
        return self._due.at(self.steps_done, every)

    def backward(self, loss: Tensor | dict[str, Tensor], micro: Turn, name: str = "loss") -> None:
        """Add a micro-batch's gradient to that of the global batch. Call once a turn.

        Args:
            loss: the mean over the micro-batch, a scalar; or several by the names to log them under, which are summed.
            name: under which the loss of the global batch is logged.
        """
        parts = loss if isinstance(loss, dict) else {name: loss}
        shares = [self._log.add(part, value, micro) for part, value in parts.items()]
        self.gradients.backward(sum(parts.values()) if isinstance(loss, dict) else loss, shares[0])

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Clip, update, and clear the gradients."""
        index, clip = self.optimizers.find(optimizer)
        self._stepped, wrong = True, ""
        if slow := self._compiling.end(self.steps_done):
            self.warn(slow)
        if self._undo is not None:
            self._undo()
            self.gradients.clear(optimizer)
            return
        looks = clip or self._due.measures(self.steps_done) or self.config.nonfinite == "skip"
        if looks or not self.gradients.finite(optimizer):
            wrong = self._log.add_norm(self.gradients.clip(optimizer, clip), index)
        if self._audit:
            self._audit.gradients(optimizer)
        if wrong:
            self.warn(f"warning: {wrong}; the step is skipped (--run.nonfinite)")
            self.log({"skipped_steps": int(self.scores.get("skipped_steps", 0)) + 1})
        else:
            optimizer.step()
        self.gradients.clear(optimizer)

    def log(self, values: dict[str, float]) -> None:
        """Log scores with this step, beside its loss. Every rank calls it, with the same numbers."""
        values = plain(values)
        self.records.pending.append(values)
        self.scores |= values
        self._measured |= values

    def log_images(self, pictures: dict[str, Sequence[np.ndarray]]) -> None:
        """Log pictures with this step: into the folder's images/, and to the trackers that take some.

        Args:
            pictures: by name, each height x width (x 3), uint8; the main process's count.
        """
        self.records.pending_images |= images.check(pictures)

    def _settle(self) -> None:
        """Log and save what is due after a step, also one whose body the recipe has left by a `break`."""
        if self._left:
            self.records.drop_pending()
            self._measured = {}
        if self._begun and self._stepped:
            self._begun = False
            self._leaving = self._left or self.stopping.due(self.steps_done)
            if self._undo is None:
                self._after_step()
            elif not self._left:
                self.records.write_pending(self.steps_done)
                self.save()  # which gives its checkpoint the scores
        elif self._begun and self._undo is not None:
            self._begun = False
            self._undo()  # its checkpoint is there, and still says that the step was not evaluated
        elif self._begun:
            self._begun = False
            self.steps_done -= 1
            if self._left and self.steps_done:
                self.save()
        self.records.write_pending(self.steps_done)

    def _after_step(self) -> None:
        self.buffers.agree()
        measures = self._due.measures(self.steps_done)
        if measures:
            rates = {f"lr{numbered(i)}": rate for i, rate in enumerate(self.optimizers.rates())}
            drift = self._drift if self._due.checks(self.steps_done) else None
            losses, about = self._log.collect(self.buffers, drift)
            self.records.step(self.steps_done, losses, {**about, **rates})
            for trouble in self.gradients.troubles():
                self.warn(trouble)
        else:
            self._log.note()
        self.records.write_pending(self.steps_done)
        if self._audit:
            self._audit.step(self.steps_done, self._log)
        self.records.progress.advance()
        self.saving.look()
        left = self._left
        self.saving.save_when_due(self.steps_done, self._due, self.scores, self._measured, self._leaving, left)

    def save(self) -> None:
        """Commit a checkpoint of this step. A failure costs a warning; earlier checkpoints stay."""
        if self._begun and not self._stepped:
            raise UserError(f"run.save in step {self.steps_done} before run.step(optimizer): call it behind the update")
        self.saving.save(self.steps_done, self._plan, self.scores, self._measured)

    def evaluation(
        self,
        model: nn.Module,
        data: Sequence,
        collate: Callable[[list], Any],
        lengths: np.ndarray | None = None,
        weights: np.ndarray | None = None,
        micro_batch: int = 0,
    ) -> Iterator[Turn]:
        """Go through a data set once, every sample on one rank, with the model in evaluation mode and no gradients.

        Every rank makes the same number of passes; one that has nothing left gets the rows of another with weight 0.
        What rows, collate and the body of the loop draw belongs to the micro-batch, and is the same in every evaluation
        of a run. Arguments are those of `batches`.

        Args:
            micro_batch: samples of one pass; 0: --run.micro-batch. 1 for samples of several sizes.
        """
        if not len(data):
            raise UserError("the evaluation set is empty: there is nothing to score")
        seed = self.config.seed
        plan = EvaluationPlan(len(data), micro_batch or self.config.micro_batch, lengths, weights, seed)
        turns = range(plan.steps(self.accelerator.data_ranks))
        self.buffers.find_changes()
        with self.records.time_aside(), aside(self.accelerator.device), evaluating(model):
            together = self.accelerator.is_fsdp2
            leaving = self.stopping.turns(len(turns), together) if self._may_leave() else turns
            for _, step in zip(leaving, load(plan, turns, data, collate, *self._place), strict=True):
                self.watchdog.beat()
                (turn,) = step.turns
                seed_all(seed, EVALUATION, turn.index)
                yield self.accelerator.counted_once(turn)

    def _may_leave(self) -> bool:
        """Tell whether an evaluation can be left here; else the step is finished first.

        DeepSpeed's steps cannot be made again. Between a step's turns and its update, buffers are of neither step.
        """
        between = self._begun and not self._stepped and self._batch.begun
        return not between and self.accelerator.distributed_type != DistributedType.DEEPSPEED

    def scores_of(self, *measures: Measure, **metrics: Any) -> Scores:
        """Collect scores over all ranks: app.training.metrics, and torchmetrics by the names to log them by."""
        return Scores(self.accelerator.device, *measures, **metrics)

    def finish(self, model: nn.Module, *parts: Any, use: str = "") -> dict[str, float]:
        """Write the finished model, and say how the run went and how to go on; where steps are left, do neither.

        Args:
            parts: tokenizer, processor and the like, saved with the model.
            use: a command that uses the model, shown to the user; {model} stands for its folder.

        Returns:
            The last value of every score.
        """
        if dry_run.on:
            raise dry_run.Finished(self, model, parts, use)
        self._settle()
        if self.steps_done == self._plan.steps:
            collectives.from_main(self.folder.check)
            with self.watchdog.long_work():
                save_model(self.accelerator, model, self.dir / "model", *parts)
            if self.config.log_model:
                with self.watchdog.unwatched():
                    self.records.log_model(self.dir / "model")
            longer = "--run.steps" if self.config.steps else "--run.epochs"
            self.records.summary(self.steps_done, self.scores, self.dir / "model", use, longer)
        return self.scores


def _recipe_name(config: Any) -> str:
    try:
        return Path(inspect.getfile(type(config))).stem
    except (TypeError, OSError):
        return "notebook"
