"""Saving and resuming one run: what a checkpoint says beside its state, and what must agree before a run goes on."""

from typing import Any

from app import layout, ranks, state
from app.accelerator import Accelerator
from app.batches import BatchPlan
from app.checkpoint import Checkpoints
from app.due import Due
from app.errors import UserError
from app.records import Records


class Saving:
    """Commit checkpoints of a run when they are due, and load the newest good one."""

    def __init__(self, accelerator: Accelerator, checkpoints: Checkpoints, records: Records):
        self.accelerator, self.checkpoints, self.records = accelerator, checkpoints, records
        self._warned = False

    def resume(self, plan: BatchPlan) -> dict[str, Any] | None:
        """Load the newest good checkpoint and return its record; None where there is none. Every rank takes part.

        Raises:
            UserError: it is of other data, of a longer run, of another model, or bound to another layout.
        """
        found = self.checkpoints.newest(self.records.progress.warn)
        if found is None:
            return None
        path, saved = found
        folder = self.records.folder.path
        layout.check_bound(saved["layout"], layout.layout(self.accelerator))
        if saved["step"] > plan.steps:
            raise UserError(
                f"{folder} holds a run after step {saved['step']}, and {plan.steps} steps are asked for: give at least "
                "as many with --run.steps or --run.epochs, or another --run.dir"
            )
        rows, before = plan.samples, saved["data"]["rows"]
        if plan.fingerprint != saved["data"]["fingerprint"]:
            now = f"now there are {rows:,}" if rows != before else "now they have other lengths"
            raise UserError(
                f"{folder} holds a run over other training data: it had {before:,} rows, and {now}. Give it the "
                "data that it had, or another --run.dir"
            )
        self.accelerator.load_state(str(path))
        return saved

    def save_when_due(self, step: int, due: Due, scores: dict[str, float], measured: dict[str, float]) -> None:
        """Commit a checkpoint where one is due, or this step's scores are the best yet. Every rank takes part.

        Args:
            scores: the last value of each.
            measured: those that were measured at this very step; they decide which checkpoint is best.
        """
        best = due.settings.best.removeprefix("-")
        if due.saves(step) or (due.may_be_best(step) and ranks.from_main(lambda: self.checkpoints.improves(measured))):
            self.save(step, due.plan, scores, measured)
        if best and measured and best not in scores and not self._warned:
            self._warned = True
            self.records.progress.warn(
                f"warning: --run.best {best}: there is no such score, so none is kept for it; there are "
                f"{', '.join(sorted(scores))}"
            )

    def save(self, step: int, plan: BatchPlan, scores: dict[str, float], measured: dict[str, float]) -> None:
        """Commit a checkpoint. A failure costs a warning; earlier checkpoints stay. Every rank takes part."""
        state.check_finite(self.accelerator._models, step)
        data = {"rows": plan.samples, "fingerprint": plan.fingerprint}
        here = {"layout": layout.layout(self.accelerator), "versions": layout.versions()}
        record = {"metrics": measured, "scores": scores, **here, "data": data}
        with self.records.time_aside():
            problems = self.checkpoints.save(step, record, self.accelerator.save_state)
        if problems:
            kept = self.checkpoints.steps()
            self.records.progress.warn(
                f"warning: no checkpoint was saved at step {step}: {'; '.join(problems)}. Training goes on; "
                f"the newest checkpoint is {f'step {kept[-1]}' if kept else 'none'}"
            )
        else:
            self.records.note(step=step)
