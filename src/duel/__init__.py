"""A working memory, and a policy that decides what it forgets.

Names are loaded when they are first used, so that `duel --help` does not wait for torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from duel import policies, scores
    from duel.errors import UserError
    from duel.memory import WorkingMemory
    from duel.replacement import expected_duplicates, replace

__version__ = "0.1.0"

_HOME = {
    "UserError": "duel.errors",
    "WorkingMemory": "duel.memory",
    "expected_duplicates": "duel.replacement",
    "replace": "duel.replacement",
}
_MODULES = ("policies", "scores")

__all__ = ["UserError", "WorkingMemory", "expected_duplicates", "policies", "replace", "scores"]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    if name in _MODULES:
        return importlib.import_module(f"duel.{name}")
    raise AttributeError(f"module 'duel' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
