"""What a training step spends its time on: each part measured by itself, on a GPU as a captured graph.

Parts that are not separate calls in a step are told apart by difference: the encoder is the training without the loss,
re-encoding is the whole care for the memory without the replacement.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from duel.benchmarks.timing import milliseconds, windows
from duel.encoders import Encoder
from duel.memory import WorkingMemory
from duel.step import TrainingStep

#: Batches of newcomers kept ready beyond the timed ones, for warming up and recording.
SPARE = 6


def parts(step: TrainingStep, *, repeats: int) -> dict[str, float]:
    """Milliseconds of sampling, augmentation, encoder, loss, replacement and refresh; a part that is not there is 0.

    sampling: the stream's next batch; on a GPU the host does it while the device computes, so this is an upper limit.
    encoder: forward, backward, optimizer and momentum copy. loss: with the predictor, where there is one.
    replacement: `WorkingMemory.update`. refresh: encoding what the memory holds and what comes into it, and keeping N
    right. Changes the step's weights and memory: measure it last.
    """
    graph = step.graph is not None and step.graph.why_not is None

    def timed(call: Callable[[], object]) -> float:
        return milliseconds(call, step.device, repeats=repeats, graph=graph)

    def sample() -> object:
        return step.stream.next(out=(step.images, step.ids))

    (samples,) = windows([sample], step.device, count=repeats, length=4)
    found = {"sampling": sorted(samples)[len(samples) // 2], "augmentation": timed(lambda: views(step))}
    memory = step.memory
    if memory is not None and step.config.source == "memory":
        found["sampling"] += timed(partial(_draw, memory, step.config.batch_size))
    first, second = views(step)
    whole = timed(lambda: train(step, first, second))
    with encoders_that_answer_at_once(step) as (dummy, _):
        found["loss"] = timed(lambda: train(step, dummy, dummy, only_loss=True))
    found["encoder"] = max(0.0, whole - found["loss"])
    found |= {"replacement": 0.0, "refresh": 0.0}
    if memory is not None:
        found["replacement"] = timed(Newcomers(step, memory, repeats + SPARE).replace)
        if step.config.memory_holds_images:
            care = timed(Newcomers(step, memory, repeats + SPARE).care)
            found["refresh"] = max(0.0, care - found["replacement"])
    return found


def _draw(memory: WorkingMemory, count: int) -> Tensor:
    return memory["image"][memory.sample(count)]


@torch.no_grad()
def views(step: TrainingStep) -> tuple[Tensor, Tensor]:
    """Two augmented views of the batch in `step.images`, laid out as the encoder wants them."""
    # torch's own generator: one of ours would have to be registered with the graph
    first, second = (view.contiguous(memory_format=step.layout) for view in step.augment.views(step.images, 2))
    return first, second


def train(step: TrainingStep, first: Tensor, second: Tensor, *, only_loss: bool = False) -> Tensor:
    """Forward, backward, optimizer and momentum copy for two views; without the latter two if `only_loss`.

    Returns the embeddings (b, d) for the memory.
    """
    step.optimizer.zero_grad(set_to_none=True)
    with step.fabric.autocast():
        output = step.method(first, second, step.ids)
    output.loss.backward()
    if not only_loss:
        step.optimizer.step()
        step.method.after_step(torch.zeros((), device=step.device))  # how far training is does not change its time
    embeddings: Tensor = output.embeddings
    return embeddings


@contextmanager
def encoders_that_answer_at_once(step: TrainingStep) -> Iterator[tuple[Tensor, Tensor]]:
    """Every encoder of the method returns a given tensor, so that what is left of a step is its loss.

    Yields a batch to call the method with, and the embeddings (2b, d) that come back and receive the gradient.
    """
    encoders = [part for part in step.method.modules() if isinstance(part, Encoder)]
    batch = step.config.batch_size
    dummy = torch.zeros(batch, 1, device=step.device)
    with step.fabric.autocast():
        dtype = torch.get_autocast_dtype(step.device.type) if torch.is_autocast_enabled(step.device.type) else None
    given = torch.randn(2 * batch, step.config.dim, device=step.device, dtype=dtype).requires_grad_()

    def answer(images: Tensor) -> Tensor:
        return given[: len(images)]

    for part in encoders:
        part.forward = answer  # type: ignore[method-assign]
    try:
        yield dummy, given
    finally:
        for part in encoders:
            del part.forward  # the class's own shows again


class Newcomers:
    """Batches drawn and encoded beforehand, offered one after the other, so that no item comes twice."""

    def __init__(self, step: TrainingStep, memory: WorkingMemory, count: int) -> None:
        self.step, self.memory = step, memory
        batches = [step.stream.next() for _ in range(count)]
        self.images = torch.stack([images for images, _ in batches])
        self.ids = torch.stack([ids for _, ids in batches])
        self.embeddings = torch.stack([step.embed(images) for images in self.images])
        self.turn = torch.zeros(1, dtype=torch.int64, device=step.device)  # there, so that replays move on too

    def next(self) -> Tensor:
        """Puts the next batch where the step looks for it; returns its embeddings."""
        self.step.images.copy_(self.images.index_select(0, self.turn)[0])
        self.step.ids.copy_(self.ids.index_select(0, self.turn)[0])
        embeddings = self.embeddings.index_select(0, self.turn)[0]
        self.turn.add_(1).remainder_(len(self.images))
        return embeddings

    def replace(self) -> None:
        """The replacement alone."""
        embeddings = self.next()
        payload: dict[str, Any] = {"image": self.step.images} if self.step.config.memory_holds_images else {}
        self.memory.update(embeddings, id=self.step.ids, **payload)

    def care(self) -> None:
        """All that a step does for its memory."""
        self.step._update_memory(self.next())
