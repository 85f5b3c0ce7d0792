"""How the C library gives memory back on a CPU."""

from __future__ import annotations

import ctypes
import os

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # mallopt(3)
_LARGEST = 2**30
_CHOSEN = ("MALLOC_", "GLIBC_TUNABLES")


def keep_freed_memory() -> bool:
    """Have glibc keep the memory of freed tensors for the next ones; whether it does now.

    By default it maps every large tensor anew and hands it back when freed, so that each step of a training waits for
    the kernel to clear all its pages again: with 32 x 32 images half of the time (docs/decisions.md). Where the
    environment says how to allocate, or the C library is another, nothing is changed.
    """
    if any(name.startswith(_CHOSEN) for name in os.environ) or not _is_glibc():
        return False
    mallopt = ctypes.CDLL(None).mallopt
    # before 2.35 the limit is half a heap, 32 MiB
    mapped = any(mallopt(_MMAP_THRESHOLD, size) for size in (_LARGEST, 2**25))
    return mapped and bool(mallopt(_TRIM_THRESHOLD, 2**31 - 1))


def _is_glibc() -> bool:
    try:
        return (os.confstr("CS_GNU_LIBC_VERSION") or "").startswith("glibc")
    except (AttributeError, ValueError, OSError):  # not on Windows, no such name
        return False
