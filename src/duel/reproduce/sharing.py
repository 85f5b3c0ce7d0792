"""Whose time a device's time is when several processes use it at once."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..locking import in_turn


class SharedClock:
    """Runs at 1/n of the usual speed while n processes are at work: what each reads to pass is its share of the time.

    It is in a file, and for all processes that name it, whichever call started them. One that dies no longer counts.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def __call__(self) -> float:
        return self._advance()

    @contextmanager
    def at_work(self) -> Iterator[None]:
        self._advance(joining=os.getpid())
        try:
            yield
        finally:
            self._advance(leaving=os.getpid())

    def _advance(self, joining: int | None = None, leaving: int | None = None) -> float:
        with in_turn(self.path) as file:
            now = time.monotonic()
            try:  # what it shows, when that was last put right, who is at work
                shown, since, working = json.loads(file.read())
            except ValueError:  # new, or cut off by a full disk
                shown, since, working = 0.0, now, []
            working = [process for process in working if _lives(process)]
            if working:
                shown += max(0.0, now - since) / len(working)  # less than nothing has passed: the machine was restarted
            if leaving in working:  # unless the file was lost meanwhile
                working.remove(leaving)
            if joining is not None:
                working.append(joining)
            file.seek(0)
            file.truncate()
            file.write(json.dumps([shown, now, working]))
            return float(shown)


def _lives(process: int) -> bool:
    if os.name == "nt":  # where asking would end it
        return True
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # it is somebody else's
        pass
    return True
