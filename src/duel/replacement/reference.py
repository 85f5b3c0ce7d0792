"""The paper's loop, word for word: B full evaluations of N. Slow on purpose; the oracle of every test."""

from __future__ import annotations

import torch
from torch import Tensor

from duel.replacement.units import units
from duel.scores import Score


def replace_reference(
    memory: Tensor, incoming: Tensor, total: Tensor | None, score: Score, admit: str, e: int, skip: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Algorithm 2 (`admit="always"`) or Algorithm 1 (`"compete"`). Returns slots (B,) and N in units (K,)."""
    memory = memory.clone()
    size = memory.shape[0]
    slots = []
    for b, item in enumerate(incoming):
        if skip is not None and bool(skip[b]):
            slots.append(-1)
            continue
        pool = memory if admit == "always" else torch.cat([memory, item[None]])
        j = int(_expected_duplicates(pool, score, e).argmax())  # the first of equals: the lowest slot leaves
        slots.append(j if j < size else -1)
        if j < size:
            memory[j] = item
    return torch.tensor(slots, dtype=torch.int64, device=memory.device), _expected_duplicates(memory, score, e)


def _expected_duplicates(pool: Tensor, score: Score, e: int) -> Tensor:
    h = units(score, pool, pool, e)  # Definition 1
    h.fill_diagonal_(0.0)
    return h.sum(1, dtype=torch.float64)  # Eq. 5
