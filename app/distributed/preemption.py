"""Where all ranks leave a run that is asked to stop: after the same step, or in the same evaluation."""

import time
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist

from app.distributed import collectives
from app.distributed.notice import Notice

_ALL_HERE = str(2**63)  # a turn that no evaluation has
_LEAVE, _GO_ON = "leave", "go on"
_REMEMBERED = 8  # steps whose time is known


class StoppedInEvaluation(BaseException):
    """Ends an evaluation and, through the recipe's loop, its run. It is not an error."""


class _Agreed(NamedTuple):
    """What ranks have agreed on after a step."""

    leave: bool
    again: bool
    """Whether they meet after the next step too."""


class Preemption:
    """Has all ranks leave at one place once one of them has heard a notice.

    While steps are short, a rank that is asked to stop names a later step after which all ranks meet, and leave. Where
    that could take too much of the time that a notice leaves, ranks meet after every step: then the step in which the
    notice comes is the last one. They meet by the rendezvous store, without a collective.
    """

    def __init__(self, device: torch.device, notice: Notice):
        """Prepare; `start` begins.

        Args:
            device: of the model.
            notice: hears what asks this rank to stop.
        """
        self._device, self._notice = device, notice
        self._events: deque[torch.Event] = deque()
        self._key, self._evaluations, self._meetings = "", 0, 0
        self._meeting: int | None = None  # the step after which ranks meet, once one of them has named it
        self._left = False
        self._since: float | None = None  # when the current step began
        self._seconds = deque[float](maxlen=_REMEMBERED)  # of the last steps

    @property
    def happened(self) -> bool:
        """Tell whether this run is asked to stop, on this rank or, as far as is known here, on another."""
        return bool(self._notice.asked) or self._left

    def start(self, step: int) -> None:
        """Begin after a step: ranks meet there at first. Every rank takes part."""
        self._key = collectives.new_key("stop")
        self._meeting = step
        self._notice.begin_steps()

    def begin(self) -> None:
        """Note that a step begins, with the loading of its data."""
        self._since = time.monotonic()

    def due(self, step: int) -> bool:
        """Tell whether a step is the last one for now. Every rank asks after each step and gets the same answer."""
        if self._since is not None:
            self._seconds.append(time.monotonic() - self._since)
        ahead = self._hold_back()
        long, coming = self._expects(ahead)
        if long or self._meeting == step:
            self._catch_up()  # the device has made this step, too
        has_time = self._notice.leaves_time_for(coming)
        if collectives.alone():
            self._left = bool(self._notice.asked)
            return self._left
        store = collectives.store()
        key = f"{self._key}/{self._meetings}"
        if self._meeting is None and (self._notice.asked or not has_time or (long and collectives.rank() == 0)):
            # No rank can finish the next step without this rank, which writes this before it takes part in that step.
            store.compare_set(key, "", str(step + 1 + ahead))
        if self._meeting is None and store.check([key]):
            self._meeting = int(store.get(key))
        if self._meeting is None or step < self._meeting:
            return False
        # Before the first step nothing is known of their time, so that ranks meet after it.
        self._left, again = self._meet(f"{key}/met", again=long or not self._seconds)
        self._meeting, self._meetings = step + 1 if again else None, self._meetings + 1
        return self._left

    def _expects(self, ahead: int) -> tuple[bool, float]:
        """Tell whether steps are so long that a notice must not wait for others than its own.

        Returns:
            Also the seconds until this rank could leave if it began another step.
        """
        slowest = max(self._seconds, default=0.0)
        without_meeting = (2 + ahead) * slowest
        long = bool(self._notice.grace) and without_meeting > self._notice.grace / 4
        return long, slowest if long or collectives.alone() else without_meeting

    def _meet(self, key: str, again: bool) -> _Agreed:
        """Wait for all ranks, and agree with them: they leave if one is asked to stop before all are here.

        Args:
            again: whether to meet after the next step too, which the main process decides.
        """
        store = collectives.store()
        if collectives.rank() == 0:
            store.set(f"{key}/again", "again" if again else "")
        if self._notice.asked:
            store.compare_set(key, "", _LEAVE)
        if store.add(f"{key}/here", 1) == dist.get_world_size():
            store.compare_set(key, "", _GO_ON)
        while not store.check([key]):
            if self._notice.asked:
                store.compare_set(key, "", _LEAVE)
            time.sleep(0.002)
        if store.get(key).decode() == _LEAVE:
            return _Agreed(True, False)
        return _Agreed(False, bool(store.get(f"{key}/again")))

    def turns(self, count: int, together: bool) -> Iterator[int]:
        """Yield the turns of an evaluation. Every rank takes part, with the same `count`.

        Args:
            together: ranks need each other in each turn, as under FSDP, so all must make the same number of turns.

        Raises:
            StoppedInEvaluation: a rank was asked to stop. Raised on all ranks: no rank must wait for one that has left.
        """
        if not self._key:  # before the first step
            yield from range(count)
            return
        self._evaluations += 1
        began = time.monotonic()
        try:
            if collectives.alone():
                yield from self._turns_alone(count)
            else:
                yield from self._turns_of_ranks(count, together, f"{self._key}/evaluation/{self._evaluations}")
        finally:
            if self._since is not None:  # a run may leave in it, so it is no part of a step's time
                self._since += time.monotonic() - began

    def _turns_alone(self, count: int) -> Iterator[int]:
        for turn in range(count):
            self._hold_back()
            if self._notice.asked:
                raise StoppedInEvaluation
            yield turn

    def _turns_of_ranks(self, count: int, together: bool, key: str) -> Iterator[int]:
        """Yield the turns up to the one that the store names under `key`."""
        store = collectives.store()
        for turn in range(count):
            ahead = self._hold_back()
            if self._notice.asked:
                # If together: a turn that no rank can have begun.
                store.compare_set(key, "", str(turn + 1 + ahead) if together else "0")
            if store.check([key]) and turn >= int(store.get(key)):
                raise StoppedInEvaluation
            yield turn
        # All ranks meet here, so that all see the same: either every rank came, or one was asked before.
        if store.add(f"{key}/here", 1) == dist.get_world_size():
            store.compare_set(key, "", _ALL_HERE)
        while not store.check([key]):
            if self._notice.asked:
                store.compare_set(key, "", str(count) if together else "0")
            time.sleep(0.002)
        if store.get(key).decode() != _ALL_HERE:
            raise StoppedInEvaluation

    def _hold_back(self) -> int:
        """Keep the host at most two steps ahead of its device; return how many steps ahead it can be."""
        if self._device.type == "cpu":
            return 0
        event = torch.Event(self._device)
        event.record()
        self._events.append(event)
        if len(self._events) > 2:
            self._events.popleft().synchronize()
        return 2

    def _catch_up(self) -> None:
        """Wait until the device has done all that the host has asked for."""
        while self._events:
            self._events.popleft().synchronize()
