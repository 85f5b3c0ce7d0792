"""Which of some vectors are unlike all others, by a threshold on their cosine: the first of those that are alike."""

from __future__ import annotations

import torch
from torch import Tensor

from .replacement.units import exact_products

PART = 256
"""Rows that are compared with each other at a time."""
ROUNDING = 1e-6
"""Of a cosine, as a share: vectors that are equal are alike by a threshold of 1, too."""
ELEMENTS = 1 << 24
"""Of a block of cosines."""


def least(alike: float) -> float:
    """The cosine, as it is computed, from which on two vectors are alike."""
    return alike * (1 - ROUNDING)


def unlike(rows: Tensor, alike: float, held: Tensor | None = None, counts: Tensor | None = None) -> Tensor:
    """bool (n,): which of these unit rows are like none that is held (m, d), nor an earlier one of which that is true.

    So of a scene that changes slowly more than one frame is among them. counts: bool (m,), which of those held there
    are to be compared with. The host does not wait for a GPU.
    """
    found = torch.empty(len(rows), dtype=torch.bool, device=rows.device)
    with exact_products(rows.device):
        for start in range(0, len(rows), PART):
            part = rows[start : start + PART]
            like = _like_any(part, rows[:start], found[:start], alike)
            if held is not None:
                like |= _like_any(part, held, counts, alike)
            found[start : start + PART] = _first_come(~like, part @ part.T >= least(alike))
    return found


def _may_wait(device: torch.device) -> bool:
    return device.type == "cpu"


def _like_any(rows: Tensor, others: Tensor, counts: Tensor | None, alike: float) -> Tensor:
    """bool (n,): whether a row is like one of the others (m, d) that counts."""
    if counts is not None and _may_wait(rows.device):
        others, counts = others[counts], None
    found = torch.zeros(len(rows), dtype=torch.bool, device=rows.device)
    size = max(1, ELEMENTS // max(1, len(rows)))
    for first in range(0, len(others), size):
        like = rows @ others[first : first + size].T >= least(alike)
        found |= (like if counts is None else like & counts[first : first + size]).any(1)
    return found


def _first_come(free: Tensor, like: Tensor) -> Tensor:
    """bool (n,): which of those that are free are like no earlier one of which that is true. like: bool (n, n).

    Each round settles one more at least, as a rule nearly all of them in a few.
    """
    earlier, most = like.tril(-1).float(), free.float() - 0.5
    found, count = free.float(), torch.empty_like(most)  # of earlier ones that are like it
    for _ in range(len(free) - 1):
        before = found.clone() if _may_wait(free.device) else None
        torch.mv(earlier, found, out=count)
        torch.lt(count, most, out=found)
        if before is not None and found.equal(before):
            break
    return found.bool()
