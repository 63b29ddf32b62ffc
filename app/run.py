"""The run: one training of one recipe in one folder. Repeating the command resumes it."""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from app.checkpoints.export import use_of
from app.config import OptimConfig, RunConfig, check, chosen, points, put, to_dict, when_begun
from app.config.needs import Needs
from app.data.rows import Fetched, Incomplete, Ordered, Rows, Streamed
from app.distributed import batch_norm, collectives, deepspeed, environment, regional_compilation, rendezvous
from app.distributed.accelerator import Accelerator
from app.distributed.object_collectives import ObjectCollectives
from app.distributed.preemption import StoppedInEvaluation
from app.errors import UserError
from app.rundir import images, recipe_source, run_record
from app.rundir.folder import RunFolder
from app.rundir.logger import RunLogger
from app.rundir.throughput import Cost
from app.rundir.trackers import check_names
from app.sampling.batch_plan import BatchPlan, EvaluationPlan, Length, Turn, Weigh, Weights, batch_sizes
from app.sampling.seeding import seed_all
from app.training.exact import gradients as exact_gradients
from app.training.feeding.fetching import Composed, Fetch
from app.training.feeding.weighing import one
from app.training.loop import beginning, ending, evaluation, purpose
from app.training.loop.gradients import Gradients
from app.training.loop.opened import Opened
from app.training.loop.services import Services
from app.training.loop.step import Batch
from app.training.loop.step_loop import StepLoop
from app.training.loop.trial import Trial
from app.training.optim import bf16, odd_parameters
from app.training.optim.building import Optimizers, Place, build_optimizer
from app.training.optim.building import check as check_optim
from app.training.scores.base import Metric
from app.training.scores.collecting import Scores, as_numbers, renamed


