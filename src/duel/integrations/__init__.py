"""A `WorkingMemory` where other libraries keep a FIFO queue: `lightly`, `metric_learning`, `moco`.

Each is a thin form of the class that it stands in for, loaded when it is first asked for; none of those libraries is
needed otherwise.
"""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["lightly", "metric_learning", "moco"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
