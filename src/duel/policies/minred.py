"""Minimum redundancy: the item whose nearest neighbour is closest leaves (max instead of the paper's sum)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from duel.errors import UserError
from duel.policies.base import Policy, takes_part
from duel.replacement.units import compute_dtype, exact_products
from duel.slots import put

if TYPE_CHECKING:
    from duel.memory import WorkingMemory

NONE = -2.0  # less than any cosine: an item is not its own neighbour
WHOLE = 2048  # up to so many slots on a GPU, every newcomer looks at all pairs
ROUNDING = 2**-6  # more than bfloat16 changes in a cosine: 2^-8 for each factor, 2^-8 for the product
BLOCK = 512  # newcomers at a time there


class MinRed(Policy):
    """Evicts, for each newcomer in turn, the item with the closest nearest neighbour; ties to the lowest slot.

    All pairs are compared anew in every update, so the size is limited. On a GPU, above 2,048 slots, they are compared
    in bfloat16, which finds the items that may have to leave; all else is exact and concerns these alone.

    Attributes:
        in_doubt: how often, since the memory was emptied, an item that was not among these could not be ruled out.
    """

    LARGEST: ClassVar[Mapping[str, int]] = {"cpu": 16384, "cuda": 65536}
    in_doubt: Tensor

    def attach(self, memory: WorkingMemory) -> None:
        super().attach(memory)
        self.register_buffer("in_doubt", torch.zeros((), dtype=torch.int64, device=memory.device))

    def ready(self, memory: WorkingMemory) -> None:
        kind = memory.device.type
        largest = self.LARGEST.get(kind, self.LARGEST["cpu"])
        if memory.size > largest:  # only now is it known where the memory is
            raise UserError(
                f"MinRed compares all pairs and is limited to {largest:,} slots on {kind}, got size={memory.size:,}; "
                f"use Duel with a sharp score such as 'exponential:0.02'"
            )
        super().ready(memory)

    def choose(self, memory: WorkingMemory, incoming: Tensor) -> Tensor:
        dtype = compute_dtype(memory.compared, incoming)
        with exact_products(incoming.device):
            z, x = memory.compared.to(dtype).clone(), incoming.to(dtype)
            skip = ~takes_part(x)
            if z.device.type != "cpu" and z.shape[0] > WHOLE:
                return self._in_blocks(z, x, skip)
            cosines = _pairs(z)
            return _on_host(cosines, z, x, skip) if z.device.type == "cpu" else _on_device(cosines, z, x, skip)

    def _in_blocks(self, z: Tensor, x: Tensor, skip: Tensor) -> Tensor:
        chosen = []
        for first in range(0, x.shape[0], BLOCK):
            block, left_out = x[first : first + BLOCK], skip[first : first + BLOCK]
            slots, sure = _by_candidates(z, block, left_out, max(WHOLE // 2, 4 * block.shape[0]))
            self.in_doubt += ~sure
            chosen.append(slots)
            if first + BLOCK < x.shape[0]:
                z = put(z, slots, block)
        return torch.cat(chosen)


def _pairs(z: Tensor) -> Tensor:
    """The cosines of all pairs, alike both ways: each other's nearest neighbours tie, and rounding is not to decide."""
    cosines = z @ z.T
    return torch.maximum(cosines, cosines.T).fill_diagonal_(NONE)


def _on_device(cosines: Tensor, z: Tensor, x: Tensor, skip: Tensor) -> Tensor:
    """Every newcomer looks at the whole matrix: no control flow, no synchronisation."""
    chosen = []
    for b in range(x.shape[0]):
        j = cosines.amax(1).argmax(keepdim=True)
        row = torch.where(skip[b], cosines[j], (x[b : b + 1] @ z.T).index_fill(1, j, NONE))
        z.index_copy_(0, j, torch.where(skip[b], z[j], x[b : b + 1]))
        cosines.index_copy_(0, j, row)
        cosines.index_copy_(1, j, row.T)
        chosen.append(torch.where(skip[b], -1, j))
    return torch.cat(chosen) if chosen else torch.empty(0, dtype=torch.int64, device=z.device)


