"""What several seeds say together. Comparisons are paired: the same seed of both rows, never a mean against a mean."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

RESAMPLES = 10_000
COVERAGE = 0.95


@dataclass(frozen=True)
class Summary:
    """Mean and standard deviation (n - 1; None for one seed) over `n` seeds."""

    mean: float
    std: float | None
    n: int


@dataclass(frozen=True)
class Recovered:
    """Share of a gap that was closed; 1 = all of it. `low` and `high` bound a bootstrap interval over seeds."""

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
    """More than twice its standard error from zero; never for one seed."""
    return difference.std is not None and abs(difference.mean) > 2 * difference.std / math.sqrt(difference.n)


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

    plain: the same method without DUEL, at that bias. balanced: the plain method on balanced data. The interval
    resamples seeds, all three figures of a seed together; None for fewer than two seeds, or where some resample has no
    gap to recover, so that the share is not bounded. None altogether where no seed has all three.
    """
    seeds = sorted(method.keys() & plain.keys() & balanced.keys())
    gain = np.array([method[s] - plain[s] for s in seeds], dtype=np.float64)
    gap = np.array([balanced[s] - plain[s] for s in seeds], dtype=np.float64)
    loss = summary(list(gap))
    if loss is None:
        return None
    if not beyond_zero(loss, 1):
        return Recovered(None, None, None, loss.n)
    share = float(gain.mean() / gap.mean())
    if len(seeds) < 2:
        return Recovered(share, None, None, 1)
    drawn = np.random.default_rng(0).integers(0, len(seeds), (RESAMPLES, len(seeds)))
    gaps = gap[drawn].mean(1)
    if gaps.min() <= 0:
        return Recovered(share, None, None, len(seeds))
    tail = 100 * (1 - COVERAGE) / 2
    low, high = np.percentile(gain[drawn].mean(1) / gaps, [tail, 100 - tail])
    return Recovered(share, float(low), float(high), len(seeds))
