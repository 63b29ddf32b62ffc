"""The run: one training of one recipe in one folder. Repeating the command resumes it."""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, cast

import numpy as np
import torch
from accelerate.utils import DistributedType, DynamoBackend
from torch import Tensor, nn

from app.checkpoints.export import save_model
from app.checkpoints.manager import CheckpointManager
from app.checkpoints.resume import contents_everywhere
from app.checkpoints.store import CheckpointStore
from app.config import OptimConfig, RunConfig, check, to_dict
from app.distributed import batch_norm, collectives, layout
from app.distributed.accelerator import Accelerator
from app.distributed.buffers import Buffers
from app.distributed.desync import DesyncCheck
from app.distributed.preemption import Left, Preemption
from app.distributed.watchdog import Watchdog
from app.errors import UserError, mendable
from app.launching import dry_run
from app.rundir import images, recipe_source
from app.rundir.atomic import draft_of
from app.rundir.folder import RunFolder
from app.rundir.logger import RunLogger
from app.rundir.throughput import Cost, peak_flops
from app.sampling.batch_plan import BatchPlan, EvaluationPlan, Turn
from app.sampling.seeding import EVALUATION, aside, seed_all
from app.training import exact_gradients
from app.training.audit import Audit
from app.training.gradients import Gradients
from app.training.loader import load
from app.training.metrics import Metric
from app.training.nonfinite import FirstNonfinite
from app.training.optimizer import Optimizers, build_optimizer
from app.training.optimizer import check as check_optim
from app.training.scores import Scores, evaluating, plain
from app.training.step import Batch, CurrentStep
from app.training.step_loop import Services, Start, StepLoop


