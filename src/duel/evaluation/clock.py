"""How long an evaluation takes, and which part of it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class Clock:
    """Seconds since it was made, in all and of named parts.

    A part that ends by reading its result counts what a GPU did for it.
    """

    def __init__(self) -> None:
        self.began, self.parts = time.perf_counter(), dict[str, float]()

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.parts[name] = self.parts.get(name, 0.0) + time.perf_counter() - began

    def read(self) -> dict[str, Any]:
        """`seconds`, and of these `seconds_by_part` with the rest, for the JSON."""
        total = time.perf_counter() - self.began
        parts = {**self.parts, "rest": total - sum(self.parts.values())}
        return {"seconds": round(total, 3), "seconds_by_part": {name: round(value, 3) for name, value in parts.items()}}
