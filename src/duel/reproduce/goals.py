"""What our form adds to the paper's, our own goals, and our figures beside the paper's: judged as its claims are."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence

from ..names import BLIND_POLICIES
from .evidence import BALANCED, LEFT, WORST, Evidence
from .grids import DWELL, GRIDS, Data
from .paper import BIASES, figure
from .rows import ROWS, Row, longer
from .stats import Summary, paired_difference, summary
from .store import AS_TRAINED, Record
from .tables import words
from .verdicts import BOTH, FEW, NEAR, SEEDS, Claim, Verdict, Wanted, conclude, points, recovers, weigh

PIXELS: Mapping[str, str] = {"D-SimCLR": "d-simclr-pixels", "D-MoCo": "d-moco-pixels"}
"""Ours, compared by thumbnails: the images that it encodes are those that the plain method does."""
OUR_ROWS: Mapping[str, str] = {"D-SimCLR": "d-simclr-ours", "D-MoCo": "d-moco-ours"}
MEASURES = {"probe": "probe", "Top-1": "top1_test_to_train", "5-shot": "few_shot"}
AS_LEFT = {f"{word}{LEFT}": f"{AS_TRAINED}{measure}" for word, measure in BOTH.items()}
EVEN = 0.97
REPRODUCED = 3.0
MINUTES = 20


def _than_plain(row: str, kinds: Sequence[Data], wanted: Wanted) -> Callable[[Evidence], Verdict]:
    """Against the plain row on each of these kinds of data."""

    def judge(evidence: Evidence) -> Verdict:
        gains = {
            f"{word} {words(data)}": evidence.gain(row, data, measure)
            for data in kinds
            for word, measure in MEASURES.items()
        }
        return weigh(gains, wanted)

    return judge


def _near(row: str, other: str, kinds: Sequence[Data]) -> Callable[[Evidence], Verdict]:
    """Not below another row on any of these kinds of data."""

    def judge(evidence: Evidence) -> Verdict:
        differences = {
            f"{word} {words(data)}": paired_difference(*(evidence.figures(r, data, measure) for r in (row, other)))
            for data in kinds
            for word, measure in MEASURES.items()
        }
        return weigh(differences, "not below")

    return judge


def _rivals(row: str, grid: str) -> list[str]:
    """The literal form and every row of the grid for its method that is not a form of ours nor the oracle's, which is a
    control. A row that encodes no more than the plain method has none that is trained for longer; one that is trained
    for longer itself only those that encode as many images."""
    mine = ROWS[row]
    literal = f"d-{mine.plain}-literal"
    names = [literal, *(name for name in GRIDS[grid].rows if not name.startswith("d-") or name == longer(literal))]
    rivals = [ROWS[name] for name in names]
    rivals = [r for r in rivals if r.plain == mine.plain and r.settings.get("policy") != "oracle"]
    if row in PIXELS.values():
        rivals = [rival for rival in rivals if not rival.as_many_as]
    if mine.as_many_as:
        rivals = [rival for rival in rivals if _encodes_much(rival)]
    return [rival.name for rival in rivals]


def _memories(row: str, grid: str) -> list[str]:
    """Of its rivals those that draw their batches from a memory, too."""
    return [rival for rival in _rivals(row, grid) if ROWS[rival].settings.get("source") == "memory"]


def _encodes_much(rival: Row) -> bool:
    """As many images as ours: by its length, or because its memory is encoded, too."""
    encoded = rival.settings.get("source") == "memory" and rival.settings.get("space") != "pixels"
    return bool(rival.as_many_as) or encoded or longer(rival.name) not in ROWS


def _is_control(row: str) -> bool:
    """Whether a rival is nobody's proposal: it knows images by their numbers, or another's policy sees thumbnails."""
    policy, space = (ROWS[row].settings.get(name) for name in ("policy", "space"))
    return policy == "distinct" or (space == "pixels" and policy not in BLIND_POLICIES)


def _beats(row: str, data: Data, rivals: Sequence[str]) -> Callable[[Evidence], Verdict]:
    def judge(evidence: Evidence) -> Verdict:
        mine = evidence.figures(row, data, "probe")
        differences = {
            ROWS[rival].label: paired_difference(mine, evidence.figures(rival, data, "probe")) for rival in rivals
        }
        own = summary(list(mine.values()))
        # of a difference to one run of another row, if that varies as this one does
        spread = None if own is None or own.std is None or own.n < FEW else math.sqrt(2) * own.std
        return weigh(differences, "beyond the spread", spread=spread, every=True)

    return judge


def _even(evidence: Evidence) -> Verdict:
    ends = {
        label: summary(list(evidence.last(row, WORST, "memory_entropy").values())) for label, row in OUR_ROWS.items()
    }
    return conclude(ends, lambda d: d.mean >= EVEN, lambda d: f"{d.mean:.3f} ({d.n})", nothing="no runs", enough=SEEDS)


def _near_plain(evidence: Evidence) -> Verdict:
    gains = {
        f"{label} {word}": evidence.gain(row, BALANCED, measure)
        for label, row in OUR_ROWS.items()
        for word, measure in BOTH.items()
    }
    return conclude(gains, lambda d: d.mean >= -NEAR, points, enough=SEEDS)


def _mean_of_device(runs: Sequence[Record], name: str) -> float:
    """Mean of these seconds, each over the processes that shared the device then, of runs that have both; else 0."""
    found = [
        seconds * share
        for run in runs
        if (seconds := run.budget(name)) is not None and (share := run.budget("share")) is not None
    ]
    return sum(found) / len(found) if found else 0.0


def _whole_table(evidence: Evidence) -> dict[tuple[str, Data], list[Record]]:
    """The runs of table 2 of one seed that were all made at one commit, of the latest such seed; else none."""
    table = GRIDS["table2"]
    made: dict[tuple[int, str], dict[tuple[str, Data], list[Record]]] = {}
    for row, data in itertools.product(table.rows, table.data):
        for run in evidence.runs(row, data):
            if run.budget("gpu_seconds") is not None:
                made.setdefault((run.seed, str(run.values["commit"])), {})[row, data] = [run]
    whole = [runs for runs in made.values() if len(runs) == len(table.rows) * len(table.data)]
    return max(whole, default={}, key=lambda runs: max(run.values.get("finished", "") for (run,) in runs.values()))


def _affordable(evidence: Evidence) -> Verdict:
    """Table 2 with one seed. Where none was made as a whole, means: a row's runs take about as long at every bias; at
    some the time was measured otherwise."""
    table, training, beside = GRIDS["table2"], dict[str, float](), 0.0
    whole = _whole_table(evidence)
    for row in table.rows:
        by_data = [whole[row, data] if whole else evidence.runs(row, data) for data in table.data]
        known = [[s for run in runs if (s := run.budget("gpu_seconds")) is not None] for runs in by_data]
        seconds = [sum(values) / len(values) for values in known if values]
        if not seconds:
            return Verdict("not yet measured", f"no GPU-seconds of {ROWS[row].label}")
        training[ROWS[row].label] = sum(seconds) / len(seconds)
        runs = list(itertools.chain.from_iterable(by_data))
        beside += sum(_mean_of_device(runs, name) for name in ("filling_seconds", "evaluation_seconds"))
    total, trained = (
        len(table.data) * seconds / 60 for seconds in (sum(training.values()) + beside, sum(training.values()))
    )
    each = "; ".join(f"{label} {seconds:.0f} s" for label, seconds in training.items())
    return Verdict(
        "holds" if total <= MINUTES else "does not hold",
        f"{total:.1f} for {len(table.data) * len(training)} runs{' made together' if whole else ', by means'}, "
        "which shared the GPU, filling and evaluation included and starting not; "
        f"training alone {trained:.1f}, a run of {each}",
    )


def _off(evidence: Evidence, row: str, theirs: str, biases: Sequence[float]) -> dict[str, Summary | None]:
    """Our mean minus the paper's figure, linear probe, where both exist."""
    found: dict[str, Summary | None] = {}
    for bias in biases:
        ours, paper = evidence.summary(row, Data(bias), "probe"), figure("probe", theirs, bias)
        found[f"×{bias:g}"] = None if ours is None or paper is None else Summary(ours.mean - paper, ours.std, ours.n)
    return found


