"""The turns of a batch on the CPU: one newcomer after the other takes the place of the item with the largest N.

Compiled (turns.c) where a C compiler was found at installation, by NumPy elsewhere. Both give the same numbers: N and h
are whole, so that their sums do not depend on the order.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np

from duel import compiled

Arrays = tuple[Any, ...]
"""(n, h, rows, at, occupant, position, evicted, level) of a batch, items numbered as in `dense.Batch`.

n: float64 (B + m,), N of all items; of newcomers at the first call without what they see of the m residents. h: (B, B +
m), of newcomers and items, whole numbers. rows: (r, m), h of some residents against all. at: int64 (m,), where in rows
that of each resident is, -1 if it is missing. occupant: int64 (m,), the item in each slot. position, evicted: int64
(B,), level: float64 (B,): for each newcomer the slot it took, the item that left (itself, and slot -1, if it was turned
away) and that item's N then. All but h, rows and at are written to.
"""

Turns = Callable[[Arrays, bool, int], int]
"""(arrays, compete, first): place newcomers from `first` on (-1: it is the first call), until one puts out a resident
whose row is missing. Returns that newcomer, who has not been placed, or B if all have been."""


def by_numpy(arrays: Arrays, compete: bool, first: int) -> int:
    """Takes twice as long where h is not float64 like n."""
    n, h, rows, at, occupant, position, evicted, level = arrays
    count = len(h)
    arriving, residents = n[:count], n[count:]
    if first < 0:
        arriving += h[:, count:].sum(1, dtype=np.float64)
    for b in range(max(first, 0), count):
        values = n[occupant]
        if compete:
            values += h[b, occupant]
        p = values.argmax()
        gone, highest = occupant.item(p), values[p]
        if compete and n[b] > highest:
            position[b], evicted[b], level[b] = -1, b, n[b]
            continue
        row = at.item(gone - count) if gone >= count else 0
        if row < 0:
            return b
        position[b], evicted[b], level[b] = p, gone, highest
        n += h[b]
        if gone < count:
            n -= h[gone]
        else:
            # a column of what is known: computed anew, it could break a tie of two by its last bit
            arriving -= h[:, gone]
            residents -= rows[row]
        occupant[p] = b
    return count


#: What an array hands out only if it lies in one piece. NumPy's own pointers take as long as half the turns.
_start = (ctypes.c_char * 0).from_buffer


def by_c(arrays: Arrays, compete: bool, first: int) -> int:
    """Where there is a `compiled.library`."""
    n, h, rows, *others = arrays
    run = compiled.library().turns_float32 if h.dtype == np.float32 else compiled.library().turns_float64
    h, rows = np.ascontiguousarray(h), np.ascontiguousarray(rows, h.dtype)
    pointers = [ctypes.byref(_start(array)) for array in (n, h, rows, *others)]
    done: int = run(*pointers, len(h), rows.shape[1], compete, first)
    return done


def fastest() -> Turns:
    return by_numpy if compiled.library() is None else by_c
