"""Which runs are the same run: a hash of the settings that change the result, and of no others. No torch here."""

from __future__ import annotations

import hashlib
import json

from ..config import TrainConfig
from ..config_checks import unread

MEMORY = (
    "source", "stream_batch", "memory_size", "policy", "score", "adaptive_target", "admit", "at_once", "max_age",
    "refresh", "space", "memory_negatives", "queue", "memory_view", "reuse_newcomers",
    "fresh_keys", "alike",
)  # fmt: skip
"""The settings that say what the working memory is."""
LATER = ("fresh_keys", "dwell_spread", "unlabelled", "alike")
"""Settings that came when there were runs on file; off is as it was."""


def fingerprint(config: TrainConfig) -> str:
    """Ten hex digits; equal for configs that give the same result.

    Left out: how a run is carried out and watched (`TrainConfig.identity`), and settings that do nothing in this run,
    so that another default for them does not make a finished run look like another one.
    """
    idle = _idle(config)
    values = {name: value for name, value in config.identity().items() if name not in idle}
    if config.has_memory:
        values |= {"method": config.base_method, "policy": config.memory_policy}  # d-moco is moco with policy duel
    whole = {k: float(v) if type(v) is int else v for k, v in values.items()}  # 27 and 27.0 are one bias
    return hashlib.sha256(json.dumps(whole, sort_keys=True).encode()).hexdigest()[:10]


def _idle(config: TrainConfig) -> set[str]:
    """Settings that change nothing in this run."""
    idle = {"recipe", *(name for name in LATER if not getattr(config, name))}
    if config.steps is not None:
        idle.add("epochs")
    if not config.has_memory:
        idle |= set(MEMORY) - {"source"}
    else:
        idle |= unread(config.memory_policy)
        idle |= set() if config.memory_encoded else {"refresh", "memory_view"}
    if config.bias_kind == "weights":
        idle.add("bias")
    elif config.bias == 1:
        idle |= {"bias_kind", "bias_mode"}
    # for a long tail the class came later to what is hashed: the first is as it was
    if config.bias_kind == "weights" or config.bias == 1 or (config.bias_kind == "longtail" and not config.bias_class):
        idle.add("bias_class")
    return idle
