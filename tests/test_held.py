"""The figure of what memories hold shows what they hold."""

from __future__ import annotations

import pytest
import torch

from duel.data import load
from duel.reproduce import held


@pytest.mark.parametrize("stream", held.STREAMS)
def test_duel_holds_the_most_different_images_and_the_fewest_common_ones(stream: str) -> None:
    fifo, reservoir, duel = (held.held(policy, stream) for policy in held.POLICIES)
    assert duel.common < 0.4 * min(fifo.common, reservoir.common)
    assert duel.different > max(fifo.different, reservoir.different)
    for found in (fifo, reservoir, duel):
        assert len(found.images) == len(found.labels) == held.SLOTS
        assert found.common == int((found.labels == 0).sum())
        assert torch.equal(found.labels, found.labels.sort().values)


def test_slots_are_images_of_the_class_that_is_told() -> None:
    source = load("digits")
    assert source.labels is not None
    found = held.held("FIFO queue", "drawn")
    for image, label in zip(found.images, found.labels, strict=True):
        of_class = source.images((source.labels == label).nonzero().flatten())[:, 0]
        assert (of_class == image).flatten(1).all(1).any()


def test_frames_are_consecutive() -> None:
    assert held.held("FIFO queue", "frames").different == held.SLOTS // held.STREAMS["frames"]
