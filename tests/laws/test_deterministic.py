"""No recipe's training step has an operation that torch refuses on a GPU when it must be deterministic.

Every recipe takes a step on a CPU while torch's operations are recorded, forward and backward. Interpolation is
decomposed into other operations, as torch does it on a GPU.
"""

import importlib
import json
import re

import pytest
import torch
from support.launching import ROOT
from support.supplies import lay_out
from support.tiny import train
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from app import UserError, parse
from app.training.exact import nondeterministic_ops
from laws.many import load
from laws.small import SMALL

RECIPES = sorted(path.stem for path in (ROOT / "recipes").glob("*.py"))
COMMON = [
    "--run.global-batch",
    8,
    "--run.micro-batch",
    4,
    "--run.steps",
    1,
    "--run.trackers",
    "--run.save-async",
    "false",
]
TEXTS = ["--data.max-length", 32, "--run.exact", "true"]
BLOCKS = ["--data.block", 32, "--sample-length", 4, "--run.exact", "true"]
GRID = ["--data.split", "train[:41]", "--data.eval-split", "train[41:58]"]
# Kinds of models that the recipes' flags offer and small.py does not use; each is small, but of the same kind.
KINDS = {
    "cls bert": ("cls", ["--model", "bert-base-cased", *TEXTS]),
    "cls regression": ("cls", ["--data.path", "numbers.jsonl", *TEXTS]),
    "lm llama": ("lm", ["--model", "FOLDER", *BLOCKS]),
    "lm gpt2": ("lm", ["--scratch.shape", "gpt2", "--scratch.layers", 1, "--scratch.dropout", 0.1, *BLOCKS]),
    "lm documents": ("lm", ["--data.packing", "documents", "--scratch.layers", 1, *BLOCKS]),
    **{
        f"lm {how}": ("lm", ["--activation-checkpointing", how, "--scratch.layers", 1, *BLOCKS])
        for how in ("block", "ops")
    },
    "img vit": ("img", ["--scratch.kind", "vit", "--scratch.width", 8, *GRID, "--run.exact", "true"]),
    "img batch norm": ("img", ["--scratch.norm", "batch", "--scratch.width", 8, *GRID]),
    "img resnet": ("img", ["--model", "microsoft/resnet-18", *GRID]),
    "seg group": ("seg", ["--scratch.norm", "group", "--loss", "bce-dice", "--run.exact", "true"]),
    "seg volumes": ("seg", ["--data.dims", 3, "--run.exact", "true"]),
    "seg segformer": ("seg", ["--model", "segformer"]),
}


