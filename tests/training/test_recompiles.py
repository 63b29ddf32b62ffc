"""Graphs that torch.compile makes again after the first steps are counted, and their reason is told once."""

import pytest
import torch

from app.rundir.run_record import Compiled
from app.training.loop.recompiles import Recompiles


@pytest.fixture(autouse=True)
def afresh():
    torch._dynamo.reset()


def test_what_is_compiled_again_is_told_with_its_reason():
    """Canary, torch 2.11 to 2.13: the counters of torch._dynamo that are read are there, and say why."""
    compiled, recompiles = torch.compile(lambda x, factor: x * factor, backend="eager"), Recompiles()
    warned = []
    for step, (size, factor) in enumerate([(3, 1.0), (3, 1.0), (3, 1.0), (3, "no"), (3, 1.0)], 1):
        recompiles.begin()
        compiled(torch.ones(size), 2 if factor == "no" else factor)
        warned.append(recompiles.end(step))
    assert warned[:3] == ["", "", ""]
    assert warned[3].startswith("warning: step 4 was compiled again")
    assert "factor" in warned[3]
    assert warned[4] == ""
    facts = recompiles.facts(asked=True)
    assert (facts.graphs, facts.recompiles) == (2, 1)
    assert facts.reasons[0].startswith("step 4: ")


def test_evaluations_do_not_count():
    compiled, recompiles = torch.compile(lambda x: x + 1, backend="eager"), Recompiles()
    for step in range(1, 5):
        recompiles.begin()
        recompiles.end(step)
        compiled(torch.ones(step))
    assert recompiles.facts(asked=False) is None
    assert recompiles.facts(asked=True) == Compiled(graphs=0, recompiles=0, reasons=())
