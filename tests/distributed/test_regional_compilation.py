"""Compile by region: which modules are compiled, and what is set for a run and restored after it."""

import copy
import pickle

import pytest
import torch
from accelerate.utils import TorchDynamoPlugin
from torch import nn

from app import UserError
from app.distributed import regional_compilation


class Layer(nn.Linear):
    """A block."""


class Model(nn.Module):
    """Two lists of blocks, one of them inside another module, and a list of several classes."""

    def __init__(self):
        super().__init__()
        self.first, self.layers = nn.Linear(3, 3), nn.ModuleList([Layer(3, 3), Layer(3, 3)])
        self.inner = nn.Sequential(nn.ModuleList([Layer(3, 3)]), nn.ReLU())
        self.mixed = nn.ModuleList([nn.Linear(3, 3), nn.ReLU()])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.mixed[1](self.mixed[0](self.inner[0][0](self.first(x))))


def test_blocks_are_compiled_and_names_stay():
    model, inputs = Model(), torch.randn(2, 3)
    names, expected = list(model.state_dict()), model(inputs)
    regional_compilation.compile_blocks(model, {"backend": "eager", "dynamic": False})
    compiled = {name for name, module in model.named_modules() if "forward" in vars(module)}
    assert compiled == {"layers.0", "layers.1", "inner.0.0"}
    assert list(model.state_dict()) == names and torch.equal(model(inputs), expected)


def test_blocks_of_a_class_share_one_graph():
    """Five of them, in two lists; their inputs have one shape."""
    made = []

    def backend(graph, inputs):
        made.append(graph)
        return graph.forward

    model = Model()
    model.layers.extend([Layer(3, 3), Layer(3, 3)])
    plugin = TorchDynamoPlugin(backend="EAGER", use_regional_compilation=True)
    with regional_compilation.settings(plugin, exact=True):
        regional_compilation.compile_blocks(model, {"backend": backend, "dynamic": False})
        for _ in range(3):
            model(torch.randn(2, 3, requires_grad=True)).sum().backward()
    assert len(made) == 1


def test_a_copy_of_compiled_blocks_has_its_own_weights():
    """Such as an average of weights; a copy is not compiled."""
    model, inputs = Model(), torch.randn(2, 3)
    expected = model(inputs)
    regional_compilation.compile_blocks(model, {"backend": "eager"})
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), copy.deepcopy(model.layers[0])):
        assert not any(isinstance(m.forward, regional_compilation.CompiledForward) for m in copied.modules())
    copied = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert torch.equal(copied(inputs), expected) and not model(inputs).any()


def test_a_model_without_blocks_is_refused():
    with pytest.raises(UserError, match="Sequential has no list of blocks of one class"):
        regional_compilation.compile_blocks(nn.Sequential(nn.Linear(2, 2)), {})


@pytest.mark.parametrize("exact", [True, False])
def test_settings_are_restored(exact):
    import torch._dynamo
    import torch._inductor.config

    def now():
        dynamo = torch._dynamo.config
        limits = dynamo.recompile_limit, dynamo.fail_on_recompile_limit_hit, dynamo.optimize_ddp
        return (*limits, torch._inductor.config.deterministic, plugin.dynamic)

    plugin = TorchDynamoPlugin(backend="INDUCTOR", use_regional_compilation=True, dynamic=False)
    before = now()
    with regional_compilation.settings(plugin, exact):
        assert now() == (regional_compilation.MOST_SHAPES, exact, False, exact, False if exact else None)
    assert now() == before


def test_kernels_that_are_chosen_by_speed_are_not_exact():
    plugin = TorchDynamoPlugin(backend="INDUCTOR", use_regional_compilation=True, mode="max-autotune")
    with pytest.raises(UserError, match="dynamo_mode max-autotune"), regional_compilation.settings(plugin, True):
        pass
