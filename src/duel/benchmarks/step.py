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

from duel import demo, recipes
from duel.benchmarks import images, tables
from duel.benchmarks.parts import parts
from duel.benchmarks.results import Results
from duel.benchmarks.timing import windows
from duel.config import MethodName, TrainConfig
from duel.errors import UserError, suggest
from duel.graph import WARM_UP
from duel.machine import build_fabric
from duel.step import TrainingStep

METHODS = ("moco", "simclr", "simsiam", "byol")
BACKBONES = ("resnet18", "resnet50")
#: Re-encoded slots of the rows with partial refresh.
REFRESH = 64
#: A rate at which embeddings spread as they do in training; at the recipe's, Adam may first crowd them together.
LR = 1e-3
#: Longer than any benchmark: the learning rate's table must cover every step.
STEPS = 100_000
#: Columns of the table and the parts they add up.
PARTS = {
    "data": ("sampling", "augmentation"),
    "enc.": ("encoder",),
    "loss": ("loss",),
    "repl.": ("replacement",),
    "refr.": ("refresh",),
}
COLUMNS = ("ms", "img/s", "GB", "ratio", *PARTS)


@dataclass(frozen=True)
class Case:
    """One row: a config, and the name of the row it is held against (None: it is such a row)."""

    name: str
    config: TrainConfig
    plain: str | None = None


def cases(
    *,
    methods: Sequence[str] = METHODS,
    backbones: Sequence[str] = BACKBONES,
    memory: Sequence[int] = (2048, 65536),
    residents: int = 512,
    recipe: str = "paper",
    **settings: Any,
) -> list[Case]:
    """Each method plain and, where it has a DUEL form, as that. MoCo is asymmetric, as in the paper.

    memory: slots of MoCo's; residents: slots of D-SimCLR's. settings: any field of TrainConfig, for all rows.
    """
    found: list[Case] = []
    for unknown in set(methods) - set(METHODS):
        raise UserError(suggest("method", unknown, METHODS))

    def case(name: str, method: MethodName, backbone: str, plain: str | None, **own: Any) -> str:
        config = recipes.recipe(recipe, method=method)
        # the library's own score rather than a recipe's: what a user gets without asking
        config = dataclasses.replace(config, backbone=backbone, score=TrainConfig.score, lr=LR, steps=STEPS)
        name = f"{name}, {backbone}"
        found.append(Case(name, dataclasses.replace(config, **{**own, **settings}), plain))
        return name

    # with what the newcomers' training gave instead of another pass over them
    reuses: list[dict[str, Any]] = [{}, {"reuse_newcomers": True}]

    for backbone in backbones:
        for slots in memory if "moco" in methods else ():
            own: dict[str, Any] = {"memory_size": slots, "symmetric": False, "refresh": 0}
            plain = case(f"MoCo {slots:,}", "moco", backbone, None, **own)
            case(f"D-MoCo {slots:,}", "d-moco", backbone, plain, **own)
            if slots == memory[0]:
                own["refresh"] = min(REFRESH, slots)
                case(f"D-MoCo {slots:,}, refresh {own['refresh']}", "d-moco", backbone, plain, **own)
        if "simclr" in methods:
            plain = case("SimCLR", "simclr", backbone, None)
            for refresh in (0, min(REFRESH, residents)):  # 0: all residents, as in the paper
                for reuse in reuses:
                    how = [f"refresh {refresh}"] * (refresh > 0) + ["reuse"] * bool(reuse) or ["literal"]
                    own = {"memory_size": residents, "refresh": refresh, **reuse}
                    case(f"D-SimCLR {residents:,}, {', '.join(how)}", "d-simclr", backbone, plain, **own)
        for name, method in (("SimSiam", "simsiam"), ("BYOL", "byol")):
            if method in methods:
                case(name, method, backbone, None)  # type: ignore[arg-type]
    return found


def demo_cases(**settings: Any) -> list[Case]:
    """The demo's two runs on the ×27 stream: the oldest leave, or the most duplicated, with the same refresh."""
    runs = demo.configs(out=Path("runs"), steps=STEPS, bias=27.0, seed=0)
    fifo, duel = (c for c in runs.values() if c.bias > 1)
    plain = f"demo, {fifo.memory_policy}"
    return [
        Case(plain, dataclasses.replace(fifo, **settings)),
        Case(f"demo, {duel.memory_policy}", dataclasses.replace(duel, **settings), plain),
    ]


def benchmark(
    rows: Sequence[Case],
    *,
    device: torch.device,
    count: int = 12,
    length: int = 20,
    warm_up: int = 40,
    repeats: int = 20,
    image_count: int = images.COUNT,
    each: Callable[[dict[str, Any]], None] = lambda row: None,
    begins: Callable[[str], None] = lambda name: None,
) -> list[dict[str, Any]]:
    """A row of figures per case; `each` gets it as soon as it is there. Rows that are compared take turns.

    count windows of length steps, after warm_up steps; repeats: timings of each part.
    """
    done: list[dict[str, Any]] = []
    for group in _groups(rows):
        for row in _measure(group, device, count, length, warm_up, repeats, image_count, begins):
            done.append(row)
            each(row)
    return done