class AsOnGPU(TorchFunctionMode):
    """Decompose interpolation as torch does on GPUs when it must be deterministic."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function is functional.interpolate:
            given = dict(zip(("input", "size", "scale_factor", "mode", "align_corners"), args, strict=False)) | kwargs
            image, mode, plain = given["input"], given.get("mode", "nearest"), not given.get("antialias")
            if (image.ndim, mode) in ((4, "bilinear"), (5, "trilinear")) and plain:
                parts = importlib.import_module("torch._decomp.decompositions")
                size, scale = given.get("size"), given.get("scale_factor")
                scale = [scale] * (image.ndim - 2) if isinstance(scale, int | float) else scale
                size = [size] * (image.ndim - 2) if isinstance(size, int) else size
                return parts._upsample_linear_vec(image, size, given.get("align_corners") or False, scale)
        return function(*args, **kwargs)


class Recorder(TorchDispatchMode):
    """Record the operations that torch would refuse, and the number of all operations."""

    def __init__(self):
        super().__init__()
        self.refused: set[str] = set()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        self.count += 1
        name = function.name().removeprefix("aten::")
        if nondeterministic_ops.find(name) and self._has_no_kernel(name, args, kwargs):
            self.refused.add(name)
        return function(*args, **kwargs)

    def _has_no_kernel(self, name, args, kwargs) -> bool:
        if name.startswith("cumsum"):
            return (kwargs.get("dtype") or args[0].dtype).is_floating_point
        if name.startswith("bincount"):
            return (args[1] if len(args) > 1 else kwargs.get("weights")) is not None
        if name.startswith(("median", "nanmedian")):
            return "dim" in name
        return not name.startswith("scatter_reduce") or "prod" in args


def refused_in(folder, recipe: str, flags: list) -> set[str]:
    """Run a recipe for a step of two micro-batches and an evaluation; return what torch would refuse."""
    module, recorder = load(str(ROOT / f"recipes/{recipe}.py")), Recorder()
    words = [str(word) for word in [*flags, *COMMON, "--run.dir", folder]]
    with pytest.MonkeyPatch.context() as patch, AsOnGPU():
        # A step begins with its batch; the evaluation is a part of its body.
        def batches(run, *args, **kwargs):
            for batch in original_batches(run, *args, **kwargs):
                with recorder:
                    yield batch

        original_batches = module.Run.batches
        patch.setattr(module.Run, "batches", batches)
        module.main(parse(module.Config, words))
    assert recorder.count > 100
    return recorder.refused


@pytest.mark.parametrize("recipe", RECIPES)
def test_no_recipe_has_an_operation_that_is_refused(tmp_path, rows, recipe):
    assert refused_in(tmp_path / "run", recipe, [*SMALL[recipe].flags(rows), "--run.exact", "true"]) == set()


@pytest.fixture(scope="module")
def there(tmp_path_factory):
    """Return a folder with small pretrained models."""
    from transformers import SegformerConfig, SegformerForSemanticSegmentation

    folder = tmp_path_factory.mktemp("models")
    lay_out(folder)
    lines = [json.dumps({"text": f"{number} words", "label": number / 2}) for number in range(40)]
    (folder / "numbers.jsonl").write_text("\n".join(lines))
    shape = {"hidden_sizes": [8, 8, 8, 8], "depths": [1] * 4, "num_attention_heads": [1] * 4, "decoder_hidden_size": 8}
    SegformerForSemanticSegmentation(SegformerConfig(num_channels=1, **shape)).save_pretrained(folder / "segformer")
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_no_kind_of_model_that_recipes_offer_has_one(tmp_path, rows, there, monkeypatch, kind):
    """Also with BatchNorm."""
    monkeypatch.chdir(there)
    recipe, flags = KINDS[kind]
    if recipe in ("cls", "lm") and "numbers.jsonl" not in flags:
        flags = ["--data.path", rows(101), "--data.eval-path", rows(7), *flags]
    if recipe == "seg":
        flags = ["--data.patch", 32, "--data.patches-per-image", 1, "--data.holdout", 0.05, *flags]
    assert refused_in(tmp_path / "run", recipe, flags) == set()


@pytest.mark.parametrize(
    ("name", "use"),
    {
        "adaptive_avg_pool2d": lambda x: functional.adaptive_avg_pool2d(x, 3),
        "bicubic": lambda x: functional.interpolate(x, scale_factor=2, mode="bicubic"),
        "reflection": lambda x: functional.pad(x, (1, 1, 1, 1), mode="reflect"),
        "nll_loss2d": lambda x: functional.cross_entropy(x, torch.zeros(len(x), *x.shape[2:], dtype=torch.long)),
        "cumsum": lambda x: x.cumsum(-1),
        "bilinear": lambda x: torch.ops.aten.upsample_bilinear2d(x, [16, 16], False),
    }.items(),
)
def test_the_recorder_sees_what_is_refused(name, use):
    """The control. nn.functional.interpolate is decomposed, and gives the same values."""
    image = torch.randn(2, 3, 8, 8, requires_grad=True)
    with AsOnGPU(), Recorder() as recorder:
        use(image).sum().backward()
    assert recorder.refused
    plain = functional.interpolate(image, scale_factor=2, mode="bilinear")
    with AsOnGPU(), Recorder() as recorder:
        apart = functional.interpolate(image, scale_factor=2, mode="bilinear")
        apart.sum().backward()
    assert not recorder.refused and torch.allclose(apart, plain, atol=1e-6)


def test_the_list_is_that_of_torch():
    """The documentation of the installed torch names no operation that the list lacks."""
    text = torch.use_deterministic_algorithms.__doc__.partition("operations will throw a")[2].partition("In addition")[
        0
    ]
    names = set(re.findall(r":(?:class|func):`torch\.(?:\w+\.)*(\w+)`", text)) | set(re.findall(r"- ``(\w+)``", text))
    names -= {"RuntimeError", "interpolate"}
    missing = names - {operation.documented for operation in nondeterministic_ops.OPERATIONS}
    assert len(names) > 20 and not missing


class Refused(torch.autograd.Function):
    """What a GPU would do with an operation that has no deterministic kernel."""

    @staticmethod
    def forward(context, value):
        return value

    @staticmethod
    def backward(context, gradient):
        raise RuntimeError(
            "adaptive_avg_pool2d_backward_cuda does not have a deterministic implementation, but you set "
            "'torch.use_deterministic_algorithms(True)'. You can turn off determinism just for this operation"
        )


class Pools(nn.Linear):
    def forward(self, x):
        return Refused.apply(super().forward(x))


@pytest.mark.parametrize("exact", [True, False])
def test_what_is_refused_is_said_with_what_to_do(tmp_path, monkeypatch, exact):
    """By its name, before any weight has changed; in ordinary mode, only if the user has set it in torch."""
    monkeypatch.setattr("support.tiny.nn.Linear", Pools)
    if exact:
        with pytest.raises(UserError, match=r"AdaptiveAvgPool2d: average with \.mean.*--run\.exact false"):
            train(tmp_path / "run", exact=True)
    else:
        with pytest.raises(RuntimeError, match="deterministic implementation"):
            train(tmp_path / "run")
    assert not list((tmp_path / "run" / "checkpoints").glob("step-*"))
