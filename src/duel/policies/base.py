"""What every policy is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from duel.checks import is_whole
from duel.errors import UserError
from duel.storage import undo_cast

if TYPE_CHECKING:
    from duel.memory import WorkingMemory


class Policy(nn.Module):
    """Decides which slot each newcomer takes.

    Args:
        max_age: an item that has been in memory for more than this many updates leaves first, the oldest before the
            others, whatever the policy would say. None: never.
    """

    def __init__(self, *, max_age: int | None = None) -> None:
        super().__init__()
        if max_age is not None and (not is_whole(max_age) or max_age < 1):
            raise UserError(
                f"max_age must be a whole number of updates, at least 1, or None for never, got {max_age!r}"
            )
        self.max_age = max_age
        self._owned = False

    def extra_repr(self) -> str:
        return "" if self.max_age is None else f"max_age={self.max_age}"

    def attach(self, memory: WorkingMemory) -> None:
        """Called once by the memory that this policy will serve; the place to make buffers of its size."""
        if self._owned:
            raise UserError(
                f"this {type(self).__name__} policy already serves another memory; give each memory a policy of its own"
            )
        self._owned = True

    def choose(self, memory: WorkingMemory, incoming: Tensor) -> Tensor:
        """int64 (B,): the slot each newcomer of incoming (B, d) takes, one by one and in order; -1 turns it away.

        `memory.arriving` is the newcomers' payload, {name: (B, ...)}, during this call only; `memory[name]` is the
        residents', where an item that `max_age` has just let in still shows the payload of the one it replaces.
        """
        raise TypeError(f"{type(self).__name__} must define choose(memory, incoming)")

    def ready(self, memory: WorkingMemory) -> None:
        """Raise if newcomers cannot be placed; asked before anything is changed."""

    def filled(self, memory: WorkingMemory) -> None:
        """The memory has just become full; from now on `choose` is asked."""

    def refreshed(self, memory: WorkingMemory, slots: Tensor, old: Tensor) -> None:
        """The distinct `slots` (n,) hold new vectors (some may be the same); `old` (n, d) are the former ones."""

    def oldest_first(self, memory: WorkingMemory) -> Tensor:
        """int64 (filled,): the slots in the order in which `max_age` lets their items go, ties to the lowest slot."""
        return torch.sort(memory.age, descending=True, stable=True).indices

    def learn(self, memory: WorkingMemory) -> None:
        """The paper's UpdatePolicy: called by `memory.learn()`, once per training step."""

    def restart(self) -> None:
        """The memory was emptied: what has been learnt from it starts at zero again."""
        for name, buffer in self.named_buffers(recurse=False):
            if name not in self._non_persistent_buffers_set:
                buffer.zero_()

    def recast(self) -> None:
        """The vectors that are compared have another dtype now, and are rounded otherwise."""

    def state_of(self, saved: Any, *, recast: bool) -> Any:
        """A saved extra state, None if there was none, as this policy takes it. recast: of vectors of another dtype."""
        return saved

    def check_state(self, state: Any) -> None:
        """Raise if `state`, what `get_extra_state` gave, is not one that this policy can go on from."""


class Counting(Policy):
    """A policy that counts something for every slot once the memory is full, and carries it on from there."""

    _counted = False

    def _count(self, memory: WorkingMemory) -> None:
        """Count anew, from what the memory holds now."""
        raise TypeError(f"{type(self).__name__} must define _count(memory)")

    def filled(self, memory: WorkingMemory) -> None:
        """Also for a full memory that was loaded without the count, or whose vectors have another dtype now."""
        if not self._counted:
            self._count(memory)

    def recast(self) -> None:
        self._counted = False

    def restart(self) -> None:
        super().restart()
        self._counted = False

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Moved with the memory, but never narrowed: it needs its 53 bits when the embeddings become bfloat16."""
        kept = {name: buffer for name, buffer in self._buffers.items() if buffer is not None}
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        undo_cast(self, kept)
        return self


def check_ids(memory: WorkingMemory, policy: str) -> None:
    """Raise if the memory does not know its items by number."""
    if memory.payload.get("id") != ((), torch.int64):
        raise UserError(f'policy {policy} needs the memory to keep ids: payload={{"id": ((), torch.int64)}}')


def takes_part(incoming: Tensor) -> Tensor:
    """bool (B,): which newcomers are to be placed; a row of zeros stands for one that is not."""
    return incoming.any(1)


def all_take_part(incoming: Tensor) -> bool:
    """True if the first column alone tells that every newcomer takes part; on the CPU, where it may be read."""
    return incoming.device.type == "cpu" and all(incoming[:, 0].tolist())
