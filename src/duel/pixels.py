"""What a policy can compare without an encoder: a small copy of each image.

Copies of an image, and frames of one scene, have nearly the same thumbnail whatever the encoder has learnt so far, and
it never goes stale. Of images that merely show the same kind of thing it says little.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import adaptive_avg_pool2d

from .checks import check_tensor
from .errors import UserError
from .losses import direction

SIDE = 8
"""In pixels. docs/decisions.md has how well other sides tell frames of an image from other images."""


def length(channels: int) -> int:
    """Of the vector that `thumbnails` gives for an image with so many channels."""
    return channels * SIDE**2


@torch.no_grad()
def thumbnails(images: Tensor) -> Tensor:
    """Images (b, c, h, w), uint8 or floating-point -> unit rows (b, 64 c), float32: the means of 8 × 8 fields of each
    channel, less the channel's own mean. So neither the brightness of an image counts nor its contrast, and of plain
    areas of colour all are alike."""
    check_tensor(images, "images", "(b, c, h, w)")
    if images.dim() != 4 or not (images.dtype == torch.uint8 or images.is_floating_point()):
        raise UserError(
            f"images must be (b, c, h, w), uint8 or floating-point, got {tuple(images.shape)} of {images.dtype}"
        )
    small = adaptive_avg_pool2d(images.float(), SIDE)
    shape = (small - small.mean((2, 3), keepdim=True)).flatten(1)
    rounding = 1e-5 * torch.linalg.vector_norm(small.flatten(1), dim=1, keepdim=True)
    plain = torch.linalg.vector_norm(shape, dim=1, keepdim=True) <= rounding
    return direction(shape.masked_fill(plain, 0.0))
