# mypy: ignore-errors
"""The Triton kernel behind MinRed on a GPU. Imported only where Triton is."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def turns_kernel(pairs, stay, before, skip, places, levels, bounds, count, new, WIDE: tl.constexpr):
    """`minred._by_numpy`, in one program: a thread has WIDE / threads places, and the pairs stay in the cache."""
    NONE: tl.constexpr = -2.0
    items = count + new  # at most 4,608, so their square fits 32 bits
    place = tl.arange(0, WIDE)
    ok = place < count
    occupant = place
    bound = tl.load(before + place, mask=ok, other=NONE - 1.0)
    for b in range(0, new):
        if tl.load(skip + b) == 0:
            me = count + b
            row = tl.load(pairs + me * items + occupant, mask=ok, other=NONE)  # whoever leaves
            gone = tl.argmax(bound, axis=0)
            level = tl.max(bound, axis=0)
            sure = 0
            while sure == 0:
                item = tl.sum(tl.where(place == gone, occupant, 0), axis=0)
                theirs = tl.load(pairs + item * items + occupant, mask=ok, other=NONE)
                found = tl.maximum(tl.max(theirs, axis=0), tl.load(stay + item))
                sure = (found >= level).to(tl.int32)
                level = found
                bound = tl.where(place == gone, found, bound)
                if sure == 0:
                    gone = tl.argmax(bound, axis=0)
                    level = tl.max(bound, axis=0)
            row = tl.where(place == gone, NONE, row)
            bound = tl.maximum(bound, tl.where(ok, row, NONE - 1.0))
            bound = tl.where(place == gone, tl.maximum(tl.max(row, axis=0), tl.load(stay + me)), bound)
            occupant = tl.where(place == gone, me, occupant)
            tl.store(places + b, gone.to(tl.int64))
            tl.store(levels + b, level)
    tl.store(bounds + place, bound, mask=ok)
