"""Several newcomers may name one slot. Who was first there, and who is there in the end, without a host read."""

from __future__ import annotations

import torch
from torch import Tensor


def last_newcomer(slots: Tensor, size: int) -> Tensor:
    """int64 (size,): the last newcomer b with slots[b] == slot, -1 where there is none. slots (B,), -1 = nowhere."""
    order = torch.arange(slots.shape[0], device=slots.device)
    none = torch.full((size,), -1, dtype=torch.int64, device=slots.device)
    return none.scatter_reduce_(0, slots.clamp(min=0), torch.where(slots >= 0, order, -1), "amax")


def first_newcomer(slots: Tensor, size: int) -> Tensor:
    """The same for the first newcomer; B where there is none."""
    count = slots.shape[0]
    order = torch.arange(count, device=slots.device)
    none = torch.full((size,), count, dtype=torch.int64, device=slots.device)
    return none.scatter_reduce_(0, slots.clamp(min=0), torch.where(slots >= 0, order, count), "amin")


def turns(present: Tensor) -> Tensor:
    """int64 (B,), all different: the i-th newcomer that takes part has turn i; those that do not come after them."""
    return torch.where(present, present.cumsum(0) - 1, present.sum() + (~present).cumsum(0) - 1)


def put(rows: Tensor, slots: Tensor, values: Tensor) -> Tensor:
    """A copy of rows with `values` in `slots` (-1: nowhere); where a slot is named twice the last one stays."""
    last = last_newcomer(slots, rows.shape[0])
    return torch.where((last >= 0)[:, None], values[last.clamp(min=0)], rows)
