"""Random numbers from a counter (splitmix64): the same on every device, capturable in a CUDA graph, no hidden state.

A policy's randomness must survive save and load bit for bit and may not be drawn on the host; a hash of (seed, counter)
does both with nothing to store but the counter.
"""

from __future__ import annotations

import torch
from torch import Tensor

NUMBERS = 1 << 53
"""How many there are of what `digest` gives."""


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


_STEP = _signed(0x9E3779B97F4A7C15)
_MIX_1 = _signed(0xBF58476D1CE4E5B9)
_MIX_2 = _signed(0x94D049BB133111EB)


def _fold(z: Tensor, bits: int) -> Tensor:
    return z ^ ((z >> bits) & ((1 << (64 - bits)) - 1))  # torch shifts arithmetically; the mask makes it logical


def uniform(seed: int, counter: Tensor) -> Tensor:
    """int64 counters of any shape -> float64 in [0, 1), one independent draw per counter."""
    z = counter * _STEP + _signed((seed * 0xD1342543DE82EF95 + 0x2545F4914F6CDD1D) & ((1 << 64) - 1))
    z = _fold(z, 30) * _MIX_1
    z = _fold(z, 27) * _MIX_2
    z = _fold(z, 31)
    return ((z >> 11) & ((1 << 53) - 1)).double() * 2.0**-53


def digest(seed: int, words: Tensor) -> Tensor:
    """int32 (n, w) -> int64 (n,) in [0, 2^53): a number for each row, the same for the same words in the same places,
    otherwise as good as drawn at random. w below 2^20."""
    place = torch.arange(words.shape[1], device=words.device)
    mixed = (uniform(seed, (words.long() << 20) ^ place) * NUMBERS).long().sum(1)  # of whole numbers, which wraps
    return (uniform(seed, mixed) * NUMBERS).long()
