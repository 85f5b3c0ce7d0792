"""A threshold in the place of a duel: what looks like something that is held is turned away."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from duel.errors import UserError
from duel.hashing import NUMBERS, digest
from duel.likeness import unlike
from duel.policies.base import takes_part
from duel.policies.simple import Ageless
from duel.replacement.units import widened
from duel.slots import again, lowest_stay, put

if TYPE_CHECKING:
    from duel.memory import WorkingMemory


class Dedup(Ageless):
    """A sample of what looks different: near-copies are told by a threshold, and no duel is fought.

    A newcomer is a copy if its cosine with an item that is no copy, and is held or came earlier in the same update, is
    `alike` or more (or a millionth less): so of a scene that changes slowly more than one frame is no copy. Items that
    are no copies come before copies; among equals a number stays or goes that every item has of its own, a hash of
    `seed` and its vector as it came, the lowest staying (bottom-k sampling: Cohen 1997). So how often the very same
    vector comes does not matter, and it is held once; how often near-copies come does, since each has a number of its
    own, and as long as none of them is held any may enter. Copies fill what slots there are too few different items
    for. Which items are copies is told when they come, and of the first ones when the memory becomes full.

    Args:
        alike: cosine of two that are copies, above 0 and at most 1.
        seed: of the items' numbers.
    """

    copies: Tensor
    numbers: Tensor

    def __init__(self, *, alike: float = 0.9, seed: int = 0, max_age: int | None = None) -> None:
        super().__init__(seed=seed, max_age=max_age)
        if not isinstance(alike, int | float) or not 0 < alike <= 1:
            raise UserError(f"alike must be a cosine above 0 and at most 1, got {alike!r}")
        self.alike = float(alike)

    def extra_repr(self) -> str:
        return f"alike={self.alike:g}, {super().extra_repr()}"

    def attach(self, memory: WorkingMemory) -> None:
        super().attach(memory)
        self.register_buffer("copies", torch.zeros(memory.size, dtype=torch.bool))
        self.register_buffer("numbers", torch.zeros(memory.size, dtype=torch.int64))

    def filled(self, memory: WorkingMemory) -> None:
        rows = memory.compared
        self.numbers.copy_(self._numbers(rows))
        self.copies.copy_(~unlike(_wide(rows), self.alike))

    def choose(self, memory: WorkingMemory, incoming: Tensor) -> Tensor:
        held, size = memory.compared, memory.size
        rows = incoming.to(held.dtype)
        numbers = torch.cat([self.numbers, self._numbers(rows)])  # (K + B,)
        copies = torch.cat([self.copies, ~unlike(_wide(rows), self.alike, _wide(held), ~self.copies)])
        absent = torch.zeros_like(copies)
        absent[size:] = ~takes_part(incoming)
        rank = numbers + copies * NUMBERS
        rank = torch.where(again(numbers, absent), 2 * NUMBERS, rank) + absent * (4 * NUMBERS)
        slots = lowest_stay(rank, size)
        both = put(torch.stack([self.numbers, self.copies.long()], 1), slots, torch.stack([numbers, copies], 1)[size:])
        self.numbers.copy_(both[:, 0])
        self.copies.copy_(both[:, 1])
        return slots

    def _numbers(self, rows: Tensor) -> Tensor:
        """int64 (n,), of their vectors."""
        return digest(self.seed, (widened(rows, torch.float32) + 0.0).view(torch.int32))  # + 0.0: -0.0 is 0.0


def _wide(rows: Tensor) -> Tensor:
    return widened(rows, torch.promote_types(rows.dtype, torch.float32))
