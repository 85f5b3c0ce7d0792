"""The paper's claims, and ours, each judged by the runs that are there and by the theory that can be run."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from .evidence import BALANCED, Evidence
from .paper import BIASES, RESOURCES, figure
from .plan import GRIDS, Data
from .rows import ROWS, SCORES
from .stats import Summary, paired_difference

MEASURE = "probe"
WORST = Data(BIASES[-1])


@dataclass(frozen=True)
class Verdict:
    """holds, holds only when ..., does not hold, or not yet measured; and why."""

    verdict: str
    evidence: str


@dataclass(frozen=True)
class Claim:
    text: str
    judge: Callable[[Evidence], Verdict]


def clear(difference: Summary) -> bool:
    """More than twice its standard error from zero; never for one seed."""
    return difference.std is not None and abs(difference.mean) > 2 * difference.std / math.sqrt(difference.n)


def weigh(differences: Mapping[str, Summary | None], *, at_least_equal: bool = False) -> Verdict:
    """A claim that every one of these paired differences (condition -> points) is positive.

    at_least_equal: that none is clearly negative. What has not been run is said; one seed proves nothing and is named.
    """
    measured = {when: d for when, d in differences.items() if d is not None}
    if not measured:
        return Verdict("not yet measured", "no paired runs")
    above = {when for when, d in measured.items() if d.mean > 0 and (clear(d) or d.n == 1)}
    below = {when for when, d in measured.items() if d.mean < 0 and (clear(d) or d.n == 1)}
    good = [when for when in measured if (when not in below if at_least_equal else when in above)]
    if len(good) == len(measured):
        verdict = "holds"
    elif good:
        verdict = f"holds only when {', '.join(good)}"
    elif below:
        verdict = "does not hold"
    else:
        verdict = "does not hold: within the spread of the seeds"
    missing = [when for when in differences if when not in measured]
    if missing:
        verdict += f" (not yet measured: {', '.join(missing)})"
    if all(d.n == 1 for d in measured.values()):
        verdict += "; one seed only"
    return Verdict(verdict, "; ".join(f"{when} {_points(d)}" for when, d in measured.items()))


def _points(d: Summary) -> str:
    spread = "" if d.std is None else f" ± {d.std:.2f}"
    return f"{d.mean:+.2f}{spread} ({d.n})"


def _gains(row: str, measure: str = MEASURE, *, at_least_equal: bool = False) -> Callable[[Evidence], Verdict]:
    def judge(evidence: Evidence) -> Verdict:
        gains = {f"×{bias:g}": evidence.gain(row, Data(bias), measure) for bias in BIASES}
        return weigh(gains, at_least_equal=at_least_equal)

    return judge


def _bias_harms(evidence: Evidence) -> Verdict:
    found = {}
    for row, label in (("simclr", "SimCLR"), ("moco", "MoCo v2")):
        balanced, biased = (evidence.figures(row, data, MEASURE) for data in (BALANCED, WORST))
        found[label] = paired_difference(balanced, biased)
    return weigh(found)


def _scores_help(method: str) -> Callable[[Evidence], Verdict]:
    def judge(evidence: Evidence) -> Verdict:
        literal = evidence.figures(f"{method}-literal", WORST, MEASURE)
        return weigh(
            {
                score: paired_difference(
                    evidence.figures(f"{method}-{score.replace(':', '')}", WORST, MEASURE), literal
                )
                for score in SCORES[:2]
            }
        )

    return judge


def _cosines(evidence: Evidence) -> Verdict:
    """Differences in hundredths of a cosine, in the direction that the paper claims."""
    found: dict[str, Summary | None] = {}
    for name, sign in (("intra_class_cosine", 1), ("inter_class_cosine", -1)):
        for bias in BIASES:
            ours, theirs = (evidence.figures(row, Data(bias), name) for row in ("d-moco-literal", "moco"))
            ahead = {seed: sign * value for seed, value in ours.items()}
            behind = {seed: sign * value for seed, value in theirs.items()}
            found[f"{name.split('_')[0]} ×{bias:g}"] = paired_difference(ahead, behind)
    return weigh(found)


def _recovers(row: str, share: float) -> Callable[[Evidence], Verdict]:
    def judge(evidence: Evidence) -> Verdict:
        gaps = {m: evidence.gap(row, WORST, m) for m in ("probe", "top1_test_to_train")}
        found = {m: gap for m, gap in gaps.items() if gap is not None}
        if len(found) < len(gaps):
            plain = evidence.gain(row, WORST, "probe")
            why = "no paired runs" if plain is None else "no gap to recover, or no runs at ×1"
            return Verdict("not yet measured", why)
        words = []
        for m, gap in found.items():
            interval = "" if gap.low is None or gap.high is None else f" [{100 * gap.low:.0f}, {100 * gap.high:.0f}]"
            words.append(f"{'probe' if m == 'probe' else 'Top-1'} {100 * gap.share:.0f} %{interval} ({gap.n})")
        good = all(gap.share >= share for gap in found.values())
        few = "; fewer than 5 seeds" if min(gap.n for gap in found.values()) < 5 else ""
        return Verdict(("holds" if good else "does not hold") + few, "; ".join(words))

    return judge


def _beats(row: str, rivals: Sequence[str]) -> Callable[[Evidence], Verdict]:
    def judge(evidence: Evidence) -> Verdict:
        mine = evidence.figures(row, WORST, MEASURE)
        return weigh({rival: paired_difference(mine, evidence.figures(rival, WORST, MEASURE)) for rival in rivals})

    return judge


def _reproduces(row: str, within: float = 3.0) -> Callable[[Evidence], Verdict]:
    """Whether a plain row of ours is near the paper's own figure, so that the D-rows may be compared with its."""

    def judge(evidence: Evidence) -> Verdict:
        off = _beside_the_paper(evidence, row, row, BIASES)
        near = [when for when, points in off.items() if abs(points) <= within]
        verdict = "not yet measured" if not off else "holds" if len(near) == len(off) else "does not hold"
        if near and len(near) < len(off):
            verdict = f"holds only when {', '.join(near)}"
        return Verdict(verdict, "; ".join(f"{when} {points:+.2f}" for when, points in off.items()) or "no runs")

    return judge


