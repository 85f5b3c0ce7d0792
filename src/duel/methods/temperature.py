"""A temperature that swings between two values (Kukleva et al. 2023), as a number on the device."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from ..errors import UserError
from .base import check_range


class Temperature(nn.Module):
    """τ(t) = low + (high - low) · (1 + cos(2π · cycles · t)) / 2, t from 0 to 1 over training; constant without `high`.

    A low temperature tells items apart, a high one groups them, which the rare classes of a long tail need. Where it
    swings, the present value is a buffer that `advance` moves: nothing is read on the host, and a saved run goes on
    where it was. It follows one step behind.
    """

    now: Tensor

    def __init__(self, low: float, high: float | None = None, cycles: float = 5.0) -> None:
        super().__init__()
        check_range("temperature", low, 0, open_low=True)
        check_range("temperature_cycles", cycles, 0, open_low=True)
        if high is not None and not low < high < math.inf:
            raise UserError(f"temperature_high must be larger than temperature {low:g}, got {high}")
        self.low, self.high, self.cycles = low, high, cycles
        if high is not None:
            self.register_buffer("now", torch.tensor(high, dtype=torch.float32))

    @property
    def value(self) -> float | Tensor:
        return self.low if self.high is None else self.now

    @torch.no_grad()
    def advance(self, progress: Tensor | float) -> None:
        """progress: share of training that is done, 0..1."""
        if self.high is None:
            return
        angle = 2 * math.pi * self.cycles * progress
        wave = angle.cos() if isinstance(angle, Tensor) else math.cos(angle)
        half = (self.high - self.low) / 2
        if isinstance(wave, Tensor):
            self.now.copy_(wave * half + (self.low + half))
        else:
            self.now.fill_(wave * half + (self.low + half))
