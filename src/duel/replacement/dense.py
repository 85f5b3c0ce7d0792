"""Exact replacement in PyTorch alone.

On the CPU a batch is simulated with N carried for every slot; a large memory is simulated on the slots that can matter
and then verified on all others (`Batch`). On a GPU, where control flow may not depend on data, one newcomer is worked
in after the other on all slots (`_column_by_column`).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from duel.replacement.units import total_units, units
from duel.scores import Score

#: Newcomers simulated at a time. Their pairwise h are a square matrix, so a huge batch goes in pieces.
BLOCK = 512
#: Up to so many slots all are simulated and there is nothing to verify.
WHOLE = 8192
#: How many rows of h are computed when one is missing: the most duplicated residents are the likeliest to leave next.
FETCH = 48


def replace_dense(
    memory: Tensor, incoming: Tensor, total: Tensor | None, score: Score, admit: str, e: int, skip: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Slots (B,) and N in units (K,), as `reference` gives them."""
    total = total_units(score, memory, e) if total is None else total.clone()
    if memory.device.type != "cpu":
        return _column_by_column(memory, incoming, total, score, admit, e, skip)
    memory, slots = memory.clone(), torch.full((incoming.shape[0],), -1, dtype=torch.int64)
    takes_part = torch.arange(incoming.shape[0]) if skip is None else (~skip).nonzero()[:, 0]
    for first in range(0, takes_part.numel(), BLOCK):
        block = takes_part[first : first + BLOCK]
        slots[block], total = _in_rounds(memory, incoming[block], total, score, admit, e)
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


def _in_rounds(
    memory: Tensor, incoming: Tensor, total: Tensor, score: Score, admit: str, e: int
) -> tuple[Tensor, Tensor]:
    """Simulate and verify, and go on from the first mistake if there was one. `memory` is updated in place."""
    slots = torch.empty(incoming.shape[0], dtype=torch.int64)
    done, width = 0, max(512, 3 * incoming.shape[0])
    while done < incoming.shape[0]:
        batch = Batch(memory, incoming[done:], total, score, admit, e, width)
        accepted = batch.verified()
        slots[done : done + accepted], total = batch.accept(accepted)
        done += accepted
        width *= 2  # a second round is rare, and a wider one is sure to get further
    return slots, total


