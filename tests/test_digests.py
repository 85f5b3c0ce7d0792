"""Images that are the same to the last bit have one number, others have others."""

from __future__ import annotations

import pytest
import torch

from duel.data import digests as module
from duel.data.digests import digests
from duel.data.sources import ArraySource


def source(images: torch.Tensor, *, resident: bool = True) -> ArraySource:
    return ArraySource(images, None, name="some", resident=resident)


@pytest.mark.parametrize("side", [1, 5, 8])
@pytest.mark.parametrize("block", [1, 100, 1 << 26])
def test_one_number_for_the_same_pixels(side: int, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_BYTES", block)
    images = torch.randint(0, 256, (40, 3, side, side), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    found = digests(source(torch.cat([images, images.flip(0)])))
    assert found.dtype == torch.int64
    assert found[:40].unique().numel() == images.unique(dim=0).shape[0] == 40
    assert found[40:].flip(0).equal(found[:40])
    assert digests(source(images), torch.tensor([7, 3])).equal(found[[7, 3]])


def test_any_single_pixel_tells() -> None:
    image = torch.full((1, 3, 6, 6), 128, dtype=torch.uint8)
    changed = image.repeat(3 * 36, 1, 1, 1)
    changed.view(108, 108).fill_diagonal_(129)
    assert digests(source(torch.cat([image, changed]))).unique().numel() == 109


def test_none_where_images_are_not_in_memory() -> None:
    assert digests(source(torch.zeros(2, 3, 4, 4, dtype=torch.uint8), resident=False)) is None
