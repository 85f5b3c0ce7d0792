"""One process at a time."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

try:
    import fcntl
except ImportError:  # not on Windows: nothing is locked there
    fcntl = None  # type: ignore[assignment]


@contextmanager
def alone(path: Path) -> Iterator[bool]:
    """Whether no other process is inside this block with the same `path`, a file that exists for that time only.

    A process that dies leaves the file, but not the lock. Where the file system knows no locks, everybody is alone.
    """
    if fcntl is None:
        yield True
        return
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(file)
            yield False
            return
        except OSError:
            pass
        if _is(file, path):
            break
        os.close(file)  # whoever held it has deleted it meanwhile
    try:
        yield True
    finally:
        path.unlink(missing_ok=True)
        os.close(file)


@contextmanager
def in_turn(path: Path) -> Iterator[TextIO]:
    """The file at `path`, made if it is not there, to be read and written by one process after the other."""
    with open(os.open(path, os.O_RDWR | os.O_CREAT, 0o644), "r+") as file:
        if fcntl is not None:
            with suppress(OSError):  # a file system that knows no locks
                fcntl.flock(file, fcntl.LOCK_EX)
        yield file  # closing it writes what is written and lets the lock go


def _is(file: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file), path.stat())
    except FileNotFoundError:
        return False
