"""The first convolution of networks for small images."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class StemConv2d(nn.Conv2d):
    """A small convolution over colours. On a GPU in half precision it is one matrix product: with so few channels cuDNN
    leaves the tensor cores, and copies the images into another layout first."""

    def forward(self, input: Tensor) -> Tensor:
        if input.is_cuda and torch.is_autocast_enabled("cuda"):
            return self.as_product(input.to(torch.get_autocast_dtype("cuda")))
        return super().forward(input)

    def as_product(self, images: Tensor) -> Tensor:
        rows = self.patches(images)
        return self.from_rows(F.linear(rows, F.pad(self.weight.flatten(1), (0, rows.shape[-1] - self.taps))))

    @property
    def taps(self) -> int:
        """Numbers that an output pixel is made of."""
        return self.weight[0].numel()

    def patches(self, images: Tensor) -> Tensor:
        """(b, c, h, w) -> (b, h', w', n): for each output pixel its `taps`, then zeros up to a multiple of eight."""
        size, step, border = self.kernel_size[0], self.stride[0], int(self.padding[0])
        framed = F.pad(images, (border, border, border, border))
        seen = framed.unfold(2, size, step).unfold(3, size, step)  # (b, c, h', w', size, size)
        return F.pad(seen.permute(0, 2, 3, 1, 4, 5).flatten(3), (0, -self.taps % 8))

    @staticmethod
    def from_rows(rows: Tensor) -> Tensor:
        """(b, h, w, c) -> (b, c, h, w), channels last."""
        return rows.permute(0, 3, 1, 2)
