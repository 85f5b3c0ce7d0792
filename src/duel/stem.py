"""The first convolution of networks for small images."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class StemConv2d(nn.Conv2d):
    """A small convolution over colours. On a GPU in half precision it is one matrix product: for three channels cuDNN
    pads and copies the images first, and its gradient takes as long as that of a layer with 64."""

    def forward(self, input: Tensor) -> Tensor:
        if input.is_cuda and torch.is_autocast_enabled("cuda"):
            return self.as_product(input.to(torch.get_autocast_dtype("cuda")))
        return super().forward(input)

    def as_product(self, images: Tensor) -> Tensor:
        rows, weight = self.patches(images), self.weight.flatten(1)
        return F.linear(rows, F.pad(weight, (0, rows.shape[-1] - weight.shape[1]))).permute(0, 3, 1, 2)

    def patches(self, images: Tensor) -> Tensor:
        """(b, c, h, w) -> (b, h', w', n): what each output pixel is made of, then zeros up to a multiple of eight."""
        (size, _), (step, _), border = self.kernel_size, self.stride, int(self.padding[0])
        framed = F.pad(images, (border, border, border, border))
        seen = framed.unfold(2, size, step).unfold(3, size, step)  # (b, c, h', w', size, size)
        rows = seen.permute(0, 2, 3, 1, 4, 5).flatten(3)
        return F.pad(rows, (0, -rows.shape[-1] % 8))
