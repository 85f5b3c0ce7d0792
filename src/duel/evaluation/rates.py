"""Accuracy: over all images, class by class, and balanced."""

from __future__ import annotations

from typing import TypedDict

import torch
from torch import Tensor

from duel.errors import UserError


class Rates(TypedDict):
    accuracy: float
    """Share of all images, 0 to 1."""
    balanced_accuracy: float
    """Mean of `per_class` over the classes that have test images."""
    per_class: list[float | None]
    """Share of each class's images; None for a class without test images."""


def class_counts(labels: Tensor, classes: int) -> Tensor:
    """(n,) int64 → (classes,) float64: how often each class occurs. Unlike bincount, it does not synchronise."""
    counts = torch.zeros(classes, dtype=torch.float64, device=labels.device)
    return counts.scatter_add_(0, labels, torch.ones_like(labels, dtype=torch.float64))


def rates(correct: Tensor, labels: Tensor, classes: int) -> Rates:
    """correct (n,) bool, labels (n,) int64 → the three accuracies (one transfer to the host)."""
    total = class_counts(labels, classes)
    right = torch.zeros_like(total).scatter_add_(0, labels, correct.to(total.dtype))
    counts, hits = total.tolist(), right.tolist()
    per_class = [hit / count if count else None for hit, count in zip(hits, counts, strict=True)]
    present = [rate for rate in per_class if rate is not None]
    return Rates(accuracy=sum(hits) / sum(counts), balanced_accuracy=sum(present) / len(present), per_class=per_class)


def check_labels(name: str, features: Tensor, labels: Tensor, classes: int | None = None) -> None:
    """Raise unless `labels` is one class index per row of `features` (n, d), n >= 1."""
    if features.ndim != 2 or not len(features):
        raise UserError(f"{name} features must have shape (n, d) with n >= 1, got {tuple(features.shape)}")
    if labels.shape != features.shape[:1]:
        raise UserError(f"{name} labels must have shape ({len(features)},), got {tuple(labels.shape)}")
    if labels.is_floating_point() or labels.dtype == torch.bool:
        raise UserError(f"{name} labels must be integers, got {labels.dtype}")
    low, high = (int(value) for value in torch.aminmax(labels))
    if low < 0 or (classes is not None and high >= classes):
        upper = "" if classes is None else f" and < {classes} (the number of classes)"
        raise UserError(f"{name} labels must be >= 0{upper}, got {low} to {high}")
