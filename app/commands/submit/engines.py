"""The schedulers by name, and which options are for which."""

from typing import TYPE_CHECKING

from app.commands.submit.engine import Engine
from app.commands.submit.kubernetes import Kubernetes
from app.commands.submit.skypilot import SkyPilot
from app.commands.submit.slurm import Slurm
from app.errors import UserError

if TYPE_CHECKING:
    from app.commands.submit.command import Options

BY_NAME: dict[str, Engine] = {"slurm": Slurm(), "kubernetes": Kubernetes(), "skypilot": SkyPilot()}


def check_options(engine: Engine, options: "Options") -> None:
    """Refuse options that are for another engine, which would do nothing.

    Raises:
        UserError: there is one.
    """
    default = type(options)(options.engine, options.recipe)
    for name, other in BY_NAME.items():
        for option in other.options:
            if option not in engine.options and getattr(options, option) != getattr(default, option):
                raise UserError(f"--{option} is for {name}: leave it out")
