"""Whether Triton kernels can be used."""

from __future__ import annotations

import importlib.util
import os

from torch import Tensor


def has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def reaches(tensor: Tensor) -> bool:
    """Whether kernels, where there are any, can work on `tensor`: on a CUDA device, or in Triton's interpreter."""
    return tensor.is_cuda or os.environ.get("TRITON_INTERPRET") == "1"
