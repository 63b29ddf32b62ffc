"""Pretrained models: what to do where one cannot be had."""

from collections.abc import Iterator
from contextlib import contextmanager

from app.errors import UserError


@contextmanager
def loading(name: str) -> Iterator[None]:
    """Explain why the model that --model names cannot be loaded."""
    try:
        yield
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise UserError(
            f"--model {name} cannot be loaded: {reason} Give a folder that save_pretrained wrote, or a Hub id; without "
            f"network, fetch it elsewhere (`hf download {name} --local-dir FOLDER`) and give the folder"
        ) from error
