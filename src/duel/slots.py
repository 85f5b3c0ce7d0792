"""Slots of a memory, without a host read: those with the highest value; and, where several newcomers name one, who was
first there and who is there in the end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from duel import compiled

#: What PyTorch copies by index on every device.
_COMMON = {
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.bfloat16, torch.float16, torch.float32, torch.float64),
}


def last_newcomer(slots: Tensor, size: int) -> Tensor:
    """int64 (size,): the last newcomer b with slots[b] == slot, -1 where there is none. slots (B,), -1 = nowhere."""
    order = torch.arange(slots.shape[0], device=slots.device)
    none = torch.full((size,), -1, dtype=torch.int64, device=slots.device)
    return none.scatter_reduce_(0, slots.clamp(min=0), torch.where(slots >= 0, order, -1), "amax")


def occupied(slots: Tensor, size: int) -> tuple[Any, Any]:
    """On the CPU: the slots that newcomers are in, int64 (n,), all different, and the last newcomer of each."""
    last = np.zeros(size + 1, np.int64)  # the newcomer's number, from 1 on; one place more, which -1 names
    last[slots.numpy()] = np.arange(1, slots.shape[0] + 1)  # the last of several is what stays
    (taken,) = last[:size].nonzero()
    return taken, last[taken] - 1


def put_rows(target: Tensor, at: Any, rows: Tensor, which: Any) -> None:
    """On the CPU: `target[at] = rows[which]`, of one dtype, by NumPy: torch takes several times as long."""
    if target.is_complex():  # which may be held as its conjugate
        target.index_copy_(0, torch.from_numpy(at), rows.index_select(0, torch.from_numpy(which)))
        return
    _array(target)[at] = _array(rows)[which]
    increment_version(target)  # so that autograd notices, should it still need what was there


def put_newcomers(slots: Tensor, rows: Sequence[tuple[Tensor, Tensor]]) -> None:
    """On the CPU: `target[slots] = values` for all (target, values) of one dtype; of several in a slot the last stays,
    -1 is nowhere."""
    library, slots, found = compiled.library(), slots.contiguous(), None
    for target, values in rows:
        values = values if values.dim() == 1 else values.contiguous()
        if library is None or not _plain(target, values):
            at, last = found = found or occupied(slots, len(target))
            put_rows(target, at, values, last)
            continue
        size, step = target.nbytes // len(target), values.stride(0) * values.itemsize
        given = (target.data_ptr(), len(target), values.data_ptr(), slots.data_ptr(), len(slots), size, step)
        if library.put_rows(*given):
            raise IndexError(f"slots must be below {len(target)}, or -1, got {slots.tolist()}")
        increment_version(target)


def _plain(target: Tensor, values: Tensor) -> bool:
    """Whether rows can be copied as they lie: nothing was put off, and no row is overwritten before it is read."""
    if not target.is_contiguous() or values.is_neg() or values.is_conj():
        return False
    here, there = target.data_ptr(), values.data_ptr()
    return here + target.nbytes <= there or there + values.nbytes <= here


def _array(rows: Tensor) -> Any:
    """For NumPy; of a dtype that it does not know, the bits."""
    rows = rows.detach()
    rows = rows.view(torch.int16) if rows.dtype == torch.bfloat16 else bits(rows)
    return rows.resolve_neg().numpy() if rows.is_neg() else rows.numpy()  # negated where that was put off


def bits(rows: Tensor) -> Tensor:
    """Rows of a dtype that PyTorch does not copy by index everywhere, as whole numbers of their bits."""
    if rows.is_complex() or rows.dtype in _COMMON:
        return rows
    return rows.detach().view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[rows.itemsize])


def first_newcomer(slots: Tensor, size: int) -> Tensor:
    """The same for the first newcomer; B where there is none."""
    count = slots.shape[0]
    order = torch.arange(count, device=slots.device)
    none = torch.full((size,), count, dtype=torch.int64, device=slots.device)
    return none.scatter_reduce_(0, slots.clamp(min=0), torch.where(slots >= 0, order, count), "amin")


def turns(present: Tensor) -> Tensor:
    """int64 (B,), all different: the i-th newcomer that takes part has turn i; those that do not come after them."""
    return torch.where(present, present.cumsum(0) - 1, present.sum() + (~present).cumsum(0) - 1)


def seats(stays: Tensor, size: int) -> Tensor:
    """int64 (B,): the slots of newcomers that stay, -1 for the others.

    stays: bool (size + B,), of residents, then newcomers; `size` in all. Newcomers take the slots of residents that
    leave, in order, lowest first.
    """
    leaving = torch.sort(stays[:size].to(torch.int8), stable=True).indices  # those that leave come first
    new = stays[size:]
    return torch.where(new, leaving[turns(new).clamp(max=size - 1)], -1)


def lowest_stay(rank: Tensor, size: int) -> Tensor:
    """int64 (B,): the slots of newcomers, -1 for the others, where those of lowest rank stay, ties to the first.

    rank: (size + B,), of residents, then newcomers.
    """
    lowest = torch.sort(rank, stable=True).indices
    stays = torch.zeros_like(rank, dtype=torch.bool)
    return seats(stays.scatter_(0, lowest, torch.arange(len(rank), device=rank.device) < size), size)


def again(names: Tensor, absent: Tensor) -> Tensor:
    """bool (n,): which int64 names have come before in the order given; those that are `absent` come last."""
    order = torch.sort(absent.to(torch.int8), stable=True).indices
    order = order[torch.sort(names[order], stable=True).indices]
    return torch.zeros_like(absent).scatter_(0, order[1:], names[order[1:]] == names[order[:-1]])


def put(rows: Tensor, slots: Tensor, values: Tensor) -> Tensor:
    """A copy of rows with `values` in `slots` (-1: nowhere); where a slot is named twice the last one stays."""
    if not len(slots):
        return rows.clone()
    last = last_newcomer(slots, rows.shape[0])
    return torch.where((last >= 0)[:, None], values[last.clamp(min=0)], rows)


def highest(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The places of the `count` largest, int64 (count,), in ascending order, and int32 (n,), 1 at them.

    Of equal values the first are taken: of items that are all alike it is the one in the first slot that leaves.
    """
    least = values.topk(count, sorted=False).values.min()
    above, tied = values > least, values == least
    inside = (above | (tied & (tied.cumsum(0) <= count - above.sum()))).int()
    rank = torch.where(inside > 0, inside.cumsum(0) - 1, count)
    places = torch.zeros(count + 1, dtype=torch.int64, device=values.device)  # of NaNs any, but such as there are
    places.scatter_(0, rank, torch.arange(values.shape[0], device=values.device))  # all others land in the last one
    return places[:count], inside
