"""Recompiles: graphs that torch.compile makes after a run's first steps, and why."""

import sys

from app.rundir.run_record import Compiled

# The first steps of a launch: in step 1 torch compiles for one shape, in step 2 for changing shapes.
FIRST = 2


class Recompiles:
    """Count the graphs that torch.compile makes inside steps; graphs of evaluations are not counted.

    It reads counters of torch._dynamo on the host, which are private (torch 2.11 to 2.13), and only if some code has
    imported that module.
    """

    def __init__(self):
        self.graphs = 0
        """Graphs made inside steps."""
        self.again: list[tuple[int, str]] = []
        """For each graph made after the first steps: the step, counted from 1, and the reason."""
        self._steps, self._before = 0, 0

    def begin(self) -> None:
        """Begin a step."""
        self._steps += 1
        self._before = _graphs()

    def end(self, step: int) -> str:
        """End the turns of a step; called once for each optimizer.

        Args:
            step: counted from 1.

        Returns:
            A warning at the first recompile; else empty.
        """
        made = _graphs() - self._before
        if not made:
            return ""
        self.graphs, self._before = self.graphs + made, self._before + made
        if self._steps <= FIRST:
            return ""
        first, reasons = not self.again, _reasons(made)
        self.again += [(step, reason) for reason in reasons]
        if not first:
            return ""
        return (
            f"warning: step {step} was compiled again, which takes time ({reasons[0]}); run.json will list each "
            "recompile. Give inputs one shape, or pad them to a few sizes, so that each is compiled once"
        )

    def facts(self, asked: bool) -> Compiled | None:
        """Return the facts for run.json; None if nothing was compiled and the profile did not ask for it.

        Args:
            asked: whether the profile compiles models.
        """
        if not self.graphs and not asked:
            return None
        reasons = (f"step {step}: {reason}" for step, reason in self.again[:20])
        return Compiled(self.graphs, len(self.again), tuple(reasons))


def _graphs() -> int:
    """Return the number of graphs that torch.compile has made in this process."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return dynamo.counters["stats"]["unique_graphs"] if dynamo else 0


def _reasons(count: int) -> list[str]:
    """Return the reasons for the last `count` graphs."""
    metrics = sys.modules["torch._dynamo.utils"].get_compilation_metrics()[-count:]
    told = [getattr(each, "recompile_reason", None) or "a new function or module" for each in metrics]
    told += ["torch gives no reason"] * (count - len(told))
    return [" ".join(reason.split())[:300] for reason in told]