def _measure(
    group: Sequence[Case],
    device: torch.device,
    count: int,
    length: int,
    warm_up: int,
    repeats: int,
    image_count: int,
    begins: Callable[[str], None],
) -> Iterator[dict[str, Any]]:
    """The rows of one group. A function of its own, so that nothing of it is left when the next one's memory counts."""
    steps: list[TrainingStep | None] = []
    figures: list[dict[str, Any]] = []
    for case in group:
        begins(case.name)
        prepared, row = _prepare(case, device, warm_up, image_count)
        steps.append(prepared)
        figures.append(row)
    times = iter(windows([step for step in steps if step is not None], device, count=count, length=length))
    for step, row in zip(steps, figures, strict=True):
        if step is not None:
            row |= _speed(next(times), step.config.batch_size)
        if row["plain"] is not None and "ms" in row and "ms" in figures[0]:
            row["ratio"] = row["ms"] / figures[0]["ms"]
    for step, row in zip(steps, figures, strict=True):
        if step is not None:
            begins(f"{row['name']}: parts")
            row |= _shares(step, row, repeats)
        yield row


def _groups(rows: Sequence[Case]) -> Iterator[list[Case]]:
    """Each plain row with those that are held against it."""
    names = {case.name for case in rows}
    for case in rows:
        if case.plain is not None and case.plain not in names:
            raise UserError(f"row {case.name!r} is held against {case.plain!r}, which is not among the rows")
        if case.plain is None:
            yield [case, *(other for other in rows if other.plain == case.name)]


def _prepare(
    case: Case, device: torch.device, warm_up: int, image_count: int
) -> tuple[TrainingStep | None, dict[str, Any]]:
    """The step, warmed up and recorded, and what is known of it by then; (None, row) if it cannot be."""
    config = dataclasses.replace(case.config, device=str(device))
    default = TrainConfig().as_dict()
    settings = {k: v for k, v in config.as_dict().items() if v != default[k] and k not in ("out", "root", "device")}
    row: dict[str, Any] = {"name": case.name, "plain": case.plain, "settings": settings}
    gc.collect()  # steps refer to themselves, through hooks
    before = 0
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
    inputs, fabric = images.load(config, device, count=image_count), build_fabric(config)
    try:
        step = TrainingStep(config, inputs, fabric=fabric)
        step.fill_memory()
        # the graph is recorded before the clock runs, whatever was asked for
        for _ in range(warm_up if step.graph is None else max(warm_up, WARM_UP + 2)):
            step()
        encoded = step.images_encoded
        step()
        loss, bad = step.read_loss()
    except Exception as error:  # one row, out of memory perhaps, must not lose the others
        return None, row | {"error": f"{type(error).__name__}: {error}".splitlines()[0]}
    if bad is not None:
        return None, row | {"error": f"the loss of step {bad} is not finite, so the memory turned its items away"}
    row |= {"images_encoded": step.images_encoded - encoded, "loss": loss}
    row["compiled"] = is_compiled(step)
    row["mode"] = "eager" if step.graph is None else step.graph.why_not or "graph"
    if device.type == "cuda":
        row["peak_gb"] = (torch.cuda.max_memory_allocated(device) - before) / 1e9
    return step, row


def is_compiled(step: TrainingStep) -> bool:
    """Whether torch.compile was put on a part of the method, by the config or because a long training is worth it."""
    return any(part._compiled_call_impl is not None for part in step.method.modules())


def _speed(times: list[float], batch: int) -> dict[str, Any]:
    ms = statistics.median(times)
    return {"ms": ms, "images_per_s": batch / ms * 1e3, "ms_windows": [round(t, 4) for t in times]}


def _shares(step: TrainingStep, row: dict[str, Any], repeats: int) -> dict[str, Any]:
    try:
        found = parts(step, repeats=repeats)
    except RuntimeError as error:  # the whole step is measured; its parts are a help to understand it
        return {"parts_error": str(error).splitlines()[0]}
    return {"parts_ms": found, "shares": {name: ms / row["ms"] for name, ms in found.items()}}


def report(rows: Sequence[Case], *, device: torch.device, out: str | None, **settings: Any) -> tuple[Path, list[str]]:
    """What `duel bench step` does: progress, a table, and the figures as JSON; returns the file and what failed."""
    from rich.console import Console
    from rich.progress import Progress

    for name in ("count", "length", "repeats"):
        if settings.get(name, 1) < 1:
            raise UserError(f"{name} must be at least 1, got {settings[name]}")
    call = {"rows": [case.name for case in rows], **settings}
    results = Results("step", device, out, call, **settings)
    console = Console()
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("steps", total=len(rows))

        def each(row: dict[str, Any]) -> None:
            results.add(row)
            progress.advance(task)

        benchmark(
            rows, device=device, each=each, begins=lambda name: progress.update(task, description=name), **settings
        )
    console.print(table(results.rows))
    return results.path, [f"{row['name']}: {row['error']}" for row in results.rows if "error" in row]


def table(rows: Sequence[dict[str, Any]]) -> Any:
    """Milliseconds, images and memory per row, the ratio to its plain row, and the share of each part in per cent."""
    shown = tables.table(
        "Training steps",
        ("",),
        COLUMNS,
        caption="ratio: to the plain row above; then shares of the step in %, each part measured by itself: "
        "sampling and augmentation, encoder with optimizer and momentum copy, loss, replacement, refresh",
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