def _reproduced(d: Summary) -> bool:
    return abs(d.mean) <= REPRODUCED


def _reproduces(row: str) -> Callable[[Evidence], Verdict]:
    return lambda evidence: conclude(_off(evidence, row, row, BIASES), _reproduced, points, nothing="no runs")


def _above_paper(row: str) -> Callable[[Evidence], Verdict]:
    """Judged only where the plain row reproduces the paper's: elsewhere the two recipes are not the same."""
    plain = ROWS[row].plain

    def judge(evidence: Evidence) -> Verdict:
        ours = _off(evidence, row, f"d-{plain}", BIASES[2:])
        if not any(ours.values()):
            return Verdict("not yet measured", "no runs")
        base = _off(evidence, plain, plain, BIASES[2:])
        off = {when: d for when, d in base.items() if d is None or not _reproduced(d)}
        why = "; ".join(
            f"{when}: the plain row {'has not been run' if d is None else f'is off by {points(d)}'}"
            for when, d in off.items()
            if ours[when] is not None
        )
        fair = {when: d for when, d in ours.items() if when not in off or d is None}
        if not any(fair.values()):
            shown = "; ".join(f"{when} {points(d)}" for when, d in ours.items() if d is not None)
            return Verdict("not comparable", shown, f" ({why})")
        found = conclude(fair, lambda d: d.mean > 0, points)
        return dataclasses.replace(found, note=f"{found.note} ({why})", incomplete=True) if why else found

    return judge


