"""A working memory, and a policy that decides what it forgets.

Names are loaded when they are first used, so that `duel --help` does not wait for torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from duel import data, integrations, losses, methods, policies, recipes, scores, theory
    from duel.config import TrainConfig
    from duel.encoders import encoder
    from duel.errors import UserError
    from duel.memory import WorkingMemory
    from duel.pixels import thumbnails
    from duel.replacement import expected_duplicates, replace
    from duel.trained import evaluate, load_trained
    from duel.training import RunResult, train

__version__ = "0.1.0"

_HOME = {
    "RunResult": "duel.training",
    "TrainConfig": "duel.config",
    "UserError": "duel.errors",
    "WorkingMemory": "duel.memory",
    "encoder": "duel.encoders",
    "evaluate": "duel.trained",
    "expected_duplicates": "duel.replacement",
    "load_trained": "duel.trained",
    "replace": "duel.replacement",
    "thumbnails": "duel.pixels",
    "train": "duel.training",
}
_MODULES = ("data", "integrations", "losses", "methods", "policies", "recipes", "scores", "theory")

__all__ = [
    "RunResult",
    "TrainConfig",
    "UserError",
    "WorkingMemory",
    "data",
    "encoder",
    "evaluate",
    "expected_duplicates",
    "integrations",
    "load_trained",
    "losses",
    "methods",
    "policies",
    "recipes",
    "replace",
    "scores",
    "theory",
    "thumbnails",
    "train",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    if name in _MODULES:
        return importlib.import_module(f"duel.{name}")
    raise AttributeError(f"module 'duel' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
