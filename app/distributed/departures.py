"""Where a rank leaves the order of collectives that all ranks have kept so far, it asks the others before it goes on.

They may leave it alike, and ask too. Or they went on, and wait in a collective that this rank will not join; so a
thread on each of them answers. All of it goes through the rendezvous store, and costs nothing while nobody asks.
"""

import os
import sys
import threading
import time
from collections.abc import Callable, Sequence

import torch.distributed as dist

from app.distributed import collectives
from app.distributed.watchdog import note_in_time

_EVERY, _PATIENCE = 0.5, 20.0  # seconds: between two looks; for a rank to notice that another one has left


class Departures:
    """Asks other ranks what they come to next, and answers them."""

    def __init__(self, verdict_on: Callable[[Sequence[str]], str], failed: Callable[[str], None]):
        """Begin to answer. Every rank takes part, at the same point.

        Args:
            verdict_on: says what is wrong with what the ranks come to next; empty if nothing is.
            failed: notes, on the main process, why the run ends.
        """
        self.verdict = ""
        """What is wrong, where ranks have come to different calls while this one went on."""
        self._verdict_on, self._failed = verdict_on, failed
        self._key, self._last = collectives.new_key("order"), ""
        self._at: tuple[int, list[str]] = (0, [])  # micro-batches begun; calls in this one that it has gone on to
        self._closed = threading.Event()
        # A connection of its own, as another thread may be waiting on the shared one.
        store = collectives.store().clone()  # type: ignore[attr-defined]  # torch's stub lacks it
        self._thread = threading.Thread(target=self._answer, args=(store,), name="departures", daemon=True)
        self._thread.start()

    def begin(self) -> None:
        """Begin a micro-batch."""
        self._at = (self._at[0] + 1, [])

    def passes(self, call: str) -> None:
        """Note that this rank goes on to a call."""
        self._at[1].append(call)

    def ask(self, call: str) -> Sequence[str]:
        """Return what each rank comes to next, by rank.

        Args:
            call: what this one does.
        """
        turn, calls = self._at
        place, store = f"{self._key}/{turn}/{len(calls)}", collectives.store()
        store.set(f"{place}/{collectives.rank()}", call)
        store.set(self._key, place)
        keys, pause = _keys(place), 0.001
        while not store.check(keys):  # the store's own wait would complain of its time limit, and heed no signal
            time.sleep(pause)
            pause = min(2 * pause, 0.1)
        call_by_rank = _read(store, keys)
        if self._last:  # all ranks have read what they asked before
            store.delete_key(f"{self._last}/{collectives.rank()}")
        self._last = place
        return call_by_rank

    def close(self) -> None:
        """Stop answering."""
        self._closed.set()
        self._thread.join(5)  # one that asks the store while the interpreter ends aborts the process

    def _answer(self, store: dist.Store) -> None:
        try:
            while not self._closed.wait(_EVERY):
                if self._look(store):
                    self._end_if_stuck()
                    return
        except RuntimeError:
            pass  # the store is gone with its launcher

    def _look(self, store: dist.Store) -> bool:
        """Answer a rank that asks, if this one has gone on from there; tell whether they come to different calls."""
        if not store.check([self._key]):
            return False
        place = store.get(self._key).decode()
        call = self._passed(*map(int, place.split("/")[-2:]))
        if not call:  # this rank is not there yet, or it will ask itself
            return False
        store.compare_set(f"{place}/{collectives.rank()}", "", call)
        keys = _keys(place)
        if store.check(keys):
            self.verdict = self._verdict_on(_read(store, keys))
        return bool(self.verdict)

    def _passed(self, turn: int, place: int) -> str:
        begun, calls = self._at
        if begun == turn and len(calls) > place:
            return calls[place]
        return "goes on to the next micro-batch" if begun > turn else ""

    def _end_if_stuck(self) -> None:
        """End this process if it does not notice by itself, as a GPU's collectives do not, that another has left."""
        if self._closed.wait(_PATIENCE):
            return
        note_in_time(self._failed, self.verdict)
        if collectives.rank() == 0:
            print(f"error: {self.verdict}", file=sys.stderr, flush=True)
        os._exit(2)


def _keys(place: str) -> list[str]:
    return [f"{place}/{rank}" for rank in range(dist.get_world_size())]


def _read(store: dist.Store, keys: list[str]) -> list[str]:
    return [value.decode() for value in store.multi_get(keys)]