FRAMES = {
    "camera": f"a stream of frames, {DWELL} of each image in a row",
    "stops": f"a stream that shows images for {DWELL} frames on average, a few for very many",
}
OURS: tuple[Claim, ...] = tuple(
    claim
    for label, row in OUR_ROWS.items()
    for claim in (
        Claim(
            f"{label} (ours) is not below {ROWS[ROWS[row].plain].label} at any bias, clearly or by half a point in the "
            "mean: linear probe, Top-1 (test to train), 5-shot",
            _than_plain(row, GRIDS["table2"].data, "not below"),
        ),
        Claim(
            f"{label} (ours) recovers 95 % of the gaps at ×27 in the mean, {ROWS[ROWS[row].plain].label} being trained "
            "for as many steps, which encodes fewer images: linear probe, Top-1 (test to train), 5-shot, and the first "
            "two with BatchNorm as training left it",
            recovers({"": row}, 0.95, measures=MEASURES | AS_LEFT),
        ),
        Claim(
            f"The same, {ROWS[ROWS[row].plain].label} being trained until it has encoded as many images as {label} "
            "(ours): linear probe, Top-1 (test to train), 5-shot",
            recovers({"": row}, 0.95, measures=MEASURES, plain=longer(ROWS[row].plain)),
        ),
        Claim(
            f"{label} (ours) is above every rival at ×27 by more than the seeds' spread, linear probe",
            _beats(row, WORST, _rivals(row, "rivals")),
        ),
        *(
            claim
            for grid, what in FRAMES.items()
            for claim in (
                Claim(
                    f"{label} (ours) is above {ROWS[ROWS[row].plain].label} on {what}: linear probe, Top-1 (test to "
                    "train), 5-shot",
                    _than_plain(row, GRIDS[grid].data, "above"),
                ),
                Claim(
                    f"{label} (ours) is above every memory of another policy on {what}, at ×27, by more than the "
                    "seeds' spread, linear probe",
                    _beats(row, GRIDS[grid].data[-1], _memories(row, grid)),
                ),
            )
        ),
        *(
            Claim(
                f"{label} (ours) is not below {ROWS[ROWS[row].plain].label} on {what}, clearly or by half a point in "
                "the mean: linear probe, Top-1 (test to train), 5-shot",
                _than_plain(row, GRIDS[grid].data, "not below"),
            )
            for grid, what in {"subset": "a fixed subset", "longtail": "a long tail of ratio 100"}.items()
        ),
    )
)
WORST_KINDS = (WORST, *(GRIDS[grid].data[-1] for grid in FRAMES))
BY_PIXELS: tuple[Claim, ...] = tuple(
    claim
    for label, row in PIXELS.items()
    for claim in (
        Claim(
            f"{label} by thumbnails, which encodes as many images as {ROWS[ROWS[row].plain].label}, is not below it at "
            "any bias, clearly or by half a point in the mean: linear probe, Top-1 (test to train), 5-shot",
            _than_plain(row, GRIDS["thumbnails"].data, "not below"),
        ),
        Claim(
            f"{label} by thumbnails is above {ROWS[ROWS[row].plain].label} at ×27, drawn and as frames: linear probe, "
            "Top-1 (test to train), 5-shot",
            _than_plain(row, WORST_KINDS, "above"),
        ),
        Claim(
            f"{label} by thumbnails is not below {label} (ours), by what the encoder gives, there, clearly or by half "
            "a point in the mean",
            _near(row, OUR_ROWS[label], WORST_KINDS),
        ),
        Claim(
            f"{label} by thumbnails is above every rival that is trained for as many steps at ×27 by more than the "
            "seeds' spread, linear probe",
            _beats(row, WORST, _rivals(row, "rivals")),
        ),
        *(
            Claim(
                f"{label} by thumbnails, trained until it has encoded as many images as {label} (ours), is above "
                f"{what} at ×27 by more than the seeds' spread, linear probe",
                _beats(
                    longer(row),
                    WORST,
                    [rival for rival in _rivals(longer(row), "rivals") if _is_control(rival) == control],
                ),
            )
            for control, what in (
                (False, "every rival that encodes as many images, but for the three controls of the next line,"),
                (True, "images known by their ids, MinRed and a threshold by thumbnails, which encode as many,"),
            )
        ),
        Claim(
            f"{label} by thumbnails recovers 95 % of both gaps at ×27 in the mean, all rows being trained until they "
            f"have encoded as many images as {label} (ours)",
            recovers({"": longer(row)}, 0.95),
        ),
        *(
            Claim(
                f"{label} by thumbnails is above every memory of another policy on {what}, at ×27, by more than the "
                "seeds' spread, linear probe",
                _beats(row, GRIDS[grid].data[-1], _memories(row, grid)),
            )
            for grid, what in FRAMES.items()
        ),
    )
)
# Set for CIFAR-10 at ×27, ResNet-18, 5,000 steps.
GOALS: tuple[Claim, ...] = (
    Claim(
        "D-SimCLR (ours) recovers 95 % of both gaps at ×27 of SimCLR for as many steps, the lower end of the interval "
        "80 %",
        recovers({"": "d-simclr-ours"}, 0.95, low=0.8),
    ),
    Claim(
        "D-MoCo (ours) recovers 80 % of both gaps at ×27 of MoCo v2 for as many steps, the lower end of the interval "
        "50 %",
        recovers({"": "d-moco-ours"}, 0.8, low=0.5),
    ),
    Claim(f"Our memories end with a class entropy of {EVEN:g} or more at ×27", _even),
    Claim(
        f"On balanced data our rows are not more than {NEAR:g} points below the plain ones, {' and '.join(BOTH)}",
        _near_plain,
    ),
    Claim(f"All runs of table 2 with one seed take {MINUTES} GPU-minutes at most", _affordable),
)
# With the paper's own recipe our figures can be held against its own.
BESIDE_THE_PAPER: tuple[Claim, ...] = tuple(
    claim
    for label, row in OUR_ROWS.items()
    for claim in (
        Claim(
            f"Our plain {ROWS[ROWS[row].plain].label} is within {REPRODUCED:g} points of the paper's, linear probe",
            _reproduces(ROWS[row].plain),
        ),
        Claim(f"{label} (ours) is above the paper's {label} at ×9 and ×27, linear probe", _above_paper(row)),
    )
)
