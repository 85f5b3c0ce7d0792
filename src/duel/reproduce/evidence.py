"""What the finished runs say about a row: figures by seed, budgets, gaps. Rates in per cent."""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..evaluation.settings import DEFAULTS
from .fingerprint import fingerprint
from .grids import DRAWN, GRIDS, TUNING, Data
from .plan import OWN, SCALES, Scale, Variation, plan_run
from .rows import ROWS
from .stats import Recovered, Summary, gap_recovered, summary
from .store import AS_TRAINED, Cost, Record

LEFT = ", BatchNorm as training left it"
"""To follow the words of a measure that AS_TRAINED stands before."""
MEASURES: Mapping[str, str] = {
    "probe": "linear probe",
    "probe_standardised": "linear probe on standardised features",
    "top1_test_to_train": "Top-1, test to train",
    "top1_test_to_test": "Top-1, test to test",
    "top10_test_to_train": "Top-10, test to train",
    "top10_test_to_test": "Top-10, test to test",
    "few_shot": "nearest centroid, 5 shots",
    f"{AS_TRAINED}probe": f"linear probe{LEFT}",
    f"{AS_TRAINED}top1_test_to_train": f"Top-1, test to train{LEFT}",
}
BALANCED, WORST = DRAWN[0], DRAWN[-1]
EARLY = (0.02, 0.06, 0.2)
"""Shares of the training at which its beginning is looked at: 100, 300 and 1,000 of 5,000 steps."""


class Evidence:
    """The runs of one scale and one variation of it: those of the seeds that our settings were chosen on (`tuning`), or
    all others."""

    def __init__(
        self,
        records: Iterable[Record],
        scale: Scale,
        variation: Variation = OWN,
        *,
        tuning: bool = False,
        costs: Mapping[str, Cost] | None = None,
        pixels: Mapping[str, Any] | None = None,
    ) -> None:
        """costs: rows whose cost has been measured side by side with their plain row's. pixels: the evaluation of raw
        images."""
        self._costs = costs or {}
        self.pixels = pixels
        self._shows_all = variation == OWN and not scale.in_part
        self._judges: dict[str, bool] = {}
        self.scale = scale.varied(variation)
        self._hashes: dict[tuple[str, Data], str] = {}
        self._runs: dict[str, list[Record]] = defaultdict(list)
        for record in records:
            if scale.tuned_on and (record.seed in scale.tuned_on) != tuning:
                continue
            self._runs[fingerprint(dataclasses.replace(record.config, seed=0))].append(record)

    @property
    def steps(self) -> int | None:
        return plan_run(ROWS["simclr"], BALANCED, self.scale, 0, {}).config.steps

    def hash(self, row: str, data: Data) -> str:
        """Equal for rows that this scale makes alike."""
        if (row, data) not in self._hashes:
            self._hashes[row, data] = plan_run(ROWS[row], data, self.scale, 0, {}).hash
        return self._hashes[row, data]

    def runs(self, row: str, data: Data) -> list[Record]:
        """By seed."""
        return sorted(self._runs.get(self.hash(row, data), []), key=lambda record: record.seed)

    def judges(self, measure: str) -> bool:
        """Whether a claim may be judged by it: not where training gives no more than raw images do, by most runs of the
        plain rows on balanced data, which have the least to cope with, or without any by most runs."""
        floor = None if self.pixels is None else self.pixels.get(measure.removeprefix(AS_TRAINED))
        if floor is None:
            return True
        if measure not in self._judges:
            easiest = [run for row in ("simclr", "moco") for run in self.runs(row, BALANCED)]
            found = [run.measure(measure) for run in easiest or shown(self, self)]
            rates = [rate for rate in found if rate is not None]
            self._judges[measure] = 2 * sum(rate > floor for rate in rates) > len(rates) or not rates
        return self._judges[measure]

    def rows(self, grid: str) -> list[str]:
        """Those of a table that are shown: all, or in a variation of the scale, and where only parts of it are run,
        those that have been."""
        rows = GRIDS[grid].rows
        return [row for row in rows if self._shows_all or any(self.runs(row, data) for data in GRIDS[grid].data)]

    def figures(self, row: str, data: Data, measure: str) -> dict[int, float]:
        """Seed -> per cent, to judge by: without linear probes that have not fitted, which say little of features."""
        if not self.judges(measure):
            return {}
        return _per_cent([run for run in self.runs(row, data) if self._fitted(run, measure)], measure)

    def summary(self, row: str, data: Data, measure: str) -> Summary | None:
        """Of all runs."""
        return summary(list(_per_cent(self.runs(row, data), measure).values()))

    def fitted(self, row: str, data: Data, measure: str) -> bool:
        """Whether the linear probes of all runs have, if that is what is measured."""
        return all(self._fitted(run, measure) for run in self.runs(row, data))

    def _fitted(self, record: Record, measure: str) -> bool:
        """A probe that the scale cuts short is not expected to."""
        return record.fitted(measure) or self.scale.evaluation.probe_epochs < DEFAULTS.probe_epochs

    def gains(self, row: str, data: Data, measure: str) -> dict[int, float]:
        """Seed -> difference to the plain row on the same data, in points."""
        ours, plain = (self.figures(name, data, measure) for name in (row, ROWS[row].plain))
        return {seed: ours[seed] - plain[seed] for seed in ours if seed in plain}

    def gain(self, row: str, data: Data, measure: str) -> Summary | None:
        return summary(list(self.gains(row, data, measure).values()))

    def gap(self, row: str, data: Data, measure: str, plain: str | None = None) -> Recovered | None:
        """Share of the plain row's loss against balanced data that the row makes good. plain: by default that of as
        many steps; of a row that is trained for longer the one that is, too."""
        plain = plain or ROWS[row].baseline
        if data == BALANCED or row == plain:
            return None
        return gap_recovered(
            self.figures(row, data, measure), self.figures(plain, data, measure), self.figures(plain, BALANCED, measure)
        )

    def has(self, measure: str) -> bool:
        """Whether there is something to show: a measure that came later is not in older runs."""
        later = measure == "probe_standardised" or measure.startswith(AS_TRAINED)
        return not later or any(run.measure(measure) is not None for run in shown(self, self))

    def budget(self, row: str, data: Data, name: str) -> float | None:
        values = [value for record in self.runs(row, data) if (value := record.budget(name)) is not None]
        return sum(values) / len(values) if values else None

    def cost(self, row: str, data: Data) -> Cost | None:
        """Over the plain row's: as measured side by side, or by runs of the same seed, commit and hardware that had the
        device to themselves. What runs at once take is a matter of what else ran."""
        if row in self._costs:
            return self._costs[row]
        ours, plain = (
            {
                (run.seed, run.values["commit"], run.values["hardware"].get("gpu")): run
                for run in self.runs(name, data)
                if run.budget("jobs") == 1
            }
            for name in (row, ROWS[row].plain)
        )
        pairs = [(ours[key], plain[key]) for key in ours if key in plain]
        ratios = [_mean_ratio(pairs, name) for name in ("gpu_seconds", "peak_gpu_memory_mb")]
        time, memory = ratios
        return None if time is None or memory is None else Cost(time, memory)

    def last(self, row: str, data: Data, metric: str) -> dict[int, float]:
        """Seed -> a metric at the end of training."""
        over_time = {record.seed: record.over_time(metric)[1] for record in self.runs(row, data)}
        return {seed: values[-1] for seed, values in over_time.items() if values}

    def logged(self, row: str, data: Data, metric: str, step: int) -> dict[int, float]:
        """Seed -> a metric as it was logged at this step."""
        over_time = {record.seed: dict(zip(*record.over_time(metric), strict=True)) for record in self.runs(row, data)}
        return {seed: values[step] for seed, values in over_time.items() if step in values}

    def early_steps(self, rows: Sequence[str], data: Data) -> list[int]:
        """The steps at which these rows first logged something after each share of EARLY."""
        logged = {step for row in rows for run in self.runs(row, data) for step in run.values["metrics"]["step"]}
        marks = [round(share * (self.steps or 0)) for share in EARLY]
        later = [[step for step in logged if step >= mark] for mark in marks]
        return sorted({min(steps) for steps in later if steps})

    def images(self, row: str, data: Data) -> int | None:
        """How many images the stream is made of: what it brought, over how often it brought all."""
        for record in self.runs(row, data):
            steps, epochs = record.over_time("epoch")
            if epochs and epochs[-1] > 0:
                return round(steps[-1] * record.config.stream_items / epochs[-1])
        return None


