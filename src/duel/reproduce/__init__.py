"""The paper's tables and figures from our code, beside the paper's own numbers; see `docs/results.md`."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .runner import Done, reproduce

__all__ = ["Done", "reproduce"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.runner"), name)
