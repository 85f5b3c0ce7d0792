"""What a training step spends its time on: on a GPU each part by itself, as a captured graph; on a CPU inside real
steps, where calls between others take longer than repeated ones.

Parts that are not separate calls in a step are told apart by difference: the encoder is the training without the loss,
re-encoding is the whole care for the memory without the replacement.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from duel.benchmarks.timing import milliseconds, windows
from duel.encoders import Encoder
from duel.methods import StepOutput
from duel.methods.base import Encoded
from duel.step import TrainingStep
from duel.upkeep import Upkeep

#: Batches of newcomers kept ready beyond the timed ones, for warming up and recording.
SPARE = 6


def parts(step: TrainingStep, *, repeats: int) -> dict[str, float]:
    """Milliseconds of sampling, augmentation, encoder, loss, replacement and refresh; a part that is not there is 0.

    On a CPU also of the step that they are parts of, so that a machine of wandering speed does not change their shares.
    sampling: the stream's next batch; on a GPU the host does it while the device computes, so this is an upper limit.
    encoder: forward, backward, optimizer and momentum copy. loss: with the predictor, where there is one.
    replacement: `WorkingMemory.update`. refresh: encoding what the memory holds and what comes into it, and keeping N
    right. Changes the step's weights and memory: measure it last.
    """
    graph = step.graph is not None and step.graph.why_not is None

    def timed(call: Callable[[], object]) -> float:
        return milliseconds(call, step.device, repeats=repeats, graph=graph, generator=step.generator)

    def loss() -> float:
        with encoders_that_answer_at_once(step) as (dummy, _):
            return timed(lambda: train(step, dummy, dummy, only_loss=True))

    if step.device.type == "cpu":
        return _inside(step, repeats, loss)

    def sample() -> object:
        return step.stream.next(out=(step.images, step.ids))

    (samples,) = windows([sample], step.device, count=repeats, length=4)
    found = {"sampling": statistics.median(samples)}
    upkeep = step.upkeep
    if upkeep is not None and step.config.source == "memory":
        found["sampling"] += timed(step._sample)
    found |= {"replacement": 0.0, "refresh": 0.0}
    if upkeep is not None:  # before the training on one batch again and again, which crowds embeddings together
        newcomers = Newcomers(step, upkeep, repeats + SPARE)
        bringing = timed(newcomers.next)
        found["replacement"] = max(0.0, timed(newcomers.replace) - bringing)
        if step.config.memory_holds_images:
            care = timed(Newcomers(step, upkeep, repeats + SPARE).care)
            found["refresh"] = max(0.0, care - bringing - found["replacement"])
    images, _ = step._sample()
    found["augmentation"] = timed(lambda: views(step, images))
    first, second = views(step, images)
    whole = timed(lambda: train(step, first, second))
    found["loss"] = loss()
    found["encoder"] = max(0.0, whole - found["loss"])
    return found


def _inside(step: TrainingStep, count: int, loss: Callable[[], float]) -> dict[str, float]:
    """Each part's median share of `count` real steps, times their median. The loss, which is no call of its own, is
    measured by itself."""
    upkeep = step.upkeep
    calls: list[tuple[str, Any, str]] = [("sampling", step.stream, "next"), ("sampling", step, "_sample")]
    calls.append(("augmentation", step.augment, "views"))
    if upkeep is not None:
        calls += [("replacement", upkeep, "_offer"), ("care", upkeep, "update"), ("care", upkeep, "after_step")]
    shares: dict[str, list[float]] = {name: [] for name in ("sampling", "augmentation", "replacement", "care")}
    wholes = []
    with timed_calls(calls) as spent:
        for _ in range(count):
            spent.clear()
            began = time.perf_counter()
            step()
            wholes.append((time.perf_counter() - began) * 1e3)
            for name, own in shares.items():
                own.append(spent.get(name, 0.0) / wholes[-1])
    whole = statistics.median(wholes)
    found = {name: statistics.median(own) * whole for name, own in shares.items()}
    care, found["loss"] = found.pop("care"), loss()
    found["refresh"] = max(0.0, care - found["replacement"]) if step.config.memory_holds_images else 0.0
    return found | {"encoder": max(0.0, whole - sum(found.values())), "step": whole}


@contextmanager
def timed_calls(calls: Sequence[tuple[str, Any, str]]) -> Iterator[dict[str, float]]:
    """While it lasts, the milliseconds that methods (name, object, attribute) take add up under their names."""
    spent: dict[str, float] = {}

    def watched(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            result = call(*args, **kwargs)
            spent[name] = spent.get(name, 0.0) + (time.perf_counter() - began) * 1e3
            return result

        return timed

    for name, owner, attribute in calls:
        setattr(owner, attribute, watched(name, getattr(owner, attribute)))
    try:
        yield spent
    finally:
        for _, owner, attribute in calls:
            delattr(owner, attribute)


@torch.no_grad()
def views(step: TrainingStep, images: Tensor) -> tuple[Tensor, Tensor]:
    """Two augmented views of images uint8 (b, c, h, w), laid out as the encoder wants them."""
    both = step.augment.views(images, 2, step.generator)
    first, second = (view.contiguous(memory_format=step.layout) for view in both)
    return first, second


def train(step: TrainingStep, first: Tensor, second: Tensor, *, only_loss: bool = False) -> StepOutput:
    """Forward, backward, optimizer and momentum copy for two views; without the latter two if `only_loss`."""
    step.optimizer.zero_grad(set_to_none=True)
    with step.fabric.autocast():
        output: StepOutput = step.method(first, second, step.anchor_ids)
    output.loss.backward()
    if not only_loss:
        step.optimizer.step()
        step.method.after_step(torch.zeros((), device=step.device))  # how far training is does not change its time
    return output


def remember(step: TrainingStep, output: StepOutput) -> None:
    """All that a step does for its memory, with the batch in `step.images` and `step.ids`."""
    if step.upkeep is not None:
        step.upkeep.update(step.images, step.ids, output)


class _StandIn(nn.Module):
    """Answers at once: as many of the given rows as it is asked about."""

    def __init__(self, rows: Tensor) -> None:
        super().__init__()
        self.rows = rows

    def forward(self, batch: Tensor) -> Tensor:
        return self.rows[: len(batch)]


@contextmanager
def encoders_that_answer_at_once(step: TrainingStep) -> Iterator[tuple[Tensor, Tensor]]:
    """Every encoder of the method returns given rows, so that what is left of a step is its loss.

    Yields a batch to call the method with, and the projections (2b, d) that come back and receive the gradient.
    """
    encoders = [part for part in step.method.modules() if isinstance(part, Encoder)]
    own = [(part.backbone, part.projection) for part in encoders]
    count, device = 2 * step.config.batch_size, step.device
    with step.fabric.autocast():
        dtype = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None
    given = torch.randn(count, step.config.dim, device=device, dtype=dtype).requires_grad_()
    for part in encoders:
        part.backbone = _StandIn(torch.zeros(count, part.feature_dim, device=device, dtype=dtype))
        part.projection = _StandIn(given)
    try:
        yield torch.zeros(step.config.batch_size, 1, device=device), given
    finally:
        for part, (backbone, projection) in zip(encoders, own, strict=True):
            part.backbone, part.projection = backbone, projection


class Newcomers:
    """Batches drawn and encoded beforehand, offered one after the other, so that no item comes twice."""

    def __init__(self, step: TrainingStep, upkeep: Upkeep, count: int) -> None:
        self.step, self.upkeep = step, upkeep
        batches = [step.stream.next() for _ in range(count)]
        self.images = torch.stack([images for images, _ in batches])
        self.ids = torch.stack([ids for _, ids in batches])
        encoded = [upkeep.encode(images) for images in self.images]
        self.embeddings = torch.stack([part.projections for part in encoded])
        self.features = torch.stack([part.features for part in encoded])
        self.turn = torch.zeros(1, dtype=torch.int64, device=step.device)  # there, so that replays move on too

    def next(self) -> StepOutput:
        """Puts the next batch where the step looks for it; returns what its training might have given."""
        self.step.images.copy_(self.images.index_select(0, self.turn)[0])
        self.step.ids.copy_(self.ids.index_select(0, self.turn)[0])
        embeddings, features = (rows.index_select(0, self.turn)[0] for rows in (self.embeddings, self.features))
        self.turn.add_(1).remainder_(len(self.images))
        return StepOutput(embeddings.new_zeros(()), embeddings, features)

    def replace(self) -> None:
        """The replacement alone."""
        output = self.next()
        self.upkeep._offer(Encoded(output.embeddings, output.features), self.step.images, self.step.ids)

    def care(self) -> None:
        """All that a step does for its memory."""
        remember(self.step, self.next())
