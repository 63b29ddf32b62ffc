"""Writing a checkpoint in a thread, while training goes on."""

import threading
from collections.abc import Callable
from concurrent.futures import Future

import torch

from app.checkpoints.store import SaveOutcome


class BackgroundSave:
    """A checkpoint that is being written in a thread."""

    def __init__(self, step: int, step_scores: dict[str, float], save: Callable[[], SaveOutcome], device: torch.device):
        """Begin to write.

        Args:
            step_scores: the scores that were measured at this step.
            device: of this process.
        """
        self.step, self.step_scores = step, step_scores
        self._outcome: Future[SaveOutcome] = Future()

        def run() -> None:
            try:
                if device.type == "cuda":
                    torch.cuda.set_device(device)  # a new thread begins on the first GPU
                self._outcome.set_result(save())
            except BaseException as error:
                self._outcome.set_exception(error)

        # A daemon, so that Ctrl-C does not wait for a write.
        self._thread = threading.Thread(target=run, name="saving", daemon=True)
        self._thread.start()

    def over(self) -> bool:
        """Tell whether it has ended in a way that lets the run go on; does not wait."""
        return self._outcome.done() and not self._outcome.exception() and not self._outcome.result().lasting

    def join(self) -> None:
        """Wait until the thread has ended.

        Its result is not enough: the thread frees the copies after that, and torch's C++ aborts a thread that is still
        running there when the interpreter ends (CPython 3.11).
        """
        self._thread.join()

    def outcome(self) -> SaveOutcome:
        """Return how it ended, once it was joined; a fault of the program is raised."""
        return self._outcome.result()