def _per_cent(records: Iterable[Record], measure: str) -> dict[int, float]:
    found = {record.seed: record.measure(measure) for record in records}
    return {seed: 100 * value for seed, value in found.items() if value is not None}


def _mean_ratio(pairs: Sequence[tuple[Record, Record]], name: str) -> float | None:
    found = [(one.budget(name), other.budget(name)) for one, other in pairs]
    ratios = [a / b for a, b in found if a is not None and b]
    return sum(ratios) / len(ratios) if ratios else None


def shown(evidence: Evidence, tuning: Evidence) -> list[Record]:
    """The runs that some row has; a run of settings that have changed since has none."""
    found = {
        record.hash: record
        for name, grid in GRIDS.items()
        for row in grid.rows
        for data in (*grid.data, *([BALANCED] if row in grid.balanced else []))
        for record in (tuning if name == TUNING else evidence).runs(row, data)
    }
    return list(found.values())


def variations(records: Iterable[Record], scale: str) -> list[Variation]:
    """The scale as it is, then every variation of it that has been run, the longest first."""
    others = {variation_of(record) for record in records if record.scale == scale and not record.own_length} - {OWN}
    return [OWN, *sorted(others, key=lambda other: (-(other.steps or math.inf), other.lr or 0.0))]


def variation_of(record: Record) -> Variation:
    """What of a run is not as its scale has it, for rows that there are and have the scale's length."""
    row = ROWS.get(record.values["row"])
    if row is None:
        return OWN
    own = plan_run(row, BALANCED, SCALES[record.scale], 0, {}).config
    mine = {name: getattr(record.config, name) for name in ("steps", "lr")}
    return Variation(**{name: value for name, value in mine.items() if value != getattr(own, name)})


def is_of(record: Record, variation: Variation) -> bool:
    """Whether a run is of this variation of its scale; one of a row with a length of its own has that of its row."""
    row = ROWS.get(record.values["row"])
    if row is None:
        return variation == OWN
    planned = plan_run(row, BALANCED, SCALES[record.scale].varied(variation), 0, {}).config
    return (record.config.steps, record.config.lr) == (planned.steps, planned.lr)
