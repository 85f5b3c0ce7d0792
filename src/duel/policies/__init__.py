"""Who leaves the memory when a newcomer arrives.

A policy is a small module with three methods, of which only `choose` is required:

    class Newest(duel.policies.Policy):                      # a FIFO queue of one's own
        def attach(self, memory):
            super().attach(memory)
            self.register_buffer("cursor", torch.zeros((), dtype=torch.int64))
        def choose(self, memory, incoming):
            slots = (self.cursor + torch.arange(len(incoming), device=incoming.device)) % memory.size
            self.cursor += len(incoming)
            return slots

`choose` is asked only when the memory is full. It returns, for each newcomer in order, the slot it takes or -1. State
goes into buffers (or `get_extra_state`), so that it is saved with the memory. On a GPU it must not read tensors on the
host. A row of zeros stands for a newcomer that takes no part (it was not a unit vector, or has been placed already).
`memory.arriving` has the newcomers' payload, by name and row for row, while `choose` runs.
"""

from __future__ import annotations

from typing import Any

from duel.errors import UserError, suggest
from duel.policies.base import Policy, takes_part
from duel.policies.dedup import Dedup
from duel.policies.duelling import AdaptiveDuel, Duel
from duel.policies.minred import MinRed
from duel.policies.oracle import Oracle
from duel.policies.simple import Distinct, Fifo, Random, Reservoir

__all__ = [
    "POLICIES",
    "AdaptiveDuel",
    "Dedup",
    "Distinct",
    "Duel",
    "Fifo",
    "MinRed",
    "Oracle",
    "Policy",
    "Random",
    "Reservoir",
    "get",
    "takes_part",
]

#: Policies by name, with their defaults. The oracle is a control that sees the labels, for measuring only.
POLICIES: dict[str, type[Policy]] = {
    "duel": Duel,
    "fifo": Fifo,
    "reservoir": Reservoir,
    "random": Random,
    "distinct": Distinct,
    "dedup": Dedup,
    "minred": MinRed,
    "adaptive": AdaptiveDuel,
    "oracle": Oracle,
}


def get(policy: Any) -> Policy:
    """The policy that a name or an object stands for."""
    if isinstance(policy, Policy):
        return policy
    if not isinstance(policy, str):
        raise UserError(f"policy must be a name ({', '.join(POLICIES)}) or a duel.policies.Policy, got {policy!r}")
    if policy not in POLICIES:
        raise UserError(suggest("policy", policy, POLICIES))
    return POLICIES[policy]()
