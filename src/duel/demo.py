"""`duel demo`: what one over-frequent digit does to learning, and what a memory that forgets duplicates can do."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from . import recipes, runs
from .config import TrainConfig
from .errors import UserError
from .inputs import Inputs, load_split
from .trained import evaluate, load_trained
from .training import train

RESULT = "demo.json"


@dataclass(frozen=True)
class Row:
    """One line of the table; shares and rates in 0..1."""

    name: str
    run_dir: str
    stream: float
    """Share of the frequent digit in the stream."""
    memory: float
    """Share of the frequent digit in the memory at the end."""
    top1: float
    """Test images whose nearest other test image shows the same digit."""
    probe: float
    few_shot: float
    """Nearest centroid of five labelled images per digit."""


def configs(*, out: Path, steps: int, bias: float, seed: int) -> dict[str, TrainConfig]:
    """Three runs that differ in the stream's bias and in who leaves the memory, and in nothing else."""
    base = dataclasses.replace(recipes.demo(source="memory"), steps=steps, seed=seed)
    kinds = {
        "balanced": ("balanced stream", 1.0, "fifo"),
        "fifo": (f"×{bias:g}, FIFO memory", bias, "fifo"),
        "duel": (f"×{bias:g}, DUEL memory", bias, "duel"),
    }
    return {
        name: dataclasses.replace(base, bias=how_much, policy=policy, out=str(out / folder))
        for folder, (name, how_much, policy) in kinds.items()
    }


def demo(
    *, out: str = "runs/demo", steps: int = 200, bias: float = 27.0, seed: int = 0, console: Console | None = None
) -> list[Row]:
    """Train and measure the three runs, print the table, and write it to demo.json in `out`."""
    console = console or Console()
    folder = Path(out)
    _check_folder(folder)
    console.print(
        f"Handwritten digits, 8×8 pixels, no labels; zeros {bias:g} times as frequent as other digits.\n"
        "A network learns from what a memory of 256 images holds while the stream passes by.\n"
        "Which images should the memory forget: the oldest, or the most duplicated?",
        highlight=False,
        soft_wrap=True,
    )
    rows = []
    with one_thread():
        for name, config in configs(out=folder, steps=steps, bias=bias, seed=seed).items():
            result = train(config, overwrite=True, label=f"{name:<18}", console=console)
            if not result.finished:
                raise KeyboardInterrupt
            rows.append(measure(name, config))
    runs.write_json(folder / RESULT, {"rows": [dataclasses.asdict(row) for row in rows], **_how(steps, bias, seed)})
    console.print(table(rows, frequent="0"))
    console.print(
        f"run directory: {folder} (one folder for each row, the table in {RESULT})\n"
        f"look closer:   duel evaluate {rows[-1].run_dir} --per-class",
        highlight=False,
        soft_wrap=True,
    )
    return rows


@contextmanager
def one_thread() -> Iterator[None]:
    """On images this small more threads gain little, and beside a busy core they lose a factor of several."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def measure(name: str, config: TrainConfig) -> Row:
    """The run's line of the table."""
    found = evaluate(config.run_dir, device="cpu", cache=False)
    labels = load_split(config, "train").labels
    ids = load_trained(config.run_dir).memory_ids
    if labels is None or ids is None:
        raise UserError(f"{config.run_dir} has no labels or no memory: the demo shows what a memory of digits holds")
    shown = Inputs.load(config, torch.device("cpu"), test=False).stream(config, torch.device("cpu"))
    drawn = torch.cat([shown.next()[1] for _ in range(64)])
    return Row(
        name=name,
        run_dir=config.run_dir,
        stream=_share(labels[drawn], config.bias_class),
        memory=_share(labels[ids], config.bias_class),
        top1=found["top1_test_to_test"],
        probe=found["probe"],
        few_shot=found["few_shot"],
    )


def table(rows: list[Row], *, frequent: str) -> Table:
    """The rows as a rich table, in per cent."""
    made = Table(title="What the stream brings, what the memory holds, what was learned (%)", title_justify="left")
    made.add_column("")
    for heading in (f"{frequent}s in the stream", f"{frequent}s in memory", "Top-1", "probe", "5-shot"):
        made.add_column(heading, justify="right")
    for row in rows:
        shares = (f"{100 * v:.0f}" for v in (row.stream, row.memory))
        made.add_row(row.name, *shares, *(f"{100 * v:.1f}" for v in (row.top1, row.probe, row.few_shot)))
    return made


def _share(labels: torch.Tensor, kind: int) -> float:
    return float((labels == kind).double().mean())


def _how(steps: int, bias: float, seed: int) -> dict[str, Any]:
    return {
        "steps": steps,
        "bias": bias,
        "bias_mode": "draw",
        "seed": seed,
        "origin": runs.describe(torch.device("cpu")),
    }


def _check_folder(folder: Path) -> None:
    """The demo may be repeated over itself, and over nothing else."""
    if not folder.exists():
        return
    ours = folder.is_dir() and (not any(folder.iterdir()) or _is_demo(folder))
    if not ours:
        raise UserError(f"out {folder} holds something else than an earlier demo; give another with --out")


def _is_demo(folder: Path) -> bool:
    try:
        return "rows" in json.loads((folder / RESULT).read_text())
    except (OSError, ValueError):
        return {p.name for p in folder.iterdir()} <= {"balanced", "fifo", "duel"}  # one that was interrupted
