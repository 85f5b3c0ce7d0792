"""Biased data made from balanced data: how frequent each class is, and the items that make it so.

Two modes: *draw* (`ClassDraw`: each item drawn independently, class by its weight, then uniformly inside it: rare items
keep being new) and *subset* (`subset_ids`: a fixed selection; of rare classes there are few images, for good).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from duel.errors import UserError, suggest

KINDS = ("dominant", "longtail", "weights")


def class_weights(
    classes: int, *, kind: str = "dominant", bias: float = 1.0, dominant: int = 0, weights: Sequence[float] = ()
) -> Tensor:
    """Share of each class in the data, float64 (classes,), sums to 1.

    "dominant": one class is `bias` times as frequent as each other, so its share is bias / (bias + C - 1).
    "longtail": shares fall exponentially from class `dominant`, in class order going round, to 1 / bias of the first
    (bias is the imbalance ratio). "weights": as given, in any unit; 0 leaves a class out.
    """
    if kind not in KINDS:
        raise UserError(suggest("bias kind", kind, KINDS))
    if classes < 1:
        raise UserError("a bias needs labelled data: this data set has no classes")
    if kind == "weights":
        if len(weights) != classes:
            raise UserError(f"weights must be {classes} numbers, one per class, got {len(weights)}")
        if any(not math.isfinite(w) or w < 0 for w in weights) or sum(weights) <= 0:
            raise UserError(f"weights must be >= 0, finite and not all 0, got {tuple(weights)}")
        shares = torch.tensor(weights, dtype=torch.float64)
        return shares / shares.sum()
    if not (math.isfinite(bias) and bias >= 1):
        raise UserError(f"bias must be >= 1 (1 is balanced, 27 makes one class 27 times as frequent), got {bias}")
    if not 0 <= dominant < classes:
        raise UserError(f"the dominant class must be in 0..{classes - 1}, got {dominant}")
    rank = (torch.arange(classes, dtype=torch.float64) - dominant) % classes
    if kind == "dominant":
        shares = torch.where(rank == 0, float(bias), 1.0).double()
    else:
        shares = float(bias) ** (-rank / max(1, classes - 1))
    return shares / shares.sum()


def _counts(labels: Tensor | None, weights: Tensor) -> Tensor:
    """Images per class, int64 (C,); complains about a class that is wanted and has none."""
    if labels is None:
        raise UserError("a bias needs labelled data: this data set has no labels")
    counts = torch.bincount(labels, minlength=len(weights))
    if len(counts) > len(weights):
        raise UserError(f"weights must be {len(counts)} numbers, one per class, got {len(weights)}")
    empty = ((counts == 0) & (weights > 0)).nonzero().flatten().tolist()
    if empty:
        raise UserError(
            f"class {empty[0]} has no images but a weight of {float(weights[empty[0]]):.3g}; give it images, "
            f"or leave it out with explicit weights (0 for class {empty[0]})"
        )
    return counts


def subset_ids(labels: Tensor | None, weights: Tensor, *, seed: int) -> Tensor:
    """The largest subset whose classes have shares `weights` (C,): ids, int64, ascending, chosen with `seed`.

    The size is bounded by the class that runs out first; counts are rounded down, but no wanted class below one image.
    """
    counts = _counts(labels, weights)
    assert labels is not None  # _counts has complained otherwise
    size = (counts / weights)[weights > 0].min()
    take = (size * weights + 1e-6).floor().clamp(min=1).where(weights > 0, torch.zeros_like(weights)).long()
    shuffled = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    kinds = labels[shuffled]
    return torch.cat([shuffled[kinds == c][:k] for c, k in enumerate(take.tolist())]).sort().values


def item_probabilities(labels: Tensor | None, weights: Tensor) -> Tensor:
    """Probability of each item in draw mode, float64 (n,): its class's weight, shared equally. Sums to 1."""
    counts = _counts(labels, weights)
    assert labels is not None
    return (weights / counts.clamp(min=1))[labels]


class ClassDraw:
    """Draw items independently: the class by `weights` (C,), then an item of it uniformly. On the CPU."""

    def __init__(self, labels: Tensor | None, weights: Tensor) -> None:
        self.counts = _counts(labels, weights)
        assert labels is not None
        self.by_class = torch.argsort(labels, stable=True)  # ids, class after class
        self.starts = self.counts.cumsum(0) - self.counts
        self.cdf = weights.cumsum(0) / weights.sum()
        self.last = int((weights > 0).nonzero().max())

    def __call__(self, n: int, generator: torch.Generator) -> Tensor:
        """n ids, int64 (n,)."""
        # float64: with float32 an item of a class of millions would not have an equal chance.
        which, where = torch.rand(2, n, dtype=torch.float64, generator=generator)
        kind = torch.searchsorted(self.cdf, which, right=True).clamp_(max=self.last)
        counts = self.counts[kind]
        inside = torch.minimum((where * counts).long(), counts - 1)
        return self.by_class[self.starts[kind] + inside]
