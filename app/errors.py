"""The one kind of error that is the user's to mend."""

import importlib.util

# What to install for a module that this project imports; other modules are the user's own.
MODULES = {
    name: name
    for name in (
        *(
            "accelerate",
            "cloudpickle",
            "datasets",
            "huggingface_hub",
            "jinja2",
            "matplotlib",
            "monai",
            "nibabel",
            "numpy",
        ),
        *("numpy", "pandas", "peft", "plotly", "psutil", "pyarrow", "rich", "safetensors", "tensorboard", "tokenizers"),
        *("torch", "torchmetrics", "tqdm", "transformers", "tyro", "wandb", "xxhash"),
    )
}
MODULES |= {"PIL": "pillow", "docstring_parser": "docstring-parser", "sklearn": "scikit-learn", "yaml": "PyYAML"}
_STAND_INS = {"tensorboardX": "tensorboard"}  # what accelerate tries in the place of another


class UserError(Exception):
    """Tell the user what to change: its message names the field, the value and the fix.

    A command-line program shows it once, without a traceback, and exits with status 2.
    """


def mendable(error: BaseException | None) -> UserError | None:
    """Return what the user is to be told of an error: itself, or which package to install; None of other faults."""
    if isinstance(error, UserError):
        return error
    if isinstance(error, ModuleNotFoundError) and error.name:
        module = error.name.partition(".")[0]
        module = _STAND_INS.get(module, module)
        if module in MODULES and not is_installed(module):
            return UserError(not_installed(MODULES[module]))
    return None


def not_installed(package: str) -> str:
    """Say that a package is missing, and how to install it."""
    return f"{package} is not installed: pip install {package}"


def is_installed(module: str) -> bool:
    """Tell whether a module can be found, without importing it."""
    try:
        return importlib.util.find_spec(module) is not None
    except ValueError:  # a stand-in for it is there
        return True
