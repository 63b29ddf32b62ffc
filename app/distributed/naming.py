"""The names of a model's tensors, the same on every layout, and this rank's shard of each tensor."""

from accelerate.utils import extract_model_from_parallel
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

_WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.", "_fsdp_wrapped_module.")


def parameter_names(models: list[nn.Module]) -> dict[nn.Parameter, str]:
    """Map each parameter to its name; a shared parameter to its first name."""
    names: dict[nn.Parameter, str] = {}
    for index, model in enumerate(plain(models)):
        for name, parameter in model.named_parameters():
            names.setdefault(parameter, in_plain_model(index, name))
    return names


def tensor_names(models: list[nn.Module]) -> dict[Tensor, str]:
    """Map each parameter and each buffer to its name; a shared one to its first name."""
    names: dict[Tensor, str] = {parameter: name for parameter, name in parameter_names(models).items()}  # noqa: C416
    for index, model in enumerate(plain(models)):
        for name, buffer in model.named_buffers():
            names.setdefault(buffer, in_plain_model(index, name))
    return names


def buffer_names(models: list[nn.Module]) -> set[str]:
    """Return the names of all buffers of the models."""
    named = [(i, name) for i, m in enumerate(plain(models)) for name, _ in m.named_buffers(remove_duplicate=False)]
    return {in_plain_model(index, name) for index, name in named}


def tied_names(models: list[nn.Module]) -> dict[str, str]:
    """Map each further name of a shared parameter to its first name; both as in checkpoints."""
    return {f"models.{i}.{n}": f"models.{i}.{f}" for i, m in enumerate(models) for n, f in shared_names(m).items()}


def shared_names(model: nn.Module) -> dict[str, str]:
    """Map each further name of a shared parameter of one model to its first name."""
    (model,) = plain([model])
    first: dict[nn.Parameter, str] = {}
    further: dict[str, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        name = _unwrapped(name)
        if first.setdefault(parameter, name) != name:
            further[name] = first[parameter]
    return further


def plain(models: list[nn.Module]) -> list[nn.Module]:
    """Return the models without the wrappers of DDP, FSDP and torch.compile."""
    return [extract_model_from_parallel(m, keep_fp32_wrapper=True, keep_torch_compile=False) for m in models]


def in_plain_model(index: int, name: str) -> str:
    """Return the checkpoint name of a tensor of model `index`, without the names of wrappers."""
    return f"models.{index}.{_unwrapped(name)}"


def _unwrapped(name: str) -> str:
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def local_shard(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a tensor; the whole tensor if it is not sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def local_gradient(parameter: Tensor) -> Tensor:
    """Return this rank's shard of the gradient of a parameter that has one."""
    assert parameter.grad is not None
    return local_shard(parameter.grad)
