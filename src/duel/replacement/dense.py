"""Exact replacement in PyTorch alone.

On the CPU a batch is simulated with N carried for every slot; a large memory is simulated on the slots that can matter
and then verified on all others (`Batch`). On a GPU, where control flow may not depend on data, one newcomer is worked
in after the other on all slots (`_column_by_column`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from duel.replacement import turns
from duel.replacement.units import PAIRS, likeliest, pair_units, total_units, units
from duel.scores import Score

#: Newcomers simulated at a time. Their pairwise h are a square matrix, so a huge batch goes in pieces.
BLOCK = 512
#: Up to so many slots all are simulated and there is nothing to verify.
WHOLE = 8192
#: How many rows of h are computed when one is missing: the most duplicated residents are the likeliest to leave next.
FETCH = 48
#: Slots at a time in which the verification looks, so that what it looks at stays in the cache.
COLUMNS = 8192


def replace_dense(
    memory: Tensor,
    incoming: Tensor,
    total: Tensor | None,
    score: Score,
    admit: str,
    e: int,
    skip: Tensor | None,
    pairs: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Slots (B,) and N in units (K,), as `reference` gives them. pairs: `pair_units` of the memory, where known."""
    total = total_units(score, memory, e) if total is None else total
    if memory.device.type != "cpu":
        return _column_by_column(memory, incoming, total, score, admit, e, skip)
    if skip is None or not bool(skip.any()):
        return _in_blocks(memory, incoming, total, score, admit, e, pairs)
    slots = torch.full(skip.shape, -1)
    slots[~skip], total = _in_blocks(memory, incoming[~skip], total, score, admit, e, pairs)
    return slots, total


def _column_by_column(
    memory: Tensor, incoming: Tensor, total: Tensor, score: Score, admit: str, e: int, skip: Tensor | None
) -> tuple[Tensor, Tensor]:
    """O(K · d) per newcomer, no host synchronisation, no K × K matrix."""
    memory = memory.clone()
    chosen = []
    for b in range(incoming.shape[0]):
        item = incoming[b : b + 1]
        gained = units(score, memory, item, e)[:, 0].double()  # what every slot would see of the newcomer
        level = total + gained if admit == "compete" else total
        j = level.argmax(keepdim=True)  # (1,)
        stays_out = gained.sum() > level[j] if admit == "compete" else torch.zeros_like(j, dtype=torch.bool)
        if skip is not None:
            stays_out = stays_out | skip[b]
        evicted = memory[j]
        lost = units(score, memory, evicted, e)[:, 0].double()
        after = (total + gained - lost).index_copy(0, j, gained.sum() - gained[j])
        total = torch.where(stays_out, total, after)
        memory.index_copy_(0, j, torch.where(stays_out, evicted, item))
        chosen.append(torch.where(stays_out, -1, j))
    slots = torch.cat(chosen) if chosen else torch.empty(0, dtype=torch.int64, device=memory.device)
    return slots, total


def _in_blocks(
    memory: Tensor, incoming: Tensor, total: Tensor, score: Score, admit: str, e: int, pairs: Tensor | None
) -> tuple[Tensor, Tensor]:
    """A block of newcomers after the other."""
    if 0 < incoming.shape[0] <= BLOCK:
        batch = Batch(memory, incoming, total, score, admit, e, pairs)
        return batch.slots(), batch.total_after()
    chosen: list[Tensor] = []
    for done in range(0, incoming.shape[0], BLOCK):
        batch = Batch(memory, incoming[done : done + BLOCK], total, score, admit, e, pairs)
        slots, total = batch.slots(), batch.total_after()
        chosen.append(slots)
        if done + BLOCK < incoming.shape[0]:
            memory, pairs = batch.memory_after(), None
    return torch.cat(chosen) if chosen else torch.empty(0, dtype=torch.int64), total


def width(newcomers: int) -> int:
    """How many slots of a large memory are simulated at first."""
    return max(512, 3 * newcomers)


