"""Whole training steps: methods with and without DUEL side by side, what each part takes, and the ratio of the two."""

from __future__ import annotations

import dataclasses
import gc
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from duel.benchmarks import images, tables
from duel.benchmarks.cases import Case
from duel.benchmarks.parts import parts
from duel.benchmarks.results import Results
from duel.benchmarks.timing import compiled_anew, windows
from duel.config import TrainConfig
from duel.errors import UserError
from duel.graph import WARM_UP
from duel.machine import build_fabric
from duel.step import TrainingStep

#: Columns of the table and the parts they add up.
PARTS = {
    "data": ("sampling", "augmentation"),
    "enc.": ("encoder",),
    "loss": ("loss",),
    "repl.": ("replacement",),
    "refr.": ("refresh",),
}
COLUMNS = ("ms", "img/s", "GB", "ratio", *PARTS)


@dataclass(frozen=True, kw_only=True)
class How:
    """How a row is measured."""

    device: torch.device
    count: int = 12
    """Windows."""
    length: int = 20
    """Steps in a window."""
    warm_up: int = 40
    """Steps before the first window."""
    repeats: int = 20
    """Timings of each part of a step; 0: the parts are left out."""
    image_count: int = images.COUNT

    def __post_init__(self) -> None:
        for name, least in (("count", 1), ("length", 1), ("repeats", 0)):
            if getattr(self, name) < least:
                raise UserError(f"{name} must be at least {least}, got {getattr(self, name)}")


def benchmark(
    rows: Sequence[Case],
    *,
    each: Callable[[dict[str, Any]], None] = lambda row: None,
    begins: Callable[[str], None] = lambda name: None,
    **how: Any,
) -> list[dict[str, Any]]:
    """A row of figures per case; how: fields of `How`.

    `each` gets a row as soon as its step is measured, and again with its parts. A plain row has windows of its own, and
    further ones with each row that is held against it: the two take turns.
    """
    plan, done = How(**how), dict[str, dict[str, Any]]()

    def note(row: dict[str, Any]) -> None:
        done[row["name"]] = row
        each(row)

    for group in _groups(rows):
        with compiled_anew():
            _measure(group, plan, note, begins)
    return list(done.values())


def _measure(
    group: Sequence[Case], how: How, each: Callable[[dict[str, Any]], None], begins: Callable[[str], None]
) -> None:
    """The rows of one group, the plain one first. Of the others one at a time is there, so that a row's memory is its
    own."""

    def shares(step: TrainingStep | None, row: dict[str, Any]) -> None:
        if step is not None and how.repeats:
            begins(f"{row['name']}: parts")
            each(row | _shares(step, row, how.repeats))

    begins(group[0].name)
    plain, first = _timed(group[0], None, how)
    each(first)
    for case in group[1:]:
        begins(case.name)
        step, row = _timed(case, plain, how)
        each(row)
        shares(step, row)
        del step
    shares(plain, first)


def _groups(rows: Sequence[Case]) -> Iterator[list[Case]]:
    """Each plain row with those that are held against it."""
    names = {case.name for case in rows}
    for case in rows:
        if case.plain is not None and case.plain not in names:
            raise UserError(f"row {case.name!r} is held against {case.plain!r}, which is not among the rows")
        if case.plain is None:
            yield [case, *(other for other in rows if other.plain == case.name)]


