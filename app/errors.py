"""The error that a user can fix."""

import difflib
import importlib.util
import re
from collections.abc import Iterable
from typing import Any

# The package to install for each module that this project imports; other modules are the user's own.
_OF_THE_SAME_NAME = """
    accelerate bitsandbytes cloudpickle datasets huggingface_hub jinja2 matplotlib monai nibabel numpy pandas
    obstore peft plotly psutil pyarrow rich sacrebleu safetensors tensorboard tokenizers torch torchmetrics tqdm
    transformers tyro wandb xxhash zstandard
"""
MODULES = {name: name for name in _OF_THE_SAME_NAME.split()}
MODULES |= {"PIL": "pillow", "docstring_parser": "docstring-parser", "sklearn": "scikit-learn", "yaml": "PyYAML"}
_STAND_INS = {"tensorboardX": "tensorboard"}  # modules that accelerate tries in place of others
_CUT_URL = re.compile(r"\b(s3|gs|az|hf|https?):/(?=[^/\s])")


class UserError(Exception):
    """A mistake that the user can fix; the message names the field, the value and the fix.

    A command-line program shows it once, without a traceback, and exits with status 2.
    """

    def __init__(self, *words: Any):
        super().__init__(*(whole_urls(word) if isinstance(word, str) else word for word in words))


def whole_urls(text: str) -> str:
    """Give URLs in a text back the slash that a `Path` takes from them; see app/storage/addresses.py."""
    return _CUT_URL.sub(r"\1://", text)


def printable(text: str, also: str = "") -> str:
    r"""Return a text in which all that a terminal would act on, or not show, is written out, as \x1b is.

    Texts that come from files, names of files included, go through here before they are shown.

    Args:
        also: characters that may stay, such as the ends of lines.
    """
    return "".join(
        each if each.isprintable() or each in also else each.encode("unicode_escape").decode("ascii") for each in text
    )


def mendable(error: BaseException | None) -> UserError | None:
    """Return the UserError to show for an error: itself, or which package to install; None for other faults."""
    if isinstance(error, UserError):
        return error
    if isinstance(error, ModuleNotFoundError) and error.name:
        module = error.name.partition(".")[0]
        module = _STAND_INS.get(module, module)
        if module in MODULES and not is_installed(module):
            return UserError(not_installed(MODULES[module]))
    return None


def not_installed(package: str) -> str:
    """Return a message that a package is missing, with the command that installs it."""
    return f"{package} is not installed: pip install {package}"


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return a clause that ends a message with the known word that is most like another; empty if none is."""
    near = difflib.get_close_matches(word, list(known), 1)
    return f"; did you mean {near[0]}?" if near else ""


def is_installed(module: str) -> bool:
    """Tell whether a module can be found, without importing it."""
    try:
        return importlib.util.find_spec(module) is not None
    except ValueError:  # it is imported already, and has no __spec__
        return True
