"""Which device and which precision a run gets, and how much memory it takes there."""

from __future__ import annotations

import importlib
import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from .allocator import keep_freed_memory
from .config import TrainConfig
from .errors import UserError

if TYPE_CHECKING:
    from lightning.fabric import Fabric


def resolve_device(name: str) -> torch.device:
    """auto, cpu, cuda or cuda:N as a device that exists."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UserError(f"device must be auto, cpu, cuda or cuda:N, got {name!r}") from error
    if device.type not in ("cpu", "cuda"):
        raise UserError(f"device must be auto, cpu, cuda or cuda:N, got {name!r}")
    if device.type == "cpu":
        if device.index:
            raise UserError(f"device must be auto, cpu, cuda or cuda:N, got {name!r}: there is one CPU")
        return torch.device("cpu")
    if device.type == "cuda":
        found = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if found == 0:
            raise UserError(
                f"device {name!r} was asked for, but torch {torch.__version__} sees no GPU; check the driver "
                "(nvidia-smi) and that torch was built for CUDA, or use --device cpu"
            )
        if device.index is not None and device.index >= found:
            raise UserError(f"device {name!r} was asked for, but there are {found} GPUs: cuda:0 to cuda:{found - 1}")
    return device


def total_memory() -> int | None:
    """Of this machine, in bytes, where the system says it."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None


def in_bf16(precision: str, device: torch.device) -> bool:
    """What auto, fp32 or bf16 means on a device."""
    return precision == "bf16" or (precision == "auto" and device.type == "cuda")


def build_fabric(config: TrainConfig) -> Fabric:
    """One device, and bf16 with float32 weights on a GPU unless the config says otherwise. On a CPU this process keeps
    the memory of freed tensors from then on."""
    processes = os.environ.get("WORLD_SIZE", "1")  # as torchrun sets it
    if processes not in ("", "0", "1"):
        raise UserError(
            f"a run trains on one device, but WORLD_SIZE is {processes}; start it without torchrun (unset WORLD_SIZE), "
            "and several seeds side by side as a process each: CUDA_VISIBLE_DEVICES=0 duel train --seed 0 ..., "
            "CUDA_VISIBLE_DEVICES=1 duel train --seed 1 ..."
        )
    device = resolve_device(config.device)
    if device.type == "cpu":
        keep_freed_memory()
    Fabric = _fabric_class()
    with quietly():
        return Fabric(
            accelerator=device.type,
            devices=1 if device.index is None else [device.index],
            precision="bf16-mixed" if in_bf16(config.precision, device) else "32-true",
        )


@contextmanager
def quietly() -> Iterator[None]:
    """Inside, Lightning does not announce the precision, praise tensor cores or hint at accelerators and clusters."""
    log = importlib.import_module("lightning_utilities.core.rank_zero").log  # which of its packages' came last
    before = log.level
    log.setLevel(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.setLevel(before)


class PeakMemory:
    """Most memory that tensors take on a GPU from now on, beyond what this process holds there already."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.held = device, 0
        if device.type == "cuda":
            torch.cuda.init()  # there are no statistics before
            torch.cuda.reset_peak_memory_stats(device)
            self.held = torch.cuda.memory_allocated(device)

    def mib(self) -> int | None:
        """None on a CPU."""
        if self.device.type != "cuda":
            return None
        return round((torch.cuda.max_memory_allocated(self.device) - self.held) / 2**20)


def _fabric_class() -> type[Fabric]:
    """Fabric is in the package lightning and, under another name, in pytorch-lightning; either will do."""
    for package in ("lightning.fabric", "lightning_fabric"):
        try:
            found: type[Fabric] = importlib.import_module(package).Fabric
            return found
        except ImportError:
            continue
    raise UserError("training needs more packages: pip install 'duel-ssl[train]'")
