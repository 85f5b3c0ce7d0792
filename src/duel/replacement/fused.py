"""Exact replacement with Triton: simulate on the slots that can matter, verify on all, no host synchronisation.

The steps are those of `dense.Batch`. Up to `WHOLE` slots all can matter, and there is nothing to verify. Above, what a
GPU changes: the simulation is one kernel; the verification is one kernel
over matrices of h; and since nothing on the host can ask whether it succeeded, the literal loop is always enqueued and
returns at once when there is nothing to mend. Scores of the library are evaluated inside the kernels; for any other
callable the kernels get matrices of h.
"""

from __future__ import annotations

import importlib.util
import math
import os
from typing import Any

import torch
from torch import Tensor

from duel.replacement.units import CHUNK_ELEMENTS, has_shortcut, likeliest, to_units, total_units
from duel.scores import Score
from duel.slots import put

#: Up to so many slots everything is simulated and there is nothing to verify.
WHOLE = 4096
#: Newcomers at a time.
BLOCK = 512
#: Slots that are simulated where not all are.
CANDIDATES = 1024
#: So many processes may share a GPU through MPS. The programs of the literal loop wait for each other: processes that
#: took more than their share could each hold a part of the GPU and wait for ever.
SHARING = 8
#: Programs of the literal loop on one processor, and the registers that each of their 128 threads may have then.
PER_PROCESSOR, REGISTERS = 4, 128


