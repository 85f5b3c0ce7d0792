"""One attempt at a run: its steps, and what happens between them. What a step is, `duel.step` says."""

from __future__ import annotations

import math
import shlex
import time
from collections.abc import Callable
from dataclasses import dataclass, field
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
from .runlog import RunLog
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
    """Whether the data have labels and a test part, so that the run can be evaluated on them."""
    device_seconds: float = 0.0
    """As `seconds`, by the clock that `train` was given."""


class NonFiniteLoss(UserError):
    """Training went astray; the message says where, and what to try."""

    step = 0
    """The first step, counted from 1, that was not finite."""


class Loop:
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
                except Exception as error:
                    if self.live and self.live.failed:
                        if self.saved_at != step.done:
                            self._save(log, must=True)  # the step had not begun
                        error.add_note(f"saved after step {step.done} of {step.steps}, from which resume goes on")
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
            for message in self.instruments.warnings(held, step.done, last=last):
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
                contents.write(path, self.step.memory, self.inputs.train, self.inputs.files)
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
