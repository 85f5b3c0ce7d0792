"""How long a plan will take, from runs that are finished; and the plan as text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from .. import runs
from ..config import TrainConfig
from .plan import Planned
from .store import Record

# From the closest kind of run to the least close: what two runs must share for one to stand for the other.
_ALIKE: tuple[tuple[str, ...], ...] = (
    ("backbone", "batch_size", "method", "source", "memory_size", "refresh", "policy", "score", "image_size"),
    ("backbone", "batch_size", "method", "source"),
    ("backbone", "batch_size", "method"),
    ("backbone", "batch_size"),
)


def seconds_of(config: TrainConfig, records: Iterable[Record], hardware: str | None = None) -> float | None:
    """Expected seconds of one run, training and measuring, alone on the device; None where nothing like it has run.

    hardware: only runs made on that device (a GPU's name, or None for the CPU).
    """
    fitting = [r for r in records if r.values["hardware"].get("gpu") == hardware and r.config.data == config.data]
    for names in _ALIKE:
        near = [r for r in fitting if all(getattr(r.config, n) == getattr(config, n) for n in names)]
        if near and config.steps:
            return sum(_scaled(r, config.steps) for r in near) / len(near)
    return None


def _scaled(record: Record, steps: int) -> float:
    budget: Mapping[str, Any] = record.values["budget"]
    alone = budget["seconds"] / budget["jobs"]  # processes that share a device take turns
    return float(alone * steps / budget["steps"] + budget["evaluation_seconds"] / budget["jobs"])


def plan_lines(plan: Sequence[Planned], known: Mapping[str, Record], work: Path, *, jobs: int) -> list[str]:
    """The plan, a line for each row, with what is finished and how long the rest should take."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    lines, total, unknown = [], 0.0, 0
    names = list(dict.fromkeys(p.row.name for p in plan))
    width = max(map(len, names), default=0)
    for name in names:
        mine = [p for p in plan if p.row.name == name]
        missing = [p for p in mine if p.hash not in known]
        begun = sum((work / p.name / runs.CONFIG).is_file() for p in missing)
        times = [seconds_of(p.config, known.values(), gpu) for p in missing]
        measured = [t for t in times if t is not None]
        total, unknown = total + sum(measured), unknown + len(times) - len(measured)
        where = " ".join(dict.fromkeys(p.data.name for p in mine))
        seeds = " ".join(str(s) for s in dict.fromkeys(p.config.seed for p in mine))
        state = f"{len(mine) - len(missing)} of {len(mine)} finished" + (f", {begun} begun" if begun else "")
        lines.append(f"{name:<{width}} {where:<20} seed {seeds:<10} {state:<28} {_length(measured, times)}")
    head = (
        f"{len(plan)} runs on {gpu or 'the CPU'}, {jobs} at a time; {sum(p.hash in known for p in plan)} are finished"
    )
    if total:
        head += f"; about {total / 60:.0f} min to go"
    if unknown:
        head += f"; {unknown} of unknown length (nothing like them has been run here)"
    return [head, *lines]


def _length(measured: Sequence[float], times: Sequence[float | None]) -> str:
    if not times:
        return ""
    return f"about {sum(measured) / 60:.1f} min" if len(measured) == len(times) else "time unknown"
