"""One planned run: train, measure, write its JSON. Everything that can go wrong with it stays with it."""

from __future__ import annotations

import dataclasses
import gc
import os
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import Console

from .. import runs
from ..config import TrainConfig
from ..locking import alone
from ..machine import resolve_device
from ..runlog import read_metrics
from ..signals import TIME_LIMIT
from ..step import worth_compiling
from ..trained import evaluate
from ..training import NonFiniteLoss, RunResult, train
from . import store
from .plan import Planned

Status = Literal["finished", "diverged", "cut", "failed", "interrupted", "not started", "elsewhere"]
Clock = Callable[[], float]


@dataclass(frozen=True)
class Job:
    """How planned runs are carried out in this process."""

    out: Path
    """Folder of results."""
    work: Path
    """Folder of run directories; each is deleted once its result is written, unless `keep`."""
    until: float | None
    """Time of `time.monotonic` at which to stop."""
    jobs: int
    """Processes that share the device."""
    keep: bool
    quiet: bool
    """No progress bars: several processes would write over each other."""
    at_once: int = 1
    """As many of these processes as there are runs for."""


@dataclass(frozen=True)
class Outcome:
    """What became of a planned run."""

    planned: Planned
    status: Status
    message: str = ""
    values: dict[str, Any] | None = None
    """What was written, for a finished run."""
    device_lost: bool = False
    """Nothing more can be run on the GPU by this process."""


def execute(planned: Planned, job: Job, clock: Clock = time.monotonic) -> Outcome:
    """Never raises for what goes wrong in the run itself: that is recorded, and tried again by the next call, unless it
    is a result.

    clock: one that counts only this process's share of the device's time.
    """
    if job.until is not None and time.monotonic() >= job.until:
        return Outcome(planned, "not started")
    folder = job.work / planned.name
    try:
        with alone(job.work / f"{planned.name}.in-use") as mine:
            if not mine:
                return Outcome(planned, "elsewhere", "another process is at it")
            made = store.find(job.out, planned.name)  # by another process, since the plan was made
            return _execute(planned, job, folder, clock) if made is None else _made(planned, made)
    except KeyboardInterrupt:
        return Outcome(planned, "interrupted", "interrupted while measuring; the next call measures again")
    except Exception as error:
        path = store.write_failure(job.out, planned.name, planned.config, error)
        message = f"{type(error).__name__}: {error} (recorded in {path})"
        return Outcome(planned, "failed", message, device_lost=not _clean_up())
    finally:
        _clean_up()


def _made(planned: Planned, values: dict[str, Any]) -> Outcome:
    failed = values.get("failed")
    return Outcome(planned, "diverged", failed) if failed else Outcome(planned, "finished", values=values)


def _clean_up() -> bool:
    """Free what the run held; False if the GPU no longer answers, as after an illegal access."""
    gc.collect()  # the step and its recorded graph refer to each other
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()  # or runs would share one limit of recompilations
    if torch.cuda.is_initialized():
        try:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        except RuntimeError:
            return False
    return True


def _execute(planned: Planned, job: Job, folder: Path, clock: Clock) -> Outcome:
    config = _on_this_machine(planned.config, folder, job.at_once)
    console = Console(file=open(os.devnull, "w")) if job.quiet else Console(stderr=True)  # noqa: SIM115
    started = (folder / runs.CONFIG).is_file()
    try:
        result = train(config, resume=started, label=planned.name, console=console, until=job.until, clock=clock)
    except NonFiniteLoss as error:
        failed = f"diverged at step {error.step}"
        _write(planned, job, folder, failed=failed)
        return Outcome(planned, "diverged", failed)
    if not result.finished:
        by = result.stopped_by
        return Outcome(planned, "cut" if by == TIME_LIMIT else "interrupted", f"stopped after step {result.steps}")
    found = evaluate(folder, device=config.device, root=config.root, settings=planned.scale.evaluation, cache=False)
    measured = {k: v for k, v in found.items() if k not in ("run", "origin")}
    values = _write(planned, job, folder, evaluation=measured, budget=_budget(folder, result, job.jobs, found))
    return Outcome(planned, "finished", values=values)


def _on_this_machine(config: TrainConfig, folder: Path, at_once: int) -> TrainConfig:
    compiled = config.compile
    if compiled is None and at_once > 1 and config.steps is not None:
        compiled = worth_compiling(config.steps, resolve_device(config.device), at_once=at_once)
    return dataclasses.replace(config, out=str(folder), compile=compiled)


def _write(planned: Planned, job: Job, folder: Path, **came_of_it: Any) -> dict[str, Any]:
    values = document(planned, folder, **came_of_it)
    store.write(job.out, planned.name, values)
    if not job.keep:
        shutil.rmtree(folder)
    return values


def document(planned: Planned, folder: Path, **came_of_it: Any) -> dict[str, Any]:
    """The result of a run as it is stored: nothing about where on this machine it happened."""
    attempts = runs.read_meta(folder)["attempts"]
    last = attempts[-1]
    return {
        "row": planned.row.name,
        "scale": planned.scale.name,
        "hash": planned.hash,
        "seed": planned.config.seed,
        "config": planned.config.identity(),
        **came_of_it,
        "hardware": last["hardware"],
        "versions": last["versions"],
        "commit": last["commit"],
        "started": attempts[0]["started"],
        "finished": datetime.now(UTC).isoformat(timespec="seconds"),
        "metrics": store.columns(read_metrics(folder)),
    }


def _budget(folder: Path, result: RunResult, jobs: int, evaluation: dict[str, Any]) -> dict[str, Any]:
    meta = runs.read_meta(folder)
    on_gpu = "gpu" in meta["attempts"][-1]["hardware"]
    return {
        **meta["budget"],
        "jobs": jobs,
        "share": round(result.device_seconds / result.seconds, 3),
        "gpu_seconds": round(result.device_seconds, 3) if on_gpu else None,
        "evaluation_seconds": evaluation["seconds"],
    }


def prepare_worker(jobs: int) -> None:
    """Called once in each process that shares the machine with others."""
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // jobs))
    if sys.stdout is not None:
        sys.stdout.flush()
