"""The paper's claims, each judged by the runs that are there; its theory is judged in `theorems`."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from .evidence import BALANCED, LEFT, WORST, Evidence
from .grids import Data
from .paper import BIASES, RESOURCES, recovered
from .rows import ROWS, SCORES
from .stats import Summary, paired_difference, summary
from .store import AS_TRAINED
from .verdicts import Claim, Outcome, Verdict, recovers, weigh

LITERAL: Mapping[str, str] = {"D-MoCo": "d-moco-literal", "D-SimCLR": "d-simclr-literal"}
PLAIN: Mapping[str, str] = {"MoCo v2": "moco", "SimCLR": "simclr"}
PREVIOUS: Mapping[str, str] = {**PLAIN, "SimSiam": "simsiam"}
TOP_K = {"Top-1": "top1_test_to_test", "Top-10": "top10_test_to_test"}
PROBES = {"": "probe", LEFT: f"{AS_TRAINED}probe"}
ABOUT_FIVE = 4.0
FAILS = 10.0


def _times(bias: float) -> str:
    return f"×{bias:g}"


def _gains(row: str, measure: str) -> Callable[[Evidence], Verdict]:
    return lambda evidence: weigh({_times(bias): evidence.gain(row, Data(bias), measure) for bias in BIASES})


def _bias_harms(evidence: Evidence) -> Verdict:
    return weigh(
        {
            f"{label}{words}": paired_difference(*(evidence.figures(row, data, measure) for data in (BALANCED, WORST)))
            for words, measure in PROBES.items()
            for label, row in PLAIN.items()
        }
    )


def _outperforms(measure: str) -> Callable[[Evidence], Verdict]:
    """Each D-row against each previous framework, at the bias where it is least ahead."""

    def judge(evidence: Evidence) -> Verdict:
        found: dict[str, Summary | None] = {}
        run: set[str] = set()
        for mine, row in LITERAL.items():
            for theirs, other in PREVIOUS.items():
                pairs = {_times(bias): _figures(evidence, (row, other), Data(bias), measure) for bias in BIASES}
                ahead = {when: d for when, pair in pairs.items() if (d := paired_difference(*pair)) is not None}
                run |= ahead.keys()
                least = min(ahead, key=lambda when: ahead[when].mean) if ahead else None
                where = "" if least is None else f" (least at {least})"
                found[f"{mine} over {theirs}{where}"] = None if least is None else ahead[least]
        return weigh(found | {_times(bias): None for bias in BIASES if _times(bias) not in run})

    return judge


def _figures(evidence: Evidence, rows: tuple[str, str], data: Data, measure: str) -> list[dict[int, float]]:
    return [evidence.figures(row, data, measure) for row in rows]


def _about_five(evidence: Evidence) -> Verdict:
    found = {}
    for label, row in LITERAL.items():
        one, ten = (evidence.gains(row, WORST, measure) for measure in TOP_K.values())
        found[label] = summary([(one[seed] + ten[seed]) / 2 for seed in one if seed in ten])
    return weigh(found, at_least=ABOUT_FIVE)


def _grows(evidence: Evidence) -> Verdict:
    found: dict[str, Summary | None] = {}
    for label, row in LITERAL.items():
        worst, balanced = (evidence.gains(row, data, "probe") for data in (WORST, BALANCED))
        found[f"{label} at ×27"] = summary(list(worst.values()))
        found[f"{label} at ×27 over ×1"] = paired_difference(worst, balanced)
    return weigh(found)


def _against_linear(method: str, evidence: Evidence, *, sign: int = 1) -> dict[str, Summary | None]:
    """The paper's other scores minus the linear one at ×27, linear probe; sign -1: the linear one minus them."""
    found = {}
    for score in SCORES[:2]:
        rows = (f"{method}-{score.replace(':', '')}", f"{method}-literal")
        found[score] = paired_difference(*_figures(evidence, rows, WORST, "probe")[::sign])
    return found


def _early(evidence: Evidence) -> Verdict:
    """Entropies of the memory, in hundredths, with the other scores minus with the linear one."""
    found: dict[str, Summary | None] = {}
    for label, row in LITERAL.items():
        method = row.removesuffix("-literal")
        for score in SCORES[:2]:
            rows = (f"{method}-{score.replace(':', '')}", row)
            steps = evidence.early_steps(rows, WORST)
            pair = [_hundredths(evidence.logged(name, WORST, "memory_entropy", steps[-1])) for name in rows if steps]
            found[f"{label} {score}"] = paired_difference(*pair) if pair else None
    return weigh(found, "apart")


