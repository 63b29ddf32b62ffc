"""Classes of optimizers: those of torch.optim by name, our own, and those of other packages by import path."""

import difflib
import importlib
import inspect
import typing
from types import ModuleType

import torch

from app.errors import UserError, did_you_mean, is_installed, not_installed
from app.training.optim.adafactor import Adafactor
from app.training.optim.adamw import AdamW8bit, LeanAdamW
from app.training.optim.muon import Muon

UNSUITABLE = {
    "LBFGS": "it evaluates the loss several times a step",
    "SparseAdam": "it takes sparse gradients only",
}


def find_class(name: str) -> type[torch.optim.Optimizer]:
    """Find the class that --optim.name gives: a name of torch.optim, or package.module.Class.

    Raises:
        UserError: there is none, it is no optimizer, or it does not suit this loop.
    """
    if is_imported(name):
        return _imported(name)
    classes = {key: value for key, value in vars(torch.optim).items() if _is_optimizer(value)}
    # torch's Muon takes matrices only, and its Adafactor whole weights.
    classes |= {each.__name__: each for each in (Muon, Adafactor, AdamW8bit)}
    if name in UNSUITABLE:
        raise UserError(f"--optim.name {name} does not work here ({UNSUITABLE[name]}): use AdamW or SGD, for example")
    usable = {key.lower(): key for key in classes if key not in UNSUITABLE}
    if name not in classes and name.lower() not in usable:
        near = difflib.get_close_matches(name.lower(), usable, cutoff=0.5)
        names = [usable[key] for key in near] or sorted(usable.values())
        raise UserError(
            f"--optim.name {name} is no optimizer of torch.optim: use {' or '.join(names)}; one of another package has "
            "an import path, such as lion_pytorch.Lion"
        )
    return classes[name] if name in classes else classes[usable[name.lower()]]


def for_updates(optimizer_class: type[torch.optim.Optimizer], updates: str) -> type[torch.optim.Optimizer]:
    """Return the class that keeps weights as --optim.updates asks, in place of one that does not.

    Raises:
        UserError: there is none.
    """
    if updates == "plain" or issubclass(optimizer_class, LeanAdamW):
        return optimizer_class
    if optimizer_class is torch.optim.AdamW:
        return LeanAdamW
    raise UserError(
        f"--optim.updates {updates} works with --optim.name AdamW and AdamW8bit, not with {optimizer_class.__name__}"
    )


def is_imported(name: str) -> bool:
    """Tell whether --optim.name is an import path, of a class that nobody has tried on all layouts."""
    return "." in name


def make(
    name: str, optimizer_class: type[torch.optim.Optimizer], parameters: list, arguments: dict[str, typing.Any]
) -> torch.optim.Optimizer:
    """Make an optimizer.

    Raises:
        UserError: a class of another package refuses the settings.
    """
    if not is_imported(name):
        return optimizer_class(parameters, **arguments)
    try:
        return optimizer_class(parameters, **arguments)
    except (TypeError, ValueError, AssertionError, NotImplementedError) as error:
        settings = ", ".join(f"{key} {value}" for key, value in arguments.items())
        raise UserError(
            f"--optim.name {name} refuses {settings} ({type(error).__name__}: {error}): change these settings, or make "
            "the optimizer in the recipe and give it to run.prepare"
        ) from None


def _is_optimizer(value: typing.Any) -> bool:
    base = torch.optim.Optimizer
    return inspect.isclass(value) and issubclass(value, base) and value is not base


def _imported(name: str) -> type[torch.optim.Optimizer]:
    if not all(part.isidentifier() for part in name.split(".")):
        raise UserError(f"--optim.name {name} is no import path: give package.module.Class, such as lion_pytorch.Lion")
    place, _, wanted = name.rpartition(".")
    module = _module(name, place)
    optimizer_class = getattr(module, wanted, None)
    if optimizer_class is None:
        classes = [key for key, value in vars(module).items() if _is_optimizer(value)]
        there = did_you_mean(wanted, classes) or (f"; it has {', '.join(classes)}" if classes else "")
        raise UserError(f"--optim.name {name}: {place} has no {wanted}{there}")
    if not _is_optimizer(optimizer_class):
        raise UserError(f"--optim.name {name} is no torch.optim.Optimizer: name a class that is one")
    needed = [
        each for each in inspect.signature(optimizer_class.step).parameters.values() if each.default is each.empty
    ]
    needed = [
        each
        for each in needed
        if each.name != "self" and each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)
    ]
    if needed or optimizer_class.__name__ in UNSUITABLE:
        why = UNSUITABLE.get(optimizer_class.__name__, "its step evaluates the loss itself, in a closure")
        raise UserError(f"--optim.name {name} does not work here ({why}): use another class")
    return optimizer_class


def _module(name: str, place: str) -> ModuleType:
    package = place.partition(".")[0]
    if not is_installed(package):
        raise UserError(f"--optim.name {name}: {not_installed(package.replace('_', '-'))}")
    try:
        return importlib.import_module(place)
    except ModuleNotFoundError as error:
        missing = str(error.name)
        inside = f"{place}.".startswith(f"{missing}.")
        why = f"{package} has no module {place}" if inside else f"{place} needs a package: {not_installed(missing)}"
        raise UserError(f"--optim.name {name}: {why}") from None
    except Exception as error:  # anything that a package does when it is imported
        raise UserError(f"--optim.name {name}: {place} does not import: {type(error).__name__}: {error}") from None
