"""What a run says of itself in run.json, for tests that need no run."""

from app.distributed.layout_record import Layout
from app.rundir.run_record import Launch, RunRecord


def launch(step: int = 0, layout: str = "1 data rank, fp32, cpu") -> Launch:
    return Launch(step, "2026-11-25 10:00:00", layout)


def record(step: int = 3, **fields) -> RunRecord:
    """The record of a run that has begun."""
    usual = {"status": "running", "steps": 9, "samples": 40, "recipe": "cls", "layout": Layout(), "versions": {}}
    usual |= {"recipe_folder": "/recipes", "commit": "", "launches": (launch(),)}
    return RunRecord(**{**usual, "step": step, **fields})
