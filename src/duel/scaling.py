"""Many tensors, each multiplied by a number per first index, in one launch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .launching import has_triton, reaches

#: Numbers that a program of the kernel takes.
BLOCK = 2048


class Scaling:
    """targets[i] = sources[i] * scales[i][:, None, ...], for tensors that stay where they are.

    From float32 to bfloat16, on a GPU, they share a launch; others, and those that lie in memory in another order than
    their targets, get one each.
    """

    def __init__(self, sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
        self.sources, self.targets = sources, targets
        self.places = _places(sources)
        pairs = list(zip(sources, targets, strict=True))
        self.together = [i for i, (a, b) in enumerate(pairs) if has_triton() and reaches(a) and _alike(a, b)]
        self.apart = sorted(set(range(len(pairs))).difference(self.together))
        # of each program: addresses of source and target, its first number, all numbers, numbers per scale, first scale
        jobs, scale = [], 0
        for source, target in (pairs[i] for i in self.together):
            size, each, places = source.numel(), source[0].numel(), (source.data_ptr(), target.data_ptr())
            jobs += [(*places, first, size, each, scale) for first in range(0, size, BLOCK)]
            scale += source.shape[0]
        self.jobs = torch.tensor(jobs, dtype=torch.int64, device=sources[0].device)  # (programs, 6)

    def fits(self, sources: Sequence[Tensor]) -> bool:
        """Whether `sources` are where they were."""
        return _places(sources) == self.places

    def __call__(self, scales: Sequence[Tensor]) -> None:
        if self.together:
            from duel import scaling_kernel

            kernel: Any = scaling_kernel.scale_kernel
            flat = torch.cat([scales[i] for i in self.together])
            kernel[(self.jobs.shape[0],)](self.jobs, flat, BLOCK=BLOCK, num_warps=4)
        for i in self.apart:
            source, target = self.sources[i], self.targets[i]
            torch.mul(source, scales[i].view(-1, *[1] * (source.ndim - 1)), out=target)


def _places(tensors: Sequence[Tensor]) -> list[tuple[int, torch.device]]:
    return [(tensor.data_ptr(), tensor.device) for tensor in tensors]


def _alike(source: Tensor, target: Tensor) -> bool:
    """Whether one loop over memory meets the same places of both, a first index at a time."""
    if source.dtype != torch.float32 or target.dtype != torch.bfloat16:
        return False
    if source.ndim != 4:
        return source.is_contiguous() and target.is_contiguous()
    layouts = (torch.contiguous_format, torch.channels_last)
    return any(all(t.is_contiguous(memory_format=layout) for t in (source, target)) for layout in layouts)
