"""What a run says while it runs: metrics.csv, TensorBoard, Weights & Biases, and a bar or lines on the terminal."""

from __future__ import annotations

import csv
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.text import Text
from torch import Tensor

from .checkpoint import atomic
from .errors import UserError
from .runs import METRICS, TENSORBOARD

_SECONDS_BETWEEN_LINES = 10.0


class RunLog:
    """Use as a context manager. `columns` are the metrics that may occur, in the order of the CSV file.

    `start` is the step a resumed run continues from: later lines of an interrupted attempt are dropped.
    A full disk costs log lines, not the run: the first failed write is reported and logging to files stops.
    """

    def __init__(
        self,
        out: Path,
        *,
        columns: Sequence[str],
        steps: int,
        start: int = 0,
        label: str = "training",
        tensorboard: bool = True,
        wandb: str | None = None,
        config: Mapping[str, Any] | None = None,
        console: Console | None = None,
    ) -> None:
        self.columns = ["step", *columns]
        self.steps, self.start, self.label = steps, start, label
        self.console = console or Console(stderr=True)
        self._path = out / METRICS
        self._files_work = True
        self._last_line = 0.0
        self._last_doing = time.monotonic()
        self._writer = _tensorboard(out / TENSORBOARD, start) if tensorboard else None
        self._wandb = _wandb(wandb, out, config or {}) if wandb else None
        self._hook = threading.excepthook
        self._bar: _Bar | None = None
        self._task = TaskID(0)
        if start == 0 or not self._path.exists():
            self._rewrite([])
        else:
            self._rewrite([row for row in read_metrics(out) if row["step"] <= start])

    def __enter__(self) -> Self:
        if self._writer is not None:
            self._hook, threading.excepthook = threading.excepthook, self._in_thread
        if self.console.is_terminal:
            self._bar = _Bar(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[metrics]}"),
                TimeRemainingColumn(),
                console=self.console,
            )
            self._bar.start()
            self._task = self._bar.add_task(self.label, total=self.steps, completed=self.start, metrics="")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
        if self._writer is not None:
            try:
                self._writer.close()
            except OSError as failed:
                self._cannot_write(self._path.with_name(TENSORBOARD), failed, "its last lines may be missing")
            threading.excepthook = self._hook
        if self._wandb is not None:
            try:
                self._wandb.finish(exit_code=0 if kind is None else 1)
            except Exception as failed:
                self.say(f"warning: Weights & Biases may lack the last lines ({failed})")

    def advance(self, step: int) -> None:
        """Move the bar; called after every step, and cheap."""
        if self._bar is not None:
            self._bar.update(self._task, completed=step)

    def log(self, step: int, metrics: Mapping[str, float], histograms: Mapping[str, Tensor] | None = None) -> None:
        """Write one line of metrics; `step` counts finished steps. histograms: for TensorBoard alone."""
        unknown = set(metrics) - set(self.columns)
        if unknown:
            raise KeyError(f"metrics {sorted(unknown)} are not among the columns {self.columns}")
        shown = "  ".join(f"{short} {show(metrics[name])}" for name, short, show in _SHOWN if name in metrics)
        memory = _of_the_memory(metrics)
        if self._bar is not None:
            self._bar.below = memory
            self._bar.update(self._task, completed=step, metrics=shown)
        elif time.monotonic() - self._last_line > _SECONDS_BETWEEN_LINES or step >= self.steps:
            self.say(f"{self.label}: step {step}/{self.steps}  {shown}" + (f"\n  {memory}" if memory else ""))
            self._last_line = time.monotonic()
        self._to_files(step, metrics, histograms or {})
        if self._wandb is not None:
            self._wandb.log(dict(metrics), step=step)

    def doing(self, what: str) -> None:
        """What goes on before the first step, beside the bar; called often, at last with nothing."""
        if self._bar is not None:
            self._bar.update(self._task, metrics=what)
        elif what and time.monotonic() - self._last_doing > _SECONDS_BETWEEN_LINES:
            self.say(f"{self.label}: {what}")
            self._last_doing = time.monotonic()

    def say(self, message: str) -> None:
        """A message for the person watching, above the bar."""
        self.console.print(message, highlight=False, soft_wrap=True, markup=False)

    def _to_files(self, step: int, metrics: Mapping[str, float], histograms: Mapping[str, Tensor]) -> None:
        if not self._files_work:
            return
        try:
            with self._path.open("a", newline="") as file:
                csv.DictWriter(file, self.columns).writerow({"step": step, **metrics})
            if self._writer is not None:
                for name, value in metrics.items():
                    self._writer.add_scalar(name, value, step)
                for name, values in histograms.items():
                    self._writer.add_histogram(name, values, step)
        except OSError as error:
            self._cannot_write(self._path, error, "training goes on without logs")

    def _cannot_write(self, path: Path, error: OSError, so: str) -> None:
        """Said once in a run."""
        if self._files_work:
            self.say(f"warning: cannot write {path} ({error.strerror or error}); {so}")
        self._files_work = False

    def _in_thread(self, failed: threading.ExceptHookArgs) -> None:
        """What TensorBoard's thread fails at is raised again where the next line is written, and need not be shown."""
        if not type(failed.thread).__module__.startswith("tensorboard."):
            self._hook(failed)

    def _rewrite(self, rows: Sequence[Mapping[str, float]]) -> None:
        try:
            with atomic(self._path) as partial, partial.open("w", newline="") as file:
                writer = csv.DictWriter(file, self.columns, extrasaction="ignore", restval="")
                writer.writeheader()
                writer.writerows({**row, "step": int(row["step"])} for row in rows)
        except OSError as error:
            raise UserError(f"cannot write {self._path}: {error.strerror or error}") from error


