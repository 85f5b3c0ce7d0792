"""The shape of a cloud of features: cosines inside and between classes, rank, distance to the simplex ETF."""

from __future__ import annotations

import torch
from torch import Tensor

from duel.errors import UserError
from duel.evaluation.numerics import unit_rows
from duel.evaluation.rates import check_labels, class_counts


def class_sums(features: Tensor, labels: Tensor, classes: int) -> tuple[Tensor, Tensor]:
    """(n, d), (n,) → float64 sums (classes, d) and counts (classes,).

    By matrix products, whose order is fixed, and not by atomics; in chunks, so that membership stays small.
    """
    sums = torch.zeros(classes, features.shape[1], dtype=torch.float64, device=features.device)
    every_class = torch.arange(classes, device=labels.device).unsqueeze(1)
    for rows, own in zip(torch.split(features, 2**14), torch.split(labels, 2**14), strict=True):
        sums.addmm_((own == every_class).double(), rows.double())
    return sums, class_counts(labels, classes)


def class_cosines(features: Tensor, labels: Tensor) -> tuple[float, float]:
    """Mean cosine over all pairs of two different images of one class, and over all pairs of two classes.

    Linear in n: the sum of all cosines between two sets is the product of their sums. NaN where no such pair exists.
    """
    check_labels("class_cosines", features, labels)
    unit = unit_rows(features.double())
    sums, counts = class_sums(unit, labels.to(unit.device), int(labels.max()) + 1)
    within = sums.square().sum()
    alike, unlike = (counts * (counts - 1)).sum(), counts.sum().square() - counts.square().sum()
    # rounding may leave something to be divided by no pairs, which is not infinite
    intra = torch.where(alike > 0, (within - unit.square().sum()) / alike, torch.nan)
    inter = torch.where(unlike > 0, (sums.sum(0).square().sum() - within) / unlike, torch.nan)
    return float(intra), float(inter)


def class_means(features: Tensor, labels: Tensor) -> Tensor:
    """(n, d), (n,) → float64 (C, d): the mean unit feature of each class that occurs, in order of class."""
    check_labels("class_means", features, labels)
    unit = unit_rows(features.double())
    sums, counts = class_sums(unit, labels.to(unit.device), int(labels.max()) + 1)
    present = counts > 0
    return sums[present] / counts[present].unsqueeze(1)


def etf_distance(means: Tensor, *, centre: bool = True) -> float:
    """Root mean square of (cosine + 1/(C-1)) over the pairs of class means (C, d); 0 on the simplex ETF.

    With `centre`, the mean of the means is taken off first, as neural collapse is measured (two classes are then
    always opposite); without, a common offset counts as distance, up to 1 + 1/(C-1) when all means coincide.
    """
    if means.ndim != 2 or len(means) < 2:
        raise UserError(f"means must have shape (C, d) with C >= 2 classes, got {tuple(means.shape)}")
    wide = means.double()
    unit = unit_rows(wide - wide.mean(0) if centre else wide)
    off = unit @ unit.T + 1 / (len(means) - 1)
    off.fill_diagonal_(0)
    return float((off.square().sum() / (len(means) * (len(means) - 1))).sqrt())


def effective_rank(features: Tensor, *, centre: bool = False) -> float:
    """exp of the entropy of the singular values' shares (Roy & Vetterli 2007; uncentred, as RankMe uses it).

    Between 1 and min(n, d); 0 for features that are all zero.
    """
    if features.ndim != 2 or not features.numel():
        raise UserError(f"features must have shape (n, d) with n, d >= 1, got {tuple(features.shape)}")
    wide = features.double()
    if centre:
        wide = wide - wide.mean(0)
    gram = wide.T @ wide if len(wide) > wide.shape[1] else wide @ wide.T
    # The Gram matrix's eigenvalues are exact to 1e-16 of the largest; what lies below is noise, not rank.
    eigenvalues = torch.linalg.eigvalsh(gram)
    floor = eigenvalues[-1] * len(gram) * torch.finfo(torch.float64).eps
    singular = torch.where(eigenvalues > floor, eigenvalues, 0).clamp_min(0).sqrt()
    if not float(singular.sum()):
        return 0.0
    share = singular / singular.sum()
    return float(torch.special.entr(share).sum().exp())
