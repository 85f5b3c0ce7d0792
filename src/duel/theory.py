"""The paper's theory as functions that one can run: the simplex ETF, Observation 1, Theorems 1 and 2.

Where the paper is wrong or silent, what holds is computed here and checked by tests. All of it in float64.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import normalize

from . import scores
from .errors import UserError
from .evaluation.geometry import etf_distance
from .replacement import Admit, replace

__all__ = [
    "Counterexample",
    "Crowd",
    "always_is_safe",
    "class_loss",
    "closed_form_gradient",
    "crowded_circle",
    "diversity",
    "diversity_change",
    "dominant",
    "drift",
    "etf_distance",
    "evicted",
    "separates",
    "simplex_etf",
    "single_positive_loss",
    "smallest_counterexample",
    "threshold",
    "unsafe_share",
]


# The simplex ETF ------------------------------------------------------------------------------------------------


def simplex_etf(classes: int, dim: int | None = None) -> Tensor:
    """Unit rows (C, d) with all inner products -1/(C-1), d = C - 1 by default; the first is (1, 0, ...).

    The paper prints -1/C, but its proof needs vectors that sum to zero, and C vectors cannot have less than -1/(C-1).
    """
    dim = classes - 1 if dim is None else dim
    if classes < 2 or dim < classes - 1:
        raise UserError(f"a simplex ETF needs classes >= 2 and dim >= classes - 1, got {classes} and {dim}")
    rows = torch.zeros(classes, dim, dtype=torch.float64)
    for i in range(classes - 1):
        rows[i, i] = (1 - rows[i].square().sum()).sqrt()
        rows[i + 1 :, i] = (-1 / (classes - 1) - rows[i + 1 :] @ rows[i]) / rows[i, i]
    return rows


def dominant(classes: int, bias: float) -> Tensor:
    """Class weights (C,) of which the first is `bias` times each of the others."""
    from .data.bias import class_weights

    return class_weights(classes, kind="dominant", bias=bias, dominant=0)


# Observation 1 --------------------------------------------------------------------------------------------------


def class_loss(z: Tensor, vectors: Tensor, weights: Tensor, own: int | Tensor, *, temperature: float = 1.0) -> Tensor:
    """The loss that Observation 1 differentiates, of a vector z (d,) of class `own`, or of n of them: (n, d), (n,).

    All items of its class are positives: the mean over positives p of -log(exp(z·z_p) / Σ_a exp(z·z_a)), for contrast
    items at vectors (C, d), a share `weights` (C,) of them in each class. The number of items only adds a constant.
    """
    logits = z @ vectors.T / temperature
    positive = logits.gather(-1, torch.as_tensor(own).unsqueeze(-1)).squeeze(-1)
    return torch.logsumexp(logits + weights.log(), -1) - positive


def closed_form_gradient(weights: Tensor, own: int, *, temperature: float = 1.0) -> Tensor:
    """∂`class_loss`/∂z at z = z_own on the simplex ETF, for any class weights (C,): (C-1,).

    k P⁻ (Σ_c ρ_c z_c - z_own) / τ. With one dominant class it is the paper's Equation 3: Σ_c ρ_c z_c is then
    (ρ_max - ρ_min) z_max, because the vectors sum to zero.
    """
    classes = len(weights)
    vectors = simplex_etf(classes)
    same, other = math.exp(1 / temperature), math.exp(-1 / (classes - 1) / temperature)
    k_p_minus = other / (weights[own] * same + (1 - weights[own]) * other)
    return k_p_minus * (weights @ vectors - vectors[own]) / temperature


def single_positive_loss(
    z: Tensor, vectors: Tensor, weights: Tensor, own: int | Tensor, *, negatives: int, temperature: float = 1.0
) -> Tensor:
    """Equation 2, of a vector z (d,) of class `own`, or of n of them: (n, d), (n,).

    One positive, `negatives` i.i.d. from the classes, the exact expectation. Its gradient on the ETF has the direction
    of Observation 1's and another length.
    """
    logits = z @ vectors.T / temperature
    positive = logits.gather(-1, torch.as_tensor(own).unsqueeze(-1))
    draws = itertools.combinations_with_replacement(range(len(weights)), negatives)
    counts = torch.stack([torch.bincount(torch.tensor(drawn), minlength=len(weights)) for drawn in draws]).to(z.dtype)
    ways = math.factorial(negatives) / torch.lgamma(counts + 1).sum(1).exp()
    chances = ways * torch.prod(weights**counts, 1)  # of each multiset of classes
    return torch.log1p((logits - positive).exp() @ counts.T) @ chances


def drift(
    weights: Tensor,
    *,
    start: Tensor | None = None,
    steps: int = 400,
    lr: float = 0.2,
    temperature: float = 1.0,
    loss: Callable[..., Tensor] = class_loss,
) -> Tensor:
    """Free class vectors under a biased loss, every class weighted by its share: positions (steps + 1, C, d).

    Gradient descent on the sphere, from the simplex ETF unless `start` (C, d) is given. A vector's step is divided by
    its class's share, so that rare classes move as fast as they do per item. loss: Observation 1's, or Equation 2's as
    `functools.partial(single_positive_loss, negatives=2)`.
    """
    vectors = (simplex_etf(len(weights)) if start is None else start).clone()
    path = [vectors]
    for _ in range(steps):
        free = vectors.clone().requires_grad_()
        losses = loss(free, free, weights, torch.arange(len(weights)), temperature=temperature)
        (losses @ weights).backward()  # type: ignore[no-untyped-call]
        if free.grad is None:
            raise RuntimeError("no gradient reached the class vectors")
        vectors = normalize(vectors - lr * free.grad / weights[:, None], dim=1)
        path.append(vectors)
    return torch.stack(path)


# What the policy evicts -----------------------------------------------------------------------------------------


class Crowd(NamedTuple):
    """A memory on the circle (K, 2), which of its items form the dense region (K,), and newcomers (B, 2)."""

    memory: Tensor
    dense: Tensor
    newcomers: Tensor


def crowded_circle() -> Crowd:
    """The example of figure-mcp: a common kind that is spread out, a dense region of six items, and three alone."""
    spread, dense, lone = torch.linspace(10, 150, 15), torch.linspace(264, 276, 6), torch.tensor([185.0, 215.0, 320.0])
    inside = torch.tensor([False] * len(spread) + [True] * len(dense) + [False] * len(lone))
    return Crowd(_circle(torch.cat([spread, dense, lone])), inside, _circle(torch.tensor([345.0, 170.0, 235.0])))


def _circle(degrees: Tensor) -> Tensor:
    angle = degrees.double() * math.pi / 180
    return normalize(torch.stack([angle.cos(), angle.sin()], 1), dim=1)


def evicted(crowd: Crowd, score: Any) -> Tensor:
    """Which items of the memory the newcomers replace (Algorithm 2): bool (K,)."""
    gone = torch.zeros(len(crowd.memory), dtype=torch.bool)
    gone[replace(crowd.memory, crowd.newcomers, score=score).slots] = True
    return gone


# Theorem 1 ------------------------------------------------------------------------------------------------------


class Counterexample(NamedTuple):
    """A pool on the simplex ETF that a replacement makes less diverse."""

    pool: tuple[int, ...]
    """Classes of the items, by slot."""
    newcomer: int
    after: tuple[int, ...]
    change: float


def diversity(pool: Tensor, score: Any = "linear") -> float:
    """p_d = Σ_i Σ_j (1 - h(z_i · z_j)) over ordered pairs of the rows of pool (K, d): the theorem's measure."""
    gram = pool.double() @ pool.double().T
    distinct = 1 - scores.get(score)(gram)
    return float(distinct.sum() - distinct.diagonal().sum())


