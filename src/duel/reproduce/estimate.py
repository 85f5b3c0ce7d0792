"""How long a plan will take, from runs that are finished, or else from steps that were benchmarked; and the plan as
text."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .. import runs
from ..config import TrainConfig
from .plan import Planned, images_per_step
from .store import Record

_SIZE = ("data", "backbone", "batch_size", "image_size")
"""What two runs must share at least for one to stand for the other."""
# From the closest kind of run to the least close. Failing these, the nearest by the images that a step encodes.
_WORK = (
    "method",
    "source",
    "memory_size",
    "refreshed_slots",
    "newcomers_from_training",
    "memory_encoded",
    "memory_policy",
)
_ALIKE = ((*_WORK, "score"), _WORK, _WORK[:2])


@dataclass(frozen=True)
class Estimate:
    """Expected seconds of one run, training and measuring, alone on the device."""

    seconds: float
    hardware: str | None
    """Of the runs that it comes from: a GPU's name, or None for a CPU."""


def seconds_of(
    config: TrainConfig, records: Iterable[Record], hardware: str | None = None, *, jobs: int = 1
) -> Estimate | None:
    """From runs on this hardware (a GPU's name, or None for a CPU); where there are none, on others. None where nothing
    like it has run. jobs: how many will run at a time."""
    side_by_side = min(jobs, os.cpu_count() or 1)
    fitting = [r for r in records if all(getattr(r.config, name) == getattr(config, name) for name in _SIZE)]
    others = sorted({str(gpu) for r in fitting if (gpu := _hardware(r)) is not None} - {hardware})
    for where in dict.fromkeys([hardware, *others, None]):
        found = _from([r for r in fitting if _hardware(r) == where], config, side_by_side)
        if found is not None:
            return Estimate(found, where)
    return None


def _hardware(record: Record) -> str | None:
    name: str | None = record.values["hardware"].get("gpu")
    return name


def _from(records: Sequence[Record], config: TrainConfig, side_by_side: int) -> float | None:
    if not records:
        return None
    for names in _ALIKE:
        near = [r for r in records if all(getattr(r.config, n) == getattr(config, n) for n in names)]
        if near:
            break
    else:
        images = images_per_step(config)
        least = min(abs(images_per_step(r.config) - images) for r in records)
        near = [r for r in records if abs(images_per_step(r.config) - images) == least]
    return sum(_scaled(r, config, side_by_side) for r in near) / len(near)


def _scaled(record: Record, config: TrainConfig, side_by_side: int) -> float:
    """Training takes as long as images are encoded."""
    budget: Mapping[str, Any] = record.values["budget"]
    # processes that share a GPU take turns; those on a CPU have its cores, and hardly slow each other down
    share = budget.get("share", 1 / budget["jobs"]) if _hardware(record) else 1 / side_by_side
    work = (config.steps or 0) * images_per_step(config) / (budget["steps"] * images_per_step(record.config))
    return float(share * (budget["seconds"] * work + budget["evaluation_seconds"]))


def plan_lines(
    plan: Sequence[Planned], ended: Mapping[str, Record], work: Path, *, jobs: int, steps: Sequence[Record] = ()
) -> list[str]:
    """The plan, a line for each row, with what is finished and how long the rest should take; then a sum per seed.

    steps: benchmarked ones (`store.steps`).
    """
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    finished = [record for record in ended.values() if record.failed is None]
    times = {
        p.hash: seconds_of(p.config, finished, gpu, jobs=jobs) or seconds_of(p.config, steps, gpu, jobs=jobs)
        for p in plan
        if p.hash not in ended
    }
    lines = []
    names = list(dict.fromkeys(p.row.name for p in plan))
    width = max(map(len, names), default=0)
    for name in names:
        mine = [p for p in plan if p.row.name == name]
        where = " ".join(dict.fromkeys(p.data.name for p in mine))
        seeds = " ".join(str(s) for s in dict.fromkeys(p.config.seed for p in mine))
        state = f"{name:<{width}} {where:<20} seed {seeds:<10} {_state(mine, ended, work):<28}"
        lines.append(f"{state} {_length([times[p.hash] for p in mine if p.hash in times], gpu)}")
    head = f"{len(plan)} runs on {gpu or 'the CPU'}, {jobs} at a time; {len(plan) - len(times)} are finished"
    if times:
        head += f"; to go: {_length(list(times.values()), gpu)}"
    gpus = sorted({found.hardware for found in times.values() if found is not None and found.hardware})
    if gpu is None and gpus:
        lines.append(f"these times are those of {', '.join(gpus)}: without a GPU it takes many times as long")
    return [head, *lines, *_per_seed(plan, times, gpu)]


def _state(mine: Sequence[Planned], ended: Mapping[str, Record], work: Path) -> str:
    there = [ended[p.hash] for p in mine if p.hash in ended]
    begun = sum((work / p.name / runs.CONFIG).is_file() for p in mine if p.hash not in ended)
    counts = {"diverged": sum(record.failed is not None for record in there), "begun": begun}
    more = [f"{count} {word}" for word, count in counts.items() if count]
    return ", ".join([f"{len(there)} of {len(mine)} finished", *more])


def _per_seed(plan: Sequence[Planned], times: Mapping[str, Estimate | None], gpu: str | None) -> list[str]:
    seeds = dict.fromkeys(p.config.seed for p in plan if p.hash in times)
    by_seed = {seed: [times[p.hash] for p in plan if p.config.seed == seed and p.hash in times] for seed in seeds}
    return [f"seed {seed}: {len(found)} runs to go, {_length(found, gpu)}" for seed, found in by_seed.items()]


def _length(times: Sequence[Estimate | None], gpu: str | None) -> str:
    """gpu: of this machine; estimates from another say so."""
    if not times:
        return ""
    known = [found for found in times if found is not None]
    elsewhere = sorted({found.hardware or "a CPU" for found in known if found.hardware != gpu})
    unknown = f"{len(times) - len(known)} of unknown length" if len(known) < len(times) else ""
    text = f"about {sum(found.seconds for found in known) / 60:.1f} min" if known else ""
    text += f" as on {', '.join(elsewhere)}" if elsewhere else ""
    return ", ".join(part for part in (text, unknown) if part)
