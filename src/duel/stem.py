"""The first convolution of networks for small images."""

from __future__ import annotations

from typing import Any

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
        rows = self.patches(images)
        return self.from_rows(F.linear(rows, F.pad(self.weight.flatten(1), (0, rows.shape[-1] - self.taps))))

    @property
    def taps(self) -> int:
        """Numbers that an output pixel is made of."""
        return self.weight[0].numel()

    @property
    def frame(self) -> tuple[int, int, int]:
        """Sides of a patch, pixels from one to the next, and zeros around the image."""
        return self.kernel_size[0], self.stride[0], int(self.padding[0])

    def patches(self, images: Tensor) -> Tensor:
        """(b, c, h, w) -> (b, h', w', n): for each output pixel its `taps`, then zeros up to a multiple of eight."""
        size, step, border = self.frame
        framed = F.pad(images, (border, border, border, border))
        seen = framed.unfold(2, size, step).unfold(3, size, step)  # (b, c, h', w', size, size)
        return F.pad(seen.permute(0, 2, 3, 1, 4, 5).flatten(3), (0, -self.taps % 8))

    def with_relu(self, images: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        """relu of another such convolution, without gradient: weight (c', n), as wide as `patches`, and bias (c',)."""
        return self.from_rows(F.relu_(F.linear(self.patches(images.to(weight.dtype)), weight, bias)))

    def with_relu_fused(self, images: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        """The same in one kernel; c' must be a power of two, from 16 on."""
        import triton

        from duel import stem_kernel

        size, step, border = self.frame
        (b, _, height, width), (channels, columns) = images.shape, weight.shape
        out_height, out_width = ((side + 2 * border - size) // step + 1 for side in (height, width))
        out = images.new_empty(b, out_height, out_width, channels, dtype=weight.dtype)
        pixels, tile, kernel = b * out_height * out_width, 128, stem_kernel.stem_kernel
        launch: Any = kernel[(-(-pixels // tile),)]
        launch(
            images, weight, bias, out, height, width, out_height, out_width, *images.stride(), pixels, self.taps,
            columns, SIZE=size, STEP=step, BORDER=border, OUT=channels,
            COLUMNS=max(16, triton.next_power_of_2(columns)), PIXELS=tile, num_warps=4,
        )  # fmt: skip
        return self.from_rows(out)

    @staticmethod
    def from_rows(rows: Tensor) -> Tensor:
        """(b, h, w, c) -> (b, c, h, w), channels last."""
        return rows.permute(0, 3, 1, 2)
