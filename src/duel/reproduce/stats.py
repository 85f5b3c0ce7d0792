"""What several seeds say together. Comparisons are paired: the same seed of both rows, never a mean against a mean."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.special import stdtrit

COVERAGE = 0.95
LARGE = 2.0
"""Points that are a gap by one seed: about twice what a gap varies by from seed to seed (0.4 to 1.2)."""


@dataclass(frozen=True)
class Summary:
    """Mean and standard deviation (n - 1; None for one seed) over `n` seeds."""

    mean: float
    std: float | None
    n: int


@dataclass(frozen=True)
class Recovered:
    """Share of a gap that was closed; 1 = all of it. `low` and `high` bound an interval of 95 %."""

    share: float | None
    """None where there is no clear gap."""
    low: float | None
    high: float | None
    n: int


def summary(values: Sequence[float]) -> Summary | None:
    if not values:
        return None
    mean = math.fsum(values) / len(values)
    squares = math.fsum((v - mean) ** 2 for v in values)
    return Summary(mean, math.sqrt(squares / (len(values) - 1)) if len(values) > 1 else None, len(values))


def clear(difference: Summary) -> bool:
    """Zero is outside the interval of 95 % for the mean, by Student's t; never for one seed."""
    if difference.std is None:
        return False
    return abs(difference.mean) > _student(difference.n) * difference.std / math.sqrt(difference.n)


def _student(n: int) -> float:
    """How many standard errors the interval of 95 % for the mean of `n` reaches to either side."""
    return float(stdtrit(n - 1, (1 + COVERAGE) / 2))


def beyond_zero(difference: Summary, sign: int) -> bool:
    """Clearly on that side of zero; of one seed, which cannot be clear, the sign counts."""
    return sign * difference.mean > 0 and (difference.n == 1 or clear(difference))


def paired_difference(ours: Mapping[int, float], theirs: Mapping[int, float]) -> Summary | None:
    """Ours minus theirs, over the seeds that both have."""
    return summary([ours[seed] - theirs[seed] for seed in sorted(ours.keys() & theirs.keys())])


def gap_recovered(
    method: Mapping[int, float], plain: Mapping[int, float], balanced: Mapping[int, float]
) -> Recovered | None:
    """(method - plain) / (balanced - plain), each a mean over the seeds (seed -> figure) that all three have.

    plain: the same method without DUEL, at that bias. balanced: the plain method on balanced data. Whether there is a
    gap has to be said by all seeds that these two have and by those shared with the method, and by one alone only if it
    is at least LARGE. The interval is Fieller's (1954) for a ratio of two means that vary together; it is bounded where
    the gap is clear. None for fewer than two seeds. None altogether where no seed has all three.
    """
    seeds = sorted(method.keys() & plain.keys() & balanced.keys())
    gain = np.array([method[s] - plain[s] for s in seeds], dtype=np.float64)
    gap = np.array([balanced[s] - plain[s] for s in seeds], dtype=np.float64)
    if not seeds:
        return None
    if not all(map(_is_gap, (paired_difference(balanced, plain), summary(list(gap))))):
        return Recovered(None, None, None, len(seeds))
    share = float(gain.mean() / gap.mean())
    if len(seeds) < 2:
        return Recovered(share, None, None, 1)
    low, high = _fieller(gain, gap)
    return Recovered(share, low, high, len(seeds))


def _is_gap(loss: Summary | None) -> bool:
    return loss is not None and beyond_zero(loss, 1) and (loss.n > 1 or loss.mean >= LARGE)


def _fieller(above: Any, below: Any) -> tuple[float, float]:
    """Where mean(above) - share · mean(below) is not clearly other than zero; mean(below) must be clear of it."""
    allowed = _student(len(above)) ** 2 / len(above) * np.cov(above, below)
    mean = np.array([above.mean(), below.mean()])
    square = np.outer(mean, mean) - allowed
    middle, rest = square[0, 1] / square[1, 1], square[0, 0] / square[1, 1]
    half = math.sqrt(max(0.0, middle**2 - rest))
    return float(middle - half), float(middle + half)