def unavailable(memory: Tensor, score: Score) -> str | None:
    """Why the fused engine cannot take these tensors, or None."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    if not memory.is_cuda and os.environ.get("TRITON_INTERPRET") != "1":
        return f"the memory is on {memory.device.type}, not on a CUDA device"
    if score.function is not None and memory.shape[0] > WHOLE:  # it cannot run inside the literal kernel
        return f"a mix or a score of your own is limited to {WHOLE:,} slots there"
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
        self, cosines: Tensor, *, out: Tensor | None = None, start: Tensor | None = None, diagonal: bool = False,
        columns: Tensor | None = None, own: Tensor | None = None, offset: int = 0, summed: int | None = None,
    ) -> Tensor:  # fmt: skip
        """Units of the cosines, written to `out` if given; returns the row sums, in units.

        start: added to the row sums. summed: they are over so many columns (all). columns: gets the column sums.
        offset: the column that meets the first row on the diagonal, which is left out if `diagonal`. own: for each
        column the row that is left out.
        """
        if self.kind == self.kernels.PLAIN:
            cosines.copy_(to_units(self.score, cosines, self.e))
        rows, count = cosines.shape
        sums = torch.empty(rows, dtype=torch.float64, device=cosines.device)
        width = _power(count) if columns is not None else min(256, _power(count))
        tile = max(1, 4096 // width)
        tiles = 8 if columns is not None and rows > 65536 else 1
        self.kernels.score_kernel[(-(-rows // (tile * tiles)),)](
            cosines, out, sums, columns, start, own, self.curve, self.one, rows, count,
            count if summed is None else summed, offset, KIND=self.kind, DIAGONAL=diagonal, STORE=out is not None,
            COLUMN_SUMS=columns is not None, ROWS=tile, COLUMNS=width, TILES=tiles, num_warps=4,
        )  # fmt: skip
        return sums

    def run(self, total: Tensor | None, skip: Tensor) -> tuple[Tensor, Tensor]:
        if self.memory.shape[0] <= WHOLE:
            return self._on_all(total, skip)
        return self._on_some(self.from_scratch() if total is None else total, skip)

    def _on_all(self, total: Tensor | None, skip: Tensor) -> tuple[Tensor, Tensor]:
        """Simulate on every slot: one product, and nothing to verify."""
        size = self.memory.shape[0]
        h, sums = self._pairs(torch.cat([self.memory, self.incoming]), size)
        if total is None:
            total = self.from_scratch() if has_shortcut(self.score, self.memory) else sums[:size]
        simulation = _Simulation(self, h, total, sums[size:], skip)
        simulation.run()
        return simulation.slots, simulation.after

    def _on_some(self, total: Tensor, skip: Tensor) -> tuple[Tensor, Tensor]:
        """Simulate on the slots that can have the largest N, verify on all others, and mend."""
        size, count = self.memory.shape[0], self.incoming.shape[0]
        seen = self.memory @ self.incoming.T
        arriving = torch.zeros(count, dtype=torch.float64, device=self.memory.device)
        bound = self.scored(seen, out=seen, start=total, columns=arriving)
        candidates, inside = likeliest(total, bound, CANDIDATES)
        items = torch.cat([self.memory[candidates], self.incoming])
        h, _ = self._pairs(items, candidates.shape[0])
        simulation = _Simulation(self, h, total, arriving, skip, candidates)
        simulation.run()
        lost = self.memory @ items[simulation.evicted].T
        tile = max(1, 4096 // _power(count))
        self.kernels.verify_kernel[(-(-size // tile),)](
            seen, lost, total, simulation.level, simulation.slots, inside, simulation.after, simulation.first_wrong,
            self.curve, self.one, size, count,
            KIND=self.kind, COMPETE=self.compete, ROWS=tile, COUNT=_power(count), num_warps=4,
        )  # fmt: skip
        # these two return at once unless a mistake was found
        simulation.run(again=True)
        self._go_on(seen, lost, total, inside, simulation)
        return simulation.slots, simulation.after

    def _pairs(self, items: Tensor, residents: int) -> tuple[Tensor, Tensor]:
        """h of all pairs as the simulation wants it, and each item's sum over the `residents` in front."""
        count = items.shape[0]
        together: int = self.kernels.TOGETHER
        room = count * count + math.prod(_shape(residents, count - residents, together)) * together
        cosines = items.new_empty(room)[: count * count].view(count, count)
        torch.mm(items, items.T, out=cosines)
        if cosines.element_size() == 4:  # in place
            h = cosines.view(torch.int32)
        else:
            h = torch.empty(room, dtype=torch.int32, device=items.device)[: count * count].view(count, count)
        return h, self.scored(cosines, out=h, diagonal=True, summed=residents)

    def _go_on(self, seen: Tensor, lost: Tensor, total: Tensor, inside: Tensor, simulation: _Simulation) -> None:
        """The literal loop from the first mistake, if there was one, over what the simulation gave."""
        (size, count), dim, device = seen.shape, self.memory.shape[1], seen.device
        parts = 1
        if self.memory.is_cuda:
            processors = torch.cuda.get_device_properties(device).multi_processor_count
            parts = max(1, min(PER_PROCESSOR * (processors // SHARING), -(-size // 64)))
        most, width = _power(parts), _power(dim)
        f64: Any = {"dtype": torch.float64, "device": device}
        i32: Any = {"dtype": torch.int32, "device": device}
        self.kernels.literal_kernel[(parts,)](
            self.memory, seen, simulation.h, lost, total, inside, simulation.after, simulation.source,
            simulation.skip, simulation.slots, simulation.first_wrong,
            torch.empty(2 * most, **f64), torch.empty(2 * most, **i32), torch.empty(2 * most, **i32),
            torch.empty(2 * most, **f64), torch.zeros(1, **i32), self.curve, self.one, size, count,
            simulation.places, dim, KIND=self.kind, COMPETE=self.compete, PARTS=most, SLOTS=512,
            ROWS=max(1, min(64, 8192 // width)), DIM=width, num_warps=4, maxnreg=REGISTERS,
        )  # fmt: skip

    def from_scratch(self) -> Tensor:
        """N of every slot, in units: a chunk of rows at a time, each matrix element written and read once."""
        size = self.memory.shape[0]
        if has_shortcut(self.score, self.memory):
            return total_units(self.score, self.memory, self.e)
        step = max(16, CHUNK_ELEMENTS["cuda"] // size // 16 * 16)
        sums = [
            self.scored(self.memory[first : first + step] @ self.memory.T, diagonal=True, offset=first)
            for first in range(0, size, step)
        ]
        return sums[0] if len(sums) == 1 else torch.cat(sums)


class _Simulation:
    """The policy on all slots, or on those named by `candidates`; see `simulate_kernel` for the arguments."""

    def __init__(
        self, launch: _Launch, h: Tensor, total: Tensor, arriving: Tensor, skip: Tensor,
        candidates: Tensor | None = None,
    ) -> None:  # fmt: skip
        count, size = launch.incoming.shape[0], launch.memory.shape[0]
        self.launch, self.h, self.total, self.arriving, self.skip = launch, h, total, arriving, skip
        self.candidates, self.places = candidates, size if candidates is None else candidates.shape[0]
        self.slots, self.after = total.new_empty(count, dtype=torch.int64), torch.empty_like(total)
        # for verifying and mending, where not all slots are simulated
        some = candidates is not None
        self.evicted = total.new_empty(count if some else 0, dtype=torch.int64)
        self.level = total.new_empty(count if some else 0)
        self.source = total.new_empty(size if some else 0, dtype=torch.int32)
        self.first_wrong = None if candidates is None else total.new_full((1,), count, dtype=torch.int32)

    def run(self, *, again: bool = False) -> None:
        """again: only if a mistake was found, and only up to it."""
        launch, kernels, places = self.launch, self.launch.kernels, self.places
        parts, threads = _shape(places, self.skip.shape[0], kernels.TOGETHER)
        kernels.simulate_kernel[(1,)](
            self.h, self.total, self.arriving, self.skip, self.candidates, self.slots, self.evicted,
            self.level, self.after, self.source, self.first_wrong, places, self.skip.shape[0], self.total.shape[0],
            COMPETE=launch.compete, AGAIN=again, PARTS=parts, THREADS=threads, TOGETHER=kernels.TOGETHER,
            PLACE_BITS=kernels.PLACE_BITS_OF_ALL if self.candidates is None else kernels.PLACE_BITS,
            num_warps=threads // 32,
        )  # fmt: skip


def _shape(residents: int, newcomers: int, together: int) -> tuple[int, int]:
    """Parts and threads of `simulate_kernel`: a place for each item."""
    groups = _power(residents) // together
    threads = max(32, _power(newcomers), min(512, groups))
    return max(1, groups // threads), threads


def total_fused(score: Score, memory: Tensor, e: int) -> Tensor:
    """`units.total_units` with Triton."""
    return _Launch(memory, memory[:0], score, "always", e).from_scratch()


def exchange_fused(total: Tensor, memory: Tensor, slots: Tensor, old: Tensor, score: Score, e: int) -> Tensor:
    """`units.exchange_units` with Triton: every h is used where it is computed, and never written."""
    launch, anew = _Launch(memory, memory[:0], score, "always", e), []
    for first in range(0, slots.shape[0], BLOCK):
        part = slots[first : first + BLOCK].contiguous()
        sums = torch.zeros(part.shape[0], dtype=torch.float64, device=memory.device)
        total = launch.scored(memory @ memory[part].T, start=total, columns=sums, own=part)
        total = total - launch.scored(memory @ old[first : first + BLOCK].T)
        anew.append(sums)
    return total.index_copy(0, slots, torch.cat(anew)) if anew else total.clone()


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
