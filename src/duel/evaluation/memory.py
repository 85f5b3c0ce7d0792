"""What a memory holds, class by class. Labels are for measuring only: nothing here may reach a method or a policy.

Every function returns tensors on the device of what it was given and does not synchronise; the caller reads them
when it logs.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from duel.errors import UserError
from duel.evaluation.rates import class_counts


def class_entropy(labels: Tensor, classes: int) -> Tensor:
    """Entropy of the classes of (n,) labels over log(classes): 1 = all equally frequent, 0 = one class only."""
    if classes < 2:
        raise UserError(f"classes must be >= 2 for an entropy, got {classes}")
    counts = class_counts(labels, classes)
    entropy: Tensor = torch.special.entr(counts / counts.sum()).sum()
    return entropy / math.log(classes)


def largest_share(labels: Tensor, classes: int) -> Tensor:
    """Share of the most frequent class among (n,) labels."""
    counts = class_counts(labels, classes)
    return counts.max() / counts.sum()


def collision_rate(
    batch_labels: Tensor,
    memory_labels: Tensor,
    classes: int,
    *,
    batch_ids: Tensor | None = None,
    memory_ids: Tensor | None = None,
) -> Tensor:
    """Share of the pairs (batch item, slot) that are of one class: the false negatives of a contrastive loss.

    batch (b,), memory (n,). Where both ids are given, an item and a slot that holds this same item are not a pair,
    since the loss masks them.
    """
    if (batch_ids is None) != (memory_ids is None):
        raise UserError("batch_ids and memory_ids must be given together, or neither")
    collisions = class_counts(batch_labels, classes) @ class_counts(memory_labels, classes)
    pairs = torch.full_like(collisions, len(batch_labels) * len(memory_labels))
    if batch_ids is not None and memory_ids is not None:
        own = (batch_ids.unsqueeze(1) == memory_ids).sum()
        collisions, pairs = collisions - own, pairs - own
    return collisions / pairs


def distinct(memory_ids: Tensor) -> Tensor:
    """Share of the slots that would be left if each item were held once: ids int64 (n,) -> 0-d float64."""
    held = memory_ids.sort().values
    return ((held[1:] != held[:-1]).sum() + 1).double() / len(held)


def turnover(before: Tensor, after: Tensor) -> Tensor:
    """Share of the slots whose item changed between two looks at the memory's ids, (n,) and (m,) with n <= m.

    Slots filled in between count as changed.
    """
    if len(before) > len(after) or not len(after):
        raise UserError(f"after must have at least the {len(before)} slots of before and at least 1, got {len(after)}")
    kept = (before == after[: len(before)]).sum().double()
    return 1 - kept / len(after)


def measure(
    memory_ids: Tensor,
    labels: Tensor,
    classes: int,
    *,
    batch_ids: Tensor | None = None,
    previous_ids: Tensor | None = None,
    age: Tensor | None = None,
) -> dict[str, Tensor]:
    """All measures of a memory at once, as 0-d float64 tensors.

    memory_ids (n,) int64: the ids of the filled slots; labels (items,) int64: the class of every id (move it to the
    ids' device beforehand to save the copy). With batch_ids (b,): `collision_rate`; with previous_ids, the ids at the
    last measurement: `turnover`; with age (n,) in updates: `mean_age` and `max_age`.
    """
    if not len(memory_ids):
        raise UserError("memory_ids is empty: fill the memory before measuring it")
    labels = labels.to(memory_ids.device)
    held = labels[memory_ids]
    found = {"class_entropy": class_entropy(held, classes), "largest_share": largest_share(held, classes)}
    if batch_ids is not None:
        batch_ids = batch_ids.to(memory_ids.device)
        found["collision_rate"] = collision_rate(
            labels[batch_ids], held, classes, batch_ids=batch_ids, memory_ids=memory_ids
        )
    if previous_ids is not None:
        found["turnover"] = turnover(previous_ids, memory_ids)
    if age is not None:
        found["mean_age"], found["max_age"] = age.double().mean(), age.double().max()
    return found