def _by_candidates(z: Tensor, x: Tensor, skip: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The slots (B,), from a simulation of the `count` residents that may come to have the closest neighbours, and
    whether no other can have had a closer one (bool, 0-d). No control flow, no synchronisation."""
    size, new, count = z.shape[0], x.shape[0], min(count, z.shape[0])
    seen = (x @ z.T).masked_fill_(skip[:, None], NONE)
    # an item's nearest neighbour can leave, which lowers this, or be a newcomer
    bound = torch.maximum(_nearest(z) + ROUNDING, seen.amax(0))
    residents = bound.topk(count).indices.sort().values
    bound = bound.index_fill(0, residents, NONE)
    items = torch.cat([z[residents], x])
    # neighbours that stay: all other residents
    stay = torch.cat([(z[residents] @ z.T), seen]).index_fill_(1, residents, NONE).amax(1)
    pairs = _pairs(items)
    visible = pairs.clone()
    visible[:, count:] = NONE  # to whom newcomers are not there yet
    slot = torch.cat([residents, residents.new_full((new,), size)])
    absent = torch.zeros(count + new, dtype=torch.bool, device=z.device)
    absent[count:] = True
    chosen, lowest = [], z.new_full((), 2.0)
    for b in range(new):
        nearest = torch.maximum(visible.amax(1), stay).masked_fill_(absent, NONE)
        level = nearest.amax()
        gone = torch.where((nearest == level) & ~absent, slot, size).argmin(keepdim=True)
        at, skipped = slot[gone], skip[b : b + 1]
        lowest = torch.where(skip[b], lowest, torch.minimum(lowest, level))
        # a skipped newcomer changes nothing: what would change is written as it was
        visible.index_copy_(1, gone, torch.where(skipped, visible.index_select(1, gone), NONE))
        absent.index_copy_(0, gone, ~skipped)
        visible[:, count + b] = torch.where(skipped, NONE, pairs[:, count + b])
        absent[count + b : count + b + 1] = skipped
        slot[count + b : count + b + 1] = at
        chosen.append(torch.where(skipped, -1, at))
    slots = torch.cat(chosen) if chosen else torch.empty(0, dtype=torch.int64, device=z.device)
    return slots, bound.amax() < lowest  # at the same level it could have the lower slot


def _nearest(z: Tensor, rows: int = 8192) -> Tensor:
    """About the cosine of every item's nearest neighbour: (K, d) -> (K,)."""
    short, found = z.bfloat16(), []
    if z.device.type == "cpu":
        short = short.to(z.dtype)  # not every processor multiplies bfloat16
    for first in range(0, z.shape[0], rows):
        cosines = short[first : first + rows] @ short.T
        cosines.diagonal(first).fill_(NONE)
        found.append(cosines.amax(1).to(z.dtype))
    return torch.cat(found)


def _on_host(cosines: Tensor, z: Tensor, x: Tensor, skip: Tensor) -> Tensor:
    """The same with each item's nearest neighbour remembered: only those who lose it look again."""
    size, count = z.shape[0], x.shape[0]
    pairs = cosines.numpy()
    nearest, neighbour = pairs.max(1), pairs.argmax(1)
    # newcomers against residents and against each other, in two products instead of one per newcomer
    to_residents, to_newcomers = (x @ z.T).numpy(), (x @ x.T).numpy()
    holds = torch.full((size,), -1).numpy()  # which newcomer a slot holds
    slots = torch.full((count,), -1)
    for b in range(count):
        if skip[b]:
            continue
        j = int(nearest.argmax())
        row = to_residents[b].copy()
        moved = (holds >= 0).nonzero()[0]
        row[moved] = to_newcomers[b, holds[moved]]
        row[j] = NONE
        pairs[j], pairs[:, j] = row, row
        orphans = (neighbour == j).nonzero()[0]
        closer = row > nearest
        nearest[closer], neighbour[closer] = row[closer], j
        changed = [*orphans.tolist(), j]
        nearest[changed], neighbour[changed] = pairs[changed].max(1), pairs[changed].argmax(1)
        holds[j] = b
        slots[b] = j
    return slots
