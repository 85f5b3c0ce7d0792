"""Settings that must stand before torch and Triton are imported."""

from __future__ import annotations

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when a kernel is decorated

torch.set_num_threads(1)  # with a busy second core, two threads are many times slower than one