def diversity_change(pool: Tensor, newcomer: Tensor, *, score: Any = "linear", admit: Admit = "always") -> float:
    """p_d after the policy has seen newcomer (d,), minus p_d before; negative: the theorem is violated."""
    slot = int(replace(pool, newcomer[None], score=score, admit=admit).slots[0])
    after = pool.clone()
    if slot >= 0:
        after[slot] = newcomer
    return diversity(after, score) - diversity(pool, score)


def always_is_safe(pool: Sequence[int], newcomer: int) -> bool:
    """Whether Algorithm 2 keeps p_d from falling, for classes on the simplex ETF; the same for every score.

    Safe iff the newcomer has the victim's class or the victim's class is strictly larger than the newcomer's. The
    printed proof asks for "at least as large": one too few, since the victim does not count among its own duplicates.
    """
    counts = {c: list(pool).count(c) for c in {*pool, newcomer}}
    largest = max(counts.values())
    victim = next(c for c in pool if counts[c] == largest)  # ties: the lowest slot
    return victim == newcomer or counts[victim] > counts[newcomer]


def smallest_counterexample(*, classes: int = 3, up_to: int = 4, score: Any = "linear") -> Counterexample | None:
    """The first pool, by size, that `admit="always"` makes less diverse on the ETF of so many classes."""
    vectors = simplex_etf(classes)
    for size in range(1, up_to + 1):
        for pool in itertools.product(range(classes), repeat=size):
            for newcomer in range(classes):
                rows = vectors[list(pool)]
                change = diversity_change(rows, vectors[newcomer], score=score)
                if change < -1e-9:
                    slot = int(replace(rows, vectors[newcomer][None], score=score).slots[0])
                    after = (*pool[:slot], newcomer, *pool[slot + 1 :])
                    return Counterexample(pool, newcomer, after, change)
    return None


