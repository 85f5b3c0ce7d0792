"""Policies that do not look at the embeddings: the queue of MoCo, and random ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from duel.hashing import uniform
from duel.policies.base import Policy

if TYPE_CHECKING:
    from duel.memory import WorkingMemory


class Fifo(Policy):
    """The queue of MoCo: the oldest item leaves."""

    cursor: Tensor

    def __init__(self, *, max_age: int | None = None) -> None:
        super().__init__(max_age=max_age)
        self.register_buffer("cursor", torch.zeros((), dtype=torch.int64))

    def choose(self, memory: WorkingMemory, incoming: Tensor) -> Tensor:
        slots = (self.cursor + torch.arange(incoming.shape[0], device=incoming.device)) % memory.size
        self.cursor += incoming.shape[0]
        return slots

    def restart(self) -> None:
        self.cursor.zero_()


class _Drawing(Policy):
    """A policy that draws at random: the same draws on every device, and after save and load."""

    arrived: Tensor

    def __init__(self, *, seed: int = 0, max_age: int | None = None) -> None:
        super().__init__(max_age=max_age)
        self.seed = seed
        self.register_buffer("arrived", torch.zeros((), dtype=torch.int64))  # newcomers since the memory was full

    def draw(self, count: int) -> tuple[Tensor, Tensor]:
        """(the running number of each newcomer, a uniform draw for it)"""
        number = self.arrived + torch.arange(count, device=self.arrived.device)
        self.arrived += count
        return number, uniform(self.seed, number)

    def restart(self) -> None:
        self.arrived.zero_()


class Random(_Drawing):
    """Any slot, each with the same probability."""

    def choose(self, memory: WorkingMemory, incoming: Tensor) -> Tensor:
        _, draw = self.draw(incoming.shape[0])
        return (draw * memory.size).long()


class Reservoir(_Drawing):
    """A uniform sample of everything seen so far (Vitter 1985, algorithm R)."""

    def choose(self, memory: WorkingMemory, incoming: Tensor) -> Tensor:
        number, draw = self.draw(incoming.shape[0])
        slots = (draw * (memory.size + number + 1)).long()
        return torch.where(slots < memory.size, slots, -1)
