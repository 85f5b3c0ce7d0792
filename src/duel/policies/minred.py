"""Minimum redundancy: the item whose nearest neighbour is closest leaves (max instead of the paper's sum)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from duel.errors import UserError
from duel.policies.base import Policy, takes_part
from duel.replacement.units import compute_dtype, exact_products

if TYPE_CHECKING:
    from duel.memory import WorkingMemory

NONE = -2.0  # less than any cosine: an item is not its own neighbour


class MinRed(Policy):
    """Evicts, for each newcomer in turn, the item with the closest nearest neighbour; ties to the lowest slot.

    All pairs are compared anew in every update, in K × K working space, so the size is limited.
    """

    LARGEST = 16384

    def attach(self, memory: WorkingMemory) -> None:
        if memory.size > self.LARGEST:
            raise UserError(
                f"MinRed compares all pairs and is limited to {self.LARGEST:,} slots, got size={memory.size:,}; "
                f"use Duel with a sharp score such as 'exponential:0.02'"
            )
        super().attach(memory)

    def choose(self, memory: WorkingMemory, incoming: Tensor) -> Tensor:
        dtype = compute_dtype(memory.compared, incoming)
        with torch.no_grad(), exact_products(incoming.device):
            z, x = memory.compared.to(dtype).clone(), incoming.to(dtype)
            skip = ~takes_part(x)
            cosines = z @ z.T
            cosines.fill_diagonal_(NONE)
            return _on_host(cosines, z, x, skip) if z.device.type == "cpu" else _on_device(cosines, z, x, skip)


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
