"""Carries out a plan: what is finished is not repeated, what fails is recorded, what is cut is continued next time."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from .. import runs
from ..config import TrainConfig
from ..errors import UserError, check_writable
from ..inputs import keep_sources, load_split
from . import store
from .command import WORK
from .estimate import plan_lines
from .execute import Job, Outcome, execute, prepare_worker
from .plan import Planned, Variation, runs_of, set_aside
from .sharing import SharedClock

#: Seconds after the time is up at which a process that has not answered is killed.
GRACE = 120.0
SHOWN = ("probe", "top1_test_to_train", "top1_test_to_test", "knn")


@dataclass(frozen=True)
class Done:
    """What one call did, and what is left."""

    finished: int
    """Runs of the plan whose result is there now, earlier calls included; that training diverged is a result too."""
    total: int
    failed: int
    interrupted: bool

    @property
    def complete(self) -> bool:
        return self.finished == self.total


def reproduce(
    what: str | Sequence[str],
    *,
    scale: str = "short",
    seeds: Sequence[int] | None = None,
    rows: Sequence[str] = (),
    biases: Sequence[float] = (),
    steps: int | None = None,
    lr: float | None = None,
    minutes: float | None = None,
    jobs: int = 1,
    root: str = "data",
    download: bool = False,
    device: str = "auto",
    out: str = "results",
    work: str = WORK,
    finished_in: Sequence[str] = ("results",),
    commit: str | None = None,
    keep: bool = False,
    machine: Mapping[str, Any] | None = None,
    dry_run: bool = False,
) -> Done:
    """Run what is missing of one grid or several ("table2", ..., "all"; `duel.reproduce.grids.GRIDS`) at a scale.

    seeds, rows, biases: only these. steps, lr: another length or learning rate than the scale's. minutes: stop after so
    long, saving the runs under way; of several processes those that do not answer are killed some time later. jobs:
    processes that share the device. out: results go to out/runs; finished runs are looked for there and in
    `finished_in`. work: where runs live until they are finished (`keep`: and after). commit: where there is no git to
    ask. machine: further settings of every run that do not decide its result (graph, compile, ...).

    Prints the plan first. Where stdout is not a terminal, it has one JSON object for each run that ended.
    """
    if jobs < 1 or (minutes is not None and not minutes > 0):
        raise UserError(f"jobs must be >= 1 and minutes > 0, got {jobs} and {minutes}")
    began = time.monotonic()
    if commit:
        os.environ[runs.COMMIT_VARIABLE] = commit
    free = {"root": os.path.expanduser(root), "download": download, "device": device, **(machine or {})}
    decisive = set(free) & set(TrainConfig().identity())
    if decisive:
        raise UserError(f"machine may only have settings that do not decide the result, got {', '.join(decisive)}")
    plan = runs_of(what, scale, seeds=seeds, rows=rows, biases=biases, variation=Variation(steps, lr), free=free)
    folders = list(dict.fromkeys([*(Path(folder) for folder in finished_in), Path(out)]))
    ended = store.load_all(folders)
    todo = [planned for planned in plan if planned.hash not in ended]
    console = Console(stderr=not dry_run, highlight=False, soft_wrap=True)
    benchmarked: list[store.Record] = []
    try:
        benchmarked = store.steps(folders)
    except UserError as error:  # no more than an estimate needs them
        console.print(f"warning: {error}", markup=False)
    for line in plan_lines(plan, ended, Path(work), jobs=jobs, steps=benchmarked):
        console.print(line, markup=False)
    if note := set_aside(what, scale, seeds or ()):
        console.print(note, markup=False)
    if dry_run:
        return Done(len(plan) - len(todo), len(plan), 0, False)
    until = None if minutes is None else began + 60 * minutes
    quiet = jobs > 1 or not console.is_terminal
    job = Job(Path(out), Path(work), until, jobs, keep, quiet, at_once=min(jobs, len(todo)))
    ends: Counter[str] = Counter()
    with keep_sources():
        _find_data(todo)
        for folder, option in ((job.out, "--out"), (job.work, "--work")) if todo and not _time_is_up(job) else ():
            check_writable(folder, f"give another with {option}")
        for outcome in _one_by_one(todo, job) if jobs == 1 else _side_by_side(todo, job):
            ends[outcome.status] += 1
            _say(outcome, console)
            if outcome.status == "interrupted":
                break
    left = len(todo) - ends["finished"] - ends["diverged"]
    console.print(_closing(len(plan) - left, len(plan), ends))
    return Done(len(plan) - left, len(plan), ends["failed"], ends["interrupted"] > 0)


def _find_data(todo: Sequence[Planned]) -> None:
    """Every data set once, before anything is run: one that is missing is said once, or downloaded once."""
    for planned in todo:
        for split in ("train", "test"):
            load_split(planned.config, split)


def _one_by_one(todo: Sequence[Planned], job: Job) -> Iterator[Outcome]:
    clock = _clock_of(job)
    for planned in todo:
        if _time_is_up(job):
            yield Outcome(planned, "not started")
            continue
        with clock.at_work():
            outcome = execute(planned, job, clock)
        yield outcome
        if outcome.device_lost:
            break


def _side_by_side(todo: Sequence[Planned], job: Job) -> Iterator[Outcome]:
    """As many processes as `jobs`, each with its data loaded once. One that dies or loses its GPU is replaced."""
    waiting = list(todo)
    while waiting and not _time_is_up(job):
        yield from _in_processes(waiting, job)
    yield from (Outcome(planned, "not started") for planned in waiting)


def _in_processes(waiting: list[Planned], job: Job) -> Iterator[Outcome]:
    """Takes runs from `waiting` until there are none, or the time is up, or some process is of no more use."""
    others = set(multiprocessing.active_children())
    context = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
    given = (job.jobs, _clock_of(job))
    pool = ProcessPoolExecutor(job.jobs, mp_context=context, initializer=_start_worker, initargs=given)
    under_way: dict[Future[Outcome], Planned] = {}
    spoilt = hung = False
    try:
        while True:
            while waiting and len(under_way) < job.jobs and not spoilt and not _time_is_up(job):
                planned = waiting.pop(0)
                under_way[pool.submit(_in_worker, planned, job)] = planned
            if not under_way:
                return
            patience = None if job.until is None else max(0.0, job.until + GRACE - time.monotonic())
            ended, _ = wait(under_way, patience, return_when=FIRST_COMPLETED)
            if not ended:
                hung = True
                for process in set(multiprocessing.active_children()) - others:
                    process.kill()
                yield from (_hung(planned, job) for planned in under_way.values())
                return
            broken = any(isinstance(future.exception(), BrokenProcessPool) for future in ended)
            for future in list(under_way) if broken else ended:  # one dead process takes all with it
                outcome = _ended(under_way.pop(future), future, job)
                spoilt = spoilt or broken or outcome.device_lost  # the rest goes on in new processes
                yield outcome
    finally:
        pool.shutdown(wait=not hung)


def _clock_of(job: Job) -> SharedClock:
    """One for all calls that work in the same folder: they are taken to share the device."""
    return SharedClock(job.work / ".clock")


def _time_is_up(job: Job) -> bool:
    return job.until is not None and time.monotonic() >= job.until


def _ended(planned: Planned, future: Future[Outcome], job: Job) -> Outcome:
    error = future.exception()
    if error is None:
        return future.result()
    store.write_failure(job.out, planned.name, planned.config, error)
    return Outcome(planned, "failed", f"its process died, perhaps for want of memory: use fewer jobs ({error})")


def _hung(planned: Planned, job: Job) -> Outcome:
    message = f"did not stop in time: its process was killed {GRACE:g} s after the time was up"
    store.write_failure(job.out, planned.name, planned.config, TimeoutError(message))
    return Outcome(planned, "failed", message)


_clock: SharedClock
_busy = threading.Lock()
_for_life = ExitStack()


def _start_worker(jobs: int, clock: SharedClock) -> None:
    global _clock
    _clock = clock
    _for_life.enter_context(keep_sources())
    prepare_worker(jobs)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """A call that is killed cannot tell its processes: they save what they are at, and end."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    if not _busy.acquire(blocking=False):
        os.kill(os.getpid(), signal.SIGTERM)  # as a polite request, while training
        _busy.acquire(timeout=GRACE)
    os._exit(1)  # who waits for work, from nobody, cannot be told otherwise


