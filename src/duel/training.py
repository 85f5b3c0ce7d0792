"""One loop: stream → step → memory → log → checkpoint. What a step is, `duel.step` says."""

from __future__ import annotations

import math
import shlex
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from . import checkpoint, contents, runs
from .checkpoint import CheckpointError
from .checks import RowsRefused
from .config import TrainConfig
from .data.live import StreamEnded
from .errors import UserError
from .inputs import ENDLESS, Inputs, LiveInputs
from .machine import PeakMemory, build_fabric
from .names import LIVE
from .runlog import RunLog, check_loggers
from .signals import END_OF_STREAM, StopRequest, StopWaiting
from .step import TrainingStep
from .upkeep import slots_for

ONLINE = ("knn", "intra_class_cosine", "inter_class_cosine")
"""What is measured on test images while training (`knn_every`)."""
#: Bytes of a memory's images that are worth a word.
LARGE_MEMORY = 2 << 30
FORMAT = 1  # of the checkpoint; raised when an older one cannot be continued


@dataclass(frozen=True)
class RunResult:
    """What `train` leaves behind."""

    run_dir: Path
    steps: int
    """Finished steps."""
    finished: bool
    """False when a signal stopped the run; `duel train --out RUN_DIR --resume` continues it."""
    metrics: dict[str, float] = field(default_factory=dict)
    """The last logged metrics."""
    seconds: float = 0.0
    """Time spent training, over all attempts."""
    stopped_by: str = ""
    """What stopped the run, if it is not finished: a signal, `signals.TIME_LIMIT` or `signals.END_OF_STREAM`."""
    labelled: bool = True
    """Whether the data have labels, so that the run can be evaluated on them."""
    device_seconds: float = 0.0
    """As `seconds`, by the clock that `train` was given."""


class NonFiniteLoss(UserError):
    """Training went astray; the message says where, and what to try."""

    step = 0
    """The first step, counted from 1, that was not finite."""


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
    out = runs.check_out(config, resume=resume, overwrite=overwrite)
    with ExitStack() as stack:
        if resume:
            stack.enter_context(runs.held(out))
        fabric = build_fabric(config)
        peak = PeakMemory(fabric.device)
        if frames is None:
            inputs = Inputs.load(config, fabric.device, test=config.knn_every > 0)
        else:
            waiting = "waiting for the first images of the stream"
            if not console.is_terminal:
                console.print(waiting)
            with console.status(waiting):
                inputs = LiveInputs.open(config, frames, fabric.device, out if resume else None)
        step = TrainingStep(config, inputs, fabric=fabric)
        spent = _restore(step, inputs, out, console) if resume else (0.0, 0.0, 0.0)
        meta = runs.read_meta(out) if resume else {}
        if meta.get("finished") and step.done == step.steps:
            console.print(f"{out} is finished ({step.done} steps): nothing to be done", soft_wrap=True, markup=False)
            return RunResult(out, step.done, True, meta["metrics"], spent[0], "", inputs.labelled, spent[1])
        check_loggers(tensorboard=config.tensorboard, wandb=config.wandb)
        if not resume:
            stack.enter_context(runs.held(out))
        runs.prepare(out, config, overwrite=overwrite)
        inputs.save(out)
        loop = _Loop(config, step, inputs, out, spent, clock)
        attempts = [*meta.get("attempts", []), {**runs.describe(fabric.device), "from_step": step.done}]
        runs.write_json(out / runs.META, {**meta, "attempts": attempts, "finished": None})
        result = loop.run(label or config.method, console, until)
        budget = {
            "steps": result.steps,
            "images_encoded": step.images_encoded,
            "seconds": round(result.seconds, 3),
            "filling_seconds": round(loop.filling_seconds, 3),
            "peak_gpu_memory_mb": _peak(peak.mib(), meta),
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
            },
        )
        return result


def _given(frames: object) -> str:
    return "without frames" if frames is None else "with frames"


def _peak(now: int | None, before: dict[str, Any]) -> int | None:
    """The most of this attempt and of those before it; None on a CPU."""
    earlier = before.get("budget", {}).get("peak_gpu_memory_mb")
    return now if now is None or earlier is None else max(now, earlier)


def _restore(step: TrainingStep, inputs: Inputs, out: Path, console: Console) -> tuple[float, float, float]:
    """Put the newest good checkpoint into `step`; returns the seconds spent before it, also by the clock given then,
    and those of filling the memory."""
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
    if state.get("items", inputs.fingerprint) != inputs.fingerprint:
        raise UserError(
            f"{step.config.data!r} has other images than when {path} was written ({len(inputs.train):,} now), and the "
            "stream and the memory know them by their number; put the files back, or start again with --overwrite"
        )
    step.load_state_dict(state["training"])
    if step.done < step.steps:
        console.print(f"resuming {out} at step {step.done} of {step.steps}", soft_wrap=True, markup=False)
    device_seconds, filling_seconds = state.get("device_seconds", state["seconds"]), state.get("filling_seconds", 0.0)
    return float(state["seconds"]), float(device_seconds), float(filling_seconds)


