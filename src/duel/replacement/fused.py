"""Exact replacement with Triton: simulate on the slots that can matter, verify on all, no host synchronisation.

The steps are those of `dense.Batch`. What a GPU changes: the simulation is one kernel; the verification is one kernel
over matrices of h; and since nothing on the host can ask whether it succeeded, the literal loop is always enqueued and
returns at once when there is nothing to mend. Scores of the library are evaluated inside the kernels; for any other
callable the kernels get matrices of h.
"""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import torch
from torch import Tensor

from duel.replacement.units import CHUNK_ELEMENTS, SHORTCUT, to_units, total_units
from duel.scores import Score
from duel.slots import last_newcomer

#: Up to so many slots everything is simulated and there is nothing to verify.
WHOLE = 1024
#: Newcomers at a time.
BLOCK = 512
#: Newcomers and candidates together in one simulation: what one program holds in registers.
ITEMS = 1024
#: The same for scores so broad that every newcomer changes who is next, which leaves nothing to prune.
WHOLE_BROAD = 3584
#: A callable cannot run inside the literal kernel, so there everything must be simulated; places take 12 bits of a key.
WHOLE_LIMIT = 4095


def unavailable(memory: Tensor, score: Score) -> str | None:
    """Why the fused engine cannot take these tensors, or None."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    if not memory.is_cuda and os.environ.get("TRITON_INTERPRET") != "1":
        return f"the memory is on {memory.device.type}, not on a CUDA device"
    if score.function is not None and memory.shape[0] > WHOLE_LIMIT:
        return f"a score of your own is limited to {WHOLE_LIMIT:,} slots there"
    return None


def replace_fused(
    memory: Tensor, incoming: Tensor, total: Tensor | None, score: Score, admit: str, e: int, skip: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Slots (B,) and N in units (K,), as `reference` gives them."""
    if skip is None:
        skip = torch.zeros(incoming.shape[0], dtype=torch.bool, device=memory.device)
    pieces = range(0, incoming.shape[0], BLOCK)
    slots = []
    for start in pieces:
        block, skipped = incoming[start : start + BLOCK], skip[start : start + BLOCK]
        taken, total = _Launch(memory, block, score, admit, e).run(total, skipped)
        slots.append(taken)
        if len(pieces) > 1:
            memory = put(memory, taken, block)
    return torch.cat(slots), total  # type: ignore[return-value]


def put(rows: Tensor, slots: Tensor, values: Tensor) -> Tensor:
    """A copy of rows with `values` in `slots` (-1: nowhere); where a slot is named twice the last one stays."""
    last = last_newcomer(slots, rows.shape[0])
    return torch.where((last >= 0)[:, None], values[last.clamp(min=0)], rows)


