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

from duel.replacement.units import SHORTCUT, to_units, total_units
from duel.scores import Score

#: Up to so many slots everything is simulated and there is nothing to verify.
WHOLE = 1024
#: Newcomers at a time, and candidates for them: both bounded by what one program holds in registers.
BLOCK = 512
CANDIDATES = 1024
#: A callable cannot run inside the literal kernel, so there everything must be simulated; places take 11 bits of a key.
WHOLE_LIMIT = 2047


def unavailable(memory: Tensor, score: Score) -> str | None:
    """Why the fused engine cannot take these tensors, or None."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    if not memory.is_cuda and os.environ.get("TRITON_INTERPRET") != "1":
        return f"the memory is on {memory.device.type}, not on a CUDA device"
    if score.kind == "callable" and memory.shape[0] > WHOLE_LIMIT:
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
    last = torch.full((rows.shape[0],), -1, dtype=torch.int64, device=rows.device)
    order = torch.arange(slots.shape[0], device=rows.device)
    last.scatter_reduce_(0, slots.clamp(min=0), torch.where(slots >= 0, order, -1), "amax")
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
        self.params = self._params()

    def _params(self) -> Tensor:
        values = [self.score.width, self.score.floor, self.score.scale]
        make: Any = {"dtype": self.memory.dtype, "device": self.memory.device}
        # full() is a kernel with a constant, which a captured graph can hold; as_tensor() would copy from the host
        parts = [v.to(**make).reshape(1) if isinstance(v, Tensor) else torch.full((1,), v, **make) for v in values]
        return torch.cat(parts)

    def scored(
        self, cosines: Tensor, *, start: Tensor | None = None, diagonal: bool = False, store: bool = True,
        columns: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """cosines -> units in place; returns the row sums and adds the column sums to `columns`."""
        if self.kind == self.kernels.PLAIN:
            cosines.copy_(to_units(self.score, cosines, self.e))
        rows, count = cosines.shape
        sums = torch.empty(rows, dtype=torch.float64, device=cosines.device)
        tile = 16
        self.kernels.score_kernel[((rows + tile - 1) // tile,)](
            cosines, sums, columns, start, self.params, self.one, rows, count,
            KIND=self.kind, DIAGONAL=diagonal, STORE=store, COLUMN_SUMS=columns is not None,
            ROWS=tile, COLUMNS=min(256, _power(count)), num_warps=4,
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
        whole = size <= (WHOLE_LIMIT if self.kind == self.kernels.PLAIN else WHOLE)
        if whole:
            candidates = torch.arange(size, device=device)
        else:
            candidates = bound.topk(CANDIDATES, sorted=False).indices.sort().values
        chosen = candidates.shape[0]
        items = torch.cat([self.memory[candidates], self.incoming])
        pairs = items @ items.T
        self.scored(pairs, diagonal=True)
        start = torch.cat([total[candidates], arriving])
        position = torch.empty(count, dtype=torch.int64, device=device)
        evicted = torch.empty(count, dtype=torch.int64, device=device)
        level = torch.empty(count, dtype=torch.float64, device=device)
        candidate_after = torch.empty(chosen, dtype=torch.float64, device=device)
        self.kernels.simulate_kernel[(1,)](
            pairs, start, skip, position, evicted, level, candidate_after, chosen, count,
            COMPETE=self.compete, ITEMS=_power(chosen + count), PLACE_BITS=self.kernels.PLACE_BITS,
            num_warps=SIMULATION_WARPS,
        )  # fmt: skip
        slots = torch.where(position >= 0, candidates[position.clamp(min=0)], -1)
        if whole:
            return slots, candidate_after
        return self._verify(total, seen, items[evicted], slots, level, candidates, candidate_after, skip)

    def _verify(
        self, total: Tensor, seen: Tensor, evicted: Tensor, slots: Tensor, level: Tensor,
        candidates: Tensor, candidate_after: Tensor, skip: Tensor,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        size, count = seen.shape
        device = seen.device
        lost = self.memory @ evicted.T
        inside = torch.zeros(size, dtype=torch.uint8, device=device).index_fill_(0, candidates, 1)
        after = torch.empty_like(total).index_copy_(0, candidates, candidate_after)
        first_wrong = torch.full((1,), count, dtype=torch.int32, device=device)
        taken = torch.where(slots >= 0, slots, size)
        tile = max(1, 4096 // _power(count))
        self.kernels.verify_kernel[((size + tile - 1) // tile,)](
            seen, lost, total, level, taken, inside, after, first_wrong, self.params, self.one, size, count,
            KIND=self.kind, COMPETE=self.compete, ROWS=tile, COUNT=_power(count), num_warps=4,
        )  # fmt: skip
        return self._mend(total, slots, after, first_wrong, skip)

    def _mend(
        self, total: Tensor, slots: Tensor, after: Tensor, first_wrong: Tensor, skip: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The literal loop over all slots, if `first_wrong` says so."""
        size, count, dim = self.memory.shape[0], self.incoming.shape[0], self.memory.shape[1]
        device = self.memory.device
        parts = min(128, (size + 63) // 64) if self.memory.is_cuda else 1
        most = _power(parts)
        whole = total.clone()
        whole_slots = slots.clone()
        f64: Any = {"dtype": torch.float64, "device": device}
        i32: Any = {"dtype": torch.int32, "device": device}
        width = _power(dim)
        self.kernels.literal_kernel[(parts,)](
            self.memory, self.incoming, whole, torch.arange(size, **i32), torch.empty(size, **f64), skip, whole_slots,
            first_wrong, torch.empty(2 * most, **f64), torch.empty(2 * most, **i32), torch.empty(2 * most, **i32),
            torch.empty(2 * most, **f64), torch.zeros(1, **i32), self.params, self.one, size, count, dim,
            KIND=self.kind, COMPETE=self.compete, PARTS=most, ROWS=max(1, min(64, 8192 // width)), DIM=width,
            num_warps=8,
        )  # fmt: skip
        mistaken = first_wrong < count
        return torch.where(mistaken, whole_slots, slots), torch.where(mistaken, whole, after)

    def from_scratch(self) -> Tensor:
        """N of every slot, in units."""
        size = self.memory.shape[0]
        if size > 16384 or (self.score.kind == "linear" and size > SHORTCUT):
            return total_units(self.score, self.memory, self.e)
        return self.scored(self.memory @ self.memory.T, diagonal=True, store=False)


#: Warps of the simulating program: a few hundred items are too little work for more.
SIMULATION_WARPS = 4


def _power(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()
