"""A control for measuring only: a memory kept balanced by one who sees the labels."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from duel.checks import check_tensor
from duel.errors import UserError
from duel.policies.base import Policy, check_ids, takes_part
from duel.slots import seats

if TYPE_CHECKING:
    from duel.memory import WorkingMemory


class Oracle(Policy):
    """For measuring only: SEES THE LABELS. Says what a perfectly balanced memory could give at most.

    Of the K residents and the newcomers, every class keeps as many as the others if it has them: at most L, where the
    level L makes the kept ones K in all; what is left over by whole numbers goes to the first classes above L, one
    each. Within a class the most recent stay: newcomers before residents, later newcomers before earlier ones,
    residents by admission, ties to the higher slot. Newcomers that stay take, in order, the slots of the residents
    that leave, lowest first; the others are turned away.

    Args:
        labels: int64 (items,), the class of every id; ids are the memory's payload "id".
        classes: how many there are; default the largest label + 1.
    """

    labels: Tensor

    def __init__(self, labels: Tensor | None = None, *, classes: int | None = None, max_age: int | None = None) -> None:
        super().__init__()
        if labels is None:
            raise UserError(
                "policy oracle balances the memory by the labels, so it needs some: train on labelled data, or give "
                "Oracle(labels). It is a control for measuring only; duel is the policy that needs none"
            )
        check_tensor(labels, "labels", "int64 (items,)")
        if labels.dim() != 1 or labels.dtype != torch.int64 or not labels.numel() or int(labels.min()) < 0:
            raise UserError(f"labels must be int64 (items,) and >= 0, got {labels.dtype} {tuple(labels.shape)}")
        if max_age is not None:
            raise UserError(f"policy oracle lets items leave by class and recency alone; leave max_age {max_age} out")
        largest = int(labels.max()) + 1
        self.classes = largest if classes is None else classes
        if self.classes < largest:
            raise UserError(f"classes must be at least {largest}, one more than the largest label, got {classes}")
        self.register_buffer("labels", labels.detach().clone(), persistent=False)

    def attach(self, memory: WorkingMemory) -> None:
        check_ids(memory, "oracle")
        super().attach(memory)

    def _check_known(self, ids: Tensor) -> None:
        """That every item has a label, where looking costs no synchronisation."""
        if ids.device.type == "cpu" and ids.numel():
            least, most = ids.numpy().min(), ids.numpy().max()
            if least < 0 or most >= len(self.labels):
                raise UserError(
                    f"policy oracle has labels of the ids 0 to {len(self.labels) - 1}, got ids from {least} to {most}"
                )

    def filled(self, memory: WorkingMemory) -> None:
        self._check_known(memory["id"])

    def choose(self, memory: WorkingMemory, incoming: Tensor) -> Tensor:
        size, count = memory.size, incoming.shape[0]
        if not count:
            return torch.zeros(0, dtype=torch.int64, device=incoming.device)
        self._check_known(memory.arriving["id"])
        labels = self.labels
        absent = torch.full((count,), self.classes, dtype=torch.int64, device=incoming.device)
        arriving = torch.where(takes_part(incoming), labels[memory.arriving["id"]], absent)
        classes = torch.cat([labels[memory["id"]], arriving])  # (K + B,), one more class for those that take no part
        counts = torch.zeros(self.classes + 1, dtype=torch.int64, device=incoming.device)
        counts.scatter_add_(0, classes, torch.ones_like(classes))
        quota = torch.cat([quotas(counts[:-1], size), torch.zeros_like(counts[:1])])

        # most recent first, then class by class with that order kept: the place of each within its class
        oldest_first = torch.sort(memory.age, stable=True, descending=True).indices
        recent = torch.cat([oldest_first, torch.arange(size, size + count, device=incoming.device)]).flip(0)
        grouped = recent[torch.sort(classes[recent], stable=True).indices]
        before = counts.cumsum(0) - counts
        place = torch.arange(size + count, device=incoming.device) - before[classes[grouped]]
        stays = torch.zeros_like(classes, dtype=torch.bool).scatter_(0, grouped, place < quota[classes[grouped]])
        return seats(stays, size)


def quotas(counts: Tensor, size: int) -> Tensor:
    """int64 (C,): how many of each class stay when min(count, level) are to be `size` in all; Σ counts >= size.

    Exact in whole numbers, without a host read: with the i smallest classes kept whole, the level of the others is
    (size - their sum) / (C - i); the right i is the first at which the next class exceeds its level.
    """
    ordered = counts.sort().values
    whole = ordered.cumsum(0) - ordered  # sum of the i smallest
    others = torch.arange(counts.shape[0], 0, -1, device=counts.device)
    levels = (size - whole).div(others, rounding_mode="floor")
    cut = ordered > levels
    first = cut.to(torch.int8).argmax(0, keepdim=True)  # with one dimension: a number as index would be read back
    level = torch.where(cut.any(), levels.gather(0, first), ordered[-1:])
    kept = torch.minimum(counts, level)
    above = counts > level
    return kept + (above & (above.cumsum(0) <= size - kept.sum()))
