"""What torch.compile does inside a run's steps: graphs that are made again after the first ones, and why."""

import sys
from typing import Any

# Steps of a launch in which everything is compiled that one shape wants, and then for shapes that change.
FIRST = 2


class Compiling:
    """Count the graphs that torch.compile makes inside steps; evaluations and what stands around steps do not count.

    Reads counters of torch._dynamo on the host, which are not public (torch 2.11 to 2.13), and only where something has
    imported it.
    """

    def __init__(self):
        self.graphs = 0
        """Made inside steps."""
        self.again: list[tuple[int, str]] = []
        """The step, counted from 1, and the reason of each graph made after the first steps."""
        self._steps, self._before = 0, 0

    def begin(self) -> None:
        """Begin a step."""
        self._steps += 1
        self._before = _graphs()

    def end(self, step: int) -> str:
        """End a step's turns, once for each optimizer; returns what to warn of: the first time, and no more.

        Args:
            step: counted from 1.
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
            f"warning: step {step} was compiled anew, which takes its time ({reasons[0]}); run.json will list all. "
            "Inputs of one shape, or of sizes rounded up to few, are compiled once"
        )

    def facts(self, asked: bool) -> dict[str, Any]:
        """Return what run.json tells; nothing where nothing was compiled, nor was to be.

        Args:
            asked: the profile has models compiled.
        """
        if not self.graphs and not asked:
            return {}
        reasons = [f"step {step}: {reason}" for step, reason in self.again[:20]]
        return {"compiled": {"graphs": self.graphs, "recompiles": len(self.again), "reasons": reasons}}


def _graphs() -> int:
    """Count the graphs that torch.compile has made in this process."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return dynamo.counters["stats"]["unique_graphs"] if dynamo else 0


def _reasons(count: int) -> list[str]:
    """Say why the last so many graphs were made."""
    metrics = sys.modules["torch._dynamo.utils"].get_compilation_metrics()[-count:]
    told = [
        getattr(each, "recompile_reason", None) or "a function or module that was not met before" for each in metrics
    ]
    told += ["torch tells no reason"] * (count - len(told))
    return [" ".join(reason.split())[:300] for reason in told]
