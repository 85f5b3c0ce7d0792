"""The paper's own figures on CIFAR-10, in per cent. "×27" is the bias: one class 27 times as frequent as any other."""

from __future__ import annotations

import math
from collections.abc import Mapping

BIASES = (1.0, 3.0, 9.0, 27.0)

Table = Mapping[str, tuple[float, float, float, float]]
"""Row -> the figure at each of BIASES."""

PROBE: Table = {
    "moco": (54.25, 55.32, 49.54, 42.17),
    "simclr": (63.34, 61.19, 61.06, 49.02),
    "d-moco": (58.15, 56.59, 62.10, 52.06),
    "d-simclr": (65.39, 63.69, 60.99, 56.60),
}
TOP1: Table = {
    "moco": (31.38, 32.38, 27.68, 23.78),
    "simclr": (39.85, 36.94, 35.58, 27.17),
    "simsiam": (18.55, 16.14, 18.72, 20.11),
    "d-moco": (37.12, 34.45, 38.20, 28.13),
    "d-simclr": (42.51, 40.79, 37.14, 33.36),
}
TOP10: Table = {
    "moco": (84.55, 84.32, 81.74, 78.40),
    "simclr": (88.38, 87.20, 84.34, 76.98),
    "simsiam": (76.45, 73.58, 76.58, 78.91),
    "d-moco": (87.22, 85.48, 87.59, 82.99),
    "d-simclr": (89.33, 88.66, 82.49, 80.51),
}
TABLES: Mapping[str, Table] = {"probe": PROBE, "top1": TOP1, "top10": TOP10}

SCORES: Mapping[str, Mapping[str, float | None]] = {
    "d-moco": {"linear": 52.06, "gaussian:1": 56.81, "quadratic": 57.32},
    "d-simclr": {"linear": 56.60, "gaussian:1": None, "quadratic": None},
}
"""Linear probe at ×27 by score function; None where the paper says that training failed."""

RESOURCES: Mapping[str, tuple[float, int]] = {
    "moco": (2.7, 10_415),
    "d-moco": (3.4, 10_415),
    "simclr": (4.1, 15_573),
    "d-simclr": (7.7, 19_065),
    "simsiam": (4.0, 15_541),
}
"""Row -> hours of training, MB of GPU memory."""


def below_previous() -> list[tuple[str, str, float, str, float, float]]:
    """Where the paper's own tables have a D-row below a previous framework: (table, D-row, bias, other, D, other)."""
    return [
        (name, row, bias, other, table[row][i], table[other][i])
        for name, table in TABLES.items()
        for row in ("d-moco", "d-simclr")
        for other in table
        if not other.startswith("d-")
        for i, bias in enumerate(BIASES)
        if table[row][i] < table[other][i]
    ]


def recovered(row: str) -> float:
    """Share of the probe's gap at the largest bias that the D-row of `row` makes good in the paper."""
    plain, d = PROBE[row], PROBE[f"d-{row}"]
    return (d[-1] - plain[-1]) / (plain[0] - plain[-1])


def score_figure(row: str, score: str) -> str:
    """The paper's linear probe of a D-row with a score at the largest bias, as its table has it."""
    found = SCORES[row].get(score, math.nan)
    return "failed" if found is None else "–" if math.isnan(found) else f"{found:.2f}"


def figure(table: str, row: str | None, bias: float) -> float | None:
    """The paper's figure in `table` (probe, top1, top10), or None where it has none."""
    if row is None or row not in TABLES[table] or bias not in BIASES:
        return None
    return TABLES[table][row][BIASES.index(bias)]
