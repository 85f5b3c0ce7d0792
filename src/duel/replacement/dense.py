"""Exact replacement in PyTorch alone.

On the CPU a batch is simulated with N carried for every slot; a large memory is simulated on the slots that can matter
and then verified on all others (`Batch`). On a GPU, where control flow may not depend on data, one newcomer is worked
in after the other on all slots (`_column_by_column`).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from duel.replacement.units import PAIRS, likeliest, pair_units, total_units, units
from duel.scores import Score

#: Newcomers simulated at a time. Their pairwise h are a square matrix, so a huge batch goes in pieces.
BLOCK = 512
#: Up to so many slots all are simulated and there is nothing to verify.
WHOLE = 8192
#: How many rows of h are computed when one is missing: the most duplicated residents are the likeliest to leave next.
FETCH = 48


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
        return _in_rounds(memory, incoming, total, score, admit, e, pairs)
    slots = torch.full(skip.shape, -1)
    slots[~skip], total = _in_rounds(memory, incoming[~skip], total, score, admit, e, pairs)
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
    memory: Tensor, incoming: Tensor, total: Tensor, score: Score, admit: str, e: int, pairs: Tensor | None
) -> tuple[Tensor, Tensor]:
    """A block after the other: simulate and verify, and go on from the first mistake if there was one."""
    chosen: list[Tensor] = []
    done, width = 0, 0
    while done < incoming.shape[0]:
        block = incoming[done : done + BLOCK]
        width = width or max(512, 3 * block.shape[0])
        batch = Batch(memory, block, total, score, admit, e, width, pairs)
        accepted = batch.verified()
        slots, total = batch.accept(accepted)
        chosen.append(slots)
        done += accepted
        # a second round is rare, and a wider one is sure to get further
        width = 2 * width if accepted < block.shape[0] else 0
        if done < incoming.shape[0]:
            memory, pairs = batch.memory_after(), None
    if len(chosen) == 1:
        return chosen[0], total
    return torch.cat(chosen) if chosen else torch.empty(0, dtype=torch.int64), total


class Batch:
    """One round of simulate-and-verify: newcomers (B, d) against the best `width` of K slots, or all of a small memory.

    An *item* is a newcomer (0..B-1) or a candidate resident (B..B+m-1, in the order of their slots). Every item that
    has not left, admitted or not, has a running N against the memory as it is: exchanging item e for newcomer b is
    `N += h[b] - h[e]` for all items at once, with a zero where a newcomer meets itself. Rows of h are needed for
    newcomers and for residents that leave: of a small memory all are computed together, or given (pairs); of others
    those of the likeliest, and more when they are missing.
    """

    def __init__(
        self,
        memory: Tensor,
        incoming: Tensor,
        total: Tensor,
        score: Score,
        admit: str,
        e: int,
        width: int,
        pairs: Tensor | None,
    ) -> None:
        self.memory, self.incoming, self.total, self.score, self.e = memory, incoming, total, score, e
        self.compete = admit == "compete"
        size, count = memory.shape[0], incoming.shape[0]
        self.whole = size <= max(WHOLE, width)
        if not self.whole:
            self.seen = units(score, incoming, memory, e)  # (B, K)
            # within a batch slot j never exceeds N(j) + Σ_b h(z_j · z_b)
            self.bound = total + _sum(self.seen, 0)
            self.candidates, _ = likeliest(total, self.bound, width)
            memory, total = memory[self.candidates], total[self.candidates]
        self.items = torch.cat([incoming, memory])
        # float64 like N: to add a row of another dtype takes twice as long
        h = units(score, incoming, self.items, e).fill_diagonal_(0.0).double()
        self.newcomers = h.numpy()  # rows of h
        self.pairs: Any = None
        if self.whole and size <= min(PAIRS, 2 * count):  # given or not, so that the same products decide
            self.pairs = (pair_units(score, memory, e) if pairs is None else pairs).numpy()
        else:
            # resident -> (rows of h against all residents, number of its own)
            self.leaving: dict[int, tuple[Any, int]] = {}
            self.known = np.zeros(self.items.shape[0], bool)  # items that have a row
            self.known[:count] = True
        own = h[:, count:].sum(1) if self.whole else _sum(self.seen, 1)  # N of the newcomers
        self.start = torch.cat([own, total]).numpy()
        self._simulate(count)

    def _row(self, gone: int, values: Any, occupant: Any) -> Any:
        """h of resident `gone` against all residents, (m,). values: N of the occupants, the items in the slots."""
        if self.pairs is not None:
            return self.pairs[gone - self.incoming.shape[0]]
        if gone not in self.leaving:
            values[self.known[occupant]] = -math.inf
            values[occupant == gone] = math.inf  # it must be among them, however many tie with it
            likely = values.argsort()[-FETCH if self.leaving else -self.incoming.shape[0] :]
            self._fetch(occupant[likely[values[likely] > -math.inf]])
        rows, i = self.leaving[gone]
        return rows[i]

    def _fetch(self, items: Any) -> None:
        """Compute the rows of h of these residents."""
        residents = self.items[self.incoming.shape[0] :]
        rows = units(self.score, self.items.index_select(0, torch.from_numpy(items)), residents, self.e).numpy()
        self.leaving.update({item: (rows, i) for i, item in enumerate(items.tolist())})
        self.known[items] = True

    def _simulate(self, count: int) -> None:
        """The policy on candidates and newcomers alone, for the first `count` newcomers."""
        # NumPy's calls cost a fifth of torch's on vectors this short
        h, n, compete = self.newcomers, self.start.copy(), self.compete
        newcomers = len(h)
        arriving, residents = n[:newcomers], n[newcomers:]
        occupant = np.arange(newcomers, n.size)  # the item that each candidate's slot holds
        position, evicted, level = [], [], []  # for each newcomer: whose place it took, which item left, its N then
        for b in range(count):
            values = n[occupant]
            if compete:
                values += h[b, occupant]
            p = int(values.argmax())
            gone, highest = occupant.item(p), values[p]
            if compete and n[b] > highest:
                p, gone, highest = -1, b, n[b]  # it is turned away
            position.append(p)
            evicted.append(gone)
            level.append(highest)
            if gone == b:
                continue
            n += h[b]
            if gone < newcomers:
                n -= h[gone]
            else:
                # a column of what is known: computed anew, it could break a tie of two by its last bit
                arriving -= h[:, gone]
                residents -= self._row(gone, values, occupant)
            occupant[p] = b
        self.running, self.occupant = n, occupant
        self.position, self.evicted, self.level = np.array(position, np.int64), evicted, level

    def verified(self) -> int:
        """How many newcomers were placed exactly as the full memory would have placed them."""
        if self.whole:
            return self.incoming.shape[0]
        self.lost, level = self._lost(), torch.tensor(self.level, dtype=torch.float64)
        rest = torch.ones(self.memory.shape[0], dtype=torch.bool)
        rest[self.candidates] = False
        rest = (rest & (self.bound >= level.min())).nonzero()[:, 0]
        if not rest.numel():
            return self.incoming.shape[0]
        seen = self.seen[:, rest].double()
        change = seen - self.lost[:, rest]
        before = change.cumsum(0).sub_(change).add_(self.total[rest])  # N of slot j when newcomer b arrives: (B, n)
        if self.compete:
            before += seen
        level, taken = level[:, None], self._slots(turned_away=self.memory.shape[0])[:, None]
        wrong = (before > level) | ((before == level) & (rest < taken))
        first = wrong.any(1).nonzero()
        return int(first[0]) if first.numel() else self.incoming.shape[0]

    def _lost(self) -> Tensor:
        """What every slot saw of the item that left for newcomer b: (B, K)."""
        evicted, count = torch.tensor(self.evicted), self.incoming.shape[0]
        resident = evicted >= count
        lost = self.seen[evicted.clamp(max=count - 1)]  # a newcomer that left again, or was turned away
        lost[resident] = units(self.score, self.items[evicted[resident]], self.memory, self.e)
        return lost

    def _slots(self, turned_away: int) -> Tensor:
        return torch.cat([self.candidates, torch.tensor([turned_away])])[self.position]  # -1 is the last

    def accept(self, count: int) -> tuple[Tensor, Tensor]:
        """The slots of the first `count` newcomers, and N in units after them."""
        if count < self.incoming.shape[0]:
            self._simulate(count)
        total = torch.from_numpy(self.running[self.occupant])
        if self.whole:
            return torch.from_numpy(self.position), total
        change = _sum(self.seen[:count], 0) - _sum(self.lost[:count], 0)
        return self._slots(turned_away=-1), (self.total + change).index_copy(0, self.candidates, total)

    def memory_after(self) -> Tensor:
        """(K, d): the memory with the newcomers that were accepted."""
        held = self.items[self.occupant]
        return held if self.whole else self.memory.index_copy(0, self.candidates, held)


def _sum(h: Tensor, dim: int) -> Tensor:
    """Whole numbers summed in float64. NumPy widens them as it goes, torch makes a copy of them all first."""
    return torch.from_numpy(h.numpy().sum(dim, dtype=np.float64))