def _above_paper(row: str, theirs: str) -> Callable[[Evidence], Verdict]:
    def judge(evidence: Evidence) -> Verdict:
        off = _beside_the_paper(evidence, row, theirs, BIASES[2:])
        verdict = "not yet measured" if not off else "holds" if min(off.values()) > 0 else "does not hold"
        return Verdict(verdict, "; ".join(f"{when} {points:+.2f}" for when, points in off.items()) or "no runs")

    return judge


def _beside_the_paper(evidence: Evidence, row: str, theirs: str, biases: Sequence[float]) -> dict[str, float]:
    """Our mean minus the paper's figure, linear probe, where both exist."""
    found = {}
    for bias in biases:
        ours, paper = evidence.summary(row, Data(bias), MEASURE), figure("probe", theirs, bias)
        if ours is not None and paper is not None:
            found[f"×{bias:g}"] = ours.mean - paper
    return found


def _costs(method: str) -> Callable[[Evidence], Verdict]:
    """Time and memory over the plain method's, against the paper's ratios; holds up to a tenth more."""

    def judge(evidence: Evidence) -> Verdict:
        rows, names = (f"d-{method}-literal", method), ("gpu_seconds", "peak_gpu_memory_mb")
        pairs = [[evidence.budget(row, WORST, name) for row in rows] for name in names]
        words, good = [], True
        for (ours, plain), word, (slow, fast) in zip(
            pairs, ("time", "memory"), zip(RESOURCES[f"d-{method}"], RESOURCES[method], strict=True), strict=True
        ):
            if ours is None or plain is None:
                return Verdict("not yet measured", "no GPU runs of both rows at ×27")
            words.append(f"{word} × {ours / plain:.2f} (paper × {slow / fast:.2f})")
            good = good and ours / plain <= 1.1 * slow / fast
        return Verdict("holds" if good else "does not hold", "; ".join(words))

    return judge


PAPER: tuple[Claim, ...] = (
    Claim("Bias harms: ×27 lowers the linear probe of plain MoCo v2 and SimCLR", _bias_harms),
    Claim("D-MoCo (literal) is above MoCo v2 at every bias, linear probe", _gains("d-moco-literal")),
    Claim("D-SimCLR (literal) is above SimCLR at every bias, linear probe", _gains("d-simclr-literal")),
    Claim("D-MoCo (literal) is above MoCo v2 at every bias, Top-1", _gains("d-moco-literal", "top1_test_to_test")),
    Claim("D-SimCLR (literal) is above SimCLR at every bias, Top-1", _gains("d-simclr-literal", "top1_test_to_test")),
    Claim("Quadratic and gaussian scores are above the linear one for D-MoCo at ×27", _scores_help("d-moco")),
    Claim("D-MoCo has larger intra- and smaller inter-class cosines than MoCo v2 (in hundredths)", _cosines),
    Claim("D-MoCo costs a quarter more time than MoCo v2 and no memory", _costs("moco")),
    Claim("D-SimCLR costs 1.9 times SimCLR's time and 1.2 times its memory", _costs("simclr")),
)


def _rivals(method: str) -> list[str]:
    """Every row of the grid for this method but ours, and the literal form."""
    return [f"d-{method}-literal", *(r for r in GRIDS["rivals"].rows if ROWS[r].plain == method and "ours" not in r)]


OURS: tuple[Claim, ...] = tuple(
    claim
    for m, word in (("simclr", "SimCLR"), ("moco", "MoCo"))
    for claim in (
        Claim(f"D-{word} (ours) is not below {word} at any bias", _gains(f"d-{m}-ours", at_least_equal=True)),
        Claim(f"D-{word} (ours) recovers 95 % of both gaps at ×27", _recovers(f"d-{m}-ours", 0.95)),
        Claim(
            f"D-{word} (ours) is above every rival at ×27, linear probe",
            _beats(f"d-{m}-ours", _rivals(m)),
        ),
    )
)
# With the paper's own recipe our figures can be held against its own.
BESIDE_THE_PAPER: tuple[Claim, ...] = tuple(
    claim
    for m, word in (("moco", "MoCo v2"), ("simclr", "SimCLR"))
    for claim in (
        Claim(f"Our plain {word} is within 3 points of the paper's, linear probe", _reproduces(m)),
        Claim(f"D-{word} (ours) is above the paper's D-row at ×9 and ×27", _above_paper(f"d-{m}-ours", f"d-{m}")),
    )
)
