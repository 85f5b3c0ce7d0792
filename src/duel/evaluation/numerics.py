"""Float32 products that are float32, rows of unit length, and copies that nobody waits for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


@contextmanager
def exact_matmul(device: torch.device) -> Iterator[None]:
    """Full float32 matrix products inside, whatever training chose for speed.

    TF32 keeps 10 bits of mantissa and bf16 autocast 7: enough to change which neighbour is nearest.
    """
    matmul = torch.backends.cuda.matmul
    # There are two ways to choose the precision, and reading the older one fails after the newer one was used.
    newer = getattr(matmul, "fp32_precision", None)
    try:
        older = torch.get_float32_matmul_precision()
    except RuntimeError:
        older = None
    torch.set_float32_matmul_precision("highest")  # sets both
    try:
        with torch.autocast(device.type, enabled=False):
            yield
    finally:
        if older is not None:
            torch.set_float32_matmul_precision(older)
        if newer is not None:
            matmul.fp32_precision = newer


def unit_rows(features: Tensor) -> Tensor:
    """(n, d) → (n, d), each row divided by its length; zero rows stay zero. Half precision becomes float32."""
    wide = features if features.dtype == torch.float64 else features.float()
    return torch.nn.functional.normalize(wide, dim=-1)


def sent(tensor: Tensor, device: torch.device) -> Tensor:
    """A host tensor on `device`; from pinned memory, so that the host does not wait for what the device is doing."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