class Batch:
    """Newcomers (B, d) simulated against the likeliest of K slots, or against all of a small memory.

    An *item* is a newcomer (0..B-1) or a candidate resident (B..B+m-1, in the order of their slots). Every item that
    has not left, admitted or not, has a running N against the memory as it is: exchanging item e for newcomer b is
    `N += h[b] - h[e]` for all items at once, with a zero where a newcomer meets itself. Rows of h are needed for
    newcomers and for residents that leave: of a small memory all are computed together, or given (pairs); of others
    those of the likeliest, and more when they are missing.

    Of a large memory all other slots are then looked at: any whose N was the largest when a newcomer came joins the
    candidates, and the simulation is repeated. The first newcomer that was placed wrongly is placed rightly by that,
    so that it ends; it is seldom needed at all, and more than once hardly ever.
    """

    def __init__(
        self, memory: Tensor, incoming: Tensor, total: Tensor, score: Score, admit: str, e: int, pairs: Tensor | None
    ) -> None:
        self.memory, self.incoming, self.total, self.score, self.e = memory, incoming, total, score, e
        self.compete = admit == "compete"
        self.pairs: Any = None
        size, count = memory.shape[0], incoming.shape[0]
        self.whole = size <= max(WHOLE, width(count))
        if self.whole:
            h = units(score, incoming, torch.cat([incoming, memory]), e).fill_diagonal_(0.0)
            if size <= min(PAIRS, 2 * count):  # given or not, so that the same products decide
                self.pairs = (pair_units(score, memory, e) if pairs is None else pairs).numpy()
            self._simulate(h, 0.0, memory, total)
            return
        self.seen = units(score, incoming, memory, e)  # (B, K)
        # within a batch slot j never exceeds N(j) + Σ_b h(z_j · z_b)
        self.bound = total + torch.from_numpy(_sum(self.seen.numpy(), 0))
        own, arriving = pair_units(score, incoming, e), _sum(self.seen.numpy(), 1)
        self.candidates, _ = likeliest(total, self.bound, width(count))
        known: dict[int, Tensor] = {}
        while True:
            chosen = self.candidates
            seen = self.seen[:, chosen]
            elsewhere = arriving - _sum(seen.numpy(), 1)
            self._simulate(torch.cat([own, seen], 1), elsewhere, memory[chosen], total[chosen])
            self.lost = self._lost(known)
            overlooked = self._overlooked()
            if not overlooked.numel():
                return
            known = {slot: self.lost[b] for b, slot in self._residents_that_left().items()}
            self.candidates = torch.cat([chosen, overlooked]).sort().values

    def _simulate(self, h: Tensor, elsewhere: Any, residents: Tensor, total: Tensor) -> None:
        """The policy on candidates and newcomers alone.

        h: (B, B + m) of newcomers and all items. elsewhere: N of the newcomers against slots beside the candidates.
        total: N of the candidates.
        """
        count, size, run = len(h), len(residents), turns.fastest()
        self.h = (h.double() if run is turns.by_numpy else h).numpy()
        self.residents, self.running = residents, np.empty(count + size)
        self.running[:count], self.running[count:] = elsewhere, total.numpy()
        self.occupant = np.arange(count, count + size, dtype=np.int64)
        self.position, self.evicted, self.level = np.empty(count, np.int64), np.empty(count, np.int64), np.empty(count)
        self.rows, self.at = self.pairs, np.arange(size, dtype=np.int64)
        if self.pairs is None:
            # room that is hardly ever outgrown; what is not written to takes no memory
            self.rows = np.empty((min(size, 8 * count + FETCH), size), h.numpy().dtype)
            self.at, self.fetched = np.full(size, -1, np.int64), 0
        done = -1
        while done < count:
            shared = (self.running, self.h, self.rows, self.at, self.occupant)
            done = run((*shared, self.position, self.evicted, self.level), self.compete, done)
            if done < count:
                self._fetch(done)

    def _fetch(self, b: int) -> None:
        """Rows of h of residents that are likely to leave, and of the one that newcomer b puts out."""
        count, occupant = len(self.h), self.occupant
        values = self.running[occupant]
        if self.compete:
            values += self.h[b, occupant]
        gone = values.argmax()
        values[(occupant < count) | (self.at[np.maximum(occupant - count, 0)] >= 0)] = -math.inf  # no row is missing
        values[gone] = math.inf  # it must be among them, however many tie with it
        likely = values.argsort()[-FETCH if self.fetched else -count :]
        items = occupant[likely[values[likely] > -math.inf]] - count
        first, end = self.fetched, self.fetched + len(items)
        if end > len(self.rows):
            self.rows = np.concatenate([self.rows, np.empty_like(self.rows)])
        rows = self.residents.index_select(0, torch.from_numpy(items))
        self.rows[first:end] = units(self.score, rows, self.residents, self.e).numpy()
        self.at[items], self.fetched = np.arange(first, end), end

    def _lost(self, known: dict[int, Tensor]) -> Tensor:
        """What every slot saw of the item that left for newcomer b: (B, K). known: rows of residents, by slot."""
        evicted, count = torch.from_numpy(self.evicted), self.incoming.shape[0]
        lost = self.seen[evicted.clamp(max=count - 1)]  # a newcomer that left again, or was turned away
        residents = self._residents_that_left()
        for b, slot in residents.items():
            if slot in known:
                lost[b] = known[slot]
        new = {b: slot for b, slot in residents.items() if slot not in known}
        lost[list(new)] = units(self.score, self.memory[list(new.values())], self.memory, self.e)
        return lost

    def _residents_that_left(self) -> dict[int, int]:
        """The slot of the resident that left for newcomer b, by b; not of a newcomer that left again."""
        count, slots = self.incoming.shape[0], self.candidates.tolist()
        return {b: slots[item - count] for b, item in enumerate(self.evicted.tolist()) if item >= count}

    def _overlooked(self) -> Tensor:
        """Slots beside the candidates that should have left for a newcomer, and some that nearly had to; int64 (n,)."""
        level, taken = self.level, self._named(turned_away=self.memory.shape[0]).numpy()
        beside = self.bound.numpy() >= level.min()
        beside[self.candidates.numpy()] = False
        (slots,) = beside.nonzero()
        lead = np.full(slots.size, -math.inf)  # by how much each was ever above the item that left
        for first in range(0, slots.size, COLUMNS):
            part = lead[first : first + COLUMNS]
            for b, n in enumerate(self._running(slots[first : first + COLUMNS])):
                np.maximum(part, n - level[b], out=part)
        near = slots[lead >= 0]  # few: only of these it matters who is first of equals
        wrong = np.zeros(near.size, bool)
        if near.size:
            for b, n in enumerate(self._running(near)):
                wrong |= (n > level[b]) | ((n == level[b]) & (near < taken[b]))
        if not wrong.any():
            return torch.empty(0, dtype=torch.int64)
        closest = slots[lead.argsort()[-3 * len(self.candidates) :]]
        return torch.from_numpy(np.union1d(near[wrong], closest))

    def _running(self, slots: Any) -> Iterator[Any]:
        """N of slots beside the candidates as each newcomer arrives (compete: with it), (n,) at a time."""
        n = self.total.numpy()[slots]
        seen, lost = (h.numpy().take(slots, axis=1) for h in (self.seen, self.lost))
        for gained, gone in zip(seen, lost, strict=True):
            yield n + gained if self.compete else n
            n += gained
            n -= gone

    def _named(self, turned_away: int) -> Tensor:
        return torch.cat([self.candidates, torch.tensor([turned_away])])[self.position]  # -1 is the last

    def slots(self) -> Tensor:
        """int64 (B,): the slot that each newcomer took, -1 if none."""
        return torch.from_numpy(self.position) if self.whole else self._named(turned_away=-1)

    def total_after(self) -> Tensor:
        """N in units (K,) after the batch."""
        total = torch.from_numpy(self.running[self.occupant])
        if self.whole:
            return total
        change = _sum(self.seen.numpy(), 0) - _sum(self.lost.numpy(), 0)
        return (self.total + torch.from_numpy(change)).index_copy(0, self.candidates, total)

    def memory_after(self) -> Tensor:
        """(K, d): the memory with the newcomers that were admitted."""
        held = torch.cat([self.incoming, self.residents])[self.occupant]
        return held if self.whole else self.memory.index_copy(0, self.candidates, held)


def _sum(h: Any, dim: int) -> Any:
    """Whole numbers (n, m) summed in float64. NumPy widens them as it goes, torch makes a copy of them all first."""
    return h.sum(dim, dtype=np.float64)