class _Launch:
    """One block of newcomers (B, d) against a memory (K, d)."""

    def __init__(self, memory: Tensor, incoming: Tensor, score: Score, admit: str, e: int) -> None:
        from duel.replacement import kernels

        self.kernels: Any = kernels
        self.memory, self.incoming, self.score, self.e = memory.contiguous(), incoming.contiguous(), score, e
        self.compete = admit == "compete"
        self.one = 2.0**e
        self.kind = kernels.KINDS.get(score.kind, kernels.PLAIN)
        self.curve = _curve(score, memory)

    def scored(
        self, cosines: Tensor, *, start: Tensor | None = None, diagonal: bool = False, store: bool = True,
        columns: Tensor | None = None, shift: int = 0, offset: int = 0,
    ) -> Tensor:  # fmt: skip
        """cosines -> units · 2^shift in place; returns the row sums and adds the column sums to `columns`, in units.

        offset: the column that meets the first row on the diagonal.
        """
        if self.kind == self.kernels.PLAIN:
            cosines.copy_(to_units(self.score, cosines, self.e))
        rows, count = cosines.shape
        sums = torch.empty(rows, dtype=torch.float64, device=cosines.device)
        width = _power(count) if columns is not None else min(256, _power(count))
        tile = max(1, 4096 // width)
        tiles = 8 if columns is not None and rows > 65536 else 1
        self.kernels.score_kernel[(-(-rows // (tile * tiles)),)](
            cosines, sums, columns, start, self.curve, self.one, rows, count, offset,
            KIND=self.kind, DIAGONAL=diagonal, STORE=store, COLUMN_SUMS=columns is not None,
            ROWS=tile, COLUMNS=width, TILES=tiles, SHIFT=2.0**shift, num_warps=4,
        )  # fmt: skip
        return sums

    def run(self, total: Tensor | None, skip: Tensor) -> tuple[Tensor, Tensor]:
        size, count = self.memory.shape[0], self.incoming.shape[0]
        device = self.memory.device
        if total is None:
            total = self.from_scratch()
        seen = self.memory @ self.incoming.T
        arriving = torch.zeros(count, dtype=torch.float64, device=device)
        bound = self.scored(seen, start=total, columns=arriving)
        whole = size <= self._whole_up_to()
        if whole:
            candidates, inside = torch.arange(size, device=device), None
        else:
            candidates, inside = _highest(bound, max(ITEMS - count, ITEMS // 4))
        chosen = candidates.shape[0]
        items = torch.cat([self.memory[candidates], self.incoming])
        pairs = items @ items.T
        self.scored(pairs, diagonal=True, shift=self.kernels.PLACE_BITS)
        slots = torch.empty(count, dtype=torch.int64, device=device)
        evicted = torch.empty(count, dtype=torch.int64, device=device)
        level = torch.empty(count, dtype=torch.float64, device=device)
        after = torch.empty_like(total)
        source = torch.empty(0 if whole else size, dtype=torch.int32, device=device)
        first_wrong = torch.full((1,), count, dtype=torch.int32, device=device)
        start = torch.cat([total[candidates], arriving])

        def simulate(again: bool) -> None:
            self.kernels.simulate_kernel[(1,)](
                pairs, start, skip, candidates, slots, evicted, level, after, source, first_wrong, chosen, count, size,
                COMPETE=self.compete, AGAIN=again, ITEMS=_power(chosen + count), PLACE_BITS=self.kernels.PLACE_BITS,
                num_warps=8 if chosen + count <= 2048 else 16,
            )  # fmt: skip

        simulate(again=False)
        if inside is None:
            return slots, after
        lost = self.memory @ items[evicted].T
        tile = max(1, 4096 // _power(count))
        self.kernels.verify_kernel[(-(-size // tile),)](
            seen, lost, total, level, slots, inside, after, first_wrong, self.curve, self.one, size, count,
            KIND=self.kind, COMPETE=self.compete, ROWS=tile, COUNT=_power(count), num_warps=4,
        )  # fmt: skip
        # these two return at once unless a mistake was found
        simulate(again=True)
        self._go_on(seen, lost, total, inside, after, source, skip, slots, first_wrong)
        return slots, after

    def _go_on(
        self, seen: Tensor, lost: Tensor, total: Tensor, inside: Tensor, after: Tensor, source: Tensor, skip: Tensor,
        slots: Tensor, first_wrong: Tensor,
    ) -> None:  # fmt: skip
        """The literal loop from the first mistake, if there was one, over `after` and `slots`."""
        (size, count), dim, device = seen.shape, self.memory.shape[1], seen.device
        parts = 1
        if self.memory.is_cuda:  # they wait for each other, so all must run at the same time
            parts = min(128, torch.cuda.get_device_properties(device).multi_processor_count, -(-size // 64))
        most, width = _power(parts), _power(dim)
        f64: Any = {"dtype": torch.float64, "device": device}
        i32: Any = {"dtype": torch.int32, "device": device}
        self.kernels.literal_kernel[(parts,)](
            self.memory, self.incoming, seen, lost, total, inside, after, source, torch.empty(size, **f64), skip, slots,
            first_wrong, torch.empty(2 * most, **f64), torch.empty(2 * most, **i32), torch.empty(2 * most, **i32),
            torch.empty(2 * most, **f64), torch.zeros(1, **i32), self.curve, self.one, size, count, dim,
            KIND=self.kind, COMPETE=self.compete, PARTS=most, ROWS=max(1, min(64, 8192 // width)), DIM=width,
            num_warps=8,
        )  # fmt: skip

    def _whole_up_to(self) -> int:
        if self.kind == self.kernels.PLAIN:
            return WHOLE_LIMIT
        width = self.score.width
        broad = self.score.kind in ("linear", "quadratic") or (not isinstance(width, Tensor) and width > -4.0)
        return WHOLE_BROAD if broad else WHOLE

    def from_scratch(self) -> Tensor:
        """N of every slot, in units: a chunk of rows at a time, each matrix element written and read once."""
        size = self.memory.shape[0]
        if self.score.kind == "linear" and size > SHORTCUT:
            return total_units(self.score, self.memory, self.e)
        step = max(16, CHUNK_ELEMENTS["cuda"] // size // 16 * 16)
        sums = [
            self.scored(self.memory[first : first + step] @ self.memory.T, diagonal=True, store=False, offset=first)
            for first in range(0, size, step)
        ]
        return sums[0] if len(sums) == 1 else torch.cat(sums)


def total_fused(score: Score, memory: Tensor, e: int) -> Tensor:
    """`units.total_units` with Triton."""
    return _Launch(memory, memory[:0], score, "always", e).from_scratch()


def _highest(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The places of the `count` largest, in ascending order, and a mask of them. Cheaper than sorting the places."""
    inside = torch.zeros_like(values, dtype=torch.int32).index_fill_(0, values.topk(count, sorted=False).indices, 1)
    rank = torch.where(inside > 0, inside.cumsum(0) - 1, count)
    places = torch.empty(count + 1, dtype=torch.int64, device=values.device)
    places.scatter_(0, rank, torch.arange(values.shape[0], device=values.device))  # all others land in the last one
    return places[:count], inside


def _curve(score: Score, like: Tensor) -> Tensor:
    """(width, floor, scale) where the kernels can read them; made once per score where they are plain numbers."""
    values = [score.width, score.floor, score.scale]
    make: Any = {"dtype": like.dtype, "device": like.device}
    if any(isinstance(v, Tensor) for v in values):
        return torch.stack([torch.as_tensor(v, **make).reshape(()) for v in values])
    known = score.__dict__.setdefault("_curves", {})
    curve = known.get((like.dtype, like.device))
    if curve is None:
        # full() is a kernel with a constant, which a captured graph can hold; a copy from the host could not be
        curve = torch.cat([torch.full((1,), float(v), **make) for v in values])
        if not (like.is_cuda and torch.cuda.is_current_stream_capturing()):  # the graph's memory is the graph's
            known[like.dtype, like.device] = curve
    return curve  # type: ignore[no-any-return]


def _power(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()