class Batch:
    """One round of simulate-and-verify: newcomers (B, d) against the best `width` of K slots, or all of a small memory.

    An *item* is a candidate resident (0..m-1, in slot order) or a newcomer (m..m+B-1). All items, admitted or not, have
    a running N against the memory as it is; since a row of h has a zero where it meets itself, exchanging item e for
    newcomer b is `N += h[b] - h[e]` for every item at once. Rows of h are needed for newcomers and for residents that
    leave; the latter are computed a few at a time, when the first of them is missing.
    """

    def __init__(
        self, memory: Tensor, incoming: Tensor, total: Tensor, score: Score, admit: str, e: int, width: int
    ) -> None:
        self.memory, self.incoming, self.total, self.score, self.e = memory, incoming, total, score, e
        self.compete = admit == "compete"
        size, count = memory.shape[0], incoming.shape[0]
        self.whole = size <= max(WHOLE, width)
        self.seen = units(score, incoming, memory, e)  # (B, K)
        # within a batch slot j never exceeds N(j) + Σ_b h(z_j · z_b)
        self.bound = total + self.seen.sum(0, dtype=torch.float64)
        if self.whole:
            self.candidates, self.items, seen = torch.arange(size), memory, self.seen
        else:
            self.candidates = self.bound.topk(width, sorted=False).indices.sort().values
            self.items, seen = memory[self.candidates], self.seen[:, self.candidates]
        m = self.candidates.numel()
        self.start = torch.cat([total[self.candidates], self.seen.sum(1, dtype=torch.float64)])
        self.h = torch.empty(count + m, m + count, dtype=memory.dtype)  # rows in the order in which they were computed
        self.h[:count, :m] = seen
        self.h[:count, m:] = units(score, incoming, incoming, e).fill_diagonal_(0.0)
        self.row_of = torch.full((m + count,), -1).numpy()
        self.row_of[m:] = range(count)
        self.rows = count
        likely = min(m, count + count // 2)
        self._fetch(self.bound[self.candidates].topk(likely, sorted=False).indices)
        self._simulate(count)

    def _fetch(self, residents: Tensor) -> None:
        """Compute the rows of h of these candidates."""
        m, count, upto = self.candidates.numel(), self.incoming.shape[0], self.rows + residents.numel()
        h = self.h[self.rows : upto]
        h[:, :m] = units(self.score, self.items[residents], self.items, self.e)
        h[:, m:] = self.h[:count, residents].T
        h.scatter_(1, residents[:, None], 0.0)
        self.row_of[residents.numpy()] = range(self.rows, upto)
        self.rows = upto

    def _simulate(self, count: int) -> None:
        """The policy on candidates and newcomers alone, for the first `count` newcomers."""
        m = self.candidates.numel()
        # NumPy's calls cost a fifth of torch's on vectors this short; the arrays share memory
        h, n, row_of = self.h.numpy(), self.start.clone().numpy(), self.row_of
        self.running = torch.from_numpy(n)
        self.occupant = torch.arange(m)  # which item a candidate's slot holds
        self.position = torch.full((count,), -1)  # whose place a newcomer took
        self.evicted = torch.arange(m, m + count)  # which item left: the newcomer itself where it was turned away
        self.level = torch.empty(count, dtype=torch.float64)  # its N when it left
        occupant, position, evicted, level = (
            t.numpy() for t in (self.occupant, self.position, self.evicted, self.level)
        )
        for b in range(count):
            row = h[b]
            values = n[occupant]
            if self.compete:
                values += row[occupant]
            p = int(values.argmax())
            if self.compete and n[m + b] > values[p]:
                level[b] = n[m + b]
                continue
            gone = occupant[p]
            level[b], position[b], evicted[b] = values[p], p, gone
            if row_of[gone] < 0:
                values[row_of[occupant] >= 0] = -math.inf
                values[p] = math.inf  # the one that leaves must be among them, however many tie with it
                missing = torch.from_numpy(values).topk(min(FETCH, m)).indices
                self._fetch(missing[torch.from_numpy(row_of[occupant])[missing] < 0])
            n += row
            n -= h[row_of[gone]]
            occupant[p] = m + b

    def verified(self) -> int:
        """How many newcomers were placed exactly as the full memory would have placed them."""
        if self.whole:
            return self.incoming.shape[0]
        self.lost = self._lost()
        rest = torch.ones(self.memory.shape[0], dtype=torch.bool)
        rest[self.candidates] = False
        rest = (rest & (self.bound >= self.level.min())).nonzero()[:, 0]
        if not rest.numel():
            return self.incoming.shape[0]
        seen = self.seen[:, rest].double()
        change = seen - self.lost[:, rest]
        before = change.cumsum(0).sub_(change).add_(self.total[rest])  # N of slot j when newcomer b arrives: (B, n)
        if self.compete:
            before += seen
        level, taken = self.level[:, None], self._slots(turned_away=self.memory.shape[0])[:, None]
        wrong = (before > level) | ((before == level) & (rest < taken))
        first = wrong.any(1).nonzero()
        return int(first[0]) if first.numel() else self.incoming.shape[0]

    def _lost(self) -> Tensor:
        """What every slot saw of the item that left for newcomer b: (B, K)."""
        m = self.candidates.numel()
        resident = self.evicted < m
        lost = self.seen[(self.evicted - m).clamp(min=0)]  # a newcomer that left again, or was turned away
        lost[resident] = units(self.score, self.items[self.evicted[resident]], self.memory, self.e)
        return lost

    def _slots(self, turned_away: int) -> Tensor:
        return torch.where(self.position >= 0, self.candidates[self.position.clamp(min=0)], turned_away)

    def accept(self, count: int) -> tuple[Tensor, Tensor]:
        """Bring the memory up to date with the first `count` newcomers: their slots, and N in units."""
        if count < self.incoming.shape[0]:
            self._simulate(count)
        slots = self._slots(turned_away=-1)
        if self.whole:
            total = self.running[self.occupant]
        else:
            total = self.total + self.seen[:count].sum(0, dtype=torch.float64)
            total -= self.lost[:count].sum(0, dtype=torch.float64)
            total[self.candidates] = self.running[self.occupant]
        m = self.candidates.numel()
        new = self.occupant >= m
        self.memory[self.candidates[new]] = self.incoming[self.occupant[new] - m]
        return slots, total
