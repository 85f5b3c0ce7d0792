# mypy: ignore-errors
"""The Triton kernels behind the fused engine. Imported only where Triton is.

They run on a CUDA device, and on the CPU in Triton's interpreter (`TRITON_INTERPRET=1`), one program after the other.
Whole numbers of units (see `units.py`) make every sum below exact, so atomics and any order of blocks give one result.
"""

from __future__ import annotations

import triton
import triton.language as tl

# How a cosine becomes h: the number is `KIND` in the kernels. PLAIN: the matrix already holds units.
PLAIN, LINEAR, QUADRATIC, GAUSSIAN, EXPONENTIAL = range(5)
KINDS = {"linear": LINEAR, "quadratic": QUADRATIC, "gaussian": GAUSSIAN, "exponential": EXPONENTIAL}

#: Bits of an arg-max key that hold a candidate's place. N in units takes the 51 above them, and 43 where all slots are
#: simulated: there one bit more lets a newcomer that competes have a place behind 4,096 slots.
PLACE_BITS, PLACE_BITS_OF_ALL = 12, 13
#: Neighbouring residents of one thread: what it loads at a time.
TOGETHER = 4


@triton.jit
def _round(x):
    """x >= 0 to the nearest whole number, ties to even: by adding 2^p, from where on a p-bit format is all whole."""
    if x.dtype == tl.float64:
        return (x + 4503599627370496.0) - 4503599627370496.0  # units stay below 2^52
    else:
        small = x < 8388608.0
        return tl.where(small, (tl.where(small, x, 0.0) + 8388608.0) - 8388608.0, x)


@triton.jit
def _units(x, curve, one, KIND: tl.constexpr):
    """cosines -> whole units. curve: width, floor, scale in the dtype of x; one: 2^e."""
    if KIND == 0:
        return x
    else:
        x = tl.minimum(tl.maximum(x, -1.0), 1.0)
        if KIND == 1:
            h = (x + 1.0) * 0.5
        elif KIND == 2:
            h = (x + 1.0) * 0.5
            h = h * h
        else:
            width = tl.load(curve)
            floor = tl.load(curve + 1)
            scale = tl.load(curve + 2)
            far = 1.0 - x
            if KIND == 3:
                far = far * far
            h = (tl.exp(far * width) - floor) * scale
        return _round(tl.maximum(h, 0.0) * one)