class Run:
    """Open a run folder, resume the training in it, and do everything around the visible loop."""

    def __init__(self, config: Any, name: str = ""):
        """Describe a run.

        Args:
            config: the recipe's config; its field `run` is a RunConfig.
            name: the folder under runs/ if --run.dir is not given; default: the name of the recipe's file.
        """
        full, choices = chosen(config)
        self._given = config
        self.fields, self.config = to_dict(full), full.run
        self.name = name or _recipe_name(config)
        self.dir = Path(self.config.dir or f"runs/{self.name}")
        self._asked = beginning.Asked(self.name, full, choices, self.fields, facts={})
        self.purpose = purpose.asked()
        self._opened: Opened | None = None  # from __enter__ on
        self._loop: StepLoop | None = None  # from `batches` on, if the run trains
        self._trial: Trial | None = None  # from __enter__ on, if it does not train
        self._taken = ExitStack()  # what is given back at the end

    @property
    def steps_done(self) -> int:
        """Return the number of steps made; inside the loop's body, the current step counts too."""
        loop = self._loop or self._trial
        return loop.steps_done if loop else 0

    @property
    def scores(self) -> dict[str, float]:
        """Return the last logged value of each score."""
        return self._opened.scores if self._opened else {}

    @property
    def services(self) -> Services:
        """Return what the run has opened."""
        return self._open_run.services

    @property
    def accelerator(self) -> Accelerator:
        """Return accelerate's Accelerator, as this project extends it."""
        return self.services.accelerator

    @property
    def gradients(self) -> Gradients:
        """Return what weighs, synchronises and clips gradients."""
        return self.services.gradients

    @property
    def folder(self) -> RunFolder:
        """Return the run's folder."""
        return self.services.folder

    @property
    def logger(self) -> RunLogger:
        """Return what writes the log."""
        return self.services.logger

    @property
    def optimizers(self) -> Optimizers:
        """Return the prepared optimizers, with their settings."""
        return self._open_run.optimizers

    @functools.cached_property
    def collectives(self) -> ObjectCollectives:
        """Return collectives of Python objects over all ranks: broadcast, gather, scatter, groups."""
        assert self._open_run  # for its error where the run is not open
        return ObjectCollectives(rendezvous.time_limit(self.config.timeout))

    @property
    def dry_run(self) -> bool:
        """Tell whether this is a dry run, for a plan, an export or an evaluation: without a run folder."""
        return not self.purpose.trains

    @property
    def for_other_device(self) -> bool:
        """Tell whether this is a dry run on a CPU, whatever device the run itself is for."""
        return self.purpose.on_cpu

    @property
    def needs(self) -> Needs:
        """Return what this run needs of its data and its model, for what loads the one and builds the other."""
        return self.purpose.needs

    def __enter__(self) -> "Run":
        check(self._asked.config)
        for settings in vars(self._asked.config).values():
            if isinstance(settings, OptimConfig):
                check_optim(settings)
        check_names(self.config.trackers)
        self.purpose.at_opening(self)
        with ExitStack() as taken:  # given back at once if the run does not begin
            self._open(self.config, taken)
            self._taken = taken.pop_all()
        return self

    def _open(self, settings: RunConfig, taken: ExitStack) -> None:
        if settings.exact:
            taken.enter_context(exact_gradients.settings())
        accelerator = Accelerator(
            settings.threads or int(settings.exact), settings.timeout, settings.slices, broadcasts_buffers=False
        )
        compiling = accelerator.state.dynamo_plugin
        if regional_compilation.is_asked_for(compiling):
            taken.enter_context(regional_compilation.settings(compiling, settings.exact))
        # Called now for their errors: they do not depend on the data, which may take long to load.
        batch_sizes(settings)
        BatchPlan(1, 1, settings.global_batch, settings.micro_batch).accumulation(accelerator.data_ranks)
        folder = RunFolder(self.dir, recipe_source.source_of(self._asked.config), self._asked.config)
        folder.check_place()
        if folder.is_remote:
            deepspeed.refuse("--run.dir in a bucket", accelerator.distributed_type)
        taken.callback(lambda: folder.release(discard=self._loop is None))
        averaging = getattr(self._asked.config, "ema", None)
        unbegun = functools.partial(beginning.unbegun, self._asked, accelerator)
        self._opened = Opened(settings, Services(settings, averaging, folder, accelerator, unbegun))
        if self.purpose.trains:
            taken.callback(self.services.notice.close)
            self.services.notice.start()
        self._trial = None if self.purpose.trains else Trial(self._opened)
        with folder.explained():
            self._settle()
            has = not self.dry_run and bool(self.services.checkpoint_store.steps())
        if not self.dry_run:
            for note in collectives.from_main(lambda: folder.claim(self.fields, settings, has), long=True):
                self.say(note)
        seed_all(settings.seed)

    def _settle(self) -> None:
        """Fill in what is decided when a run begins, such as its date: alike on all ranks, and in the given config too.

        A dry run on a run's folder is as that run.
        """
        store, asked = self.services.checkpoint_store, self._asked
        values = collectives.from_main(lambda: when_begun(asked.config, store.settings()))
        for config in (self._given, asked.config):
            put(config, asked.fields, values)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        loop, services = self._loop, self.services
        if error is not None:
            services.notice.wait_if_over()
        if loop is not None and isinstance(error, StoppedInEvaluation):
            loop.stopped_in_evaluation, error = True, None
        cause, advice = error, self.gradients.explained(error)
        error = advice or error
        try:
            if error is None and loop is not None:
                loop.finish_step()
                if loop.leaving or loop.finished:
                    ending.keep_training(loop, waits=False)
            services.checkpoint_manager.wait(quietly=error is not None)
        except BaseException as problem:
            error = problem
            raise
        finally:
            try:
                ending.close(services, loop, error)
            finally:
                self._taken.close()
                collectives.leave(clean=error is None)
        environment.tell_preempted(error is None and loop is not None and ending.preempted(loop))
        if advice is not None:
            raise advice from cause
        if error is None and services.notice.stops_cell:
            raise KeyboardInterrupt from None
        return loop is not None and loop.stopped_in_evaluation

    @property
    def _open_run(self) -> Opened:
        """Return what the run has opened.

        Raises:
            UserError: it is not open.
        """
        if self._opened is None:
            raise UserError("the run is not open: use it in a block, `with Run(config) as run:`")
        return self._opened

    def _begun(self, call: str) -> StepLoop | Trial:
        """Return the loop that has begun, or what takes its place.

        Raises:
            UserError: the run is not open, or run.batches was not called yet.
        """
        loop = (self._loop or self._trial) if self._open_run else None
        if loop is None:
            raise UserError(f"{call} before run.batches: call it in the body of the loop over run.batches, or after it")
        return loop

    @property
    def trial(self) -> Trial:
        """Return what a command, in whose place nothing is trained, runs the loop's body with."""
        assert self._trial is not None, "this run trains"
        return self._trial

    def say(self, text: str) -> None:
        """Print a line on the main process only."""
        self.logger.progress.say(text)

    def warn(self, text: str) -> None:
        """Print a line to standard error, on the main process only."""
        self.logger.progress.warn(text)

    def note(self, **facts: Any) -> None:
        """Add facts about this run to run.json. Call it before `batches`, with values that JSON can hold.

        Raises:
            UserError: run.json has a field of that name already, or cannot hold the values.
        """
        noted = {**self._asked.facts, **facts}
        run_record.check_facts(noted)
        self._asked.facts.update(facts)

    @contextmanager
    def main_process_first(self) -> Iterator[None]:
        """Let one process of each machine prepare what the others reuse, such as cached data; the others wait."""
        with self.accelerator.local_main_process_first():
            yield
        # One rank may have drawn random numbers in the block: seeded again, all ranks get the same initial weights.
        seed_all(self.config.seed)

    def prepare(
        self, model: nn.Module, optim: OptimConfig | torch.optim.Optimizer, averaged: bool = True
    ) -> tuple[nn.Module, Any]:
        """Place a model and make its optimizer. Call once for each model.

        Args:
            optim: settings, which determine the learning rate of every step; or an optimizer of your own, whose
                learning rate the run does not change.
            averaged: whether --ema averages its weights.
        """
        optimizers = self.optimizers  # first, for its error where the run is not open
        where = odd_parameters.Where(self.accelerator.num_processes, self.accelerator.is_fsdp2, self.config.exact)
        odd_parameters.check(model, where)
        odd_parameters.give_memory(model)
        settings = None
        if isinstance(optim, OptimConfig):
            rate = self._asked.config.optim.lr if optim.lr is None else optim.lr
            settings = dataclasses.replace(optim, lr=rate, points=points.read(optim.points))
        if self.config.sync_bn and not self.dry_run:  # training alone needs it; it keeps the names of weights
            model = batch_norm.synchronised(model, self.accelerator)
        if settings is not None:
            check_optim(settings)
            bf16.keep_weights(model, settings, None if self.dry_run else self.accelerator.mixed_precision)
            sharded = self.accelerator.is_fsdp2 or self.accelerator.ranks_per_data_rank > 1
            # Where weights are cut, parts are moved one by one; a plan's weights may be nowhere.
            if not sharded and not self.for_other_device:
                model.to(self.accelerator.device)
            ours = Place(self.accelerator.device, sharded, self.config.exact, self.config.seed)
            optim = build_optimizer(model, settings, None if self.dry_run else ours)
        if not model.training:
            model.train()  # from_pretrained returns a model in evaluation mode
        if note := batch_norm.note(model, self.accelerator, self.config):
            (self.warn if note.warns else self.say)(note.text)
        own = cast(torch.optim.Optimizer, optim)
        model, optimizer = self.gradients.prepare(model, own, settings.clip if settings else 0.0)
        optimizers.add(optimizer, settings)
        self.services.averages.add(model, optimizer, averaged)
        return model, optimizer

    def compiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Compile a function of tensors, such as a loss, if the profile compiles by region; else return it as it is."""
        return regional_compilation.compiled(function, self.accelerator.state.dynamo_plugin)

    def batches(
        self,
        data: Rows,
        collate: Callable[[list], Any],
        lengths: np.ndarray | Length | None = None,
        weights: Weights | Weigh | None = None,
        augment: Callable[[Any, np.random.Generator], Any] | None = None,
        cost: Cost | None = None,
        fetch: Fetch = (),
    ) -> Iterator[Batch]:
        """Resume the run, then yield the batch of each remaining step. Scores logged in the body belong to that step.

        Args:
            data: rows by sample id; if it has `__getitems__`, that is called with a list of ids.
            collate: makes the model inputs from a list of rows; if it has a method `at`, `collate.at(step)` does so in
                a training step, counted from 0.
            lengths: one for each sample, if known: for less padding, and micro-batches of similar cost; or a function
                of a row, for data whose lengths are known only when they are read (see --data.sort-over).
            weights: one for each sample, in the loss; or a function of a row, for data whose weights are known only
                when they are read, which costs a small collective each step; default: all 1.
            augment: changes one row; it gets a random generator for that row. If it has a method `many`, that changes
                all rows of a micro-batch: `augment.many(rows, seed, epochs, ids)`.
            cost: what a sample costs, to log tokens per second and MFU.
            fetch: a stage, or several one after the other: functions that change what collate returns, such as one
                that reads what a sampled row refers to. Each works in a thread of its own, ahead of the step, and so
                draws nothing from the global random generators.
        """
        if self._loop is not None:
            raise UserError("run.batches was called before, and goes through the whole run: open another Run")
        self.keep_best("")  # the recipe has chosen none
        weigh = weights if callable(weights) else None
        if weigh is None and isinstance(data, Incomplete) and data.skips:
            if weights is not None:
                raise UserError("--data.bad skip: weights that are known before rows are read would count missing rows")
            weigh = one
        known = None if callable(weights) else weights
        plan = BatchPlan.of_run(self.config, len(data), None if callable(lengths) else lengths, known)
        plan = plan.ordered(data.order(plan)) if isinstance(data, Ordered) else plan
        length = lengths if callable(lengths) and plan.order.sort_over > 1 else None
        if length is None and plan.order.sort_over > 1:
            raise UserError("--data.sort-over: these data have no lengths to sort by: leave it out")
        if length is not None and known is not None:
            raise UserError("micro-batches that are sorted as they are read need weights that are a function of a row")
        if not self.purpose.trains:
            plan.check_limit()
            stages = Composed(collate, fetch) if fetch else collate
            yield from self.purpose.at_loop(self, plan, data, stages, augment)
            return
        if isinstance(data, Fetched):
            self._taken.callback(data.close)
        for each in data.read_by_chunks() if isinstance(data, Streamed) else ():
            if each is not None:  # on the machine that reads most, so that all are refused alike
                machines = self.accelerator.data_ranks_by_machine
                each.check_room(max(len(plan.lanes_of(ranks, self.accelerator.data_ranks)) for ranks in machines))
        self._loop = loop = beginning.begin(self._open_run, self._asked, plan, data, cost)
        self.services.preemption.start(loop.start.step)
        self.services.watchdog.start()
        yield from loop.go_through(
            self.services.load(loop.plan, loop.steps, data, collate, augment, fetch, weigh, length)
        )

    def keep_best(self, metric: str) -> None:
        """Keep the checkpoint with the best value of a metric as well, unless --run.best says another or none.

        Args:
            metric: as --run.best names it: with a minus sign where lower is better.
        """
        if self._open_run and self._loop is not None:
            raise UserError(f"run.keep_best({metric!r}) after run.batches: call it before")
        if self.config.best == "auto":
            put(self._asked.config, self.fields, {"run.best": metric})

    def due(self, every: int) -> bool:
        """Tell whether something that happens every `every` steps is due now; 0: at the end of each epoch.

        The last step of the run is always due.
        """
        return self._begun("run.due").due(every)

    def backward(self, loss: Tensor | dict[str, Tensor], micro: Turn, name: str = "loss") -> None:
        """Add a micro-batch's gradient to that of the global batch. Call it once for each micro-batch, on every rank.

        Args:
            loss: the mean over the micro-batch, a scalar; or several by name, which are logged apart and summed.
            name: the name of the loss in the log.
        """
        parts = loss if isinstance(loss, dict) else {name: loss}
        whole = cast(Tensor, sum(loss.values())) if isinstance(loss, dict) else loss
        self._open_run.inside("run.backward").backward(parts, whole, micro)

    def observe(self, values: dict[str, Tensor], micro: Turn) -> None:
        """Log numbers with this step's loss that nothing is trained on: their means over the global batch.

        They may be NaN or infinite, which is logged as null.

        Args:
            values: means over the micro-batch by name, scalars.
        """
        self._open_run.inside("run.observe").observe(values, micro)

    def observe_rows(self, losses: Callable[[], Tensor | tuple[Tensor, Tensor]], micro: Turn) -> None:
        """Log the loss of each source of a mixture, as loss/NAME; without a mixture, nothing is done.

        Args:
            losses: returns the loss of each row of the micro-batch, [rows]; or these and the weights of the rows in the
                sources' means, such as their tokens. It is called in steps that are logged alone.
        """
        step = self._open_run.inside("run.observe_rows")
        if self._loop is not None and self._loop.triggers.reads_losses(step.number):
            step.observe_rows(losses, micro)

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Clip the gradients, update the weights, and clear the gradients."""
        entry, step = self.optimizers.find(optimizer), self._open_run.inside("run.step")
        self._begun("run.step").update(step, optimizer, entry)

    def log(self, values: dict[str, float]) -> None:
        """Log scores with this step, next to its loss. Every rank must call it, with the same numbers."""
        self._open_run.log(as_numbers(values))

    def evaluate(self, function: Callable[..., dict[str, float]], model: nn.Module, data: Any, *more: Any) -> None:
        """Score a model and log the scores: those of the average of its weights instead or as well, as --ema asks.

        Args:
            function: returns scores by name; it is called with this Run and the other arguments.
            data: the evaluation set; or a dictionary of several, of which the first one has the plain names of scores,
                and another one, called `hard`, names such as eval-hard/accuracy.
        """
        sets = data if isinstance(data, dict) else {"": data}
        for kind, weights in self.services.averages.passes():
            with weights:
                for index, (name, each) in enumerate(sets.items()):
                    rename = functools.partial(renamed, kind=kind, set_name=name if index else "")
                    with self.logger.pictures_renamed(rename), self.services.remarks.renamed(rename):
                        self.log(rename(function(self, model, each, *more)))

    def log_images(self, pictures: dict[str, Sequence[np.ndarray]]) -> None:
        """Log pictures with this step: in the run folder's images/, and in the trackers that take pictures.

        Args:
            pictures: by name, each height x width (x 3), uint8; those of the main process are kept.
        """
        self.logger.pending_images |= images.check(pictures)

    def save(self) -> None:
        """Commit a checkpoint of this step, on every rank. A failure is a warning; earlier checkpoints stay."""
        self._begun("run.save").save()

    def evaluation(
        self,
        model: nn.Module,
        data: Rows,
        collate: Callable[[list], Any],
        lengths: np.ndarray | None = None,
        weights: np.ndarray | None = None,
        micro_batch: int = 0,
        fetch: Fetch = (),
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
        plan = EvaluationPlan(len(data), micro_batch or self.config.micro_batch, lengths, weights, self.config.seed)
        may_stop = self._open_run.may_stop_in_evaluation()
        yield from evaluation.turns(self.services, model, plan, data, collate, may_stop, fetch)

    def scores_of(self, *own: Metric, **metrics: Any) -> Scores:
        """Collect scores over all ranks: from metrics of app.training.scores, and from torchmetrics, by name."""
        return Scores(self.accelerator.device, self.services.remarks, *self.purpose.metrics(own), **metrics)

    def finish(self, model: nn.Module, *parts: Any, use: str = "") -> dict[str, float]:
        """Write the finished model, and print a summary; if steps remain, do neither. Every rank must call it.

        Args:
            parts: the tokenizer, processor and so on to save with the model.
            use: a command that uses the model, printed for the user; {model} is replaced by the model's folder.

        Returns:
            The last value of every score.
        """
        use = use_of(model, use)
        loop = self._begun("run.finish")
        if isinstance(loop, StepLoop):
            ending.write_model(loop, model, parts, use)
        else:
            self.purpose.at_finish(self, model, parts, use)
        return self.scores


def _recipe_name(config: Any) -> str:
    try:
        return Path(inspect.getfile(type(config))).stem
    except (TypeError, OSError):
        return "notebook"
