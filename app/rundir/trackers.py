"""Experiment trackers: those that accelerate knows get the numbers of metrics.jsonl as well."""

import math
import netrc
import os
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from app import storage
from app.config import flatten
from app.errors import UserError, did_you_mean, mendable
from app.rundir.images import Images


def check_names(names: tuple[str, ...]) -> None:
    """Refuse trackers that accelerate does not know.

    Raises:
        UserError: there is one.
    """
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS

    for name in names:
        if name not in LOGGER_TYPE_TO_CLASS:
            available = sorted(LOGGER_TYPE_TO_CLASS)
            meant = did_you_mean(name, available)
            raise UserError(f"--run.trackers {name}: accelerate knows {', '.join(available)}{meant}")


class Trackers:
    """The trackers of one run, on the main process. One that fails costs a warning and never ends the training."""

    def __init__(self, names: tuple[str, ...], folder: Path, ids: dict[str, str], warn: Callable[[str], Any]):
        """Remember what to start.

        Args:
            names: of the trackers, as accelerate names them.
            ids: the ids under which trackers know this run from an earlier launch; new ones are added.
        """
        self.names, self.folder, self.ids, self.warn = names, folder, ids, warn
        self.trackers: dict[str, Any] = {}

    def start(self, config: dict, resumed_from: int) -> None:
        """Start each tracker; a resumed run goes on under its earlier id."""
        from accelerate.tracking import LOGGER_TYPE_TO_CLASS

        for name in self.names:
            try:
                self.trackers[name] = self._start(name, LOGGER_TYPE_TO_CLASS[name], config, resumed_from)
            except Exception as error:
                why = mendable(error) or f"{type(error).__name__}: {error}"
                self.warn(f"warning: tracker {name} did not start and is left out: {why}")

    def _start(self, name: str, kind: Any, config: dict, resumed_from: int) -> Any:
        project = self.folder.parent.name if name == "wandb" else self.folder.name
        options: dict[str, Any] = {}
        if name == "wandb":
            options = _wandb_options(self.folder, self.ids)
        if name == "tensorboard":
            options = {"purge_step": resumed_from + 1}
        # What they write on the way to a store is staged on this machine, and goes up when they are closed.
        where = (str(storage.at(self.folder).local(name)),) if kind.requires_logging_directory else ()
        tracker = kind("" if name == "tensorboard" else project, *where, **options)
        tracker.start()
        if not resumed_from:
            # Trackers differ in which types they take; all take these.
            plain = {k: v if isinstance(v, int | float | str) else str(v) for k, v in flatten(config).items()}
            tracker.store_init_configuration(plain)
        return tracker

    def log(self, step: int, values: dict[str, Any]) -> None:
        """Send numbers of one step to every tracker; those that are not finite are left out, as not all take them."""
        numbers = {k: value for k, value in values.items() if isinstance(value, int | float) and math.isfinite(value)}
        self._each(lambda tracker: tracker.log(numbers, step=step))

    def log_images(self, step: int, images: Images) -> None:
        """Send pictures of one step to every tracker that takes pictures."""
        # tensorboard takes no lists, and must be told that channels come last; accelerate passes on what it gets.
        stacked = {name: np.stack(arrays) for name, arrays in images.items()}

        def send(tracker: Any) -> None:
            if hasattr(tracker, "log_images"):
                options = {"dataformats": "NHWC"} if tracker.name == "tensorboard" else {}
                tracker.log_images(stacked, step=step, **options)

        self._each(send)

    def log_model(self, model: Path) -> None:
        """Hand a model's folder to wandb, as an artifact of this run."""

        def send(tracker: Any) -> None:
            if tracker.name == "wandb":
                import wandb

                artifact = wandb.Artifact(f"{self.folder.name}-model", "model")
                artifact.add_dir(str(storage.at(model).down()))
                tracker.tracker.log_artifact(artifact)

        self._each(send)

    def _each(self, send: Callable[[Any], Any]) -> None:
        for name in list(self.trackers):
            try:
                send(self.trackers[name])
            except Exception as error:
                self.warn(f"warning: tracker {name} failed and is left out from here: {type(error).__name__}: {error}")
                del self.trackers[name]

    def finish(self) -> None:
        """Close every tracker."""
        for name, tracker in self.trackers.items():
            try:
                tracker.finish()
                self._keep(name)
            except Exception as error:
                self.warn(f"warning: tracker {name} did not close: {type(error).__name__}: {error}")
        self.trackers = {}

    def _keep(self, name: str) -> None:
        """Have a tracker's files kept that are staged on the way to a store."""
        files = storage.at(self.folder)
        if files.is_remote:
            for entry in files.files(name):
                files.up(entry.name)


def _wandb_options(folder: Path, ids: dict[str, str]) -> dict[str, Any]:
    """Choose one id for the whole run; work offline unless the user is logged in or says otherwise."""
    import wandb

    ids.setdefault("wandb", secrets.token_hex(4))
    place = storage.at(folder).local()
    storage.at(place).make()
    options: dict[str, Any] = {"id": ids["wandb"], "name": folder.name, "dir": str(place)}
    if "WANDB_MODE" not in os.environ:
        options["mode"] = "online" if _logged_in() else "offline"
    if options.get("mode", os.environ.get("WANDB_MODE")) == "online":
        options["resume"] = "allow"
    else:
        options["settings"] = wandb.Settings(silent=True)
    return options


def _logged_in() -> bool:
    """Tell whether wandb has a key for its server, without asking the user or the server."""
    import wandb

    if os.environ.get("WANDB_API_KEY"):
        return True
    host = urlsplit(os.environ.get("WANDB_BASE_URL") or wandb.Settings().base_url).hostname or ""
    try:
        return netrc.netrc(os.environ.get("NETRC")).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False