def _debiased(evidence: Evidence) -> Verdict:
    """Entropies of the memory at the end, in hundredths, minus a FIFO memory's."""
    found = {}
    for label, rows in {"D-MoCo": ("d-moco-literal", "moco"), "D-SimCLR": ("d-simclr-literal", "simclr-fifo")}.items():
        ends = (_hundredths(evidence.last(row, WORST, "memory_entropy")) for row in rows)
        found[label] = paired_difference(*ends)
    return weigh(found)


def _hundredths(values: Mapping[int, float]) -> dict[int, float]:
    return {seed: 100 * value for seed, value in values.items()}


def _cosines(evidence: Evidence) -> Verdict:
    """Differences in hundredths of a cosine, in the direction that the paper claims."""
    found: dict[str, Summary | None] = {}
    for name, sign in (("intra_class_cosine", 1), ("inter_class_cosine", -1)):
        for bias in BIASES:
            pair = _figures(evidence, ("d-moco-literal", "moco"), Data(bias), name)
            found[f"{name.split('_')[0]} {_times(bias)}"] = paired_difference(*pair[::sign])
    return weigh(found)


def _costs(method: str) -> Callable[[Evidence], Verdict]:
    """Time and memory over the plain method's, against the paper's ratios; holds up to a tenth more."""
    paper = [d / plain for d, plain in zip(RESOURCES[f"d-{method}"], RESOURCES[method], strict=True)]

    def judge(evidence: Evidence) -> Verdict:
        ours = evidence.cost(f"d-{method}-literal", WORST)
        if ours is None:
            return Verdict("not yet measured", "no GPU runs of both rows at ×27 by themselves")
        pairs = {"time": (ours.time, paper[0]), "memory": (ours.memory, paper[1])}
        outcome: Outcome = "holds" if all(own <= 1.1 * theirs for own, theirs in pairs.values()) else "does not hold"
        words = (f"{name} × {own:.2f} (paper × {theirs:.2f})" for name, (own, theirs) in pairs.items())
        return Verdict(outcome, "; ".join(words) + ours.how)

    return judge


_TABLES = {f"Table 2, linear probe{words}": measure for words, measure in PROBES.items()} | {
    f"Table 1, {word}": measure for word, measure in TOP_K.items()
}
PAPER: tuple[Claim, ...] = (
    Claim("Bias harms: ×27 lowers the linear probe of plain MoCo v2 and SimCLR", _bias_harms),
    *(
        Claim(f"{table}: {label} (literal) is above {ROWS[ROWS[row].plain].label} at every bias", _gains(row, measure))
        for table, measure in _TABLES.items()
        for label, row in LITERAL.items()
    ),
    *(
        Claim(
            f'"outperform the previous frameworks in all environments", {word}: each literal D-row above MoCo v2, '
            "SimCLR and SimSiam",
            _outperforms(measure),
        )
        for word, measure in TOP_K.items()
    ),
    Claim(
        '"large gains of about 5 % in average" at ×27: Top-1 and Top-10 of the literal D-rows, averaged, rise by '
        f"{ABOUT_FIVE:g} points or more",
        _about_five,
    ),
    Claim(
        '"especially in a severely biased dataset": the literal D-rows gain at ×27, and more than at ×1, linear probe',
        _grows,
    ),
    Claim(
        '"prevents the downstream task performance from degradation": the literal D-rows recover half of the gap at '
        f"×27 (in the paper {100 * recovered('moco'):.0f} and {100 * recovered('simclr'):.0f} % of the probe's)",
        recovers(LITERAL, 0.5),
    ),
    Claim(
        '"Adaptively debiased distribution in the memory": the literal D-rows\' memory ends with more class entropy '
        "than a FIFO memory at ×27 (in hundredths)",
        _debiased,
    ),
    Claim(
        "Table 3: quadratic and gaussian scores are above the linear one for D-MoCo at ×27",
        lambda evidence: weigh(_against_linear("d-moco", evidence)),
    ),
    Claim(
        f'"SimCLR-based one fails when the function is not linear": D-SimCLR loses {FAILS:g} points or more of the '
        "probe at ×27",
        lambda evidence: weigh(_against_linear("d-simclr", evidence, sign=-1), at_least=FAILS),
    ),
    Claim(
        'The score "will affect the behavior of MCP in early-stage learning": a fifth of the way the memory\'s entropy '
        "differs from that with the linear score at ×27 (in hundredths)",
        _early,
    ),
    Claim(
        "D-MoCo has larger intra- and smaller inter-class cosines than MoCo v2 (in hundredths)",
        _cosines,
    ),
    Claim(
        "D-MoCo (literal) costs no more than a quarter more time than MoCo v2 and no memory, give or take a tenth",
        _costs("moco"),
    ),
    Claim(
        "D-SimCLR (literal) costs no more than 1.9 times SimCLR's time and 1.2 times its memory, give or take a tenth",
        _costs("simclr"),
    ),
)
