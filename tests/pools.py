"""Memories and newcomers for tests, and a judge of what an engine did with them."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import normalize

from duel import scores
from duel.replacement import Replacement
from duel.replacement.units import exponent, widened


def isotropic(n: int, d: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return normalize(torch.randn(n, d, generator=generator, dtype=torch.float64), dim=1).to(dtype)


def clusters(
    n: int, d: int, seed: int, *, classes: int = 10, bias: float = 27.0, spread: float = 0.5
) -> tuple[Tensor, Tensor]:
    """n unit rows around `classes` centres, one of them `bias` times as frequent; and which centre."""
    generator = torch.Generator().manual_seed(seed)
    centres = normalize(torch.randn(classes, d, generator=generator, dtype=torch.float64), dim=1)
    weights = torch.ones(classes)
    weights[0] = bias
    labels = torch.multinomial(weights, max(1, n), replacement=True, generator=generator)[:n]
    noise = torch.randn(n, d, generator=generator, dtype=torch.float64) / d**0.5
    return normalize(centres[labels] + spread * noise, dim=1), labels


def lattice(n: int, d: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Unit rows with four entries of ±1/2: few different ones, so many exact duplicates, antipodes and ties.

    Their cosines are multiples of 1/4 and exact in every dtype and order of summation, so all engines see the same h.
    """
    generator = torch.Generator().manual_seed(seed)
    rows = torch.zeros(n, d, dtype=dtype)
    half = d // 2
    first = torch.rand(n, max(4, half), generator=generator).argsort(1)[:, :4]
    signs = torch.randint(0, 2, (n, 4), generator=generator) * 2 - 1
    return rows.scatter_(1, first.clamp(max=d - 1), (0.5 * signs).to(dtype))


def judge(memory: Tensor, incoming: Tensor, done: Replacement, score: str, admit: str) -> tuple[float, float]:
    """Replay an engine's choices in float64. Returns two errors, in expected duplicates:

    how far below the maximum the N of any evicted item was, and how far the returned N is from the true one.
    """
    h = scores.get(score)
    dtype = torch.float64 if memory.dtype == torch.float64 else torch.float32
    pool, size = widened(memory, dtype).double().clone(), memory.shape[0]
    worst = 0.0
    for item, slot in zip(widened(incoming, dtype).double(), done.slots.tolist(), strict=True):
        here = pool if admit == "always" else torch.cat([pool, item[None]])
        n = _duplicates(here, h)
        chosen = size if slot < 0 else slot
        worst = max(worst, float(n.max() - n[chosen]))
        if slot >= 0:
            pool[slot] = item
    return worst, float((_duplicates(pool, h) - done.duplicates.cpu()).abs().max())


def _duplicates(pool: Tensor, h: scores.Score) -> Tensor:
    matrix = h(pool @ pool.T)
    return matrix.fill_diagonal_(0.0).sum(1)


def rounding(memory: Tensor, score: str) -> float:
    """How far two engines' N may differ: K cosines, each off by a few roundings of the dtype, times the slope of h.

    bfloat16 rows are widened before they are multiplied, so they too are compared in float32.
    """
    grid = torch.linspace(-1, 1, 10001, dtype=torch.float64)
    slope = float(scores.get(score)(grid).diff().max() / grid.diff()[0])
    eps = torch.finfo(torch.float64 if memory.dtype == torch.float64 else torch.float32).eps
    return memory.shape[0] * (8 * eps * (1 + slope) + 2.0 ** -exponent(memory.shape[0]))
