"""Whose time a device's time is when several processes use it at once."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.context import BaseContext


class SharedClock:
    """Runs at 1/n of the usual speed while n processes are at work: what each reads to pass is its share of the time.

    For processes that are given it when they start.
    """

    def __init__(self, context: BaseContext) -> None:
        self._state = context.Array("d", 3)  # what it shows, when that was last put right, how many are at work

    def __call__(self) -> float:
        return self._advance(0)

    @contextmanager
    def at_work(self) -> Iterator[None]:
        self._advance(1)
        try:
            yield
        finally:
            self._advance(-1)

    def _advance(self, joining: int) -> float:
        with self._state.get_lock():
            shown, since, working = self._state[:]
            now = time.monotonic()
            if working:
                shown += (now - since) / working
            self._state[:] = [shown, now, working + joining]
            return float(shown)
