"""For pytorch-metric-learning: its cross-batch memory, with a policy that decides who leaves.

    loss = DuelCrossBatchMemory(NTXentLoss(), embedding_size=128, memory_size=4096)
    loss(embeddings, labels)

It takes the losses and miners that `CrossBatchMemory` takes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from duel.errors import UserError
from duel.memory import WorkingMemory

try:
    from pytorch_metric_learning.losses import CrossBatchMemory
except ImportError as error:
    raise UserError(
        f"duel.integrations.metric_learning needs it: pip install pytorch-metric-learning ({error})"
    ) from error

__all__ = ["DuelCrossBatchMemory"]


class DuelCrossBatchMemory(CrossBatchMemory):  # type: ignore[misc]
    """pytorch-metric-learning's `CrossBatchMemory`, held by a `WorkingMemory`.

    A batch is compared with itself and with those of the memory's items that it did not replace. (A FIFO memory holds
    its batch for sure; a policy may give the place of one newcomer to the next, which may be its only positive.) Labels
    are kept for the loss alone: the policy compares embeddings, brought to unit length. Under `DistributedLossWrapper`
    each process meets its own items first, so that the memories of two processes differ.

    Args:
        loss, embedding_size, memory_size, miner, kwargs: those of `CrossBatchMemory`.
        policy: a name or a `duel.policies.Policy`.

    Attributes:
        memory: the `WorkingMemory`, with payload "embedding" (of the length it came with) and "label". In `state_dict`.
        embedding_memory, label_memory: what the last batch was compared with; the batch comes first.
    """

    def __init__(
        self,
        loss: Any,
        embedding_size: int,
        memory_size: int = 1024,
        miner: Any = None,
        *,
        policy: Any = "duel",
        **kwargs: Any,
    ) -> None:
        super().__init__(loss, embedding_size, memory_size=memory_size, miner=miner, **kwargs)
        payload = {"embedding": ((embedding_size,), torch.float32), "label": ((), torch.int64)}
        self.memory = WorkingMemory(memory_size, embedding_size, policy, payload, normalize=True)

    @torch.no_grad()
    def add_to_memory(self, embeddings: Tensor, labels: Tensor, batch_size: int) -> None:
        memory = self.memory.to(embeddings.device)
        held = {name: memory[name].clone() for name in ("embedding", "label")}
        slots = memory.update(embeddings, embedding=embeddings.detach().float(), label=labels.long())
        memory.learn()
        left = torch.ones(memory.size, dtype=torch.bool, device=slots.device)
        left[slots[slots >= 0]] = False
        left = left[: len(held["label"])]
        self.curr_batch_idx = torch.arange(batch_size, device=labels.device)
        self.embedding_memory = torch.cat([embeddings.detach(), held["embedding"][left].to(embeddings.dtype)])
        self.label_memory = torch.cat([labels, held["label"][left].to(labels.dtype)])

    def reset_queue(self) -> None:
        """Forget everything."""
        if "memory" in self._modules:  # not yet while the parent class is set up
            self.memory.reset()
        self.embedding_memory = torch.zeros(self.memory_size, self.embedding_size)
        self.label_memory = torch.zeros(self.memory_size, dtype=torch.int64)
        self.has_been_filled, self.queue_idx = True, 0  # all of the two above counts
