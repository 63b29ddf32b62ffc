"""Models without contents, on torch's meta device: for plans, and where another process has the contents."""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from app.config.needs import EVERYTHING, Needs

M = TypeVar("M")


def made_where_needed(build: Callable[..., M]) -> Callable[..., M]:
    """Have a function that makes a model make it without contents for a plan, and once for all ranks if it is large.

    So a plan of a model that this machine could not hold takes no memory. The function gets another argument, `needs`:
    what the run needs, `run.needs`.
    """

    @functools.wraps(build)
    def made(*args: Any, needs: Needs = EVERYTHING, **named: Any) -> M:
        import torch

        from app.distributed import made_once

        def shapes() -> M:
            with torch.device("meta"):
                return build(*args, **named)

        if not needs.weights:
            return shapes()
        return made_once.make(lambda: build(*args, **named), shapes)  # type: ignore[type-var]  # it is a module

    return made


def load_shapes(kind: type[Any], name: str, settings: dict[str, Any]) -> Any:
    """Make the model that `from_pretrained` would load, without contents.

    Args:
        kind: the class of transformers that loads it, such as AutoModelForCausalLM.
        settings: for `from_pretrained`.
    """
    import torch
    from transformers import AutoConfig

    config_settings = {key: value for key, value in settings.items() if key not in ("dtype", "ignore_mismatched_sizes")}
    with torch.device("meta"):
        return kind.from_config(
            AutoConfig.from_pretrained(name, trust_remote_code=False, **config_settings), dtype=settings["dtype"]
        )
