"""Ctrl-C and SIGTERM as a polite request: finish the step, save, say how to go on."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, Self

TIME_LIMIT, END_OF_STREAM = "the time limit", "the end of the stream"
AT_ONCE = "at once, so that the steps since the last checkpoint are lost"


class StopWaiting(KeyboardInterrupt):
    """The request came while there was nothing to finish first."""


class StopRequest:
    """Inside the block the first SIGINT or SIGTERM sets `requested`; a second one interrupts at once.

    until: a time of `time.monotonic` after which to stop as well, or None. waiting: whether the program just waits, so
    that the first signal raises StopWaiting. Outside the main thread Python allows no handlers: signals then do what
    they did before.
    """

    def __init__(self, until: float | None = None, waiting: Callable[[], bool] = lambda: False) -> None:
        self.until, self.waiting = until, waiting
        self.name = ""
        self._asked = False
        self._before: dict[int, Any] = {}

    @property
    def requested(self) -> bool:
        if not self._asked and self.until is not None and time.monotonic() >= self.until:
            self.ask(TIME_LIMIT)
        return self._asked

    def ask(self, name: str) -> None:
        """Stop, by what `name` says."""
        self._asked, self.name = True, name

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._restore()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._asked and self.name not in (TIME_LIMIT, END_OF_STREAM):
            self._restore()
            raise KeyboardInterrupt(AT_ONCE)
        self.ask("Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name)
        if self.waiting():
            raise StopWaiting

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()
