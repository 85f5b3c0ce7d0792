"""What is not to be compiled when the caller is."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


def eagerly(function: Callable[P, R]) -> Callable[P, R]:
    """Run as it is also from within `torch.compile`, which would trace what is done in NumPy: for minutes, and for
    bfloat16 wrongly."""

    @wraps(function)
    def run(*args: P.args, **keywords: P.kwargs) -> R:
        called: Callable[P, R] = torch.compiler.disable(function) if torch.compiler.is_compiling() else function
        return called(*args, **keywords)

    return run
