"""What is compiled at installation where there is a C compiler (setup.py): loops that take long in Python."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
from typing import Any

Integer, Pointer = ctypes.c_int64, ctypes.c_void_p
#: The functions and what they take; all return a whole number.
FUNCTIONS: dict[str, list[Any]] = {
    "turns_float32": [Pointer] * 8 + [Integer] * 4,
    "turns_float64": [Pointer] * 8 + [Integer] * 4,
    "put_rows": [Pointer, Integer, Pointer, Pointer, Integer, Integer, Integer],
}


@functools.cache
def library() -> Any:
    """The functions by name; None where they were not built or cannot be loaded: NumPy does the same."""
    built = importlib.util.find_spec("duel._compiled")  # no module of Python's, but named as one
    if built is None or built.origin is None:
        return None
    try:
        found = ctypes.CDLL(built.origin)
        for name, arguments in FUNCTIONS.items():
            function = getattr(found, name)
            function.argtypes, function.restype = arguments, Integer
    except (OSError, AttributeError):  # of another machine; or a linker that does not show its functions
        return None
    return found
