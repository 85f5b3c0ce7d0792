"""The turns of a batch on the CPU: one newcomer after the other takes the place of the item with the largest N.

By NumPy, and compiled where numba is installed (`pip install 'duel-ssl[fast]'`), as soon as NumPy has taken as long as
loading it does. Both give the same numbers: N and h are whole, so that their sums do not depend on the order.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import numpy as np

#: Seconds that turns may take by NumPy before numba is loaded, which takes about so many: it never costs more than it
#: has yet to give.
PATIENCE = 2.0

_waited = 0.0


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
    global _waited
    n, h, rows, at, occupant, position, evicted, level = arrays
    began, count = time.perf_counter(), len(h)
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
            count = b
            break
        position[b], evicted[b], level[b] = p, gone, highest
        n += h[b]
        if gone < count:
            n -= h[gone]
        else:
            # a column of what is known: computed anew, it could break a tie of two by its last bit
            arriving -= h[:, gone]
            residents -= rows[row]
        occupant[p] = b
    _waited += time.perf_counter() - began
    return count


def _by_loops(arrays: Arrays, compete: bool, first: int) -> int:
    """The same without a temporary array, to be compiled."""
    n, h, rows, at, occupant, position, evicted, level = arrays
    count: int = h.shape[0]
    slots = occupant.size
    if first < 0:
        for b in range(count):
            seen = n[b]
            for item in range(count, n.size):
                seen += h[b, item]
            n[b] = seen
    for b in range(max(first, 0), count):
        p, highest = 0, -np.inf
        for slot in range(slots):
            value = n[occupant[slot]]
            if compete:
                value += h[b, occupant[slot]]
            if value > highest:
                p, highest = slot, value
        if compete and n[b] > highest:
            position[b], evicted[b], level[b] = -1, b, n[b]
            continue
        gone = occupant[p]
        row = at[gone - count] if gone >= count else 0
        if row < 0:
            return b
        position[b], evicted[b], level[b] = p, gone, highest
        # first the one, then the other: the difference of two h would be rounded to their dtype
        if gone < count:
            for item in range(n.size):
                n[item] = (n[item] + h[b, item]) - h[gone, item]
        else:
            for item in range(count):
                n[item] = (n[item] + h[b, item]) - h[item, gone]
            for item in range(slots):
                n[count + item] = (n[count + item] + h[b, count + item]) - rows[row, item]
        occupant[p] = b
    return count


def fastest() -> Turns:
    return compiled() if _waited >= PATIENCE else by_numpy


def at_once() -> None:
    """No patience any more: what is measured is a long training's."""
    global _waited
    _waited = PATIENCE


@functools.cache
def compiled() -> Turns:
    """Machine code; `by_numpy` where numba is not installed or switched off."""
    try:
        import numba
    except ImportError:  # which it raises, too, where it does not know this NumPy yet
        return by_numpy
    if numba.config.DISABLE_JIT:
        return by_numpy
    free = {"reassoc"}  # the order of sums is the compiler's choice
    try:
        loops: Turns = numba.njit(cache=True, fastmath=free)(_by_loops)
    except RuntimeError:  # nowhere to keep what was compiled
        loops = numba.njit(fastmath=free)(_by_loops)
    return loops
