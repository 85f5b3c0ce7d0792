# mypy: ignore-errors
"""The Triton kernel behind `scaling`. Imported only where Triton is."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def scale_kernel(jobs, scales, BLOCK: tl.constexpr):
    """A program takes BLOCK numbers of one tensor; a row of `jobs` says which and where."""
    job = jobs + tl.program_id(0) * 6
    source = tl.load(job).to(tl.pointer_type(tl.float32))
    target = tl.load(job + 1).to(tl.pointer_type(tl.bfloat16))
    at = tl.load(job + 2) + tl.arange(0, BLOCK)
    inside = at < tl.load(job + 3)
    scale = tl.load(scales + tl.load(job + 5) + at // tl.load(job + 4), mask=inside, other=0.0)
    tl.store(target + at, (tl.load(source + at, mask=inside, other=0.0) * scale).to(tl.bfloat16), mask=inside)
