"""What a training step spends its time on: each part measured by itself, on a GPU as a captured graph.

Parts that are not separate calls in a step are told apart by difference: the encoder is the training without the loss,
re-encoding is the whole care for the memory without the replacement.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager

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

    sampling: the stream's next batch; on a GPU the host does it while the device computes, so this is an upper limit.
    encoder: forward, backward, optimizer and momentum copy. loss: with the predictor, where there is one.
    replacement: `WorkingMemory.update`, on a CPU after a refresh as in a step. refresh: encoding what the memory holds
    and what comes into it, and keeping N right. Changes the step's weights and memory: measure it last.
    """
    graph = step.graph is not None and step.graph.why_not is None

    def timed(call: Callable[[], object], before: Callable[[], object] = lambda: None) -> float:
        return milliseconds(call, step.device, repeats=repeats, graph=graph, generator=step.generator, before=before)

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
        found["replacement"] = max(0.0, timed(newcomers.replace, newcomers.refresh) - bringing)
        if step.config.memory_holds_images:
            care = timed(Newcomers(step, upkeep, repeats + SPARE).care)
            found["refresh"] = max(0.0, care - bringing - found["replacement"])
    images, _ = step._sample()
    found["augmentation"] = timed(lambda: views(step, images))
    first, second = views(step, images)
    whole = timed(lambda: train(step, first, second))
    with encoders_that_answer_at_once(step) as (dummy, _):
        found["loss"] = timed(lambda: train(step, dummy, dummy, only_loss=True))
    found["encoder"] = max(0.0, whole - found["loss"])
    return found


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
        encoded = [step.encode(images) for images in self.images]
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

    def refresh(self) -> None:
        """What a step does to the memory before newcomers come, with the embeddings it has."""
        memory = self.upkeep.memory
        slots = memory.stalest(self.upkeep.refreshed)
        second = None if memory.policy_dim is None else memory.compared[slots]
        memory.refresh(slots, memory.embeddings[slots], policy_embeddings=second)

    def replace(self) -> None:
        """The replacement alone."""
        output = self.next()
        self.upkeep._offer(Encoded(output.embeddings, output.features), self.step.images, self.step.ids)

    def care(self) -> None:
        """All that a step does for its memory."""
        remember(self.step, self.next())