class _Loop:
    """The steps of one attempt, and what happens between them."""

    def __init__(
        self,
        config: TrainConfig,
        step: TrainingStep,
        inputs: Inputs,
        out: Path,
        spent: tuple[float, float, float],
        clock: Callable[[], float],
    ) -> None:
        self.config, self.step, self.inputs, self.out = config, step, inputs, out
        self.folder = out / runs.CHECKPOINTS
        self.before, self.filling_seconds, self.clock = spent[:2], spent[2], clock
        self._begin()
        self.metrics: dict[str, float] = {}
        self._mentioned = self._unmeasurable = False
        self.live = inputs.live if isinstance(inputs, LiveInputs) else None
        self.instruments = inputs.instruments(config, step.memory)
        self.saved_at = step.done if checkpoint.checkpoints(self.folder) else -1

    def _begin(self) -> None:
        self.began = time.monotonic(), self.clock()
        self._tick = (self.began[0], self.step.done)

    @property
    def seconds(self) -> float:
        return self.before[0] + time.monotonic() - self.began[0]

    @property
    def device_seconds(self) -> float:
        return self.before[1] + self.clock() - self.began[1]

    def run(self, label: str, console: Console, until: float | None = None) -> RunResult:
        config, step = self.config, self.step
        with (
            RunLog(
                self.out,
                columns=self._columns(),
                steps=step.steps,
                start=step.done,
                label=label,
                tensorboard=config.tensorboard,
                wandb=config.wandb,
                config=config.as_dict(),
                console=console,
            ) as log,
            StopRequest(until, waiting=lambda: self.live is not None and self.live.waiting) as stop,
        ):
            self._warn_of_size(log)
            self._fill(log, stop)
            self._begin()
            while step.done < step.steps and not stop.requested:
                try:
                    self._step()
                except StopWaiting:
                    break
                except StreamEnded:
                    if not stop.requested:  # Ctrl-C also ends what is before a pipe
                        stop.ask(END_OF_STREAM)
                    break
                except Exception:
                    if self.live and self.live.failed and self.saved_at != step.done:
                        self._save(log, must=True)  # the step had not begun
                    raise
                log.advance(step.done)
                last = step.done == step.steps
                if step.done % config.log_every == 0 or last:
                    self._log(log, last)
                    self._mention_graph(log)
                if step.done % config.checkpoint_every == 0 and not last:
                    self._save(log, must=False)
            if self.saved_at != step.done:
                self._save(log, must=True)
            finished = step.done == step.steps
            if not finished:
                pipe = "… | " if self.live else ""
                log.say(
                    f"stopped by {stop.name} after step {step.done} of {step.steps}; everything is saved.\n"
                    f"Continue with: {pipe}duel train --out {shlex.quote(str(self.out))} --resume"
                )
        spent, shared = self.seconds, self.device_seconds
        return RunResult(self.out, step.done, finished, self.metrics, spent, stop.name, self.inputs.labelled, shared)

    def _fill(self, log: RunLog, stop: StopRequest) -> None:
        """Fill the memory and the queue, which does not count as training."""
        began = time.monotonic()
        try:
            for how_far in self.step.filling():
                self.saved_at = -1  # what is filled is not saved yet
                log.doing(how_far)
                if stop.requested:
                    break
        except StopWaiting:
            pass
        except StreamEnded as ended:
            if not stop.requested:
                raise UserError(f"{ended}, too few to fill the memory; lower memory_size") from ended
        log.doing("")
        if self.step.device.type == "cuda":
            torch.cuda.synchronize(self.step.device)
        self.filling_seconds += time.monotonic() - began

    def _warn_of_size(self, log: RunLog) -> None:
        config, slots = self.config, slots_for(self.config, self.inputs)
        if slots < config.memory_size:
            log.say(
                f"the memory gets {slots:,} slots, as many as there are images, not {config.memory_size:,}, and holds "
                "those that look unlike others more than once; to make it drop duplicates give it fewer (--memory-size)"
            )
        size = slots * math.prod(self.inputs.train.shape)
        if config.memory_holds_images and config.memory_images == "device" and size > LARGE_MEMORY:
            log.say(
                f"the memory's images take {size / 2**30:.1f} GiB on the device and in each checkpoint; a lower "
                "--memory-size or --image-size saves that, --memory-images host moves them"
            )

    def _mention_graph(self, log: RunLog) -> None:
        why = self.step.why_eager
        if why is not None and not self._mentioned:
            log.say(f"the step cannot be recorded as a CUDA graph and runs eagerly: {why}")
            self._mentioned = True

    def _step(self) -> None:
        try:
            self.step()
        except UserError as error:  # a memory on the CPU refuses NaN at once, before the loss is next read
            finite = self.step.is_finite()
            if finite and not isinstance(error, RowsRefused):
                raise
            what = "an embedding" if finite else "a weight"
            raise self._astray(self.step.bad_step(), what, self.step.done) from error

    def _columns(self) -> list[str]:
        memory = [] if self.instruments is None else self.instruments.columns
        online = ONLINE if self.inputs.test is not None else ()
        return ["loss", "lr", *(["epoch"] if self._has_epochs else []), "steps_per_s", *memory, *online]

    @property
    def _has_epochs(self) -> bool:
        return self.inputs.items != ENDLESS

    def _log(self, log: RunLog, last: bool) -> None:
        step = self.step
        mean, bad = step.read_loss()  # waits for the device
        if bad is not None:
            raise self._astray(bad)
        now = time.monotonic()
        elapsed, steps = now - self._tick[0], step.done - self._tick[1]
        self.metrics = {
            "loss": mean,
            "lr": step.lr_at(step.done - 1),
            **({"epoch": step.done * self.config.stream_items / self.inputs.items} if self._has_epochs else {}),
            "steps_per_s": steps / max(elapsed, 1e-9),
        }
        if self.instruments is not None:
            since = (
                step.done - 1
            ) % self.config.log_every + 1  # the last line, also where a resumed run did not write it
            held = self.instruments.read(step.anchor_ids, since)
            self.metrics |= held
            for message in self.instruments.warnings(held, step.done):
                log.say(f"warning: {message}")
        every = self.config.knn_every
        if self.inputs.test is not None and every and (step.done % every < self.config.log_every or last):
            self.metrics |= self._measure(log)
        log.log(step.done, self.metrics, {} if step.memory is None else {"memory_ages": step.memory.age})
        self._tick = (time.monotonic(), step.done)

    def _measure(self, log: RunLog) -> dict[str, float]:
        """A quick look at the features of test images, by the names in ONLINE. That it fails costs no weights."""
        from .evaluation import online_measures

        if self.inputs.test is None or self._unmeasurable:
            return {}
        mean, std = self.inputs.stats
        encoder = self.step.method.encoder
        try:
            with torch.random.fork_rng(enabled=True):  # measuring must not change what is trained
                found = online_measures(
                    encoder, self.inputs.train, self.inputs.test, mean=mean, std=std, device=self.step.device
                )
        except UserError as error:
            log.say(f"warning: no k-NN while training: {error}")
            self._unmeasurable = True
            return {}
        return {name: value for name, value in found.items() if math.isfinite(value)}

    def _save(self, log: RunLog, *, must: bool) -> None:
        """Write a checkpoint, but never one that is not good. `must`: nothing comes after it."""
        if not self.step.is_finite():
            raise self._astray(self.step.bad_step())
        spent = {
            "seconds": self.seconds,
            "device_seconds": self.device_seconds,
            "filling_seconds": self.filling_seconds,
        }
        state = {"format": FORMAT, "training": self.step.state_dict(), **spent, **self._inputs_state()}
        try:
            checkpoint.save(self.folder, self.step.done, state, keep=self.config.keep)
            self.saved_at = self.step.done
        except CheckpointError as error:
            if must:
                raise
            log.say(f"warning: {error}. Training goes on and will try again at the next checkpoint")
            return
        self._list_memory(log)

    def _list_memory(self, log: RunLog) -> None:
        path = self.out / runs.MEMORY
        try:
            if self.step.memory is not None:
                contents.write(path, self.step.memory, self.inputs.train)
        except (OSError, ValueError) as error:
            log.say(f"warning: cannot write {path} ({getattr(error, 'strerror', None) or error})")

    def _inputs_state(self) -> dict[str, Any]:
        """What evaluating and exporting need to know besides the weights."""
        mean, std = self.inputs.stats
        shape, items = list(self.inputs.train.shape), self.inputs.fingerprint
        return {"image_shape": shape, "mean": list(mean), "std": list(std), "items": items}

    def _astray(self, bad: int | None, what: str = "a weight", at: int | None = None) -> NonFiniteLoss:
        """bad: the step, from 0, whose loss was not finite; else `what` was not, at a step or in the last one."""
        step = (self.step.done - 1 if at is None else at) if bad is None else bad
        what = what if bad is None else "the loss"
        kept = checkpoint.checkpoints(self.folder)
        last_good = f"the last good checkpoint is {kept[-1]}" if kept else "no checkpoint had been written yet"
        error = NonFiniteLoss(
            f"{what} became NaN or infinite at step {step + 1} (learning rate {self.step.lr_at(step):.3g}); "
            f"{last_good}. "
            f"Try a lower --lr (now {self.config.lr:g}), a longer --warmup (now {self.config.warmup:g}), --clip 1, "
            "or --precision fp32, in a new run"
        )
        error.step = step + 1
        return error
