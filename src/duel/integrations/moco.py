"""For MoCo code: models with a buffer `queue` (dim, slots) and a method `_dequeue_and_enqueue(keys)`.

    class DuelMoCo(DuelQueue, MoCo):
        pass

    model = DuelMoCo(...)  # as before

The rest of such a model, its loss included, goes on reading `self.queue`.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, distributed, nn

from duel.errors import UserError
from duel.memory import WorkingMemory

__all__ = ["DuelQueue"]


class DuelQueue(nn.Module):
    """Goes before a MoCo model among the parents of a class, and decides who leaves its queue.

    The random columns that the queue starts with are its own: newcomers take their places first. A batch may be of any
    size. In a process group the keys of all processes are taken in, in the order of ranks, as MoCo's own queue does.

    Attributes:
        policy: a name or a `duel.policies.Policy`, which every model gets a copy of; set it in the class.
        duel_memory: the `WorkingMemory` behind `queue`. In `state_dict`.
    """

    policy: Any = "duel"
    queue: Tensor

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        queue = getattr(self, "queue", None)
        if not isinstance(queue, Tensor) or queue.dim() != 2 or not hasattr(super(), "_dequeue_and_enqueue"):
            raise UserError(
                f"{type(self).__name__}: DuelQueue goes before a model with a buffer queue (dim, slots) and a method "
                "_dequeue_and_enqueue, as in class DuelMoCo(DuelQueue, MoCo)"
            )
        dim, size = queue.shape
        self.duel_memory = WorkingMemory(size, dim, copy.deepcopy(self.policy), normalize=True)

    @torch.no_grad()
    def _dequeue_and_enqueue(self, keys: Tensor) -> None:
        memory = self.duel_memory
        slots = memory.update(_of_all_processes(keys))
        memory.learn()
        taken = slots.clamp(min=0)  # one that was turned away writes what is in slot 0 anyhow
        self.queue[:, taken] = memory.embeddings[taken].t().to(self.queue.dtype)


def _of_all_processes(rows: Tensor) -> Tensor:
    """(b, d) -> (processes · b, d), in the order of ranks."""
    if not (distributed.is_available() and distributed.is_initialized()):
        return rows
    all_rows = [torch.empty_like(rows) for _ in range(distributed.get_world_size())]
    distributed.all_gather(all_rows, rows.contiguous())
    return torch.cat(all_rows)