def _in_worker(planned: Planned, job: Job) -> Outcome:
    with _busy, _clock.at_work():
        return execute(planned, job, _clock)


def _say(outcome: Outcome, console: Console) -> None:
    planned = outcome.planned
    facts: dict[str, Any] = {"status": outcome.status, "run": planned.name}
    if outcome.values is not None:
        evaluation, budget = outcome.values["evaluation"], outcome.values["budget"]
        facts |= {name: evaluation.get(name) for name in SHOWN}
        facts |= {"seconds": budget["seconds"], "peak_gpu_memory_mb": budget["peak_gpu_memory_mb"]}
    if outcome.message:
        facts["message"] = outcome.message
    if not sys.stdout.isatty():
        print(json.dumps(facts), flush=True)
    elif outcome.values is not None:
        console.print(
            f"{planned.name}: linear probe {100 * facts['probe']:.2f} %, "
            f"Top-1 test to train {100 * facts['top1_test_to_train']:.2f} %, {facts['seconds']:.0f} s"
        )
    elif outcome.status != "not started":
        console.print(f"{planned.name}: {outcome.status}. {outcome.message}", markup=False)


def _closing(finished: int, total: int, ends: Counter[str]) -> str:
    parts = [f"{finished} of {total} runs are finished"]
    if ends["diverged"]:
        parts.append(f"the training of {ends['diverged']} of them diverged")
    if ends["failed"]:
        parts.append(f"{ends['failed']} failed and will be tried again by the next call")
    if ends["elsewhere"]:
        parts.append(f"another process is at {ends['elsewhere']}: the same command looks at them again")
    if ends["cut"] or ends["not started"]:
        parts.append("the time is up: the same command goes on from here")
    elif ends["interrupted"]:
        parts.append("interrupted: the same command goes on from here")
    return "; ".join(parts)
