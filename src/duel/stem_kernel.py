# mypy: ignore-errors
"""The Triton kernel behind a folded `StemConv2d`. Imported only where Triton is."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def stem_kernel(
    images, weight, bias, out, height, width, out_height, out_width, stride_b, stride_c, stride_h, stride_w, pixels,
    taps, columns, SIZE: tl.constexpr, STEP: tl.constexpr, BORDER: tl.constexpr, OUT: tl.constexpr,
    COLUMNS: tl.constexpr, PIXELS: tl.constexpr,
):  # fmt: skip
    """relu(patches @ weight.T + bias) -> out (pixels, OUT), with images of any strides and weight (OUT, columns).

    A program makes PIXELS output pixels; the patches, `taps` numbers for each, are never written.
    """
    p = tl.program_id(0) * PIXELS + tl.arange(0, PIXELS)
    left = p % out_width * STEP - BORDER
    top = p // out_width % out_height * STEP - BORDER
    image = (p // (out_width * out_height)).to(tl.int64)
    k = tl.arange(0, COLUMNS)
    y = top[:, None] + (k // SIZE % SIZE)[None, :]
    x = left[:, None] + (k % SIZE)[None, :]
    inside = (y >= 0) & (y < height) & (x >= 0) & (x < width) & (p < pixels)[:, None] & (k < taps)[None, :]
    at = image[:, None] * stride_b + (k // (SIZE * SIZE))[None, :] * stride_c + y * stride_h + x * stride_w
    patches = tl.load(images + at, mask=inside, other=0.0).to(weight.dtype.element_ty)
    o = tl.arange(0, OUT)
    filters = tl.load(weight + o[None, :] * columns + k[:, None], mask=(k < columns)[:, None], other=0.0)
    sums = tl.dot(patches, filters) + tl.load(bias + o)[None, :].to(tl.float32)
    made = tl.maximum(sums, 0.0).to(out.dtype.element_ty)
    tl.store(out + p.to(tl.int64)[:, None] * OUT + o[None, :], made, mask=(p < pixels)[:, None])
