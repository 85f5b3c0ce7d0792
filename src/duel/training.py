"""A run from its config to its result: stream → step → memory → log → checkpoint, which `duel.loop` carries out."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console

from . import runs
from .checkpoint import CheckpointError
from .config import TrainConfig
from .config_checks import check_live
from .errors import UserError
from .inputs import Inputs, LiveInputs
from .loop import FORMAT, Loop, NonFiniteLoss, RunResult
from .machine import PeakMemory, build_fabric
from .names import LIVE
from .runlog import check_loggers
from .step import TrainingStep

__all__ = ["NonFiniteLoss", "RunResult", "train"]


def train(
    config: TrainConfig,
    *,
    frames: Iterable[Any] | None = None,
    resume: bool = False,
    overwrite: bool = False,
    label: str | None = None,
    console: Console | None = None,
    until: float | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> RunResult:
    """Train as `config` says, in its run directory; `duel.runs` says what is written there.

    frames: where `config.data` is "-", the images to train on as they come, without end or until there are no more
    (`duel.data.LiveStream` says what is taken).

    resume: continue from the newest good checkpoint; on the CPU the result is, bit for bit, the same as without the
    interruption, but for frames, which are those that come then. A finished run is left as it is. overwrite: delete the
    run that the directory holds. label: what the progress bar says. until: stop and save at that time of
    `time.monotonic`, to be resumed. clock: one that counts only this run's share of the device's time.
    """
    console = console or Console(stderr=True)
    if (frames is None) == (config.data == LIVE):
        raise UserError(f"frames go with data {LIVE!r}, and only with that; got data {config.data!r} {_given(frames)}")
    if frames is not None:
        check_live(config)
    out = runs.check_out(config, resume=resume, overwrite=overwrite)
    where = config.data
    if resume:  # a path is what the run was started with, and may lead elsewhere now
        saved = runs.load_config(out)
        where = runs.locate(out, saved) if where == saved.data else where
        config = dataclasses.replace(config, data=saved.data)
    data_at = {} if (place := runs.place(where)) is None else {runs.DATA_AT: place}
    with ExitStack() as stack:
        if resume:
            stack.enter_context(runs.held(out))
        fabric = build_fabric(config)
        peak = PeakMemory(fabric.device)
        if frames is None:
            at = dataclasses.replace(config, data=where)
            inputs = Inputs.load(at, fabric.device, test=config.knn_every > 0, known_as=config.data)
        else:
            waiting = "waiting for the first images of the stream"
            if not console.is_terminal:
                console.print(waiting)
            with console.status(waiting):
                inputs = LiveInputs.open(config, frames, fabric.device, out if resume else None)
        step = TrainingStep(config, inputs, fabric=fabric)
        meta = runs.read_meta(out) if resume else {}
        moved = meta.get(runs.DATA_AT) != place
        spent = _restore(step, inputs, out, console, moved=moved) if resume else (0.0, 0.0, 0.0)
        if meta.get("finished") and step.done == step.steps:
            if moved:
                runs.write_json(out / runs.META, {**meta, **data_at})
            console.print(f"{out} is finished ({step.done} steps): nothing to be done", soft_wrap=True, markup=False)
            return RunResult(out, step.done, True, meta["metrics"], spent[0], "", inputs.labelled, spent[1])
        check_loggers(tensorboard=config.tensorboard, wandb=config.wandb)
        if not resume:
            stack.enter_context(runs.held(out))
        runs.prepare(out, config, overwrite=overwrite)
        inputs.save(out)
        loop = Loop(config, step, inputs, out, spent, clock)
        attempt = {**runs.describe(fabric.device), "from_step": step.done, "compiled": step.compiled}
        attempts = [*meta.get("attempts", []), attempt]
        runs.write_json(out / runs.META, {**meta, **data_at, "attempts": attempts, "finished": None})
        result = loop.run(label or config.method, console, until)
        budget = {
            "steps": result.steps,
            "images_encoded": step.images_encoded,
            "seconds": round(result.seconds, 3),
            "filling_seconds": round(loop.filling_seconds, 3),
            "peak_gpu_memory_mb": _peak(peak.mib(), meta),
            "compiled": _same(each.get("compiled") for each in attempts),
        }
        ended = datetime.now(UTC).isoformat(timespec="seconds")
        runs.write_json(
            out / runs.META,
            {
                "attempts": attempts,
                "finished": result.finished,
                "ended": ended,
                "budget": budget,
                "metrics": result.metrics,
                **data_at,
            },
        )
        return result


def _given(frames: object) -> str:
    return "without frames" if frames is None else "with frames"


def _same(values: Iterable[bool | None]) -> bool | None:
    """What they all are; None where they differ."""
    found = set(values)
    return found.pop() if len(found) == 1 else None


def _peak(now: int | None, before: dict[str, Any]) -> int | None:
    """The most of this attempt and of those before it; None on a CPU."""
    earlier = before.get("budget", {}).get("peak_gpu_memory_mb")
    return now if now is None or earlier is None else max(now, earlier)


def _look_alike(state: dict[str, Any], inputs: Inputs) -> bool:
    """Whether size, mean and standard deviation are those of a checkpoint: of arrays nothing else tells."""
    then = [*state["mean"], *state["std"]]
    now = [value for part in inputs.stats for value in part]
    alike = all(math.isclose(a, b, abs_tol=1e-3) for a, b in zip(then, now, strict=True))
    return alike and state["image_shape"] == list(inputs.train.shape)


def _restore(
    step: TrainingStep, inputs: Inputs, out: Path, console: Console, *, moved: bool
) -> tuple[float, float, float]:
    """Put the newest good checkpoint into `step`; returns the seconds spent before it, also by the clock given then,
    and those of filling the memory. moved: the data are read from another place than then."""
    # images that are kept on the host may not fit on the device
    where = "cpu" if step.config.memory_images == "host" else step.device
    path, state, problems = runs.load_latest(out, map_location=where)
    for problem in problems:
        console.print(f"warning: {problem}; falling back to the one before it", soft_wrap=True, markup=False)
    if path is None:
        console.print(f"{out} has no checkpoint yet; starting from the beginning", soft_wrap=True, markup=False)
        return 0.0, 0.0, 0.0
    if state.get("format") != FORMAT:
        raise CheckpointError(
            f"{path} has format {state.get('format')!r}, this version reads {FORMAT}; start again with --overwrite"
        )
    same = state.get("items", inputs.fingerprint) == inputs.fingerprint
    if not same or (moved and not _look_alike(state, inputs)):
        raise UserError(
            f"{inputs.train.name!r} has other images than when {path} was written ({len(inputs.train):,} now), or "
            "an older version kept others of them for testing, and the stream and the memory know them by their "
            "number; put the files back, or start again with --overwrite"
        )
    with runs.same_network(out):
        step.load_state_dict(state["training"])
    if step.done < step.steps:
        console.print(f"resuming {out} at step {step.done} of {step.steps}", soft_wrap=True, markup=False)
    device_seconds, filling_seconds = state.get("device_seconds", state["seconds"]), state.get("filling_seconds", 0.0)
    return float(state["seconds"]), float(device_seconds), float(filling_seconds)