class Run:
    """Open a run folder, resume the training in it, and do everything around the visible loop."""

    def __init__(self, config: Any, name: str = ""):
        """Describe a run.

        Args:
            config: the recipe's config; its field `run` is a RunConfig.
            name: the folder under runs/ if --run.dir is not given; default: the name of the recipe's file.
        """
        self.fields, self.config = to_dict(config), config.run
        self.name, self._asked = name or _recipe_name(config), config
        self.dir = Path(self.config.dir or f"runs/{self.name}")
        self._facts: dict[str, Any] = {}  # for run.json
        self._dry = dry_run.current()
        self._loop: StepLoop | None = None  # from __enter__ on
        self._begun = False

    @property
    def steps_done(self) -> int:
        """Return the number of steps made; inside the loop's body, the current step counts too."""
        return self._loop.steps_done if self._loop else 0

    @property
    def scores(self) -> dict[str, float]:
        """Return the last logged value of each score."""
        return self._loop.scores if self._loop else {}

    @property
    def optimizers(self) -> Optimizers:
        """Return the prepared optimizers, with their settings."""
        return self._loop.optimizers

    @property
    def dry_run(self) -> bool:
        """Tell whether this is a dry run, for a plan or an export: on a CPU, without a run folder."""
        return self._dry is not None

    def __enter__(self) -> "Run":
        check(self._asked)
        with ExitStack() as taken:  # given back at once if the run does not begin
            self._open(self.config, taken)
            self._taken = taken.pop_all()
        return self

    def _open(self, settings: RunConfig, taken: ExitStack) -> None:
        if settings.exact:
            taken.enter_context(exact_gradients.settings())
        self.accelerator = Accelerator(settings.threads or int(settings.exact), settings.timeout)
        kind = exact_gradients.ExactGradients if settings.exact else Gradients
        self.gradients = kind(self.accelerator, settings.seed)
        # Called now for its error: it does not depend on the data, which may take long to load.
        BatchPlan(1, 1, settings.global_batch, settings.micro_batch).accumulation(self.accelerator.data_ranks)
        rank, world = self.accelerator.process_index, self.accelerator.num_processes
        self.folder = RunFolder(self.dir, recipe_source.source_of(self._asked), self._asked)
        taken.callback(lambda: self.folder.release(discard=not self._begun))
        self.logger = RunLogger(self.accelerator.is_main_process, self.folder, settings.quiet)
        at = self.dir / "checkpoints"
        self.watchdog = Watchdog(settings.timeout, self.logger.failed, [at, draft_of(self.dir / "model")])
        self.checkpoint_store = CheckpointStore(
            at, rank, world, settings.keep, settings.best, check_owner=self.folder.check, on_block=self.watchdog.moved
        )
        self.buffers = Buffers(self.accelerator, self.warn)
        self.checkpoint_manager = CheckpointManager(
            self.accelerator, self.buffers, self.checkpoint_store, self.logger, self.watchdog, settings.save_async
        )
        self.stopping = Preemption(self.accelerator.device, self.logger.failed)
        if not self.dry_run:
            has = bool(self.checkpoint_store.steps())
            for note in collectives.from_main(lambda: self.folder.claim(self.fields, settings, has), long=True):
                self.say(note)
        services = Services(
            self.accelerator,
            self.gradients,
            self.logger,
            self.buffers,
            self.checkpoint_manager,
            self.stopping,
            self.watchdog,
        )
        self._loop = StepLoop(settings, services)
        seed_all(settings.seed)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        if isinstance(error, Left):
            self._loop.left, error = True, None
        cause, advice = error, self.gradients.explained(error)
        error = advice or error
        try:
            if error is None:
                self._loop.settle()
            self.checkpoint_manager.wait(quietly=error is not None)
        except BaseException as problem:
            error = problem
            raise
        finally:
            self._close(error)
        if advice is not None:
            raise advice from cause
        return self._loop.left

    def _close(self, error: BaseException | None) -> None:
        try:
            self.watchdog.close()
            self.stopping.close()
            if mendable(error):
                heard = self.accelerator.is_main_process or not collectives.heard_on_main(error)
                error.audible = heard  # type: ignore[union-attr]  # read where the error is reported
            self.logger.close()
            if self.accelerator.is_main_process:
                self._leave_folder(error)
        finally:
            self._taken.close()
            collectives.leave(clean=error is None)

    def _leave_folder(self, error: BaseException | None) -> None:
        loop = self._loop
        if not self._begun:
            return
        asked = self.accelerator.state.dynamo_plugin.backend != DynamoBackend.NO
        if compiled := loop.recompiles.facts(asked):
            self.logger.note(**compiled)
        if error is None and loop.steps_done == loop.plan.steps and not loop.left:
            self.logger.note(status="finished", step=loop.steps_done, metrics=loop.scores)
        elif error is None or isinstance(error, KeyboardInterrupt):
            self.logger.note(status="preempted")
            asked = error is None and 0 < self.config.stop_at <= loop.steps_done
            self.logger.stopped(loop.steps_done, self.checkpoint_store.steps(), asked, loop.left)
        else:
            self.logger.failed(f"{type(error).__name__}: {error}")

    def say(self, text: str) -> None:
        """Print a line on the main process only."""
        self.logger.progress.say(text)

    def warn(self, text: str) -> None:
        """Print a line to standard error, on the main process only."""
        self.logger.progress.warn(text)

    def note(self, **facts: Any) -> None:
        """Add facts about this run to run.json. Call it before `batches`, with values that JSON can hold."""
        self._facts |= facts

    @contextmanager
    def main_process_first(self) -> Iterator[None]:
        """Let one process of each machine prepare what the others reuse, such as cached data; the others wait."""
        with self.accelerator.local_main_process_first():
            yield
        # One rank may have drawn random numbers in the block: seeded again, all ranks get the same initial weights.
        seed_all(self.config.seed)

    def prepare(self, model: nn.Module, optim: OptimConfig | torch.optim.Optimizer) -> tuple[nn.Module, Any]:
        """Place a model and make its optimizer. Call once for each model.

        Args:
            optim: settings, which determine the learning rate of every step; or an optimizer of your own, whose
                learning rate the run does not change.
        """
        settings = optim if isinstance(optim, OptimConfig) else None
        if self.config.sync_bn and not self.dry_run:  # a dry run is on a CPU; SyncBatchNorm keeps the names of weights
            model = batch_norm.synchronised(model, self.accelerator)
        if isinstance(optim, OptimConfig):
            check_optim(optim)
            if not self.accelerator.is_fsdp2:  # FSDP2 moves one shard at a time
                model.to(self.accelerator.device)
            optim = build_optimizer(model, optim)
        if not model.training:
            model.train()  # from_pretrained returns a model in evaluation mode
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
        """Resume the run, then yield the batch of each remaining step. Scores logged in the body belong to that step.

        Args:
            data: rows by sample id; if it has `__getitems__`, that is called with a list of ids.
            collate: makes the model inputs from a list of rows.
            lengths: one for each sample, if known: for less padding, and micro-batches of similar cost.
            weights: one for each sample, in the loss; default: all 1.
            augment: changes one row; it gets a random generator for that row.
            cost: what a sample costs, to log tokens per second and MFU.
        """
        if self._begun:
            raise UserError("run.batches was called before, and goes through the whole run: open another Run")
        plan = BatchPlan.of_run(self.config, len(data), lengths, weights)
        if self._dry is not None:
            yield from self._dry.at_loop(self, plan, data, collate, augment)
            self._loop.dry_run = True
            return
        plan, steps = self._begin(plan, data, cost)
        yield from self._loop.go_through(load(plan, steps, data, collate, *self._place, augment))

    def trying(self, step: CurrentStep, gradients: Gradients) -> AbstractContextManager[None]:
        """Run the loop's body once in a dry run, on a step whose changes are undone."""
        return self._loop.trying(step, gradients)

    def _begin(self, plan: BatchPlan, data: Sequence, cost: Cost | None) -> tuple[BatchPlan, range]:
        """Resume, open the logger, and return the plan and the indices of the remaining steps; on every rank."""
        order = f"{plan.fingerprint} {plan.seed} {plan.global_batch} {plan.micro_batch} {plan.steps}"
        drift = None if collectives.alone() else DesyncCheck(self.accelerator.models, self.buffers, order)
        self.say(layout.header(plan, self.accelerator))
        here = layout.layout(self.accelerator)
        if layout.is_bound(here):
            self.say("DeepSpeed writes checkpoints that only this layout can read; with an fsdp profile, all can")
        saved, plan = self.checkpoint_manager.resume(plan, contents_everywhere(data), self.config)
        plan.check_stop(self.config)
        # Checkpoints of earlier versions have no entry "buffers".
        self.buffers.begin(saved.get("buffers", ()) if saved else (), plan)
        start = Start(saved["step"], saved["scores"], bool(saved.get("unevaluated"))) if saved else Start()
        if saved:
            moved = "" if saved["layout"] == here else f" (saved on {layout.in_short(saved['layout'])})"
            first = ", whose evaluation comes first" if start.unevaluated else ""
            self.say(f"resuming {self.dir} after step {start.step} of {plan.steps}{moved}{first}")
            changes = layout.changes_bits({**saved["layout"], **saved["versions"]}, here) if self.config.exact else []
            if changes:
                self.warn(f"warning: --run.exact: {'; '.join(changes)}: bits from here on may differ from those before")
        about = {"steps": plan.steps, "samples": plan.samples, "recipe": self.name, "layout": here}
        about |= {"versions": layout.versions(), **self._facts}
        if chosen := self.gradients.arithmetic():
            about["arithmetic"] = chosen

        def write() -> None:
            origin = recipe_source.origin_of(self._asked)
            self.logger.open(start.step, self.config, self.fields, start.unevaluated, **about, **origin)

        collectives.from_main(write, long=True)  # trackers may take long to start
        peak = peak_flops(here["device"], here["precision"])
        self.logger.start(plan, start.step, cost, peak and peak * self.accelerator.num_processes)
        faults = FirstNonfinite(plan, *self._place[:3])
        audit = Audit(self.accelerator, self.dir, start.step, self.warn) if self.config.audit else None
        steps = self._loop.begin(plan, start, faults, drift, audit)
        self._begun = True
        self.stopping.start()
        self.watchdog.start()
        return plan, steps

    @property
    def _place(self) -> tuple[int, int, torch.device, int]:
        """Return this process's data rank, the number of data ranks, its device, and its number of loader workers."""
        device, workers = self.accelerator.device, self.config.workers
        workers = workers if workers >= 0 else (0 if device.type == "cpu" else 4)
        return self.accelerator.data_rank, self.accelerator.data_ranks, device, workers

    def due(self, every: int) -> bool:
        """Tell whether something that happens every `every` steps is due now; 0: at the end of each epoch.

        The last step of the run is always due.
        """
        return self._loop.due(every)

    def backward(self, loss: Tensor | dict[str, Tensor], micro: Turn, name: str = "loss") -> None:
        """Add a micro-batch's gradient to that of the global batch. Call it once for each micro-batch, on every rank.

        Args:
            loss: the mean over the micro-batch, a scalar; or several by name, which are logged apart and summed.
            name: the name of the loss in the log.
        """
        parts = loss if isinstance(loss, dict) else {name: loss}
        self._loop.backward(parts, cast(Tensor, sum(loss.values())) if isinstance(loss, dict) else loss, micro)

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Clip the gradients, update the weights, and clear the gradients."""
        self._loop.update(optimizer)

    def log(self, values: dict[str, float]) -> None:
        """Log scores with this step, next to its loss. Every rank must call it, with the same numbers."""
        self._loop.log(plain(values))

    def log_images(self, pictures: dict[str, Sequence[np.ndarray]]) -> None:
        """Log pictures with this step: in the run folder's images/, and in the trackers that take pictures.

        Args:
            pictures: by name, each height x width (x 3), uint8; those of the main process are kept.
        """
        self.logger.pending_images |= images.check(pictures)

    def save(self) -> None:
        """Commit a checkpoint of this step, on every rank. A failure is a warning; earlier checkpoints stay."""
        self._loop.save()

    def evaluation(
        self,
        model: nn.Module,
        data: Sequence,
        collate: Callable[[list], Any],
        lengths: np.ndarray | None = None,
        weights: np.ndarray | None = None,
        micro_batch: int = 0,
    ) -> Iterator[Turn]:
        """Go through a data set once, each sample on one rank, with the model in evaluation mode and without gradients.

        Every rank makes the same number of forward passes; a rank without samples left gets another micro-batch's rows
        with weight 0. Random numbers drawn by rows, collate and the loop's body depend on the micro-batch only, and
        are the same in every evaluation of a run. The other arguments are those of `batches`.

        Args:
            micro_batch: samples in one forward pass; 0: --run.micro-batch. Use 1 for samples of different sizes.
        """
        if not len(data):
            raise UserError("the evaluation set is empty: there is nothing to score")
        seed = self.config.seed
        plan = EvaluationPlan(len(data), micro_batch or self.config.micro_batch, lengths, weights, seed)
        turns = range(plan.steps(self.accelerator.data_ranks))
        self.buffers.find_changes()
        with self.logger.time_aside(), aside(self.accelerator.device), evaluating(model):
            together = self.accelerator.is_fsdp2
            leaving = self.stopping.turns(len(turns), together) if self._may_leave() else turns
            for _, step in zip(leaving, load(plan, turns, data, collate, *self._place), strict=True):
                self.watchdog.beat()
                (turn,) = step.turns
                seed_all(seed, EVALUATION, turn.index)
                yield self.accelerator.counted_once(turn)

    def _may_leave(self) -> bool:
        """Tell whether an evaluation can be left here; if not, the step is finished first.

        DeepSpeed's steps cannot be repeated. Between a step's first forward pass and its update, buffers belong to
        neither step.
        """
        return self._loop.may_leave_evaluation() and self.accelerator.distributed_type != DistributedType.DEEPSPEED

    def scores_of(self, *own: Metric, **metrics: Any) -> Scores:
        """Collect scores over all ranks: from metrics of app.training.metrics, and from torchmetrics, by name."""
        return Scores(self.accelerator.device, *own, **metrics)

    def finish(self, model: nn.Module, *parts: Any, use: str = "") -> dict[str, float]:
        """Write the finished model, and print a summary; if steps remain, do neither. Every rank must call it.

        Args:
            parts: the tokenizer, processor and so on to save with the model.
            use: a command that uses the model, printed for the user; {model} is replaced by the model's folder.

        Returns:
            The last value of every score.
        """
        if self._dry is not None:
            self._dry.at_finish(self, model, parts, use)
        self._loop.settle()
        if self.steps_done == self._loop.plan.steps:
            collectives.from_main(self.folder.check)
            with self.watchdog.long_work():
                save_model(self.accelerator, model, self.dir / "model", *parts)
            if self.config.log_model:
                with self.watchdog.unwatched():
                    self.logger.log_model(self.dir / "model")
            longer = "--run.steps" if self.config.steps else "--run.epochs"
            self.logger.summary(self.steps_done, self.scores, self.dir / "model", use, longer)
        return self.scores


def _recipe_name(config: Any) -> str:
    try:
        return Path(inspect.getfile(type(config))).stem
    except (TypeError, OSError):
        return "notebook"
