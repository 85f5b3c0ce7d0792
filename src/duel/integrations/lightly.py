"""For lightly: a memory bank whose policy decides who leaves.

    criterion = NTXentLoss(temperature=0.1, memory_bank_size=(4096, 128))
    criterion.memory_bank = DuelMemoryBank((4096, 128))

All that takes a `MemoryBankModule` takes it: NTXentLoss, DirectCLRLoss, CO2Regularizer. NNCLR takes `DuelNNMemoryBank`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from duel.errors import UserError
from duel.memory import WorkingMemory

try:
    from lightly.models import utils
    from lightly.models.modules import NNMemoryBankModule
    from lightly.models.modules.memory_bank import MemoryBankModule
    from lightly.utils import dist
except ImportError as error:
    raise UserError(f"duel.integrations.lightly needs lightly: pip install lightly ({error})") from error

__all__ = ["DuelMemoryBank", "DuelNNMemoryBank"]


class DuelMemoryBank(MemoryBankModule):  # type: ignore[misc]
    """lightly's memory bank, held by a `WorkingMemory`.

    Like lightly's it starts with random rows, so that it always has the same shape. They count as empty: newcomers take
    their places first, and the policy decides once they are gone. Unlike lightly's it is in the loss's `state_dict`,
    random rows and all.

    Args:
        size: (slots, dim), or 0 for no memory bank.
        policy: a name or a `duel.policies.Policy`.
        gather_distributed: take in the embeddings of all processes; their memories then stay alike.
        feature_dim_first: give the bank as (dim, slots).
        memory: further settings of `WorkingMemory`. Embeddings are brought to unit length unless `normalize=False`.
    """

    bank: Tensor

    def __init__(
        self,
        size: int | Sequence[int],
        policy: Any = "duel",
        *,
        gather_distributed: bool = False,
        feature_dim_first: bool = True,
        **memory: Any,
    ) -> None:
        super().__init__(size, gather_distributed=gather_distributed, feature_dim_first=feature_dim_first)
        slots, dim = self.size if len(self.size) == 2 else (0, 0)
        self.memory = WorkingMemory(slots, dim, policy, **{"normalize": True, **memory}) if slots else None
        if slots:
            self.register_buffer("bank", self.bank)  # now persistent

    def forward(
        self, output: Tensor, labels: Tensor | None = None, update: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """`output`, and the bank as it was before `output`, if `update`, was offered to it."""
        if self.memory is None:
            return output, None
        held = self.memory.embeddings
        bank = held.clone() if self.memory.full else torch.cat([held, self.bank[len(held) :].to(held)])
        if update:
            self._dequeue_and_enqueue(output)
        return output, bank.t() if self.feature_dim_first else bank

    @torch.no_grad()
    def _dequeue_and_enqueue(self, batch: Tensor) -> None:
        if self.memory is None:
            return
        if self.gather_distributed and dist.world_size() > 1:
            batch = utils.concat_all_gather(batch)
        self.memory.update(batch)
        self.memory.learn()
        if self.memory.full:
            self.bank = self.bank[:0].clone()  # the random rows are done with

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        """Also of a bank with random rows into one whose rows are gone, and the other way round."""
        if self.memory is not None and f"{prefix}memory._embeddings" in state_dict:
            saved = state_dict.setdefault(f"{prefix}bank", self.bank)  # an older version did not save them
            if saved.shape in ((0, self.memory.dim), self.size):
                self.bank = self.bank.new_empty(saved.shape)
        super()._load_from_state_dict(state_dict, prefix, *rest)


class DuelNNMemoryBank(NNMemoryBankModule, DuelMemoryBank):  # type: ignore[misc]
    """lightly's bank of nearest neighbours (NNCLR), among items that are not duplicates of each other."""

    def __init__(self, size: Sequence[int], policy: Any = "duel", **memory: Any) -> None:
        DuelMemoryBank.__init__(self, size, policy, **memory)
