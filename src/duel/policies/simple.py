"""Policies that do not look at the embeddings: the queue of MoCo, random ones, one that knows items by their ids."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from duel.errors import UserError, check_seed
from duel.hashing import uniform
from duel.policies.base import Policy, check_ids, takes_part
from duel.slots import again, lowest_stay, turns

if TYPE_CHECKING:
    from duel.memory import WorkingMemory


class Fifo(Policy):
    """The queue of MoCo: the oldest item leaves."""

    cursor: Tensor

    def __init__(self, *, max_age: int | None = None) -> None:
        super().__init__(max_age=max_age)
        self.register_buffer("cursor", torch.zeros((), dtype=torch.int64))

    def choose(self, memory: WorkingMemory, incoming: Tensor) -> Tensor:
        present = takes_part(incoming)
        if self.max_age is not None:  # what has just left for its age was the oldest, at the cursor
            new = memory._admitted_at[self.oldest_first(memory)] == memory._clock
            # no more than were exchanged: slots that this same update has filled are new, too
            self.cursor += torch.minimum(new.long().cumprod(0).sum(), (~present).sum())
        slots = (self.cursor + turns(present)) % memory.size
        self.cursor += present.sum()
        return torch.where(present, slots, -1)

    def oldest_first(self, memory: WorkingMemory) -> Tensor:
        """The order of the queue."""
        return (self.cursor + torch.arange(memory.size, device=self.cursor.device)) % memory.size


class _Seeded(Policy):
    """A policy that draws at random: the same draws on every device, and after save and load."""

    def __init__(self, *, seed: int = 0, max_age: int | None = None) -> None:
        super().__init__(max_age=max_age)
        self.seed = check_seed(seed)

    def extra_repr(self) -> str:
        age = super().extra_repr()
        return f"seed={self.seed}{', ' * bool(age)}{age}"

    def get_extra_state(self) -> dict[str, int]:
        return {"seed": self.seed}

    def state_of(self, saved: Any, *, recast: bool) -> Any:
        return self.get_extra_state() if saved is None else saved  # an older version did not save its seed

    def check_state(self, state: Any) -> None:
        if not isinstance(state, dict) or "seed" not in state:
            raise UserError(f"state_dict holds no state of a {type(self).__name__} policy")

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.seed = state["seed"]


class _Drawing(_Seeded):
    """One draw for each newcomer."""

    arrived: Tensor

    def __init__(self, *, seed: int = 0, max_age: int | None = None) -> None:
        super().__init__(seed=seed, max_age=max_age)
        self.register_buffer("arrived", torch.zeros((), dtype=torch.int64))  # newcomers since the memory was full

    def draw(self, incoming: Tensor) -> tuple[Tensor, Tensor]:
        """(the running number of each newcomer that takes part, a uniform draw for it)"""
        present = takes_part(incoming)
        number = self.arrived + turns(present)
        self.arrived += present.sum()
        return number, uniform(self.seed, number)


class Random(_Drawing):
    """Any slot, each with the same probability."""

    def choose(self, memory: WorkingMemory, incoming: Tensor) -> Tensor:
        _, draw = self.draw(incoming)
        return (draw * memory.size).long()


class Reservoir(_Drawing):
    """A uniform sample of everything seen so far (Vitter 1985, algorithm R)."""

    def choose(self, memory: WorkingMemory, incoming: Tensor) -> Tensor:
        number, draw = self.draw(incoming)
        slots = (draw * (memory.size + number + 1)).long()
        return torch.where(slots < memory.size, slots, -1)


class Ageless(_Seeded):
    """A policy by which items leave for what they are, whenever they came."""

    def __init__(self, *, seed: int = 0, max_age: int | None = None) -> None:
        if max_age is not None:
            name = type(self).__name__.lower()
            raise UserError(
                f"policy {name} lets items leave for what they are, not by age; leave max_age {max_age} out"
            )
        super().__init__(seed=seed)


class Distinct(Ageless):
    """A uniform sample of the *different* items seen so far: what knowing exact copies by their ids gives.

    Every id has a random number of its own, and those with the lowest stay (bottom-k sampling: Cohen 1997), so that how
    often an item came does not matter and nothing but the memory is kept of what was seen. An item that is held already
    is turned away. Copies that entered while the memory was filling leave first, for any item that is not held.

    Ids are the memory's payload "id". Near-duplicates with ids of their own are different items.
    """

    def attach(self, memory: WorkingMemory) -> None:
        check_ids(memory, "distinct")
        super().attach(memory)

    def choose(self, memory: WorkingMemory, incoming: Tensor) -> Tensor:
        ids = torch.cat([memory["id"], memory.arriving["id"]])  # (K + B,)
        absent = torch.zeros_like(ids, dtype=torch.bool)
        absent[memory.size :] = ~takes_part(incoming)
        return lowest_stay(torch.where(again(ids, absent), 1.0, uniform(self.seed, ids)) + 2.0 * absent, memory.size)