def unsafe_share(
    *, etf: bool, admit: Admit = "always", score: Any = "linear", pools: int = 500, seed: int = 0
) -> float:
    """Share of random pools that one newcomer makes less diverse: classes on the ETF, or isotropic unit vectors."""
    changes = [
        diversity_change(pool, newcomer, score=score, admit=admit)
        for pool, newcomer in itertools.islice(_random_pools(etf, seed), pools)
    ]
    return sum(change < -1e-9 for change in changes) / pools


def _random_pools(etf: bool, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    while True:
        size, classes, dim = (int(n) for n in torch.randint(2, 17, (3,), generator=generator))
        if etf:
            rows = simplex_etf(classes)[torch.randint(classes, (size + 1,), generator=generator)]
        else:
            rows = normalize(torch.randn(size + 1, dim, generator=generator, dtype=torch.float64), dim=1)
        yield rows[:-1], rows[-1]


# Theorem 2 ------------------------------------------------------------------------------------------------------


def threshold(score: Any, probability: float) -> float:
    """The cosine α* with h(x) ≥ probability ⇔ x ≥ α*: the end of the cosines for which h is high enough.

    Every score has it that takes the upper value where it jumps (`separates` tells). Only where h is continuous and
    strictly increasing is it the one cosine with h(α*) = probability.
    """
    if not 0 <= probability <= 1:
        raise UserError(f"probability must lie in [0, 1], got {probability}")
    h = scores.get(score)
    low, high = -1.0, 1.0
    if float(h(torch.tensor(low, dtype=torch.float64))) >= probability:
        return low
    for _ in range(60):  # bisection, to the last bit
        middle = (low + high) / 2
        if float(h(torch.tensor(middle, dtype=torch.float64))) >= probability:
            high = middle
        else:
            low = middle
    return high


def separates(score: Any, probability: float, at: float, cosines: Tensor) -> bool:
    """Whether h(x) ≥ probability ⇔ x ≥ at for these cosines: what Theorem 2 says of α*."""
    return torch.equal(scores.get(score)(cosines) >= probability, cosines >= at)
