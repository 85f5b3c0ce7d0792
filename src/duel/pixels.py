"""What a policy can compare without an encoder: a small copy of each image.

Copies of an image, and frames of one scene, have nearly the same thumbnail whatever the encoder has learnt so far, and
it never goes stale. Of images that merely show the same kind of thing it says little.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import adaptive_avg_pool2d, normalize, pad

from .checks import check_tensor
from .errors import UserError
from .names import THUMBNAIL_SIDE as SIDE

FLOOR = 2 / 255
"""Contrast, of a range of 0 to 1, that noise may have: with less a thumbnail is that of a plain area."""


def length(channels: int) -> int:
    """Of the vector that `thumbnails` gives for an image with so many channels."""
    return channels * SIDE**2 + 1


@torch.no_grad()
def thumbnails(images: Tensor) -> Tensor:
    """Images (b, c, h, w), uint8 or floating-point in 0..1 -> unit rows (b, 64 c + 1), float32.

    A row has the means of 8 × 8 fields of each channel, less the channel's own mean, and as its last entry what a
    contrast of `FLOOR` would have in all of them together. So neither the brightness of an image counts nor, beyond
    that, its contrast; and plain areas are all alike, of any colour, rather than as different as their noise.
    """
    check_tensor(images, "images", "(b, c, h, w)")
    if images.dim() != 4 or not (images.dtype == torch.uint8 or images.is_floating_point()):
        raise UserError(
            f"images must be (b, c, h, w), uint8 or floating-point, got {tuple(images.shape)} of {images.dtype}"
        )
    small = adaptive_avg_pool2d(images.float(), SIDE) / (255 if images.dtype == torch.uint8 else 1)
    shape = (small - small.mean((2, 3), keepdim=True)).flatten(1)
    return normalize(pad(shape, (0, 1), value=FLOOR * shape.shape[1] ** 0.5), dim=1)