def _timed(case: Case, plain: TrainingStep | None, how: How) -> tuple[TrainingStep | None, dict[str, Any]]:
    """The case's step and its row, with its time and, beside `plain`, the ratio; (None, row) if it cannot be run."""
    step, row = _prepare(case, how)
    if step is None:
        return None, row
    turn = _turn(step)
    length = row["window_steps"] = -(-how.length // turn) * turn
    calls = [step] if plain is None else [plain, step]
    *others, own = windows(calls, how.device, count=how.count, length=length)
    ms = statistics.median(own)
    row |= {"ms": ms, "images_per_s": step.config.batch_size / ms * 1e3, "ms_windows": [round(t, 4) for t in own]}
    for times in others:
        row["plain_ms"] = statistics.median(times)
        row["ratio"] = ms / row["plain_ms"]
    return step, row


def _turn(step: TrainingStep) -> int:
    """Steps from one move of the memory's centre to the next, 1 where it has none: each window must have its share."""
    upkeep = step.upkeep
    return 1 if upkeep is None or upkeep.centre is None else upkeep.recentre_every


def _prepare(case: Case, how: How) -> tuple[TrainingStep | None, dict[str, Any]]:
    """The step, warmed up and recorded, and what is known of it by then; (None, row) if it cannot be."""
    device = how.device
    config = dataclasses.replace(case.config, device=str(device))
    default = TrainConfig().as_dict()
    settings = {k: v for k, v in config.as_dict().items() if v != default[k] and k not in ("out", "root", "device")}
    row: dict[str, Any] = {"name": case.name, "plain": case.plain, "settings": settings}
    before = 0
    if device.type == "cuda":
        gc.collect()  # steps refer to themselves, through hooks
        torch.cuda.synchronize(device)
        torch._C._cuda_clearCublasWorkspaces()  # of earlier rows: this one would be spared what it needs itself
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
    inputs, fabric = images.load(config, device, count=how.image_count), build_fabric(config)
    try:
        step = TrainingStep(config, inputs, fabric=fabric)
        step.fill_memory()
        # the graph is recorded before the clock runs, whatever was asked for
        for _ in range(how.warm_up if step.graph is None else max(how.warm_up, WARM_UP + 2)):
            step()
        encoded = step.images_encoded
        step()
        loss, bad = step.read_loss()
    except Exception as error:  # one row, out of memory perhaps, must not lose the others
        return None, row | {"error": first_line(error)}
    if bad is not None:
        return None, row | {"error": f"the loss of step {bad} is not finite, so the memory turned its items away"}
    row |= {"images_encoded": step.images_encoded - encoded, "loss": loss}
    row |= {"compiled": is_compiled(step), "mode": mode(step)}
    if device.type == "cuda":
        row["peak_gb"] = (torch.cuda.max_memory_allocated(device) - before) / 1e9
    return step, row


def first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


def is_compiled(step: TrainingStep) -> bool:
    """Whether torch.compile was put on a part of the method, by the config or because a long training is worth it."""
    return any(part._compiled_call_impl is not None for part in step.method.modules())


def mode(step: TrainingStep) -> str:
    """graph, eager, or why the step could not be recorded as a graph."""
    return "eager" if step.graph is None else step.graph.why_not or "graph"


def _shares(step: TrainingStep, row: dict[str, Any], repeats: int) -> dict[str, Any]:
    try:
        found = parts(step, repeats=repeats)
    except Exception as error:  # the whole step is measured; its parts are a help to understand it
        return {"parts_error": first_line(error)}
    whole = found.pop("step", row["ms"])
    return {"parts_ms": found, "shares": {name: ms / whole for name, ms in found.items()}}


def report(
    rows: Sequence[Case], *, device: torch.device, out: str | None, append: bool = False, **settings: Any
) -> tuple[Path, list[str]]:
    """What `duel bench step` does: progress, a table, and the figures as JSON; returns the file and what failed.

    append: keep the rows that the file has, but for those of the same name.
    """
    from rich.console import Console
    from rich.progress import Progress

    How(device=device, **settings)  # a mistake is told before anything is written
    call = {"rows": [case.name for case in rows], "append": append, **settings}
    results = Results("step", device, out, call, append=append, **settings)
    console = Console()
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("steps", total=len(rows))
        names = set()

        def each(row: dict[str, Any]) -> None:
            results.add(row)
            names.add(row["name"])
            progress.update(task, completed=len(names))

        done = benchmark(
            rows, device=device, each=each, begins=lambda name: progress.update(task, description=name), **settings
        )
    console.print(table(results.rows))
    return results.path, [f"{row['name']}: {row['error']}" for row in done if "error" in row]


def table(rows: Sequence[dict[str, Any]]) -> Any:
    """Milliseconds, images and memory per row, the ratio to its plain row, and the share of each part in per cent."""
    shown = tables.table(
        "Training steps",
        ("",),
        COLUMNS,
        caption="ratio: to the plain row, in turns; then shares of the step in % (on a GPU each part measured by "
        "itself): sampling and augmentation, encoder with optimizer and momentum copy, loss, replacement, refresh",
    )
    for row in rows:
        shown.add_row(row["name"], *(["failed"] if "error" in row else cells(row)))
    return shown


def cells(row: dict[str, Any]) -> list[str]:
    """A row's figures as text, in the order of the table's columns; a dash where there is none."""
    shares = row.get("shares", {})
    return [
        f"{row['ms']:.2f}",
        f"{row['images_per_s']:,.0f}",
        f"{row['peak_gb']:.2f}" if "peak_gb" in row else "–",
        f"{row['ratio']:.3f}" if "ratio" in row else "–",
        *(_percent(sum(shares.get(name, 0.0) for name in names)) for names in PARTS.values()),
    ]


def _percent(share: float) -> str:
    return f"{100 * share:.1f}" if share else "–"