def _count(value: float) -> str:
    return f"{value:.0f}" if value >= 99.5 else f"{value:.2g}"


# name, as it is shown, how
_SHOWN = (
    ("loss", "loss", "{:.4f}".format),
    ("lr", "lr", "{:.2g}".format),
    ("steps_per_s", "steps/s", _count),
    ("knn", "knn", "{:.1%}".format),
)
_SHARES = (
    ("memory_entropy", "entropy", ".2f"),
    ("memory_largest", "largest", ".0%"),
    ("memory_collisions", "collisions", ".0%"),
    ("memory_distinct", "distinct", ".0%"),
    ("memory_turnover", "turnover", ".0%"),
)


class _Bar(Progress):
    """With a line below it."""

    below = ""

    def get_renderables(self) -> Iterable[RenderableType]:
        yield from super().get_renderables()
        if self.below:
            yield Text(self.below, no_wrap=True, overflow="ellipsis")


def _of_the_memory(metrics: Mapping[str, float]) -> str:
    """What is known of the memory, to fit into 120 columns: median age (of the oldest), mean N (largest), mean cosine
    within classes/between them."""
    parts = [f"{short} {metrics[name]:{form}}" for name, short, form in _SHARES if name in metrics]
    for name, short in (("memory_age", "age"), ("memory_duplicates", "N")):
        if name in metrics:
            parts.append(f"{short} {_count(metrics[name])} ({_count(metrics[f'{name}_max'])})")
    if "memory_intra" in metrics:
        parts.append(f"cosine {metrics['memory_intra']:.2f}/{metrics['memory_inter']:.2f}")
    return f"memory: {'  '.join(parts)}" if parts else ""


def read_metrics(run: Path) -> list[dict[str, float]]:
    """The lines of metrics.csv as numbers; what a line does not have is left out of it."""
    with (run / METRICS).open(newline="") as file:
        return [{k: float(v) for k, v in row.items() if k and v} for row in csv.DictReader(file)]


def check_loggers(*, tensorboard: bool, wandb: str | None) -> None:
    """Raise if something that is asked for is not installed; before a run begins, or an earlier one is deleted."""
    if tensorboard:
        _summary_writer()
    if wandb:
        _wandb_module(wandb)


def _summary_writer() -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise UserError(
            "tensorboard is not installed; install duel-ssl[train], or train with --no-tensorboard"
        ) from error
    return SummaryWriter


def _tensorboard(folder: Path, start: int) -> Any:
    # what an interrupted run wrote after its last checkpoint is written again
    return _summary_writer()(folder, purge_step=start + 1 if start else None)


def _wandb_module(project: str) -> Any:
    try:
        import wandb
    except ImportError as error:
        raise UserError(f"wandb {project!r} was asked for, but wandb is not installed; pip install wandb") from error
    return wandb


def _wandb(project: str, out: Path, config: Mapping[str, Any]) -> Any:
    return _wandb_module(project).init(
        project=project, name=out.name, dir=str(out), config=dict(config), resume="allow", id=out.name
    )
