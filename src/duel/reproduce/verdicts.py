"""How a claim is judged: what is measured, which conditions pass, and what can be said then."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

from .evidence import WORST, Evidence
from .rows import ROWS
from .stats import Recovered, Summary, beyond_zero, paired_difference

Wanted = Literal["above", "not below", "beyond the spread", "apart"]
Outcome = Literal[
    "holds",
    "holds so far",
    "holds only when",
    "holds except when",
    "not clear",
    "does not hold",
    "not comparable",
    "not yet measured",
]
SEEDS = 5
"""That our own goals ask for."""
FEW = 3
"""Fewer seeds than these are told of by a star."""
NEAR = 0.5
"""Points that a mean may be below another without being called below it, where that is not clear."""

NO_CLEAR_GAP = "no clear gap"
BOTH: Mapping[str, str] = {"probe": "probe", "Top-1": "top1_test_to_train"}
"""The gaps that goals were set for."""

Measured = TypeVar("Measured", Summary, Recovered)


@dataclass(frozen=True)
class Verdict:
    """What is found, and why."""

    outcome: Outcome
    evidence: str
    note: str = ""
    """When, and what has not been run."""
    incomplete: bool = False
    """Part of what the claim needs has not been run, or with too few seeds."""
    passed: tuple[int, int] | None = None
    """How many of its conditions pass, of how many."""

    @property
    def words(self) -> str:
        return self.outcome + self.note

    @property
    def measured(self) -> bool:
        return self.outcome != "not yet measured"

    @property
    def short(self) -> str:
        """For a table of many: the number of conditions instead of their names, a star for an incomplete one."""
        if not self.measured:
            return "–"
        some = self.outcome.endswith("when") and self.passed is not None
        words = f"holds in {self.passed[0]} of {self.passed[1]}" if some and self.passed else self.outcome
        return words + " …" * words.endswith("when") + "\\*" * self.incomplete


NO_PAIRS = "no paired runs"


@dataclass(frozen=True)
class Claim:
    text: str
    judge: Callable[[Evidence], Verdict]


def weigh(
    differences: Mapping[str, Summary | None],
    wanted: Wanted = "above",
    *,
    at_least: float = 0.0,
    spread: float | None = None,
    every: bool = False,
) -> Verdict:
    """A claim about every one of these paired differences (condition -> points).

    above: clearly positive, and `at_least` so large in the mean. not below: none clearly negative, nor by more than
    NEAR in the mean. beyond the spread: clearly positive, and by more than their own standard deviation, or `spread`
    for one seed. apart: clearly not zero. One seed cannot be clear: its sign counts (NEAR, for not below), and
    the verdict names it; where nothing could be said against the claim then, it is shown and not judged by. Where
    nothing is clear in either direction, that is the outcome (of not below only NEAR counts then). every: see
    `conclude`.
    """

    def passes(d: Summary) -> bool:
        if wanted == "not below":
            return d.mean >= -NEAR and (d.n == 1 or not beyond_zero(d, -1))
        if wanted == "apart":
            return beyond_zero(d, 1) or beyond_zero(d, -1)
        if wanted == "beyond the spread" and d.mean <= (spread or 0.0 if d.std is None else d.std):
            return False
        return beyond_zero(d, 1) and d.mean >= at_least

    def says_something(d: Summary) -> bool:
        return d.n > 1 or not (wanted == "apart" or (wanted == "beyond the spread" and spread is None and d.mean > 0))

    judged = {when: d if d is not None and says_something(d) else None for when, d in differences.items()}
    aside = [f"{when} {points(d)}, too few" for when, d in differences.items() if d is not None and not judged[when]]
    found = conclude(judged, passes, points, every=every, nothing="; ".join(aside) or NO_PAIRS)
    if aside and found.measured:
        found = dataclasses.replace(found, evidence="; ".join([found.evidence, *aside]))
    below = any(d is not None and beyond_zero(d, -1) for d in judged.values())
    unclear = not below and not at_least and not every and wanted in ("above", "apart")
    return dataclasses.replace(found, outcome="not clear") if found.outcome == "does not hold" and unclear else found


def conclude(
    found: Mapping[str, Measured | None],
    passes: Callable[[Measured], bool],
    show: Callable[[Measured], str],
    *,
    nothing: str = NO_PAIRS,
    enough: int = 1,
    every: bool = False,
) -> Verdict:
    """A claim that holds where every condition that has been measured passes.

    enough: seeds that it asks for. every: it is false as soon as one condition fails, as that of being above all others
    is; else it holds except there, or only where the others are.
    """
    measured = {when: value for when, value in found.items() if value is not None}
    if not measured:
        return Verdict("not yet measured", nothing)
    good = [when for when, value in measured.items() if passes(value)]
    bad = [when for when in measured if when not in good]
    missing = [when for when in found if when not in measured]
    seeds = [value.n for value in measured.values()]
    outcome: Outcome = "does not hold" if not good else "holds so far" if missing or max(seeds) == 1 else "holds"
    note = ""
    if good and bad and every:
        outcome, note = "does not hold", f" against {_listed(bad)}"
    elif good and bad:
        outcome = "holds except when" if len(good) > len(bad) else "holds only when"
        note = f" {_listed(bad if len(good) > len(bad) else good)}"
    if missing:
        note += f" (nothing to judge by: {_listed(missing)})"
    alone = [when for when, value in measured.items() if value.n == 1]
    if max(seeds) == 1:
        note += "; one seed only"
    elif alone:
        note += f"; one seed only: {_listed(alone)}"
    elif min(seeds) < enough:
        note += f"; fewer than {enough} seeds"
    evidence = "; ".join(f"{when} {show(value)}" for when, value in measured.items())
    return Verdict(
        outcome, evidence, note, bool(missing) or min(seeds) < max(enough, FEW), passed=(len(good), len(measured))
    )


def _listed(names: Sequence[str]) -> str:
    return ("; " if any(", " in name for name in names) else ", ").join(names)


def points(d: Summary) -> str:
    spread = "" if d.std is None else f" ± {d.std:.2f}"
    return f"{d.mean:+.2f}{spread} ({d.n})"


def share(gap: Recovered) -> str:
    if gap.share is None:
        return NO_CLEAR_GAP
    interval = "" if gap.low is None or gap.high is None else f" [{100 * gap.low:z.0f}, {100 * gap.high:z.0f}]"
    return f"{100 * gap.share:z.0f} %{interval} ({gap.n})"


def recovers(
    rows: Mapping[str, str],
    least: float,
    *,
    low: float | None = None,
    measures: Mapping[str, str] = BOTH,
    plain: str | None = None,
) -> Callable[[Evidence], Verdict]:
    """Whether these rows (label -> row) make good so large a share of these gaps (word -> measure) at the largest bias,
    where these are clear; low: the least that the lower end of the interval may be. plain: the row that the gap is of,
    if not each row's own (`Evidence.gap`)."""

    def passes(gap: Recovered) -> bool:
        return (
            gap.share is not None and gap.share >= least and (low is None or (gap.low is not None and gap.low >= low))
        )

    def judge(evidence: Evidence) -> Verdict:
        gaps = {
            f"{label} {word}".strip(): evidence.gap(row, WORST, measure, plain)
            for label, row in rows.items()
            for word, measure in measures.items()
        }
        unclear = [when for when, gap in gaps.items() if gap is not None and gap.share is None]
        fair = {when: gap for when, gap in gaps.items() if when not in unclear}
        without = f"{NO_CLEAR_GAP}: {_listed(unclear)}"
        if unclear and not any(fair.values()):
            return Verdict("not comparable", without, incomplete=bool(fair))
        pairs = ((row, plain or ROWS[row].baseline) for row in rows.values())
        run = any(paired_difference(*(evidence.figures(r, WORST, "probe") for r in pair)) for pair in pairs)
        found = conclude(fair, passes, share, nothing="no runs at ×1" if run else "no paired runs", enough=SEEDS)
        return dataclasses.replace(found, note=f"{found.note} ({without})", incomplete=True) if unclear else found

    return judge
