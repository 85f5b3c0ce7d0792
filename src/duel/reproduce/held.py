"""What memories hold of a biased stream, to be looked at: scikit-learn's digits, one of them far too frequent.

Nothing is trained: thumbnails say what is alike.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ..data import Stream, class_weights, load
from ..memory import WorkingMemory
from ..pixels import length, thumbnails
from ..policies import Duel, Fifo, Policy, Reservoir
from .grids import DWELL
from .paper import BIASES
from .rows import recommended

SLOTS, BATCH, BATCHES = 64, 64, 200
COMMON = 0
STREAMS = {"drawn": 1, "frames": DWELL}
"""Kind of stream -> frames of an image in a row."""
POLICIES: dict[str, Callable[[], Policy]] = {
    "FIFO queue": Fifo,
    "reservoir": Reservoir,
    "DUEL": lambda: Duel(score=recommended("d-simclr", "memory")["score"]),
}


class Held(NamedTuple):
    """The slots of a memory, by class."""

    images: Tensor
    """uint8 (n, 8, 8)"""
    labels: Tensor
    """int64 (n,)"""
    different: int
    """Images of the data among them."""

    @property
    def common(self) -> int:
        """Slots that hold the frequent class."""
        return int((self.labels == COMMON).sum())


def held(policy: str, stream: str) -> Held:
    """What a memory of this policy holds of this stream, at its end."""
    source = load("digits")
    assert source.labels is not None
    weights = class_weights(len(source.classes), bias=BIASES[-1], dominant=COMMON)
    shown = Stream(source, batch_size=BATCH, device="cpu", seed=0, weights=weights, dwell=STREAMS[stream])
    payload = {"image": (source.shape, torch.uint8), "id": ((), torch.int64)}
    memory = WorkingMemory(size=SLOTS, dim=length(source.shape[0]), policy=POLICIES[policy](), payload=payload)
    for _ in range(BATCHES):
        images, ids = shown.next()
        memory.update(thumbnails(images), image=images, id=ids)
    labels = source.labels[memory["id"]]
    order = labels.argsort(stable=True)
    return Held(memory["image"][order, 0], labels[order], len(memory["id"].unique()))