@triton.jit
def score_kernel(
    matrix, out, row_sums, column_sums, start, own, curve, one, rows, columns, summed, offset,
    KIND: tl.constexpr, DIAGONAL: tl.constexpr, STORE: tl.constexpr, COLUMN_SUMS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """cosines (rows, columns) -> units in `out`, with row sums (+ `start`) and column sums in float64.

    Row sums are over the first `summed` columns. own (columns,): the row that is the same item as a column, and is left
    out; with DIAGONAL that is row + `offset`. Column sums need COLUMNS >= columns: a program adds its TILES tiles of
    rows up before it meets the others.
    """
    down = tl.zeros((COLUMNS,), dtype=tl.float64)
    for tile in range(0, TILES):
        r = (tl.program_id(0) * TILES + tile) * ROWS + tl.arange(0, ROWS).to(tl.int64)
        row_ok = r < rows
        total = tl.zeros((ROWS,), dtype=tl.float64)
        if start is not None:
            total += tl.load(start + r, mask=row_ok, other=0.0)
        for first in range(0, columns, COLUMNS):
            c = first + tl.arange(0, COLUMNS)
            at = r[:, None] * columns + c[None, :]
            ok = row_ok[:, None] & (c < columns)[None, :]
            h = _units(tl.load(matrix + at, mask=ok, other=-1.0), curve, one, KIND)
            if DIAGONAL:
                h = tl.where(r[:, None] + offset == c[None, :], 0.0, h)
            if own is not None:
                h = tl.where(r[:, None] == tl.load(own + c, mask=c < columns, other=-1)[None, :], 0.0, h)
            h = tl.where(ok, h, 0.0)
            if STORE:
                tl.store(out + at, h.to(out.dtype.element_ty), mask=ok)
            wide = h.to(tl.float64)
            total += tl.sum(tl.where((c < summed)[None, :], wide, 0.0), axis=1)
            if COLUMN_SUMS:
                down += tl.sum(wide, axis=0)
        tl.store(row_sums + r, total, mask=row_ok)
    if COLUMN_SUMS:
        c = tl.arange(0, COLUMNS)
        tl.atomic_add(column_sums + c, down, mask=c < columns, sem="relaxed")


@triton.jit
def _higher(key, item, other_key, other_item):
    """Combine for the arg-max below. Keys of living items differ, so there are no ties to break here."""
    take = other_key > key
    return tl.where(take, other_key, key), tl.where(take, other_item, item)


@triton.jit
def simulate_kernel(
    h, start, arriving, skip, slot_of, slots, evicted, level, after, source, first_wrong, candidates, count, rows,
    COMPETE: tl.constexpr, AGAIN: tl.constexpr, PARTS: tl.constexpr, THREADS: tl.constexpr, TOGETHER: tl.constexpr,
    PLACE_BITS: tl.constexpr,
):  # fmt: skip
    """The policy on `candidates` residents and `count` newcomers, one program. See `dense.Batch` for the idea.

    h: (n, n) units in int32 with a zero diagonal, n = candidates + count, and behind them as many more elements as
    there are places for residents. start (rows,): N of each slot; arriving (count,): N of each newcomer against the
    memory, in units; slot_of (candidates,): the slots of the residents, in ascending order, or None where all slots are
    simulated.
    Out, per newcomer: its slot (-1 = turned away) and, unless all are simulated, the item that left and its N then; per
    slot of a resident: N after.
    An item's key is its N followed by its place counted from the end, so the largest key is the largest N at the lowest
    slot. A resident's place is its own number, so its key tells which it is. A newcomer that competes has the last
    place, which no resident may have (candidates < 2^PLACE_BITS): it loses ties.
    AGAIN: only if there was a mistake, and only up to it, so that the literal kernel can go on from there; it also says
    which row of memory, or rows + b, the residents' slots hold by then (`source`).

    What the shape of this is for: a newcomer costs a chain of latencies. Each thread has one newcomer and PARTS times
    TOGETHER residents, so that one reduction finds the best of both; and the rows are loaded without masks (what lies
    beyond them is added to places that nobody has), or the assembler would wait for one load before the next.
    """
    LAST: tl.constexpr = (1 << PLACE_BITS) - 1
    GONE: tl.constexpr = -(1 << 62)  # stays below every living key whatever is added to it
    items = candidates + count  # at most 4,608, so their square fits 32 bits
    upto = count
    go = count > 0
    if AGAIN:
        upto = tl.load(first_wrong)
        go = upto < count
    if go:
        new = tl.arange(0, THREADS)
        part = tl.arange(0, PARTS)
        # this order of the axes gives neighbouring threads neighbouring residents
        old = (part[None, :, None] * THREADS + new[:, None, None]) * TOGETHER + tl.arange(0, TOGETHER)[None, None, :]
        old_ok = old < candidates
        new_ok = new < count
        to_new = h + candidates  # of a row: where the newcomers begin
        slot = old.to(tl.int64)
        if slot_of is not None:
            slot = tl.load(slot_of + old, mask=old_ok, other=0)
        key = tl.load(start + slot, mask=old_ok, other=0.0).to(tl.int64) << PLACE_BITS
        key = tl.where(old_ok, key + (LAST - old), GONE)
        new_key = tl.load(arriving + new, mask=new_ok, other=0.0).to(tl.int64) << PLACE_BITS
        row = tl.load(h + candidates * items + old)
        new_row = tl.load(to_new + candidates * items + new)
        for b in range(0, upto):
            me = candidates + b
            # the next newcomer's row does not depend on who leaves: fetch it while the arg-max runs
            ahead = tl.minimum(me + 1, items - 1) * items
            following = tl.load(h + ahead + old)
            new_following = tl.load(to_new + ahead + new)
            left_out = tl.load(skip + b) != 0
            if COMPETE:
                value = key + (row.to(tl.int64) << PLACE_BITS)
                new_value = tl.where(new <= b, new_key + (new_row.to(tl.int64) << PLACE_BITS), GONE)
            else:
                value = key
                new_value = tl.where(new < b, new_key, GONE)
            best = tl.max(tl.max(value, axis=2), axis=1)
            item = tl.where(new_value > best, candidates + new, LAST - (best & LAST).to(tl.int32))
            best, gone = tl.reduce((tl.maximum(best, new_value), item), 0, _higher)
            taken = LAST - (best & LAST).to(tl.int32)
            turned_away = (gone == me) | left_out
            gone = tl.where(turned_away, me, gone)  # exchanging a newcomer for itself changes nothing
            loss = tl.load(h + gone * items + old)
            new_loss = tl.load(to_new + gone * items + new)
            key = tl.where(old == gone, GONE, key + ((row - loss).to(tl.int64) << PLACE_BITS))
            new_key += (new_row - new_loss).to(tl.int64) << PLACE_BITS
            new_key = tl.where(new == b, new_key + (LAST - taken), new_key)
            new_key = tl.where(new == gone - candidates, GONE, new_key)
            if AGAIN == 0:
                into = taken.to(tl.int64)
                if slot_of is not None:
                    into = tl.load(slot_of + tl.minimum(taken, candidates - 1))
                    tl.store(evicted + b, gone.to(tl.int64))
                    # a newcomer that takes no part can have no rival
                    tl.store(level + b, tl.where(left_out, float("inf"), (best >> PLACE_BITS).to(tl.float64)))
                tl.store(slots + b, tl.where(turned_away, -1, into))
            row = following
            new_row = new_following
        stays = old_ok & (key > (GONE >> 1))
        tl.store(after + slot, (key >> PLACE_BITS).to(tl.float64), mask=stays)
        joined = (new < upto) & (new_key > (GONE >> 1))
        new_slot = (LAST - (new_key & LAST)).to(tl.int64)
        if slot_of is not None:
            new_slot = tl.load(slot_of + new_slot, mask=joined, other=0)
        tl.store(after + new_slot, (new_key >> PLACE_BITS).to(tl.float64), mask=joined)
        if AGAIN:
            tl.store(source + slot, slot.to(tl.int32), mask=stays)
            tl.store(source + new_slot, (rows + new).to(tl.int32), mask=joined)


@triton.jit
def verify_kernel(
    seen, lost, total, level, slots, is_candidate, after, first_wrong, curve, one, rows, count,
    KIND: tl.constexpr, COMPETE: tl.constexpr, ROWS: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    """N of every slot before each newcomer, against what the simulation evicted; and N after the batch.

    seen: units (rows, count) against the newcomers; lost: cosines (KIND) with the evicted items; slots (count,) as the
    simulation has them. first_wrong: the earliest newcomer for which a slot outside the simulation should have left.
    """
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS).to(tl.int64)
    b = tl.arange(0, COUNT)
    ok = (r < rows)[:, None] & (b < count)[None, :]
    at = r[:, None] * count + b[None, :]
    gain = tl.load(seen + at, mask=ok, other=0.0)
    loss = _units(tl.load(lost + at, mask=ok, other=-1.0), curve, one, KIND)
    slot = tl.load(slots + b, mask=b < count, other=-1)
    taken = tl.where(slot >= 0, slot, rows)  # a newcomer that stays out counts as slot K
    change = tl.where(ok & (slot >= 0)[None, :], gain.to(tl.float64) - loss.to(tl.float64), 0.0)
    start = tl.load(total + r, mask=r < rows, other=0.0)
    upto = tl.cumsum(change, axis=1)
    before = start[:, None] + upto - change
    if COMPETE:
        before += gain.to(tl.float64)
    bar = tl.load(level + b, mask=b < count, other=float("inf"))[None, :]
    inside = tl.load(is_candidate + r, mask=r < rows, other=1) != 0
    wrong = (before > bar) | ((before == bar) & (r[:, None] < taken[None, :]))
    wrong = wrong & ok & (inside == 0)[:, None]
    first = tl.min(tl.min(tl.where(wrong, b[None, :], COUNT), axis=1), axis=0)
    if first < count:
        tl.atomic_min(first_wrong, first)
    tl.store(after + r, start + tl.sum(change, axis=1), mask=(r < rows) & (inside == 0))


@triton.jit
def _best(n, slot, source, other_n, other_slot, other_source):
    take = (other_n > n) | ((other_n == n) & (other_slot < slot))
    return tl.where(take, other_n, n), tl.where(take, other_slot, slot), tl.where(take, other_source, source)


@triton.jit
def _with_newcomer(b, r, source, ok, seen, h, rows, count, candidates):
    """Units of newcomer b with what slots r hold by now (`source`), from the matrices that the simulation had."""
    old = source < rows
    resident = tl.load(seen + r.to(tl.int64) * count + b, mask=ok & old, other=0.0).to(tl.float64)
    items = candidates + count
    at = (candidates + tl.maximum(source - rows, 0)) * items + candidates + b
    return tl.where(old, resident, tl.load(h + at, mask=ok & (old == 0), other=0).to(tl.float64))


@triton.jit
def literal_kernel(
    memory, seen, h, lost, before, is_candidate, n, source, skip, slots, first_wrong,
    part_n, part_slot, part_source, part_sum, arrived, curve, one, rows, count, candidates, dim,
    KIND: tl.constexpr, COMPETE: tl.constexpr, PARTS: tl.constexpr, SLOTS: tl.constexpr, ROWS: tl.constexpr,
    DIM: tl.constexpr,
):  # fmt: skip
    """All slots, newcomer after newcomer, from the first that was placed wrongly; returns at once if there was none.

    Each of the PARTS programs owns a range of slots; they meet once per newcomer. n (rows,) and source (rows,), which
    row of memory (its own) or rows + b a slot holds, are as the simulation left them for candidates and brought up to
    date here for all others. n and slots (count,) are overwritten. Only the h of residents with a resident that leaves
    are computed, ROWS slots at a time; all others are in `seen` and `h`, as the simulation had them, and are looked at
    for SLOTS at a time.
    """
    begin_at = tl.load(first_wrong)
    if begin_at < count:
        me = tl.program_id(0)
        parts = tl.num_programs(0)
        share = tl.cdiv(tl.cdiv(rows, parts), ROWS) * ROWS
        begin = me * share
        end = tl.minimum(begin + share, rows)
        d = tl.arange(0, DIM)
        p = tl.arange(0, PARTS)
        for first in range(begin, end, SLOTS):
            r = first + tl.arange(0, SLOTS).to(tl.int64)
            outside = (r < end) & (tl.load(is_candidate + r, mask=r < end, other=1) == 0)
            value = tl.load(before + r, mask=outside, other=0.0)
            for b in range(0, begin_at):
                loss = _units(tl.load(lost + r * count + b, mask=outside, other=-1.0), curve, one, KIND)
                change = tl.load(seen + r * count + b, mask=outside, other=0.0).to(tl.float64) - loss.to(tl.float64)
                value += tl.where(tl.load(slots + b) >= 0, change, 0.0)
            tl.store(n + r, value, mask=outside)
            tl.store(source + r, r.to(tl.int32), mask=outside)
        tl.debug_barrier()
        for b in range(begin_at, count):
            parity = (b % 2) * PARTS
            best_n = tl.full((), -1.0, tl.float64)
            best_slot = rows
            best_source = rows + b
            total = tl.zeros((), tl.float64)
            for first in range(begin, end, SLOTS):
                r = first + tl.arange(0, SLOTS)
                ok = r < end
                src = tl.load(source + r, mask=ok, other=0)
                gain = _with_newcomer(b, r, src, ok, seen, h, rows, count, candidates)
                total += tl.sum(gain, axis=0)
                value = tl.load(n + r, mask=ok, other=-1.0)
                if COMPETE:
                    value += gain
                top, slot, from_ = tl.reduce((value, r, src), 0, _best)
                best_n, best_slot, best_source = _best(best_n, best_slot, best_source, top, slot, from_)
            tl.store(part_n + parity + me, best_n)
            tl.store(part_slot + parity + me, best_slot)
            tl.store(part_source + parity + me, best_source)
            tl.store(part_sum + parity + me, total)
            tl.debug_barrier()
            tl.atomic_add(arrived, 1)
            while tl.atomic_add(arrived, 0) < (b - begin_at + 1) * parts:
                pass
            tl.debug_barrier()
            here = p < parts
            top, slot, from_ = tl.reduce(
                (
                    tl.load(part_n + parity + p, mask=here, other=-1.0, cache_modifier=".cg"),
                    tl.load(part_slot + parity + p, mask=here, other=rows, cache_modifier=".cg"),
                    tl.load(part_source + parity + p, mask=here, other=0, cache_modifier=".cg"),
                ),
                0,
                _best,
            )  # fmt: skip
            total = tl.sum(tl.load(part_sum + parity + p, mask=here, other=0.0, cache_modifier=".cg"), axis=0)
            out = tl.load(skip + b) != 0
            if COMPETE:
                out = out | (total > top)
            if me == 0:
                tl.store(slots + b, tl.where(out, -1, slot).to(tl.int64))
            if out == 0:
                if from_ >= rows:  # a newcomer leaves again
                    for first in range(begin, end, SLOTS):
                        r = first + tl.arange(0, SLOTS)
                        ok = r < end
                        src = tl.load(source + r, mask=ok, other=0)
                        gain = _with_newcomer(b, r, src, ok, seen, h, rows, count, candidates)
                        loss = _with_newcomer(from_ - rows, r, src, ok, seen, h, rows, count, candidates)
                        value = tl.load(n + r, mask=ok, other=0.0) + gain - loss
                        tl.store(n + r, tl.where(r == slot, total - gain, value), mask=ok)
                        tl.store(source + r, tl.where(r == slot, rows + b, src), mask=ok)
                else:
                    gone = tl.load(memory + from_.to(tl.int64) * dim + d, mask=d < dim, other=0.0)
                    for first in range(begin, end, ROWS):
                        r = first + tl.arange(0, ROWS)
                        ok = r < end
                        src = tl.load(source + r, mask=ok, other=0)
                        at = r.to(tl.int64)[:, None] * dim + d[None, :]
                        z = tl.load(memory + at, mask=ok[:, None] & (d < dim)[None, :], other=0.0)
                        loss = _units(tl.sum(z * gone[None, :], axis=1), curve, one, KIND).to(tl.float64)
                        arrived_at = from_.to(tl.int64) * count + tl.maximum(src - rows, 0)
                        known = tl.load(seen + arrived_at, mask=ok & (src >= rows), other=0.0).to(tl.float64)
                        loss = tl.where(src >= rows, known, loss)
                        gain = _with_newcomer(b, r, src, ok, seen, h, rows, count, candidates)
                        value = tl.load(n + r, mask=ok, other=0.0) + gain - loss
                        tl.store(n + r, tl.where(r == slot, total - gain, value), mask=ok)
                        tl.store(source + r, tl.where(r == slot, rows + b, src), mask=ok)
                tl.debug_barrier()
